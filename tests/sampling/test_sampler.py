"""From logits to the target's distribution and to a token, against plain Python and transformers.

The frequencies of sampled tokens are checked with Pearson's statistic at a false alarm of 1e-9.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from outrider.ops.sampling import reference
from outrider.sampling.arrays import SamplingArrays
from outrider.sampling.sampler import sample_rows, target_probs

INF = math.inf
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
"""A softmax of float32 logits is right to a few roundings of 6e-8; float64 has room to spare."""
NORMAL_TAIL_1E9 = 5.998
"""A standard normal exceeds this with probability 1e-9."""


@dataclass(frozen=True)
class Choice:
    """Parameters of one row; values that float32 holds exactly."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


def arrays(choices: Sequence[Choice], vocab_size: int) -> SamplingArrays:
    return SamplingArrays(
        temperature=torch.tensor([c.temperature for c in choices]),
        top_k=torch.tensor([vocab_size if c.top_k is None else c.top_k for c in choices]),
        top_p=torch.tensor([c.top_p for c in choices]),
        min_p=torch.tensor([c.min_p for c in choices]),
        seeds=torch.tensor([c.seed for c in choices]),
    )


def plain_probs(logits: Sequence[float], choice: Choice) -> list[float]:
    """The definition, one row at a time: temperature, then top-k, then top-p, then min-p."""
    temperature = choice.temperature if choice.temperature > 0 else 1.0
    scaled = [logit / temperature for logit in logits]
    highest = max(scaled)
    weights = {token: math.exp(score - highest) for token, score in enumerate(scaled)}
    order = sorted(weights, key=lambda token: (-scaled[token], token))
    order = order[: choice.top_k]
    total, reached, nucleus = math.fsum(weights[token] for token in order), 0.0, list[int]()
    for token in order:
        nucleus.append(token)
        reached += weights[token] / total
        if choice.top_p < 1 and reached >= choice.top_p:
            break
    kept = [token for token in nucleus if weights[token] >= choice.min_p * weights[order[0]]]
    total = math.fsum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(logits))]


def check(logits: list[list[float]], choices: list[Choice], dtype: torch.dtype) -> None:
    got = target_probs(torch.tensor(logits, dtype=dtype), arrays(choices, len(logits[0])))
    assert got.dtype == dtype
    want = torch.tensor(
        [plain_probs(row, choice) for row, choice in zip(logits, choices, strict=True)],
        dtype=dtype,
    )
    assert torch.equal(got > 0, want > 0)
    torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype] * 10, atol=TOLERANCE[dtype])


EVEN = [0.0, 0.0, 0.0, 0.0]  # a quarter each, exactly
ONE_HOT = [-INF, 2.0, -INF, -INF, -INF]
HAND_PICKED = {
    # logits, choice, distribution by hand
    "all off": (EVEN, Choice(), [0.25, 0.25, 0.25, 0.25]),
    "greedy is treated as temperature 1": (EVEN, Choice(0.0), [0.25, 0.25, 0.25, 0.25]),
    "top-k keeps the lower ids of a tie": (EVEN, Choice(top_k=3), [1 / 3, 1 / 3, 1 / 3, 0]),
    "top-k 1 keeps one": ([1.0, 3.0, 3.0], Choice(top_k=1), [0, 1, 0]),
    "top-k 1 of equal scores": (EVEN, Choice(top_k=1), [1, 0, 0, 0]),
    "top-p reached exactly": (EVEN, Choice(top_p=0.5), [0.5, 0.5, 0, 0]),
    "top-p passed by a hair": (EVEN, Choice(top_p=0.5 + 2**-20), [1 / 3, 1 / 3, 1 / 3, 0]),
    "tiny top-p keeps the first": (EVEN, Choice(top_p=2**-30), [1, 0, 0, 0]),
    "top-p looks at what top-k left": (EVEN, Choice(top_k=2, top_p=0.5), [1, 0, 0, 0]),
    "min-p 1 keeps all the likeliest": ([5.0, 1.0, 5.0], Choice(min_p=1.0), [0.5, 0, 0.5]),
    "min-p looks at what top-k left": (
        [2.0, 2.0, 1.0, 1.0],
        Choice(top_k=3, min_p=0.25),
        [1 / (2 + math.exp(-1)), 1 / (2 + math.exp(-1)), math.exp(-1) / (2 + math.exp(-1)), 0],
    ),
    "min-p after temperature": (
        [0.0, -2.0],
        Choice(2.0, min_p=0.25),  # exp(-1) is over a quarter, exp(-2) is not
        [1 / (1 + math.exp(-1)), math.exp(-1) / (1 + math.exp(-1))],
    ),
    "top-p after temperature": ([0.0, -2.0], Choice(0.5, top_p=0.96875), [1, 0]),
    "one-hot": (ONE_HOT, Choice(), [0, 1, 0, 0, 0]),
    "one-hot and everything on": (ONE_HOT, Choice(0.5, 3, 0.5, 0.5), [0, 1, 0, 0, 0]),
    "top-k wider than what is possible": ([-INF, 0.0, 0.0], Choice(top_k=3), [0, 0.5, 0.5]),
    "one token": ([-3.0], Choice(0.5, 1, 0.5, 1.0), [1]),
    "far apart": ([0.0, -1e4, 1e4], Choice(0.25), [0, 0, 1]),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("logits", "choice", "probs"), HAND_PICKED.values(), ids=list(HAND_PICKED))
