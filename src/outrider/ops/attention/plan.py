"""How attention is cut into work for kernels, and how a kernel is launched.

Host side only; knows nothing of Triton. The kernels' side is told at the head of triton.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.ops.dispatch import capability, num_multiprocessors, overlaps_launches

LEAF = 256
"""Tokens of a leaf."""
GROUP = 4
"""Leaves of a group."""
WHOLE = 1 << 30
"""A cut that no context reaches: an item takes all groups of a sequence."""
MAX_WORKSPACE_BYTES = 512 * 2**20
MAX_SEQUENCES = 256
"""Sequences of one launch; a larger batch, or one of larger partial sums, is several launches."""


@dataclass(frozen=True)
class Launch:
    """A kernel and all it is launched with."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]

    def run(self) -> None:
        self.kernel[self.grid](*self.args, **self.options)

    def compile(self) -> Any:
        """Compile without running; returns what Triton's warmup returns."""
        return self.kernel.warmup(*self.args, grid=self.grid, **self.options)


@dataclass(frozen=True)
class Card:
    """What launches depend on besides their arguments.

    Attributes:
        capability: (9, 0) for Hopper.
        overlaps_launches: see ops.dispatch.
    """

    capability: tuple[int, int]
    num_multiprocessors: int
    overlaps_launches: bool

    @staticmethod
    def of(tensor: Tensor) -> Card:
        """The card that holds the tensor; for one on a CPU, what the interpreter can run."""
        if not tensor.is_cuda:
            return Card((8, 0), 1, False)
        device = tensor.device
        return Card(capability(device), num_multiprocessors(device), overlaps_launches(tensor))


@dataclass(frozen=True)
class Attending:
    """Arguments of paged_attention or prefill_attention, and where the result goes."""

    queries: Tensor
    kv_pool: Tensor
    block_tables: Tensor
    starts: Tensor
    num_rows: Tensor
    gate: Tensor | None
    output: Tensor

    def __post_init__(self) -> None:
        assert self.queries.is_contiguous(), self.queries.stride()
        assert self.kv_pool[0].is_contiguous(), self.kv_pool.stride()
        assert self.starts.is_contiguous() and self.num_rows.is_contiguous()
        assert self.block_tables.stride(1) == 1, self.block_tables.stride()
        assert self.gate is None or self.gate.stride(3) == 1, self.gate.stride()

    @property
    def num_kv_heads(self) -> int:
        return self.kv_pool.shape[2]

    @property
    def block_size(self) -> int:
        return self.kv_pool.shape[3]

    @property
    def head_dim(self) -> int:
        return self.queries.shape[3]

    @property
    def share(self) -> int:
        """Query heads of a key/value head."""
        return self.queries.shape[2] // self.num_kv_heads

    @property
    def num_packed(self) -> int:
        """Rows of one sequence and key/value head: its tokens times `share`."""
        return self.queries.shape[1] * self.share

    @property
    def scale(self) -> float:
        """Turns products of queries and keys into exponents of 2."""
        return math.log2(math.e) / math.sqrt(self.head_dim)

    @property
    def gate_args(self) -> tuple[Tensor, int, int, int]:
        """Pointer and strides; any pointer where there is no gate."""
        if self.gate is None:
            return self.queries, 0, 0, 0
        batch_stride = self.gate.stride(0) if self.gate.shape[0] > 1 else 0
        return self.gate, batch_stride, self.gate.stride(1), self.gate.stride(2)

    def sequences(self, begin: int, end: int) -> Attending:
        """The same for a part of the batch."""
        return Attending(
            self.queries[begin:end],
            self.kv_pool,
            self.block_tables[begin:end],
            self.starts[begin:end],
            self.num_rows[begin:end],
            None if self.gate is None else self.gate[begin:end],
            self.output[begin:end],
        )


