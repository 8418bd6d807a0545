"""y = x W^T in plain Triton: any card, shape and dtype. The order of the sum is segments.py's."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.ops.dispatch import capability, overlaps_launches
from outrider.ops.linear.segments import MAX_COUNTERS, arrival_counters, num_segments

GROUP = 8
"""Rows of tiles that pass over the weight together, so that their rows of x stay in L2."""


class Tile(NamedTuple):
    """What one program computes, and with what."""

    tokens: int
    outputs: int
    depth: int
    """Steps over K are this long."""
    num_stages: int
    num_warps: int


SMALL, MEDIUM, LARGE = Tile(16, 64, 128, 4, 4), Tile(64, 64, 64, 4, 4), Tile(128, 128, 32, 4, 8)

SMALL_FLOAT32, LARGE_FLOAT32 = Tile(16, 32, 32, 2, 4), Tile(64, 64, 32, 2, 8)
"""Multiplied by ordinary fused multiply-adds, every output by one thread in order of k."""

ONLY_SM100 = Tile(128, 64, 64, 3, 4)
"""SM100 multiplies small tiles by another instruction than large ones, and nobody has compared
their bits: there, one tile serves any number of rows."""


def choose_tile(num_rows: int, dtype: torch.dtype, capability: tuple[int, int]) -> Tile:
    """The tile for a number of rows; no choice made here changes a bit."""
    if dtype == torch.float32:
        return SMALL_FLOAT32 if num_rows <= 16 else LARGE_FLOAT32
    if capability[0] == 10:
        return ONLY_SM100
    return SMALL if num_rows <= 16 else MEDIUM if num_rows <= 64 else LARGE


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x_ptr,  # [num_rows, K], rows x_stride apart
    w_ptr,  # [N, K], rows w_stride apart
    y_ptr,  # [num_rows, N]
    partials_ptr,  # float32 [SEGMENTS, num_rows, N]
    arrivals_ptr,  # int32 [tiles], zero before and after
    num_rows,
    N,
    K,
    x_stride,
    w_stride,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    WHOLE_STEPS: tl.constexpr,  # whether DEPTH divides K
    SEGMENTS: tl.constexpr,
    SPREAD: tl.constexpr,  # whether each segment has a program of its own
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[m, n] = sum over segments i of (sum over k in segment i of x[m, k] w[n, k])."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i_tile = tl.program_id(0)
    i_segment = 0
    num_steps = tl.cdiv(K, DEPTH)
    if SPREAD:
        i_segment = i_tile % SEGMENTS
        i_tile = i_tile // SEGMENTS
        num_steps = num_steps // SEGMENTS
    num_tile_rows = tl.cdiv(num_rows, TOKENS)
    tiles_of_group = GROUP * tl.cdiv(N, OUTPUTS)
    i_first = i_tile // tiles_of_group * GROUP
    i_inside = i_tile % tiles_of_group
    rows_of_group = min(num_tile_rows - i_first, GROUP)
    o_m = (i_first + i_inside % rows_of_group) * TOKENS + tl.arange(0, TOKENS)
    o_n = (i_inside // rows_of_group) * OUTPUTS + tl.arange(0, OUTPUTS)
    o_k = i_segment * num_steps * DEPTH + tl.arange(0, DEPTH)
    inside_m = o_m[:, None] < num_rows
    inside_n = o_n[:, None] < N
    p_x = x_ptr + o_m.to(tl.int64)[:, None] * x_stride + o_k[None, :]
    p_w = w_ptr + o_n.to(tl.int64)[:, None] * w_stride + o_k[None, :]

    OWN: tl.constexpr = 1 if SPREAD else SEGMENTS
    b_sum = tl.zeros((TOKENS, OUTPUTS), tl.float32)
    for _ in range(OWN):
        b_segment = tl.zeros((TOKENS, OUTPUTS), tl.float32)
        for _ in range(num_steps // OWN):
            if WHOLE_STEPS:
                b_x = tl.load(p_x, mask=inside_m, other=0.0)
                b_w = tl.load(p_w, mask=inside_n, other=0.0)
            else:
                b_x = tl.load(p_x, mask=inside_m & (o_k[None, :] < K), other=0.0)
                b_w = tl.load(p_w, mask=inside_n & (o_k[None, :] < K), other=0.0)
            b_segment = tl.dot(b_x, tl.trans(b_w), b_segment, input_precision="ieee")
            p_x += DEPTH
            p_w += DEPTH
            o_k += DEPTH
        if OWN == 1:
            b_sum = b_segment
        else:
            b_sum += b_segment

    inside = inside_m & (o_n[None, :] < N)
    o_y = o_m.to(tl.int64)[:, None] * N + o_n[None, :]
    if SPREAD:
        segment_size = num_rows.to(tl.int64) * N
        tl.store(partials_ptr + i_segment * segment_size + o_y, b_sum, mask=inside)
        tl.debug_barrier()
        num_before = tl.atomic_add(arrivals_ptr + i_tile, 1, sem="acq_rel", scope="gpu")
        if num_before == SEGMENTS - 1:
            b_sum = tl.zeros((TOKENS, OUTPUTS), tl.float32)
            for i in tl.static_range(SEGMENTS):
                p_partials = partials_ptr + i * segment_size + o_y
                b_sum += tl.load(p_partials, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(y_ptr + o_y, b_sum.to(y_ptr.dtype.element_ty), mask=inside)
            tl.store(arrivals_ptr + i_tile, 0)
    else:
        tl.store(y_ptr + o_y, b_sum.to(y_ptr.dtype.element_ty), mask=inside)


def linear_triton(x: Tensor, weight: Tensor) -> Tensor:
    """x [R, K] with any strides, weight [N, K] contiguous within a row -> [R, N]."""
    if x.stride(1) != 1:
        x = x.contiguous()
    on_gpu = x.is_cuda
    tile = choose_tile(x.shape[0], x.dtype, capability(x.device) if on_gpu else (8, 0))
    y = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    launch(x, weight, y, tile, pdl=on_gpu and overlaps_launches(x))
    return y


def constants_of(num_rows: int, n: int, k: int, tile: Tile, pdl: bool) -> dict[str, object]:
    """What the kernel of a product is compiled for, but for types and alignment."""
    segments = num_segments(n, k)
    return {
        "TOKENS": tile.tokens,
        "OUTPUTS": tile.outputs,
        "DEPTH": tile.depth,
        "WHOLE_STEPS": k % tile.depth == 0,
        "SEGMENTS": segments,
        # With many rows there are programs enough, and partial sums cost more than they bring.
        "SPREAD": segments > 1 and num_rows <= 32,
        "GROUP": GROUP,
        "PDL": pdl,
        "num_stages": tile.num_stages,
        "num_warps": tile.num_warps,
        "launch_pdl": pdl,
    }


def launch(
    x: Tensor, weight: Tensor, y: Tensor, tile: Tile, pdl: bool, warmup: bool = False
) -> object:
    """Run one tile shape; `warmup` compiles and returns the kernel instead."""
    (num_rows, k), n = x.shape, weight.shape[0]
    constants = constants_of(num_rows, n, k, tile, pdl)
    num_programs = num_tiles = -(-num_rows // tile.tokens) * -(-n // tile.outputs)
    partials = arrivals = None
    if constants["SPREAD"]:
        assert num_tiles <= MAX_COUNTERS, (num_tiles, tile)
        segments = num_segments(n, k)
        num_programs = num_tiles * segments
        partials = torch.empty((segments, num_rows, n), dtype=torch.float32, device=x.device)
        arrivals = arrival_counters(weight)
    grid = (num_programs,)
    arguments = (x, weight, y, partials, arrivals, num_rows, n, k, x.stride(0), weight.stride(0))
    if warmup:
        return linear_kernel.warmup(*arguments, grid=grid, **constants)
    return linear_kernel[grid](*arguments, **constants)
