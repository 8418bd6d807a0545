"""Which tile `linear` takes on SM90. No choice made here changes a bit, only the time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from outrider.ops.linear.segments import MAX_COUNTERS

SHARED_MEMORY = 228 * 1024
"""Bytes of a multiprocessor; every program takes 1 KB of it besides its own."""

REGISTERS = 65536

HALF = 111 * 1024
"""Bytes of a ring beside which the ring of the next kernel, launched early, has room."""

MAX_STAGES = 10

WIDTHS = (32, 48, 64, 80, 96, 128, 160, 192, 256)
"""Sizes of a tile on its side that is no multiple of 64: sums of two powers of two."""


class Tile(NamedTuple):
    """What one program computes, and with what."""

    tokens: int
    outputs: int
    depth: int
    """Steps over K are this long."""
    stages: int
    """Steps in flight."""
    num_warps: int
    weights_first: bool
    """Whether outputs, not tokens, are the 64-row operand of wgmma."""
    spread: bool
    """Whether each segment of a tile has a program of its own."""

    @property
    def rows(self) -> int:
        """Size of the 64-row operand."""
        return self.outputs if self.weights_first else self.tokens

    @property
    def columns(self) -> tuple[int, int]:
        """Size of the other operand as two blocks, a power of two each; the second may be 0."""
        size = self.tokens if self.weights_first else self.outputs
        block = 1 << (size.bit_length() - 1)
        return block, size - block

    @property
    def sums(self) -> int:
        """Sums of a thread, a register each."""
        return self.tokens * self.outputs // (32 * self.num_warps)


class Product(NamedTuple):
    """What decides about a tile."""

    num_rows: int
    n: int
    k: int
    segments: int
    num_multiprocessors: int

    def num_programs(self, tokens: int, outputs: int, spread: bool) -> int:
        tiles = -(-self.num_rows // tokens) * -(-self.n // outputs)
        return tiles * self.segments if spread else tiles


MEASURED = {
    (32, 4096, 4096): Tile(32, 64, 128, 9, 4, True, False),
    (64, 24576, 4096): Tile(64, 192, 128, 3, 4, False, False),
    (128, 6144, 4096): Tile(128, 64, 64, 9, 8, False, False),
    (128, 10240, 4096): Tile(128, 128, 64, 7, 8, False, False),
    (128, 32000, 4096): Tile(128, 256, 64, 4, 8, False, False),
    (128, 151936, 4096): Tile(128, 192, 64, 5, 8, False, False),
    (128, 248320, 4096): Tile(128, 192, 64, 5, 8, False, False),
    (256, 6144, 4096): Tile(128, 128, 64, 7, 8, False, False),
}
"""By (rows up to, N, K): what was faster on an H200 than what the rules say. Those of 32 and 128
rows in a chain of layers (bench/results/2026-11-29-linear-chain-h200.json) or, of the two large
heads, alone (...-linear-128-rows-h200.json); the others in earlier runs of bench/linear_sweep.py,
of which no file was kept."""


@lru_cache(maxsize=8192)
def choose_tile(product: Product) -> Tile:
    """The tile for a product; no choice made here changes a bit.

    Up to 32 rows only the weight's bytes count. Above, copies from L2 and products soon take as
    long, and the tile is the one with the best estimate. bench/linear_sweep.py measures others.
    """
    num_rows, n, k, _, num_multiprocessors = product
    measured = MEASURED.get((1 << (num_rows - 1).bit_length(), n, k))
    if measured and num_multiprocessors == 132:
        return measured
    if num_rows <= 32:
        return choose_skinny_tile(product)
    return min(tiles(product), key=lambda tile: estimate(product, tile))


def choose_skinny_tile(product: Product) -> Tile:
    """Up to 32 rows: 64 outputs a program, weights as the 64-row operand, segments spread.

    The ring leaves room for that of the next kernel, which fills it while this one ends. But where
    each multiprocessor should have one program with a long way to go, the ring is so large that
    none gets two: those that become free first would, and be last by far.
    """
    num_rows, n, k, segments, num_multiprocessors = product
    tokens = 8 if num_rows <= 8 else 16 if num_rows <= 16 else 32
    programs = -(-n // 64)
    way = k // segments
    is_long = way >= 6144 or (way >= 4096 and tokens > 8)
    one_each = programs * segments <= num_multiprocessors
    budget = SHARED_MEMORY if one_each and is_long else HALF
    return fill_ring(product, tokens, 64, 128, True, segments > 1, budget)


def tiles(product: Product) -> Iterator[Tile]:
    """Tiles to be considered for more than 32 rows."""
    num_rows, segments = product.num_rows, product.segments
    for spread in (False, True) if segments > 1 else (False,):
        for rows in (64, 128, 256):
            for width in WIDTHS:
                for weights_first in (False, True):
                    tokens, outputs = (width, rows) if weights_first else (rows, width)
                    depth = 128 if tokens + outputs <= 128 else 64
                    tile = fill_ring(product, tokens, outputs, depth, weights_first, spread)
                    # Several segments of a program need two sets of sums, partial sums three.
                    if tile.sums > (192 if segments == 1 else 80):
                        continue
                    if tokens >= num_rows + 64 or (weights_first and tokens < num_rows):
                        continue
                    if spread and product.num_programs(tokens, outputs, False) > MAX_COUNTERS:
                        continue
                    yield tile


def estimate(product: Product, tile: Tile) -> float:
    """Microseconds that a tile should take, as fitted to an H200; right to 10 % or so.

    A multiprocessor copies 90 KB and multiplies 3.25 million pairs a microsecond, all of them
    together read 4 MB of weights. The longest of the three hides the others but for a part. A round
    has a beginning and an end, and what is spread pays for the partial sums of its threads.
    """
    num_programs = product.num_programs(tile.tokens, tile.outputs, tile.spread)
    rounds = -(-num_programs // product.num_multiprocessors)
    k = product.k // product.segments if tile.spread else product.k
    copies = rounds * 2 * (tile.tokens + tile.outputs) * k / 90e3
    products = rounds * tile.tokens * tile.outputs * k / 3.25e6
    share = min(1.0, num_programs / product.num_multiprocessors)
    weights = 2 * product.n * product.k / 4e6 / share**0.5
    exchange = 4.0 + tile.sums / 16 if tile.spread else 0.0
    return (copies**8 + products**8 + weights**8) ** (1 / 8) + rounds * (1.0 + exchange)


def fill_ring(
    product: Product,
    tokens: int,
    outputs: int,
    depth: int,
    weights_first: bool,
    spread: bool,
    budget: int = SHARED_MEMORY,
) -> Tile:
    """A tile with as many stages as fit when all programs, or as many as can be, are resident."""
    rows = outputs if weights_first else tokens
    num_warps = 4 if rows == 64 else 8
    tile = Tile(tokens, outputs, depth, 2, num_warps, weights_first, spread)
    sets_of_sums = 1 if spread or product.segments == 1 else 2
    registers = 32 * num_warps * (sets_of_sums * tile.sums + 48)
    programs = product.num_programs(tokens, outputs, spread)
    resident = min(-(-programs // product.num_multiprocessors), max(1, REGISTERS // registers), 3)
    room = min(SHARED_MEMORY // resident - 1024 - 8 * MAX_STAGES, budget)
    num_steps = -(-product.k // depth) // (product.segments if spread else 1)
    stages = min(room // ((tokens + outputs) * depth * 2), MAX_STAGES, num_steps)
    return tile._replace(stages=max(2, stages))