@dataclass(frozen=True)
class Cut:
    """How a batch may be cut, and the memory that its partial sums need.

    Attributes:
        row_tiles: items that share a head's packed rows among them.
        max_leaf_items: work of more leaves than this is cut more coarsely, on the device.
        programs: those that take turns with the items; 0 where a program has no registers for the
            sums of a group and of a row, so that no sequence is taken whole.
        lanes: sequences that a program counts over, a power of two.
        num_partials: rows of partial sums in the worst case.
    """

    row_tiles: int
    max_leaf_items: int
    programs: int
    lanes: int
    num_partials: int

    def workspace(self, attending: Attending) -> tuple[Tensor, Tensor, Tensor]:
        """Partial sums of values [P, D], their references [P] and sums of weights [P], float32."""
        device = attending.queries.device
        values = torch.empty(
            (self.num_partials, attending.head_dim), dtype=torch.float32, device=device
        )
        scalars = torch.empty((2, self.num_partials), dtype=torch.float32, device=device)
        return values, scalars[0], scalars[1]


def _cuts(attending: Attending, tokens: int) -> int:
    """Most pieces of so many tokens that a sequence has."""
    return _ceil(attending.block_tables.shape[1] * attending.block_size, tokens)


def _ceil(count: int, size: int) -> int:
    return -(-count // size)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def cut_batch(attending: Attending, rows_per_item: int, max_leaf_items: int, programs: int) -> Cut:
    """The cut of a batch that `batch_parts` gave."""
    heads = len(attending.starts) * attending.num_kv_heads
    row_tiles = _ceil(attending.num_packed, rows_per_item)
    leaves = min(heads * _cuts(attending, LEAF), max_leaf_items // row_tiles)
    groups = heads * _cuts(attending, LEAF * GROUP)
    lanes = max(32, _power_of_two(len(attending.starts)))
    num_partials = max(leaves, groups) * attending.num_packed
    return Cut(row_tiles, max_leaf_items, programs, lanes, num_partials)


def batch_parts(whole: Attending) -> Iterator[Attending]:
    """The batch in parts that count over few enough sequences and need a bounded workspace.

    At batch 64, 32k tokens, T = 9 and 32 query heads of 128 the workspace is 0.3 GB; only longer
    tables than that are cut.
    """
    batch = len(whole.starts)
    row_bytes = (whole.head_dim + 2) * 4
    num_rows = _cuts(whole, LEAF * GROUP) * whole.num_kv_heads * whole.num_packed
    step = min(MAX_SEQUENCES, max(1, MAX_WORKSPACE_BYTES // (num_rows * row_bytes)))
    if batch <= step:
        yield whole
        return
    for begin in range(0, batch, step):
        yield whole.sequences(begin, min(begin + step, batch))


@dataclass(frozen=True)
class PrefillTile:
    """What a program of a prompt chunk works on, and how.

    Attributes:
        rows: packed rows, a power of two that is at least the query heads of a key/value head.
        tokens: tokens of a step; a row's bits depend on it and on nothing else here.
        descriptors: tiles come by bulk tensor copies instead of single pointers.
    """

    rows: int
    tokens: int
    num_warps: int
    num_stages: int
    descriptors: bool

    @staticmethod
    def of(attending: Attending, card: Card) -> PrefillTile:
        """The tile for a card. Without 16-bit matrix units, tiles are small: products are many
        instructions there."""
        head_dim, dtype = attending.head_dim, attending.queries.dtype
        if dtype == torch.float32 or card.capability < (8, 0):
            rows = max(32, _power_of_two(attending.share))
            wide = head_dim > 128
            return PrefillTile(rows, 16 if wide else 32, 8 if head_dim > 64 else 4, 1, False)
        fits = head_dim in (64, 128, 256) and attending.block_size % 64 == 0
        if fits and (9, 0) <= card.capability < (12, 0):  # cards after that have less shared memory
            return PrefillTile(128, 64, 8, 3 if head_dim == 256 else 5, descriptors=True)
        if head_dim > 128:
            return PrefillTile(64, 32, 4, 2, descriptors=False)
        return PrefillTile(128, 64, 8, 2, descriptors=False)