def test_hand_picked_rows_come_out_as_worked_by_hand(
    logits: list[float], choice: Choice, probs: list[float], dtype: torch.dtype
) -> None:
    assert plain_probs(logits, choice) == pytest.approx(probs, abs=1e-12)
    check([logits], [choice], dtype)


def random_choice(draw: random.Random, vocab_size: int) -> Choice:
    return Choice(
        temperature=draw.choice([0.0, 0.25, 0.5, 1.0, 1.5, 4.0]),
        top_k=draw.choice([None, 1, 2, draw.randint(1, vocab_size), vocab_size]),
        top_p=draw.choice([1.0, 2**-20, draw.randrange(1, 2**12) / 2**12]),
        min_p=draw.choice([0.0, 0.0, 1.0, draw.randrange(2**12) / 2**13]),
    )


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 4, 7, 33, 130])
def test_random_rows_agree_with_the_definition(vocab_size: int) -> None:
    draw = random.Random(vocab_size)
    logits = [[draw.gauss(0, 3) for _ in range(vocab_size)] for _ in range(150)]
    for row in logits[::3]:
        for token in range(1, vocab_size):
            if draw.random() < 0.4:
                row[token] = -INF
    choices = [random_choice(draw, vocab_size) for _ in logits]
    check(logits, choices, torch.float64)


@pytest.mark.parametrize("vocab_size", [3, 8, 33])
def test_rows_full_of_ties_keep_the_lower_ids(vocab_size: int) -> None:
    """Scores are logs of powers of 2 and sum to 1, so that every threshold is exact."""
    draw = random.Random(vocab_size)
    rows: list[list[float]] = []
    for _ in range(100):
        parts = [1.0]
        while len(parts) < vocab_size and min(parts) > 2**-6:
            parts.append(parts.pop(draw.randrange(len(parts))) / 2)
            parts.append(parts[-1])
        parts += [0.0] * (vocab_size - len(parts))
        draw.shuffle(parts)
        rows.append([math.log(part) if part else -INF for part in parts])
    choices = [
        Choice(top_k=draw.randint(1, vocab_size), min_p=draw.choice([0.0, 2**-3 + 2**-9]))
        for _ in rows
    ]
    check(rows, choices, torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_logits_are_widened_first(dtype: torch.dtype) -> None:
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    sampling = arrays([Choice(0.5, 20, 0.75, 2**-6)] * 20, 50)
    got = target_probs(logits, sampling)
    assert got.dtype == torch.float32
    assert torch.equal(got, target_probs(logits.float(), sampling))


@pytest.mark.parametrize(
    "choice",
    [
        Choice(0.75),
        Choice(top_k=7),
        Choice(top_p=0.875),
        Choice(min_p=0.125),
        Choice(1.5, 20, 0.75, 0.0625),
        Choice(0.5, 3, 0.5, 0.25),
    ],
    ids=str,
)
def test_rows_without_ties_agree_with_transformers_warpers(choice: Choice) -> None:
    import transformers  # here, since it takes seconds

    logits = torch.randn(64, 37, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    warped = logits * 4
    for warper in (
        transformers.TemperatureLogitsWarper(choice.temperature),
        transformers.TopKLogitsWarper(choice.top_k or 37),
        transformers.TopPLogitsWarper(choice.top_p),
        transformers.MinPLogitsWarper(choice.min_p),
    ):
        warped = warper(None, warped)
    want = warped.softmax(-1)
    got = target_probs(logits * 4, arrays([choice] * 64, 37))
    assert torch.equal(got > 0, want > 0)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def mixed_rows(num_rows: int, vocab_size: int) -> tuple[Tensor, list[Choice], Tensor]:
    """Logits, choices of every kind, positions."""
    draw = random.Random(5)
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(2)) * 3
    choices = [
        Choice(c.temperature, c.top_k, c.top_p, c.min_p, seed=draw.randrange(2**63))
        for c in (random_choice(draw, vocab_size) for _ in range(num_rows))
    ]
    positions = torch.tensor([draw.randrange(2**33) for _ in range(num_rows)])
    return logits, choices, positions


@pytest.mark.parametrize("vocab_size", [5, 64, 1001])
def test_a_row_does_not_depend_on_its_neighbours(vocab_size: int) -> None:
    logits, choices, positions = mixed_rows(40, vocab_size)
    sampling = arrays(choices, vocab_size)
    probs, tokens = target_probs(logits, sampling), sample_rows(logits, sampling, positions)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(3))
    shuffled = sampling.gather(order)
    assert torch.equal(target_probs(logits[order], shuffled), probs[order])
    assert torch.equal(sample_rows(logits[order], shuffled, positions[order]), tokens[order])
    for row in range(40):
        one = slice(row, row + 1)
        alone = arrays(choices[one], vocab_size)
        # Alone, a row that keeps everything is not even sorted: its bits must not tell.
        assert torch.equal(target_probs(logits[one], alone), probs[one])
        assert torch.equal(sample_rows(logits[one], alone, positions[one]), tokens[one])


