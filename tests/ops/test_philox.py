"""Philox against published answers and plain integers; race times against the exponential law."""

import itertools
import math
import random

import pytest
import torch
from torch import Tensor

from outrider.ops.philox import Purpose, uniforms
from outrider.ops.philox import reference as philox_module
from outrider.ops.philox.reference import philox_reference as philox
from outrider.ops.philox.reference import race_times_of_reference as race_times_of
from outrider.ops.philox.reference import race_times_reference

# Random123, tests/kat_vectors, philox4x32 with 10 rounds: counter, key (low word first), output.
KNOWN_ANSWERS = {
    "zeros": ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "ones": (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    "digits of pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
}
FALSE_ALARM = 1e-9
NORMAL_TAIL = 6.11
"""A standard normal is further from 0 than this with probability FALSE_ALARM."""
LARGEST_SEED = 2**63 - 1


def race_times(
    seeds: Tensor,
    keys: Tensor,
    num_tokens: int,
    purpose: Purpose = Purpose.TARGET,
    index: Tensor | int = 0,
) -> Tensor:
    return race_times_reference(seeds, keys, num_tokens, purpose, index)


def as_int64(value: int) -> int:
    """The int64 of the same 64 bits."""
    return value - 2**64 if value >= 2**63 else value


def plain_philox(counter: tuple[int, ...], seed: int) -> tuple[int, ...]:
    """Salmon et al. 2011, section 3.3, on Python's unbounded integers."""
    words, key = list(counter), [seed % 2**32, seed // 2**32]
    for _ in range(10):
        left, right = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [
            right // 2**32 ^ words[1] ^ key[0],
            right % 2**32,
            left // 2**32 ^ words[3] ^ key[1],
            left % 2**32,
        ]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return tuple(words)


def counters(rows: list[tuple[int, ...]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    c0, c1, c2, c3 = torch.tensor(rows).unbind(-1)
    return c0, c1, c2, c3


@pytest.mark.parametrize(
    ("counter", "key", "words"), KNOWN_ANSWERS.values(), ids=list(KNOWN_ANSWERS)
)
def test_published_answers_come_out(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    seed = key[0] + key[1] * 2**32
    assert plain_philox(counter, seed) == words
    got = philox(counters([counter]), torch.tensor([as_int64(seed)]))
    assert got.tolist() == [list(words)]


def test_any_counter_and_any_64_bit_seed_agree_with_plain_integers() -> None:
    draw = random.Random(0)
    edges = [0, 1, 2**31 - 1, 2**31, 2**32 - 1]
    rows = [
        tuple(draw.choice([draw.randrange(2**32), draw.choice(edges)]) for _ in range(4))
        for _ in range(600)
    ]
    seeds = [draw.randrange(2**64) for _ in range(500)]
    seeds += [2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1, 2**63, 2**64 - 1] * 10
    seeds += [2**63 - draw.randrange(1000) for _ in range(40)]
    got = philox(counters(rows), torch.tensor([as_int64(seed) for seed in seeds]))
    want = [list(plain_philox(row, seed)) for row, seed in zip(rows, seeds, strict=True)]
    assert got.tolist() == want


def test_counters_and_seeds_broadcast() -> None:
    low, high = torch.tensor([3, 5, 7]), torch.tensor([[1], [2]])
    zero = torch.zeros(1, dtype=torch.int64)
    words = philox((low, high, zero, zero), torch.tensor([[11], [2**40]]))
    assert words.shape == (2, 3, 4)
    assert tuple(words[1, 2].tolist()) == plain_philox((7, 2, 0, 0), 2**40)
    assert tuple(words[0, 1].tolist()) == plain_philox((5, 1, 0, 0), 11)


@pytest.mark.parametrize("position", [0, 1, 2**32 - 1, 2**32, 5 * 2**32 + 3])
@pytest.mark.parametrize("seed", [0, 2**32, LARGEST_SEED])
def test_a_time_is_minus_the_log_of_its_own_word(seed: int, position: int) -> None:
    """Four ids share a counter: (id // 4, low and high word of the position, purpose 0)."""
    times = race_times(torch.tensor([seed]), torch.tensor([position]), 11)[0].tolist()
    for token_id, time in enumerate(times):
        counter = (token_id // 4, position % 2**32, position // 2**32, 0)
        uniform = (plain_philox(counter, seed)[token_id % 4] + 0.5) / 2**32
        assert time == pytest.approx(-math.log1p(-uniform), rel=1e-5)


def test_times_are_positive_finite_float32() -> None:
    times = race_times(torch.arange(300), torch.arange(300), 999)
    assert times.dtype == torch.float32 and times.shape == (300, 999)
    assert bool((times > 0).all()) and bool(times.isfinite().all())


@pytest.mark.parametrize(
    ("word", "low", "high"), [(0, 1.16e-10, 1.17e-10), (0xFFFFFFFF, 16.0, 23.0)]
)
def test_the_extreme_words_give_positive_finite_times(
    monkeypatch: pytest.MonkeyPatch, word: int, low: float, high: float
) -> None:
    """The smallest uniform is 2^-33, whose time is 2^-33; the largest would be 1 - 2^-33."""
    monkeypatch.setattr(
        philox_module,
        "philox_reference",
        lambda counter, seed: torch.full((seed.shape[0], counter[0].shape[0], 4), word),
    )
    times = race_times(torch.zeros(2, dtype=torch.int64), torch.arange(2), 7)
    assert times.shape == (2, 7)
    assert bool(((times >= low) & (times <= high)).all())


def largest_gap(times: Tensor) -> float:
    """Kolmogorov-Smirnov distance between the times and the standard exponential law."""
    ordered = times.double().sort().values
    law = -torch.expm1(-ordered)
    rank = torch.arange(len(ordered), dtype=torch.float64)
    above, below = (rank + 1) / len(ordered) - law, law - rank / len(ordered)
    return float(torch.maximum(above, below).max())


def gap_allowed(num_samples: int) -> float:
    """Dvoretzky-Kiefer-Wolfowitz: P(gap > e) <= 2 exp(-2 n e^2)."""
    return math.sqrt(math.log(2 / FALSE_ALARM) / (2 * num_samples))


STREAMS = {
    "ids of one row": (torch.tensor([7]), torch.tensor([3]), 400_000),
    "seeds at one position": (torch.arange(400_000), torch.full((400_000,), 3), 1),
    "positions of one seed": (torch.full((400_000,), LARGEST_SEED), torch.arange(400_000), 1),
    "all three": (torch.arange(200).repeat(200), torch.arange(200).repeat_interleave(200), 10),
}


@pytest.mark.parametrize(("seeds", "positions", "num_tokens"), STREAMS.values(), ids=list(STREAMS))
def test_times_follow_the_exponential_law_along_every_part_of_their_key(
    seeds: Tensor, positions: Tensor, num_tokens: int
) -> None:
    times = race_times(seeds, positions, num_tokens).flatten()
    assert len(times) == 400_000
    assert largest_gap(times) < gap_allowed(len(times))


def test_the_law_test_notices_a_wrong_law() -> None:
    times = race_times(torch.tensor([7]), torch.tensor([3]), 400_000)[0]
    assert largest_gap(times * 1.02) > gap_allowed(len(times))


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["position", "seed", "token id"])
def test_times_of_neighbouring_keys_are_uncorrelated(dim: int) -> None:
    seeds, positions = torch.arange(60).repeat(50), torch.arange(50).repeat_interleave(60)
    times = race_times(seeds, positions, 60).double().view(50, 60, 60)
    pairs = times.shape[dim] - 1
    # Times have mean 1 and variance 1, so products of independent ones have mean 0 and variance 1.
    products = (times.narrow(dim, 0, pairs) - 1) * (times.narrow(dim, 1, pairs) - 1)
    assert abs(float(products.sum())) / math.sqrt(products.numel()) < NORMAL_TAIL


def test_a_time_depends_on_seed_position_and_id_alone() -> None:
    seeds = torch.tensor([5, 2**40, 5, LARGEST_SEED, 0, 6])
    positions = torch.tensor([9, 9, 10, 2**33, 0, 9])
    whole = race_times(seeds, positions, 50)
    order = torch.tensor([3, 0, 5, 4, 1, 2])
    assert torch.equal(race_times(seeds[order], positions[order], 50), whole[order])
    for row in range(len(seeds)):
        for num_tokens in (1, 3, 4, 5, 49):
            alone = race_times(seeds[row : row + 1], positions[row : row + 1], num_tokens)
            assert torch.equal(alone[0], whole[row, :num_tokens])


def test_rows_whose_keys_differ_in_one_bit_share_no_times() -> None:
    seed, position = 1234567, 89
    keys = [(seed, position)]
    keys += [(seed ^ 1 << bit, position) for bit in range(63)]
    keys += [(seed, position ^ 1 << bit) for bit in range(40)]
    seeds, positions = torch.tensor(keys).unbind(-1)
    times = race_times(seeds, positions, 16)
    same = (times[:, None] == times[None]).all(-1)
    assert torch.equal(same, torch.eye(len(keys), dtype=torch.bool))


SEEDS = torch.tensor([3, 3, 2**62 + 5])
KEYS = torch.tensor([7, 8, 2**33])


def test_streams_of_another_purpose_or_index_share_no_number() -> None:
    streams = [
        race_times(SEEDS, KEYS, 64, purpose, index) for purpose in Purpose for index in (0, 1, 7)
    ]
    numbers = torch.stack(streams).flatten()
    assert len(numbers.unique()) > 0.999 * len(numbers)
    for one, other in itertools.combinations(streams, 2):
        assert not (one == other).all(-1).any()


def test_an_index_for_each_row_gives_each_row_its_own_stream() -> None:
    index = torch.tensor([0, 5, 2])
    times = race_times(SEEDS, KEYS, 9, Purpose.RESIDUAL, index)
    for row, place in enumerate(index.tolist()):
        alone = race_times(SEEDS[row : row + 1], KEYS[row : row + 1], 9, Purpose.RESIDUAL, place)
        assert torch.equal(times[row], alone[0])


def test_times_of_listed_ids_are_those_of_the_whole_row() -> None:
    ids = torch.tensor([[5, 0, 17], [3, 3, 2], [16, 1, 9]])
    for purpose in Purpose:
        whole = race_times(SEEDS, KEYS, 18, purpose, 3)
        assert torch.equal(race_times_of(SEEDS, KEYS, ids, purpose, 3), whole.gather(1, ids))


def test_uniforms_are_the_first_word_of_their_counter() -> None:
    numbers = uniforms(SEEDS, KEYS, 4, Purpose.ACCEPT)
    for row, (seed, key) in enumerate(zip(SEEDS.tolist(), KEYS.tolist(), strict=True)):
        for index in range(4):
            counter = (0, key & 0xFFFFFFFF, key >> 32, index * 256 + int(Purpose.ACCEPT))
            word = plain_philox(counter, seed)[0]
            assert float(numbers[row, index]) == pytest.approx((word + 0.5) / 2**32, abs=2**-24)
            assert 0 < float(numbers[row, index]) < 1
