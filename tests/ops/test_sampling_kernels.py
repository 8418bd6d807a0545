"""Sampling kernels against the sorting reference: the same decisions, the same kept tokens.

Without a GPU they run under Triton's interpreter, on a GPU through the public functions too. The
reference gets float64 logits, so that its own rounding decides nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
import triton
import triton.language as tl

from outrider.ops import philox, sampling
from outrider.ops.philox import Purpose
from outrider.ops.philox import reference as noise
from outrider.ops.philox import triton as noise_kernels
from outrider.ops.sampling import reference

INF, NAN = math.inf, math.nan
HAS_GPU = torch.cuda.is_available()
CPU = pytest.param("cpu", marks=pytest.mark.skipif(HAS_GPU, reason="the interpreter is off"))
DEVICES = [CPU, pytest.param("cuda", marks=pytest.mark.gpu)]
SMALL_DTYPES = [
    torch.float32,
    torch.float16,
    pytest.param(torch.bfloat16, marks=pytest.mark.gpu),
]
TOLERANCE = 1e-6
"""Of probabilities, absolute and relative to 1: a weight is a float32 exponential."""

LEAST = 1e-35
"""Under this, a float32 probability may be 0."""

ROUNDING = 2.0**-20
"""Relative to a threshold, what float32 exponentials and sums of them may be off by: 8 steps of a
float32 in front of a power of 2. A token whose mass is that near may fall on either side."""


@pytest.fixture(autouse=True)
def kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU too, where Triton interprets them."""
    if not HAS_GPU:
        for module in (sampling, philox):
            monkeypatch.setattr(module, "uses_kernels", lambda _: True)
            monkeypatch.setattr(module, "overlaps_launches", lambda _: False)


@triton.jit
def _words_kernel(p_seeds, p_keys, p_last, p_block, p_words, p_times, SIZE: tl.constexpr):
    o_i = tl.arange(0, SIZE)
    b_seed, b_key = tl.load(p_seeds + o_i), tl.load(p_keys + o_i)
    b_words = noise_kernels.philox_words(
        b_seed, b_key, tl.load(p_last + o_i), tl.load(p_block + o_i)
    )
    for j in tl.static_range(4):
        tl.store(p_words + o_i * 4 + j, b_words[j].to(tl.int64))
        tl.store(p_times + o_i * 4 + j, noise_kernels.exponential(b_words[j]))


@triton.jit
def _times_kernel(p_words, p_times, SIZE: tl.constexpr):
    o_i = tl.arange(0, SIZE)
    b_word = tl.load(p_words + o_i).to(tl.uint32)
    tl.store(p_times + o_i, noise_kernels.exponential(b_word))


