"""How the sum over K is cut: the numerical contract that all kernels of `linear` share.

A weight W [N, K] has a number of segments S that follows from its shape alone. With K cut into S
equal ranges, the value of one output is

    y = round(((s_0 + s_1) + s_2) + s_3),   s_i = sum of x[k] w[k] over range i, in order of k

in float32, with one rounding to the dtype at the end. Tensor cores add 16 products at a time to a
running float32 sum; in which order they do that inside is theirs, but it was seen to be the same
for every tile shape, for either operand order of wgmma, and for mma.sync. So tiles may be chosen
by the number of rows, and segments may be spread over programs or run one after the other.

| dtype, card | kernel | bits of a row depend on the row alone |
|---|---|---|
| float16, bfloat16, SM90, K a multiple of 8 | hopper.py, wgmma | yes |
| float16, bfloat16, other K, other SM80+ | triton.py, tl.dot | yes (SM100: one tile shape) |
| float32, any | triton.py, fused multiply-adds in order of k | yes |
| float16, SM75 | library.py, the matrix library at 64 rows | not promised by the library |
"""

from functools import cache

import torch
from torch import Tensor

MAX_SEGMENTS = 4
SEGMENT_MULTIPLE = 128
"""Segments are whole steps of every kernel, and the widest step over K is this long."""

MIN_SEGMENT = 512
MIN_PROGRAMS = 96
"""Of 64 outputs each; with fewer, multiprocessors idle that could pull bytes."""

MAX_COUNTERS = 4096


@cache
def num_segments(n: int, k: int) -> int:
    """Number of segments S of a weight [n, k]: 1, 2 or 4.

    Decoding a few rows is bound by the bytes of the weight, and needs about as many programs as
    there are multiprocessors (132 on an H100 or H200), each with a long way to go. In chains of
    an 8B layer, cutting o and down in two paid up to 32 rows and cutting qkv did not. Above
    that a program mostly runs its segments itself, and they cost nothing. So: the fewest
    segments that make 96 programs, which is 2 for N of 4096 and 1 from 6144 on.
    """
    wanted = 1
    while wanted < MAX_SEGMENTS and wanted * -(-n // 64) < MIN_PROGRAMS:
        wanted *= 2
    while wanted > 1 and (k % (wanted * SEGMENT_MULTIPLE) or k // wanted < MIN_SEGMENT):
        wanted //= 2
    return wanted


def uses_library(dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """Whether the product is the matrix library's: float16 without usable tensor-core kernels."""
    return dtype == torch.float16 and capability < (8, 0)


def is_invariant(dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """Whether a row's bits on this card depend on the row and the weight alone, for any shape."""
    return not uses_library(dtype, capability)


_counters: dict[tuple[torch.device, int], Tensor] = {}


def arrival_counters(weight: Tensor) -> Tensor:
    """Zeros [MAX_COUNTERS], int32, with which the programs of a tile find out who is last.

    Kernels leave them zero. Each weight has its own for good, because graphs remember the address:
    two different projections may run at the same time, one projection twice may not. A first call
    inside a graph capture gets counters that belong to the graph, zeroed by it at every replay.
    """
    key = (weight.device, weight.data_ptr())
    counters = _counters.get(key)
    if counters is None:
        counters = torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=weight.device)
        if not (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
            _counters[key] = counters
    return counters
