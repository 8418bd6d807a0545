"""Which tile `linear` takes on SM90. No choice made here changes a bit, only the time."""

from __future__ import annotations

from typing import NamedTuple

from outrider.ops.linear.segments import MAX_COUNTERS

SHARED_MEMORY = 228 * 1024
"""Bytes of a multiprocessor; every program takes 1 KB of it besides its own."""

MAX_STAGES = 8


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


def choose_tile(product: Product) -> Tile:
    """The tile for a product; no choice made here changes a bit.

    Up to 32 rows only bytes count: weights are the 64-row operand and every segment has its own
    program. Up to 64, a wide weight keeps that order and a narrow one is cut finer with the tokens
    as the 64 rows. bench/linear_sweep.py measures alternatives.
    """
    num_rows, n, _, segments, num_multiprocessors = product
    if num_rows > 64:
        return choose_large_tile(product)
    if num_rows <= 32:
        tokens = 8 if num_rows <= 8 else 16 if num_rows <= 16 else 32
        return fill_ring(product, tokens, 64, 128, weights_first=True, spread=segments > 1)
    if -(-n // 64) >= num_multiprocessors:
        return fill_ring(product, 64, 64, 128, weights_first=True, spread=segments > 1)
    outputs = 32 if -(-n // 32) <= num_multiprocessors else 64
    spread = segments > 1 and -(-n // outputs) < num_multiprocessors // 2
    return fill_ring(product, 64, outputs, 128, weights_first=False, spread=spread)


RELATIVE_SPEED = {256: 1.0, 128: 0.85, 64: 0.6}
"""Of a tile of 128 tokens by so many outputs, while its multiprocessor is busy."""

COST_OF_SPREADING = 1.2
"""Partial sums go through L2 and come back."""


def choose_large_tile(product: Product) -> Tile:
    """More than 64 rows: the tile of 128 tokens whose rounds over the multiprocessors end first."""
    segments = product.segments
    best: tuple[float, int, bool] | None = None
    for outputs, speed in RELATIVE_SPEED.items():
        for spread in (False, True) if segments > 1 else (False,):
            if spread and product.num_programs(128, outputs, False) > MAX_COUNTERS:
                continue
            if outputs == 256 and segments > 1 and not spread:
                continue  # two sets of sums do not fit in the registers
            programs = product.num_programs(128, outputs, spread)
            rounds = -(-programs // product.num_multiprocessors)
            share = COST_OF_SPREADING / segments if spread else 1.0
            cost = rounds * outputs / speed * share
            if best is None or cost < best[0]:
                best = (cost, outputs, spread)
    assert best is not None
    _, outputs, spread = best
    # Programs that a multiprocessor can hold, as registers allow.
    most = {256: 1, 128: 2 if spread or segments == 1 else 1, 64: 3}[outputs]
    return fill_ring(product, 128, outputs, 64, False, spread, most_programs=most)


def fill_ring(
    product: Product,
    tokens: int,
    outputs: int,
    depth: int,
    weights_first: bool,
    spread: bool,
    most_programs: int = 3,
) -> Tile:
    """A tile with as many stages as fit when all programs are resident, or most_programs."""
    programs = product.num_programs(tokens, outputs, spread)
    resident = min(-(-programs // product.num_multiprocessors), most_programs)
    budget = SHARED_MEMORY // resident - 1024 - 8 * MAX_STAGES
    num_steps = -(-product.k // depth) // (product.segments if spread else 1)
    stages = budget // ((tokens + outputs) * depth * 2)
    stages = max(2, min(stages, MAX_STAGES, num_steps))
    return Tile(tokens, outputs, depth, stages, 8 if tokens == 128 else 4, weights_first, spread)