def test_a_row_that_cannot_be_sampled_leaves_its_neighbours_alone() -> None:
    logits, choices, positions = mixed_rows(6, 20)
    sampling = arrays(choices, 20)
    want = sample_rows(logits, sampling, positions)
    logits[2] = math.nan
    got = sample_rows(logits, sampling, positions)
    others = torch.tensor([0, 1, 3, 4, 5])
    assert torch.equal(got[others], want[others])


@pytest.mark.parametrize("vocab_size", [2, 5, 16, 4099])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_greedy_rows_take_the_lowest_id_of_a_tie(vocab_size: int, dtype: torch.dtype) -> None:
    logits = torch.zeros(vocab_size + 1, vocab_size, dtype=dtype)
    for row in range(vocab_size) if vocab_size < 100 else range(0, vocab_size, 97):
        logits[row, :row] = -1.0  # ids from `row` on are tied
    sampling = arrays([Choice(0.0)] * (vocab_size + 1), vocab_size)
    got = sample_rows(logits, sampling, torch.arange(vocab_size + 1))
    for row in range(vocab_size) if vocab_size < 100 else range(0, vocab_size, 97):
        assert got[row] == row
    assert got[vocab_size] == 0


def test_greedy_and_sampled_rows_share_a_batch_and_stay_themselves() -> None:
    logits, choices, positions = mixed_rows(60, 12)
    logits[:, 3] = logits.amax(-1)  # a tie for the lead
    tokens = sample_rows(logits, arrays(choices, 12), positions)
    for row, choice in enumerate(choices):
        scores = logits[row].tolist()
        probs = plain_probs(scores, choice)
        if choice.temperature == 0:
            assert tokens[row] == scores.index(max(scores))
        else:
            assert probs[int(tokens[row])] > 0
    assert any(choice.temperature == 0 for choice in choices)


def test_greedy_rows_ignore_seed_position_and_filters() -> None:
    logits = torch.randn(9, 31, generator=torch.Generator().manual_seed(4))
    choices = [Choice(0.0, 3, 0.5, 0.5, seed=seed) for seed in range(9)]
    got = sample_rows(logits, arrays(choices, 31), torch.arange(9) * 77)
    assert torch.equal(got, logits.max(-1).indices)


def pearson_limit(freedom: int) -> float:
    """Chi-square quantile at 1 - 1e-9, by Wilson and Hilferty's cube."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + NORMAL_TAIL_1E9 * math.sqrt(spread)) ** 3


def pearson(tokens: Tensor, probs: Sequence[float]) -> float:
    """Pearson's statistic; infinite where a token of probability 0 was drawn."""
    counts = torch.bincount(tokens, minlength=len(probs)).tolist()
    total = 0.0
    for count, prob in zip(counts, probs, strict=True):
        expected = prob * len(tokens)
        total += (count - expected) ** 2 / expected if prob else (INF if count else 0.0)
    return total


SAMPLED = {
    "plain": ([0.0, 1.0, -1.0, 0.5, 2.0], Choice()),
    "hot": ([0.0, 1.0, -1.0, 0.5, 2.0], Choice(4.0)),
    "filtered": ([0.0, 1.0, -1.0, 0.5, 2.0, 0.25, -0.5], Choice(1.5, 6, 0.9375, 0.0625)),
    "skewed": ([8.0, 0.0, 1.0], Choice()),
    "impossible tokens": ([-INF, 0.0, -INF, 1.0], Choice()),
    "wide": ([math.sin(i) for i in range(102)], Choice()),
}
STREAMS = {
    "seeds": lambda n: (torch.arange(n), torch.full((n,), 17)),
    "positions": lambda n: (torch.full((n,), 2**62 + 1), torch.arange(n)),
}


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize(("logits", "choice"), SAMPLED.values(), ids=list(SAMPLED))
def test_frequencies_follow_the_distribution(
    logits: list[float], choice: Choice, stream: str
) -> None:
    num_rows = 30_000
    seeds, positions = STREAMS[stream](num_rows)
    sampling = arrays([choice], len(logits)).gather(torch.zeros_like(seeds))
    sampling = SamplingArrays(
        sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, seeds
    )
    rows = torch.tensor(logits).expand(num_rows, -1)
    tokens = sample_rows(rows, sampling, positions)
    probs = plain_probs(logits, choice)
    assert pearson(tokens, probs) < pearson_limit(sum(p > 0 for p in probs) - 1)