@pytest.mark.parametrize("device", DEVICES)
def test_words_are_the_references_bit_for_bit(device: str) -> None:
    draw = random.Random(0)
    size = 1024
    edges = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62 + 5, 2**63 - 1]

    def numbers(limit: int) -> Tensor:
        picked = [
            draw.choice([draw.randrange(limit), draw.choice(edges) % limit]) for _ in range(size)
        ]
        return torch.tensor(picked)

    seeds = torch.where(torch.arange(size) % 3 == 0, -numbers(2**63), numbers(2**63))
    keys, last, block = numbers(2**63), numbers(2**32), numbers(2**31)
    counter = (block, keys & noise.MASK, keys >> 32, last)
    want = noise.philox_reference(counter, seeds)
    words = torch.zeros((size, 4), dtype=torch.int64, device=device)
    times = torch.zeros((size, 4), device=device)
    inputs = [each.to(device) for each in (seeds, keys, last, block)]
    _words_kernel[(1,)](*inputs, words, times, size, enable_fp_fusion=False)
    assert torch.equal(words.cpu(), want)
    torch.testing.assert_close(times.cpu(), noise._exponential(want), rtol=4e-7, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_a_time_is_right_to_roundings_for_every_size_of_word(device: str) -> None:
    draw = random.Random(1)
    near = [2**31, 2**30, 3 * 2**30, 2**32 - 2**8, 2**32 - 1]
    words = [0, 1, 2, 3, *near, *(word - 1 for word in near), *(word // 2 + 1 for word in near)]
    words += [draw.randrange(2 ** draw.randint(1, 32)) for _ in range(2048 - 2 * len(words))]
    words += [2**32 - 1 - word for word in words[: 2048 - len(words)]]
    given = torch.tensor(words, device=device)
    times = torch.zeros(2048, device=device)
    _times_kernel[(1,)](given, times, 2048, enable_fp_fusion=False)
    uniform = ((given.cpu().float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24).double()
    want = -torch.log1p(-uniform)
    assert bool((times > 0).all()) and bool(times.isfinite().all())
    torch.testing.assert_close(times.cpu().double(), want, rtol=3e-7, atol=0)


SEEDS, KEYS = torch.tensor([3, -3, 2**62 + 5]), torch.tensor([7, 8, 2**33])


@pytest.mark.parametrize("device", DEVICES)
def test_uniforms_are_the_references_bit_for_bit(device: str) -> None:
    seeds, keys = SEEDS.to(device), KEYS.to(device)
    for count in (1, 5, 200):
        got = philox.uniforms(seeds, keys, count, Purpose.ACCEPT)
        assert torch.equal(got.cpu(), noise.uniforms_reference(SEEDS, KEYS, count, Purpose.ACCEPT))
    assert philox.uniforms(seeds, keys, 0, Purpose.ACCEPT).shape == (3, 0)


ARGMAX_ROWS = {
    "one": [3.0],
    "a tie": [1.0, 5.0, 5.0, 5.0],
    "zeros of both signs": [-1.0, -0.0, 0.0],
    "zeros of both signs, swapped": [-1.0, 0.0, -0.0],
    "negative": [-3.0, -1.5, -2.0, -1.5],
    "NaN never wins": [NAN, 1.0, NAN, 2.0, NAN],
    "NaN loses to -inf": [NAN, -INF, NAN],
    "all NaN": [NAN, NAN, NAN],
    "all -inf": [-INF, -INF],
    "+inf": [0.0, INF, 3.0, INF],
}
ARGMAX_WANT = [0, 1, 1, 1, 1, 3, 0, 0, 0, 1]


@pytest.mark.parametrize("dtype", SMALL_DTYPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_argmax_of_hand_picked_rows(device: str, dtype: torch.dtype) -> None:
    for row, want in zip(ARGMAX_ROWS.values(), ARGMAX_WANT, strict=True):
        logits = torch.tensor([row], dtype=dtype, device=device)
        assert sampling.argmax(logits).tolist() == [want], row
        names = torch.arange(len(row), device=device) * 7 + 2
        assert sampling.argmax(logits, names).tolist() == [want * 7 + 2]


@pytest.mark.parametrize("dtype", SMALL_DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [2, 255, 4096, 4097, 9001])
@pytest.mark.parametrize("device", DEVICES)
def test_argmax_takes_the_lowest_id_of_a_tie_across_chunks(
    device: str, vocab_size: int, dtype: torch.dtype
) -> None:
    logits = torch.randn(6, vocab_size + 3, generator=torch.Generator().manual_seed(0))
    logits = logits.to(dtype)[:, :vocab_size]  # rows further apart than they are long
    best = [0, vocab_size - 1, vocab_size // 2, vocab_size // 3, min(4095, vocab_size - 1), 1]
    for row, first in enumerate(best):
        logits[row, first:] = logits[row, first:].clamp(max=8)
        logits[row, first::97] = 9
    assert sampling.argmax(logits.to(device)).tolist() == best


@dataclass(frozen=True)
class Choice:
    """Parameters of a row."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True)
class Law:
    """Parameters of rows as the functions take them."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def of(cls, choices: Sequence[Choice], vocab_size: int, device: str = "cpu") -> Law:
        def floats(values: list[float]) -> Tensor:
            return torch.tensor(values, device=device)

        top_k = [vocab_size if c.top_k is None else min(c.top_k, vocab_size) for c in choices]
        return cls(
            floats([c.temperature for c in choices]),
            torch.tensor(top_k, device=device),
            floats([c.top_p for c in choices]),
            floats([c.min_p for c in choices]),
        )

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.temperature, self.top_k, self.top_p, self.min_p))

    def part(self, index: Tensor) -> Law:
        return Law(*(each[index] for each in self))

    def shifted(self, by: float) -> Law:
        """With thresholds in float64 that keep more, or less where `by` is negative."""
        top_p, min_p = self.top_p.double(), self.min_p.double()
        return Law(
            self.temperature,
            self.top_k,
            torch.where(top_p < 1, top_p * (1 + by), 1.0),
            (min_p * (1 - by)).clamp(max=1.0),
        )


def steps(vocab_size: int, seed: int) -> Tensor:
    """Logits with few values, so that every threshold falls into a tie."""
    values = torch.randint(0, 5, (vocab_size,), generator=torch.Generator().manual_seed(seed))
    return values.float() * 0.5


def spread(vocab_size: int, seed: int, scale: float = 3.0) -> Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def masked(vocab_size: int, seed: int) -> Tensor:
    """A grammar's row: few tokens possible."""
    row = spread(vocab_size, seed)
    allowed = torch.rand(vocab_size, generator=torch.Generator().manual_seed(seed)) < 0.05
    allowed[vocab_size // 2] = True
    return torch.where(allowed, row, -INF)


def peaked(vocab_size: int, seed: int) -> Tensor:
    row = spread(vocab_size, seed)
    row[vocab_size // 3] = 60.0
    return row


ROWS: dict[str, tuple[Callable[[int, int], Tensor], Choice]] = {
    "plain": (spread, Choice()),
    "greedy is treated as temperature 1": (spread, Choice(0.0, 5)),
    "cold": (spread, Choice(0.05)),
    "top-k": (spread, Choice(top_k=20)),
    "top-k 1": (spread, Choice(top_k=1)),
    "top-k 1 of equal scores": (lambda v, s: torch.zeros(v), Choice(top_k=1)),
    "top-k of equal scores": (lambda v, s: torch.full((v,), -2.5), Choice(top_k=37)),
    "top-k of nearly everything": (spread, Choice(1.5, top_k=251)),
    "top-k in a tie": (steps, Choice(top_k=9)),
    "top-k wider than what is possible": (masked, Choice(top_k=200)),
    "top-p": (spread, Choice(top_p=0.9)),
    "top-p near 1": (spread, Choice(top_p=0.9999)),
    "tiny top-p": (spread, Choice(top_p=1e-20)),
    "top-p of zero": (spread, Choice(top_p=0.0)),
    "top-p in a tie": (steps, Choice(top_p=0.503)),
    "top-p of equal scores": (lambda v, s: torch.zeros(v), Choice(top_p=0.503)),
    "top-p of a grammar's row": (masked, Choice(top_p=0.8)),
    "top-p of a peak": (peaked, Choice(top_p=0.9)),
    "min-p": (spread, Choice(min_p=0.03)),
    "min-p 1": (steps, Choice(min_p=1.0)),
    "top-k and top-p": (spread, Choice(0.7, 20, 0.8)),
    "top-k and top-p in one tie": (steps, Choice(1.0, 17, 0.7)),
    "everything": (spread, Choice(1.3, 40, 0.95, 0.02)),
    "hot": (spread, Choice(40.0, 100, 0.703)),
    "very hot": (spread, Choice(1e6, None, 0.503)),
    "very hot top-k": (spread, Choice(1e6, 11)),
    "far apart": (lambda v, s: spread(v, s, 1e4), Choice(0.7, 30, 0.95)),
    "unlikely tail": (lambda v, s: -torch.arange(v).float(), Choice(top_p=0.999999)),
    "a grammar's row": (masked, Choice()),
}


def row_of(name: str, vocab_size: int, dtype: torch.dtype) -> tuple[Tensor, Choice]:
    make, choice = ROWS[name]
    return make(vocab_size, list(ROWS).index(name)).to(dtype), choice


def assert_probs(got: Tensor, logits: Tensor, law: Law) -> None:
    """Kept is what sorting keeps, up to ROUNDING at a threshold, each with its share of the mass.

    Sums are taken in float64, where got lies.
    """
    assert got.dtype == torch.float32 and got.shape == logits.shape
    wide = logits.double()
    most, fewest = (
        reference.processed_probs_reference(wide, *law.shifted(by)) for by in (ROUNDING, -ROUNDING)
    )
    kept = got > 0
    assert not (kept & (most == 0)).any(), (kept & (most == 0)).nonzero()
    lost = ~kept & (fewest > LEAST)
    assert not lost.any(), lost.nonzero()
    want = torch.where(kept, most, 0.0)
    want = want / want.sum(-1, keepdim=True)
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=TOLERANCE)
    torch.testing.assert_close(got.sum(-1), torch.ones_like(got[:, 0]), rtol=0, atol=1e-5)


def assert_processed(logits: Tensor, choices: Sequence[Choice], device: str) -> None:
    law, want_law = (Law.of(choices, logits.shape[1], where) for where in (device, "cpu"))
    got = sampling.processed_probs(logits.to(device), *law)
    assert_probs(got.cpu(), logits, want_law)


@pytest.mark.parametrize("dtype", SMALL_DTYPES, ids=str)
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("device", DEVICES)
def test_rows_keep_what_sorting_keeps(device: str, name: str, dtype: torch.dtype) -> None:
    for vocab_size in (300,) if device == "cpu" else (1, 2, 7, 300, 4099, 20011):
        logits, choice = row_of(name, vocab_size, dtype)
        assert_processed(logits[None], [choice], device)


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 33])
@pytest.mark.parametrize("device", DEVICES)
def test_tiny_vocabularies(device: str, vocab_size: int) -> None:
    choices = [Choice(), Choice(0.7, 2, 0.6), Choice(2.0, None, 0.9, 0.1)]
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    assert_processed(logits, choices, device)


CROSSING = ["plain", "top-k in a tie", "top-p near 1", "top-p of equal scores", "everything"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_thresholds_across_chunks_and_past_their_capacity(device: str, dtype: torch.dtype) -> None:
    """9001 logits are three chunks; equal scores overflow what a chunk may keep a copy of."""
    rows, choices = zip(*(row_of(name, 9001, dtype) for name in CROSSING), strict=True)
    assert_processed(torch.stack(rows), choices, device)


LARGE = [
    Choice(),
    Choice(0.7, 20, 0.8),
    Choice(top_p=0.95),
    Choice(1.0, 50),
    Choice(1.0, 1000, 0.99),
    Choice(1.0, 3000),
    Choice(1.3, None, 0.9, 0.001),
    Choice(5.0, None, 0.9),
    Choice(min_p=0.05),
    Choice(0.0),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [32000, 151936, 248320])
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_large_vocabularies(vocab_size: int, dtype: torch.dtype, scale: float) -> None:
    logits = torch.randn(10, vocab_size, generator=torch.Generator().manual_seed(0)) * scale
    logits = logits.to(dtype).cuda()
    law = Law.of(LARGE, vocab_size, "cuda")
    assert_probs(sampling.processed_probs(logits, *law), logits, law)


def seeds_of(num_rows: int, device: str) -> tuple[Tensor, Tensor]:
    draw = random.Random(num_rows)
    seeds = [draw.randrange(2**63) for _ in range(num_rows)]
    positions = [draw.randrange(2**33) for _ in range(num_rows)]
    return torch.tensor(seeds, device=device), torch.tensor(positions, device=device)


def decided(times: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Winner of each row, and whether it wins by more than rounding can move."""
    ratio = torch.where(weights > 0, times.double() / weights.double(), INF)
    best = ratio.topk(min(2, ratio.shape[1]), dim=-1, largest=False)
    clear = best.values[:, 0] * (1 + 1e-4) < best.values[:, -1]
    return best.indices[:, 0], clear | (ratio.shape[1] == 1)


def assert_draws(got: Tensor, times: Tensor, weights: Tensor) -> None:
    want, clear = decided(times, weights)
    assert torch.equal(got.cpu()[clear], want[clear])
    assert clear.float().mean() > 0.9


@pytest.mark.parametrize("dtype", SMALL_DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [7, 300, 2101])
@pytest.mark.parametrize("device", DEVICES)
def test_the_race_of_the_processed_distribution_decides(
    device: str, vocab_size: int, dtype: torch.dtype
) -> None:
    names = ["plain", "everything", "top-k and top-p", "a grammar's row", "min-p"]
    names += ["plain", "min-p", "cold", "plain", "hot"]
    rows, choices = zip(*(row_of(name, vocab_size, dtype) for name in names), strict=True)
    logits = torch.stack(rows)
    law, want_law = (Law.of(choices, vocab_size, where) for where in (device, "cpu"))
    seeds, positions = seeds_of(10, device)
    got = sampling.sample(logits.to(device), *law, seeds, positions)
    times = noise.race_times_reference(seeds.cpu(), positions.cpu(), vocab_size, Purpose.TARGET, 0)
    probs = reference.processed_probs_reference(logits.double(), *want_law)
    assert_draws(got, times, probs)


@pytest.mark.parametrize("device", DEVICES)
def test_greedy_rows_take_the_argmax_beside_sampled_ones(device: str) -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0))
    logits[:, 7] = logits.amax(-1) + 1
    logits[:, 250] = logits[:, 7]
    choices = [
        Choice(0.0),
        Choice(0.0, 3, 0.5, 0.5),
        Choice(30.0),
        Choice(0.0),
        Choice(9.0),
        Choice(0.0),
    ]
    law = Law.of(choices, 300, device)
    got = sampling.sample(logits.to(device), *law, *seeds_of(6, device)).tolist()
    assert [got[row] for row in (0, 1, 3, 5)] == [7] * 4
    assert got[2] not in (7, 250) or got[4] not in (7, 250)


@pytest.mark.parametrize("device", DEVICES)
def test_a_part_of_the_vocabulary_meets_the_noise_of_the_whole(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randperm(5000, generator=generator)[:301]
    logits = torch.randn(8, 301, generator=generator) * 2
    wide = torch.full((8, 5000), -INF)
    wide[:, ids] = logits
    choices = [Choice(), Choice(0.0), Choice(0.7, 20, 0.8), Choice(min_p=0.1)] * 2
    seeds, positions = seeds_of(8, device)
    part, whole = (Law.of(choices, size, device) for size in (301, 5000))
    got = sampling.sample(logits.to(device), *part, seeds, positions, ids.to(device))
    assert torch.equal(got, sampling.sample(wide.to(device), *whole, seeds, positions))


BAD_ROWS = {
    "NaN": [NAN] * 9,
    "-inf": [-INF] * 9,
    "+inf": [INF] * 9,
    "one +inf": [0.0, 2.0, INF, *[-1.0] * 6],
    "some NaN": [NAN, 1.0, 2.0] * 3,
}


@pytest.mark.parametrize(
    "choice", [Choice(), Choice(top_k=5), Choice(1.0, 5, 0.9), Choice(0.7, None, 0.9, 0.1)], ids=str
)
@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_cannot_be_sampled_give_some_id_and_leave_others_alone(
    device: str, choice: Choice
) -> None:
    bad = [*BAD_ROWS.values()]
    logits = torch.randn(len(bad) + 2, 9, generator=torch.Generator().manual_seed(0)).to(device)
    law, keys = Law.of([choice] * len(logits), 9, device), seeds_of(len(logits), device)
    names = torch.arange(9, device=device) * 3
    want, want_probs = sampling.sample(logits, *law, *keys), sampling.processed_probs(logits, *law)
    logits[1:-1] = torch.tensor(bad)
    got, probs = sampling.sample(logits, *law, *keys), sampling.processed_probs(logits, *law)
    assert bool(((got >= 0) & (got < 9)).all()), got
    assert torch.equal(got[:: len(bad) + 1], want[:: len(bad) + 1])
    assert torch.equal(probs[:: len(bad) + 1], want_probs[:: len(bad) + 1])
    assert not logits[-2, int(got[-2])].isnan()
    assert bool((sampling.sample(logits, *law, *keys, names) % 3 == 0).all())


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("vocab_size", [1, 5, 300, 2051])
@pytest.mark.parametrize("device", DEVICES)
def test_weights_are_raced_as_they_are(device: str, vocab_size: int, per_row: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(8, vocab_size + 1, generator=generator)[:, :vocab_size] ** 4
    weights[:, 1::3] = 0.0
    index = torch.tensor([3, 0, 1, 7, 2, 2, 5, 3]) if per_row else 6
    given = index.to(device) if isinstance(index, Tensor) else index
    seeds, keys = seeds_of(8, device)
    got = sampling.race(weights.to(device), seeds, keys, Purpose.RESIDUAL, given)
    times = noise.race_times_reference(seeds.cpu(), keys.cpu(), vocab_size, Purpose.RESIDUAL, index)
    assert_draws(got, times, weights)


@pytest.mark.parametrize("device", DEVICES)
def test_what_has_no_weight_is_never_drawn(device: str) -> None:
    weights = torch.zeros(4, 300, device=device)
    weights[0, 123], weights[1, 299], weights[2] = 1e-30, 3.0, -1.0
    weights[0, :100] = NAN
    got = sampling.race(weights, *seeds_of(4, device), Purpose.RESIDUAL, 0)
    assert got.tolist() == [123, 299, 0, 0]


@pytest.mark.parametrize("dtype", SMALL_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("vocab_size", "m"), [(1, 1), (5, 5), (300, 1), (300, 17), (300, 300), (4100, 64), (9001, 33)]
)
@pytest.mark.parametrize("device", DEVICES)
def test_the_best_come_in_order_and_ties_by_id(
    device: str, vocab_size: int, m: int, dtype: torch.dtype
) -> None:
    rows = [
        spread(vocab_size, 1),
        steps(vocab_size, 2),
        torch.zeros(vocab_size),
        masked(vocab_size, 3),
    ]
    logits = torch.stack(rows).to(dtype)
    logits[0, 0] = NAN
    scores, ids = sampling.top_m(logits.to(device), m)
    clean = torch.where(logits.isnan(), -INF, logits)
    want = clean.sort(dim=-1, descending=True, stable=True)
    assert scores.dtype == dtype and torch.equal(scores.cpu(), want.values[:, :m])
    assert torch.equal(ids.cpu(), want.indices[:, :m])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [32000, 151936, 248320])
@pytest.mark.parametrize("m", [1, 16, 32, 64, 777, 1024])
def test_the_best_of_large_vocabularies(vocab_size: int, m: int, dtype: torch.dtype) -> None:
    logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(0)) * 4
    logits[4] = logits[4].round()
    logits = logits.to(dtype).cuda()
    scores, ids = sampling.top_m(logits, m)
    want = logits.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(scores, want.values[:, :m]) and torch.equal(ids, want.indices[:, :m])


@pytest.mark.parametrize("m", [1, 5, 32])
@pytest.mark.parametrize("device", DEVICES)
def test_a_listed_draw_says_what_it_was_drawn_from(device: str, m: int) -> None:
    choices = [
        Choice(),
        Choice(0.0),
        Choice(0.7, 3),
        Choice(top_p=0.6),
        Choice(1.3, 20, 0.9, 0.05),
        Choice(top_p=1e-20),
        Choice(min_p=1.0),
        Choice(2.0),
    ]
    logits = torch.randn(8, 300, generator=torch.Generator().manual_seed(0)) * 2
    scores, ids = sampling.top_m(logits.to(device), m)
    ids = ids * 11 + 5
    law, want_law = (Law.of(choices, 300, where) for where in (device, "cpu"))
    seeds, keys = seeds_of(8, device)
    tokens, probs = sampling.draw_listed(scores, ids, *law, seeds, keys, Purpose.DRAFT, 3)
    want = reference.processed_probs_reference(scores.cpu().double(), *want_law)
    assert torch.equal(probs.cpu() > 0, want > 0)
    torch.testing.assert_close(probs.cpu().double(), want, rtol=1e-5, atol=TOLERANCE)
    times = noise.race_times_of_reference(seeds.cpu(), keys.cpu(), ids.cpu(), Purpose.DRAFT, 3)
    place = (ids == tokens[:, None]).long().argmax(-1)
    assert_draws(place, times, want)


@pytest.mark.parametrize(("most", "m"), [(1, 1), (3, 5), (4, 32), (8, 64)])
@pytest.mark.parametrize("device", DEVICES)
def test_block_terms_are_those_of_the_reference(device: str, most: int, m: int) -> None:
    generator = torch.Generator().manual_seed(0)
    batch, vocab_size = 9, 150
    probs = torch.softmax(torch.randn(batch, most + 1, vocab_size, generator=generator) * 2, -1)
    probs[0, :, ::2] = 0
    probs = probs / probs.sum(-1, keepdim=True)
    ids = torch.rand(batch, most, vocab_size, generator=generator).argsort(-1)[..., :m]
    q = torch.rand(batch, most, m, generator=generator) ** 3
    q[1] = probs[1, :-1].gather(-1, ids[1])
    q[..., m // 2 + 1 :] *= torch.rand(batch, most, 1, generator=generator) < 0.5
    q = q / q.sum(-1, keepdim=True)
    drafts = ids.gather(-1, torch.zeros(batch, most, 1, dtype=torch.int64))[..., 0]
    drafts[2, 0] = ids[2, 0, -1]
    drafts[3] = (ids[3].amax(-1) + 1) % vocab_size  # perhaps not of q at all
    num_drafts = torch.arange(batch) % (most + 1)
    held = [torch.nn.functional.pad(each, (0, 0, 0, 2)) for each in (ids, q)]  # a wider table
    given = [each.to(device)[:, :most] for each in held]
    got = sampling.block_terms_sparse(
        probs.to(device), drafts.to(device), num_drafts.to(device), *given
    )
    want = reference.block_terms_sparse_reference(
        probs.double(), drafts, num_drafts, ids, q.double()
    )
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=1e-5, atol=1e-5)


def everything(logits: Tensor, law: Law, seeds: Tensor, keys: Tensor) -> list[Tensor]:
    """What every function gives for the same rows."""
    scores, ids = sampling.top_m(logits, min(20, logits.shape[1]))
    probs = sampling.processed_probs(logits, *law)
    return [
        sampling.argmax(logits),
        sampling.sample(logits, *law, seeds, keys),
        probs,
        sampling.race(probs, seeds, keys, Purpose.RESIDUAL, 1),
        scores,
        ids,
        *sampling.draw_listed(scores, ids, *law, seeds, keys, Purpose.DRAFT, 2),
    ]


def assert_rows_are_their_own(
    device: str, vocab_size: int, dtype: torch.dtype, num_rows: int, parts: list[list[int]]
) -> None:
    names = [name for name in ROWS if name != "far apart"]
    picked = [names[row % len(names)] for row in range(num_rows)]
    rows, choices = zip(*(row_of(name, vocab_size, dtype) for name in picked), strict=True)
    logits = torch.stack(rows).to(device)
    law, (seeds, keys) = Law.of(choices, vocab_size, device), seeds_of(num_rows, device)
    together = everything(logits, law, seeds, keys)
    for part in parts:
        index = torch.tensor(part, device=device)
        alone = everything(logits[index], law.part(index), seeds[index], keys[index])
        for one, all_of_them in zip(alone, together, strict=True):
            assert torch.equal(one, all_of_them[index])


@pytest.mark.skipif(HAS_GPU, reason="the interpreter is off")
def test_interpreted_rows_do_not_depend_on_their_neighbours() -> None:
    assert_rows_are_their_own("cpu", 304, torch.float16, 8, [[5], [7, 3]])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [304, 32000, 151936, 248320])
def test_rows_do_not_depend_on_their_neighbours(vocab_size: int, dtype: torch.dtype) -> None:
    parts = [[row] for row in range(0, 84, 5)]
    parts += [[*range(83, -1, -1)], [*range(0, 84, 2)], [7] * 300]
    assert_rows_are_their_own("cuda", vocab_size, dtype, 84, parts)


def pearson_limit(freedom: int) -> float:
    """Chi-square quantile at 1 - 1e-9, by Wilson and Hilferty's cube."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 5.998 * math.sqrt(spread)) ** 3


def assert_law(tokens: Tensor, probs: Tensor) -> None:
    counts = torch.bincount(tokens.cpu(), minlength=len(probs)).double()
    assert not counts[probs == 0].any()
    expected = (probs * len(tokens))[probs > 0]
    statistic = float(((counts[probs > 0] - expected) ** 2 / expected).sum())
    assert statistic < pearson_limit(max(len(expected) - 1, 1))


LAWS = [
    Choice(),
    Choice(3.0),
    Choice(0.5, 4),
    Choice(1.0, None, 0.8),
    Choice(1.5, 6, 0.9, 0.1),
    Choice(min_p=0.2),
]
LAW_ROW = [0.0, 1.0, -1.0, 0.5, 2.0, 0.25, -0.5, -INF, 1.0]


@pytest.mark.gpu
@pytest.mark.parametrize("choice", LAWS, ids=str)
@pytest.mark.parametrize("keyed_by", ["seed", "position"])
def test_tokens_follow_the_law_on_a_gpu(choice: Choice, keyed_by: str) -> None:
    size, row = 60_000, torch.tensor(LAW_ROW)
    law = Law.of([choice], len(row), "cuda").part(torch.zeros(size, dtype=torch.int64))
    running = torch.arange(size, device="cuda")
    fixed = torch.full_like(running, 17)
    seeds, keys = (running, fixed) if keyed_by == "seed" else (fixed, running)
    logits = row.cuda().expand(size, -1)
    probs = reference.processed_probs_reference(row[None].double(), *Law.of([choice], len(row)))[0]
    assert_law(sampling.sample(logits, *law, seeds, keys), probs)
    weights = probs.float().cuda().expand(size, -1)
    assert_law(sampling.race(weights, seeds, keys, Purpose.RESIDUAL, 2), probs)
    scores, ids = sampling.top_m(logits, 5)
    tokens, q = sampling.draw_listed(scores, ids, *law, seeds, keys, Purpose.DRAFT, 1)
    full = torch.zeros(len(row), dtype=torch.float64)
    full[ids[0].cpu()] = q[0].cpu().double()
    assert_law(tokens, full / full.sum())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_everything_can_be_captured_and_waits_for_nothing(dtype: torch.dtype) -> None:
    logits = torch.randn(7, 32000, device="cuda").to(dtype)
    law = Law.of(LARGE[:7], 32000, "cuda")
    seeds, keys = seeds_of(7, "cuda")

    def all_of_them() -> list[Tensor]:
        return [
            *everything(logits, law, seeds, keys),
            philox.uniforms(seeds, keys, 3, Purpose.ACCEPT),
        ]

    all_of_them()
    torch.cuda.set_sync_debug_mode("error")
    try:
        all_of_them()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = all_of_them()
    logits.copy_(torch.randn(7, 32000, device="cuda"))
    keys += 1
    graph.replay()
    for one, other in zip(captured, all_of_them(), strict=True):
        assert torch.equal(one, other)
