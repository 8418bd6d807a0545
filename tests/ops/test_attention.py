"""Paged attention is causal softmax attention, whatever block table and neighbours surround it."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from outrider.ops.attention import SUPPORTED_DTYPES, paged_attention

ABSOLUTE_ERROR = {
    torch.float32: 2e-6,
    # Values are about 1 in size; the result is rounded once.
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}


@dataclass(frozen=True)
class Heads:
    """num query heads, num key and value heads, head size."""

    queries: int
    keys: int
    size: int


HEADS = [Heads(4, 2, 32), Heads(6, 2, 16), Heads(2, 2, 64), Heads(3, 1, 24), Heads(1, 1, 256)]


class Context:
    """Keys and values of a few sequences, as plain lists and as a poisoned pool."""

    def __init__(self, lengths: list[int], heads: Heads, dtype: torch.dtype, seed: int = 0) -> None:
        self.lengths, self.heads, self.dtype = lengths, heads, dtype
        rng = torch.Generator().manual_seed(seed)
        self.keys = [self._random(n, heads.keys, rng) for n in lengths]
        self.values = [self._random(n, heads.keys, rng) for n in lengths]
        self.queries = [self._random(n, heads.queries, rng) for n in lengths]
        self._rng = rng

    def _random(self, length: int, num_heads: int, rng: torch.Generator) -> Tensor:
        return torch.randn(length, num_heads, self.heads.size, generator=rng).to(self.dtype)

    def pool(self, block_size: int, sequences: list[int]) -> tuple[Tensor, Tensor]:
        """(pool, block tables) with blocks in random order, NaN wherever nothing was written."""
        needed = [-(-self.lengths[i] // block_size) for i in sequences]
        num_blocks, width = 2 + sum(needed), max(needed) + 2
        shape = (2, num_blocks, self.heads.keys, block_size, self.heads.size)
        pool = torch.full(shape, float("nan"), dtype=self.dtype)
        free = (torch.randperm(num_blocks - 1, generator=self._rng) + 1).tolist()
        tables = torch.zeros((len(sequences), width), dtype=torch.int64)
        for row, (sequence, count) in enumerate(zip(sequences, needed, strict=True)):
            block_ids = [free.pop() for _ in range(count)]
            tables[row, :count] = torch.tensor(block_ids)
            for position in range(self.lengths[sequence]):
                block, offset = block_ids[position // block_size], position % block_size
                pool[0, block, :, offset] = self.keys[sequence][position]
                pool[1, block, :, offset] = self.values[sequence][position]
        return pool, tables

    def expected(self, sequence: int, position: int) -> Tensor:
        """[Hq, D] float64, from the definition, one head at a time."""
        group = self.heads.queries // self.heads.keys
        result: list[Tensor] = []
        for head in range(self.heads.queries):
            query = self.queries[sequence][position, head].double()
            keys = self.keys[sequence][: position + 1, head // group].double()
            values = self.values[sequence][: position + 1, head // group].double()
            scores = keys @ query / self.heads.size**0.5
            weights = (scores - scores.max()).exp()
            result.append(weights @ values / weights.sum())
        return torch.stack(result)


def attend(
    context: Context, block_size: int, sequences: list[int], num_rows: list[int], width: int
) -> Tensor:
    """The last num_rows[i] positions of each sequence, as one rectangle of `width` rows."""
    pool, tables = context.pool(block_size, sequences)
    starts = [context.lengths[s] - n for s, n in zip(sequences, num_rows, strict=True)]
    shape = (len(sequences), width, context.heads.queries, context.heads.size)
    queries = torch.full(shape, 3.0, dtype=context.dtype)
    for row, (sequence, count) in enumerate(zip(sequences, num_rows, strict=True)):
        queries[row, :count] = context.queries[sequence][starts[row] :]
    return paged_attention(queries, pool, tables, torch.tensor(starts), torch.tensor(num_rows))


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("block_size", [16, 48, 64])
def test_rows_are_the_softmax_of_the_definition(
    dtype: torch.dtype, heads: Heads, block_size: int
) -> None:
    context = Context([5, 64, 65, 131], heads, dtype)
    num_rows = [5, 1, 4, 3]
    result = attend(context, block_size, [0, 1, 2, 3], num_rows, width=5)
    assert result.dtype == dtype
    for sequence, count in enumerate(num_rows):
        for row in range(count):
            position = context.lengths[sequence] - count + row
            error = result[sequence, row].double() - context.expected(sequence, position)
            assert error.abs().max() <= ABSOLUTE_ERROR[dtype], (sequence, row)


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
def test_padding_rows_are_finite(dtype: torch.dtype) -> None:
    context = Context([3, 70], HEADS[0], dtype)
    assert attend(context, 16, [0, 1], [1, 0], width=4).isfinite().all()


@pytest.mark.parametrize(
    ("heads", "dtype", "num_threads"),
    [
        *((heads, torch.float32, 1) for heads in HEADS),
        *((HEADS[1], dtype, 1) for dtype in SUPPORTED_DTYPES[1:]),
        (HEADS[0], torch.float32, 2),
    ],
    ids=str,
)
def test_a_rows_bits_do_not_depend_on_rows_neighbours_or_blocks(
    heads: Heads, dtype: torch.dtype, num_threads: int
) -> None:
    context = Context([70, 9, 200, 64, 1, 129, 33, 65, 128], heads, dtype)
    alone = attend(context, 64, [0], [1], width=1)[0, 0]
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for num_rows in range(1, 10):
            for width in (num_rows, 9):
                for block_size in (16, 80):
                    result = attend(context, block_size, [0], [num_rows], width)
                    assert torch.equal(result[0, num_rows - 1], alone), (num_rows, width)
        for batch in range(2, 10):
            others = list(range(1, batch))
            num_rows = [min(context.lengths[s], 1 + s % 4) for s in others]
            result = attend(context, 16, [*others, 0], [*num_rows, 1], width=4)
            assert torch.equal(result[-1, 0], alone), batch
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
def test_a_chunk_of_a_prompt_has_the_bits_of_its_rows_one_by_one(dtype: torch.dtype) -> None:
    context = Context([100], HEADS[0], dtype)
    chunk = attend(context, 16, [0], [100], width=100)[0]
    pool, tables = context.pool(64, [0])
    for position in (0, 1, 15, 16, 63, 64, 65, 99):
        row = paged_attention(
            context.queries[0][position][None, None],
            pool,
            tables,
            torch.tensor([position]),
            torch.tensor([1]),
        )
        assert torch.equal(row[0, 0], chunk[position]), position


def test_scores_far_beyond_the_range_of_exp_give_finite_rows() -> None:
    context = Context([80], HEADS[0], torch.float32)
    context.keys[0] = context.keys[0] * 1000
    result = attend(context, 16, [0], [2], width=2)[0]
    for row, position in enumerate((78, 79)):
        # The largest score wins by far: the row is the value at that position.
        error = result[row].double() - context.expected(0, position)
        assert error.abs().max() <= 1e-3