def test_the_frequency_test_notices_a_wrong_temperature() -> None:
    logits, num_rows = [0.0, 1.0, -1.0, 0.5, 2.0], 30_000
    seeds = torch.arange(num_rows)
    sampling = arrays([Choice(1.0625)], 5).gather(torch.zeros_like(seeds))
    sampling = SamplingArrays(
        sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, seeds
    )
    tokens = sample_rows(torch.tensor(logits).expand(num_rows, -1), sampling, seeds * 0 + 17)
    assert pearson(tokens, plain_probs(logits, Choice())) > pearson_limit(4)


def test_the_same_seed_and_position_draw_the_same_token_in_any_batch_and_row() -> None:
    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(6))
    choice = Choice(seed=2**50 + 3)
    alone = sample_rows(logits, arrays([choice], 200), torch.tensor([40]))
    for num_rows in (2, 3, 17):
        for row in (0, 1, num_rows - 1):
            others, choices, positions = mixed_rows(num_rows, 200)
            others[row], choices[row], positions[row] = logits[0], choice, 40
            tokens = sample_rows(others, arrays(choices, 200), positions)
            assert tokens[row] == alone[0]


def test_padding_the_vocabulary_with_impossible_tokens_draws_the_same_tokens() -> None:
    logits = torch.randn(300, 37, generator=torch.Generator().manual_seed(7))
    choices = [Choice(seed=seed) for seed in range(300)]
    wide = torch.cat((logits, torch.full((300, 14), -INF)), dim=1)
    positions = torch.arange(300)
    assert torch.equal(
        sample_rows(logits, arrays(choices, 37), positions),
        sample_rows(wide, arrays(choices, 51), positions),
    )


SHORTEST, LONGEST = 2.0**-33, 16.64
"""The ends of what race_times may return: see test_philox."""


@pytest.mark.parametrize(("impossible", "possible"), [(SHORTEST, LONGEST), (LONGEST, SHORTEST)])
def test_a_token_of_probability_zero_is_never_drawn_whatever_the_times(
    monkeypatch: pytest.MonkeyPatch, impossible: float, possible: float
) -> None:
    logits = torch.tensor([[-INF, 0.0, -INF, -INF], [3.0, 2.0, 1.0, 0.0], [0.0, 0.0, 0.0, 90.0]])
    choices = [Choice(), Choice(top_k=2), Choice(min_p=0.5)]
    kept = torch.tensor([[0, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 1]], dtype=torch.bool)
    times = torch.where(kept, possible, impossible)
    monkeypatch.setattr(reference, "race_times_reference", lambda *_: times)
    tokens = sample_rows(logits, arrays(choices, 4), torch.zeros(3, dtype=torch.int64))
    assert kept.gather(1, tokens[:, None]).all()


def test_a_token_too_unlikely_for_float32_loses_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its time over its probability overflows, whichever time it has."""
    logits = torch.tensor([[-100.0, 0.0, -103.0, -150.0]])
    times = torch.tensor([[LONGEST, LONGEST, SHORTEST, SHORTEST]])
    monkeypatch.setattr(reference, "race_times_reference", lambda *_: times)
    tokens = sample_rows(logits, arrays([Choice()], 4), torch.zeros(1, dtype=torch.int64))
    assert tokens.tolist() == [1]


def test_the_token_with_the_shortest_time_over_its_probability_is_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Probabilities 1/7, 2/7, 4/7; the ratios are 7, 3.5, 5.25 and then 0.7, 1.75, 7."""
    logits = torch.tensor([[1.0, 2.0, 4.0], [1.0, 2.0, 4.0]]).log()
    times = torch.tensor([[1.0, 1.0, 3.0], [0.1, 0.5, 4.0]])
    monkeypatch.setattr(reference, "race_times_reference", lambda *_: times)
    tokens = sample_rows(logits, arrays([Choice()] * 2, 3), torch.zeros(2, dtype=torch.int64))
    assert tokens.tolist() == [1, 0]
