"""y = x W^T on SM90: wgmma fed by a ring of bulk tensor copies, for any number of rows.

One kernel in two orientations. wgmma multiplies 64 rows of one operand by 8 to 256 rows of the
other, here called its columns. For few tokens the weights are the rows (`weights_first`), so that 1
to 8 tokens cost no more than 8; for many the tokens are. Columns may come in two blocks of
different size: 96 or 192 outputs a program often give every multiprocessor one program, where
powers of two leave a third of them idle. Neither the orientation nor the tile changes a bit, see
segments.py.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.ops.dispatch import num_multiprocessors
from outrider.ops.linear.descriptors import can_copy, matrix_descriptor, row_stride
from outrider.ops.linear.hopper_tiles import Product, Tile, choose_tile
from outrider.ops.linear.segments import MAX_COUNTERS, arrival_counters, num_segments

TOKENS_OF_GROUP = 2048
"""Rows of tiles with so many tokens pass over the weight together: 16 MB of x at K = 4096."""


@gluon.jit
def tile_indices(
    i_tile, num_rows, N, TOKENS: gl.constexpr, OUTPUTS: gl.constexpr, GROUP: gl.constexpr
):
    """Row and column of a tile. Tiles of GROUP * TOKENS rows pass over all columns before the next.

    Neighbouring programs share a weight tile, so weights come from memory once, and the rows of a
    group stay in L2. GROUP 0: there is one row of tiles.
    """
    if GROUP == 0:
        return i_tile * 0, i_tile
    else:
        num_tile_rows = gl.cdiv(num_rows, TOKENS)
        tiles_of_group = GROUP * gl.cdiv(N, OUTPUTS)
        i_first = i_tile // tiles_of_group * GROUP
        i_inside = i_tile % tiles_of_group
        rows_of_group = min(num_tile_rows - i_first, GROUP)
        return i_first + i_inside % rows_of_group, i_inside // rows_of_group


@gluon.jit
def copy_rows(desc, ring, filled, stage, o_row, o_k, inside):
    """Start to copy rows of one step over K into a stage of their ring, where inside holds."""
    tma.async_copy_global_to_shared(
        desc, [o_row, o_k], filled.index(stage), ring.index(stage), pred=inside
    )


@gluon.jit
def copy_columns(desc, more_desc, ring, more_ring, filled, stage, o_column, o_k, inside):
    """The same for columns, which may come in two blocks."""
    copy_rows(desc, ring, filled, stage, o_column, o_k, inside)
    if more_ring is not None:
        o_more = o_column + ring.shape[1]
        copy_rows(more_desc, more_ring, filled, stage, o_more, o_k, inside)


@gluon.jit
def places(b_sum, FIRST_COLUMN: gl.constexpr, WEIGHTS_FIRST: gl.constexpr):
    """Token and output, counted inside the tile, of every sum of a block."""
    WGMMA: gl.constexpr = b_sum.type.layout
    o_row = gl.arange(0, b_sum.shape[0], layout=gl.SliceLayout(1, WGMMA))[:, None]
    o_column = gl.arange(0, b_sum.shape[1], layout=gl.SliceLayout(0, WGMMA))[None, :]
    if WEIGHTS_FIRST:
        return o_column + FIRST_COLUMN, o_row
    else:
        return o_row, o_column + FIRST_COLUMN


@gluon.jit
def save_partial(
    b_sum,
    p_partial,
    rows_left,
    OUTPUTS: gl.constexpr,
    FIRST_COLUMN: gl.constexpr,
    WEIGHTS_FIRST: gl.constexpr,
):
    """Leave a block of sums in partials [TOKENS, OUTPUTS], as far as their tokens exist."""
    o_token, o_output = places(b_sum, FIRST_COLUMN, WEIGHTS_FIRST)
    inside = (o_token < rows_left) & (o_output < OUTPUTS)
    gl.store(p_partial + o_token * OUTPUTS + o_output, b_sum, mask=inside)


@gluon.jit
def add_partials(
    b_own,
    i_own,
    p_partials,
    rows_left,
    SEGMENTS: gl.constexpr,
    TOKENS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    FIRST_COLUMN: gl.constexpr,
    WEIGHTS_FIRST: gl.constexpr,
):
    """A block of sums over all segments, in their order; that of segment i_own is at hand."""
    o_token, o_output = places(b_own, FIRST_COLUMN, WEIGHTS_FIRST)
    inside = (o_token < rows_left) & (o_output < OUTPUTS)
    p_places = p_partials + o_token * OUTPUTS + o_output
    b_sum = gl.zeros_like(b_own)
    for i in gl.static_range(SEGMENTS):
        p_other = p_places + i * (TOKENS * OUTPUTS)
        b_other = gl.load(p_other, mask=inside & (i != i_own), other=0.0, cache_modifier=".cg")
        b_sum += gl.where(inside & (i == i_own), b_own, b_other)
    return b_sum


@gluon.constexpr_function
def rows_layout(outputs, vector, num_warps):
    """A thread holds `vector` neighbouring outputs of a token."""
    lanes = min(32, outputs // vector)
    return gl.BlockedLayout([1, vector], [32 // lanes, lanes], [num_warps, 1], [1, 0])


@gluon.jit
def gated_pairs(b_y):
    """silu(gate) * up of neighbours (gate, up), rounded where ops.silu_mul rounds."""
    TYPE: gl.constexpr = b_y.dtype
    b_pairs = b_y.reshape([b_y.shape[0], b_y.shape[1] // 2, 2])
    b_gate, b_up = gl.split(b_pairs)
    b_gate = b_gate.to(gl.float32)
    b_silu = (b_gate / (1.0 + gl.exp(-b_gate))).to(TYPE).to(gl.float32)
    return (b_silu * b_up.to(gl.float32)).to(TYPE)


@gluon.jit
def store_sums(
    b_sum, y_ptr, o_token, o_output, num_rows, N, WEIGHTS_FIRST: gl.constexpr, GATED: gl.constexpr
):
    """Round a block of sums and store it in rows of y; 16 bytes per thread, 8 where GATED."""
    b_y = b_sum.to(y_ptr.dtype.element_ty)
    if WEIGHTS_FIRST:
        b_y = gl.permute(b_y, (1, 0))
    OUTPUTS: gl.constexpr = b_y.shape[1]
    b_y = gl.convert_layout(b_y, rows_layout(OUTPUTS, 8, gl.num_warps()))
    if GATED:
        PAIRS: gl.constexpr = rows_layout(OUTPUTS // 2, 4, gl.num_warps())
        b_y = gl.convert_layout(gated_pairs(b_y), PAIRS, assert_trivial=True)
        o_output = o_output // 2
        N = N // 2
    ROWS_OF_Y: gl.constexpr = b_y.type.layout
    o_m = gl.arange(0, b_y.shape[0], layout=gl.SliceLayout(1, ROWS_OF_Y))
    o_n = o_output + gl.arange(0, b_y.shape[1], layout=gl.SliceLayout(0, ROWS_OF_Y))
    p_y = y_ptr + o_token.to(gl.int64) * N + o_m[:, None] * N + o_n[None, :]
    gl.store(p_y, b_y, mask=(o_m[:, None] < num_rows - o_token) & (o_n[None, :] < N))


@gluon.jit
def finish(
    b_sum,
    y_ptr,
    p_partials,
    i_segment,
    o_token,
    o_output,
    num_rows,
    N,
    SEGMENTS: gl.constexpr,
    TOKENS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    FIRST_COLUMN: gl.constexpr,
    WEIGHTS_FIRST: gl.constexpr,
    GATED: gl.constexpr,
):
    """Add what the programs of the other segments have left, if there are any, and store."""
    if SEGMENTS > 1:
        b_sum = add_partials(
            b_sum, i_segment, p_partials, num_rows - o_token,
            SEGMENTS, TOKENS, OUTPUTS, FIRST_COLUMN, WEIGHTS_FIRST,
        )  # fmt: skip
    if WEIGHTS_FIRST:
        o_token += FIRST_COLUMN
    else:
        o_output += FIRST_COLUMN
    store_sums(b_sum, y_ptr, o_token, o_output, num_rows, N, WEIGHTS_FIRST, GATED)


@gluon.jit
def accumulate(
    row_desc,
    column_desc,
    more_desc,
    row_ring,
    column_ring,
    more_ring,
    filled,
    o_row,
    o_column,
    o_k,
    num_steps,
    SEGMENTS: gl.constexpr,
):
    """The sums of the columns and of those that come in a second block, if there is one.

    The rings hold the first steps, or they are on their way; the others are copied on the way.
    """
    STAGES: gl.constexpr = row_ring.shape[0]
    DEPTH: gl.constexpr = row_ring.shape[2]
    ROWS: gl.constexpr = row_ring.shape[1]
    COLUMNS: gl.constexpr = column_ring.shape[1]
    MORE: gl.constexpr = 0 if more_ring is None else more_ring.shape[1]
    STAGE_BYTES: gl.constexpr = (ROWS + COLUMNS + MORE) * DEPTH * 2
    WGMMA: gl.constexpr = wgmma_layout(COLUMNS, gl.num_warps())
    b_sum = gl.zeros((ROWS, COLUMNS), gl.float32, WGMMA)
    b_more_sum = b_sum
    if MORE > 0:
        b_more_sum = gl.zeros((ROWS, MORE), gl.float32, wgmma_layout(MORE, gl.num_warps()))
    stage = 0
    last_stage = STAGES - 1
    phase = 0
    i_step = 0
    for _ in range(SEGMENTS):
        b_part = gl.zeros((ROWS, COLUMNS), gl.float32, WGMMA)
        b_more = b_part
        if MORE > 0:
            b_more = gl.zeros((ROWS, MORE), gl.float32, wgmma_layout(MORE, gl.num_warps()))
        for _ in range(num_steps // SEGMENTS):
            mbarrier.wait(filled.index(stage), phase)
            s_rows = row_ring.index(stage)
            s_columns = column_ring.index(stage).permute((1, 0))
            b_part = warpgroup_mma(s_rows, s_columns, b_part, is_async=True)
            # With the products of one step in flight those of the step before have ended.
            if MORE > 0:
                s_more = more_ring.index(stage).permute((1, 0))
                b_more = warpgroup_mma(s_rows, s_more, b_more, is_async=True)
                b_part, b_more = warpgroup_mma_wait(num_outstanding=2, deps=(b_part, b_more))
            else:
                b_part = warpgroup_mma_wait(num_outstanding=1, deps=(b_part,))
            # They have for this warp. The stage can be refilled when they have for all.
            gl.thread_barrier()
            i_next = i_step - 1 + STAGES
            refill = (i_step >= 1) & (i_next < num_steps)
            o_next = o_k + i_next * DEPTH
            mbarrier.expect(filled.index(last_stage), STAGE_BYTES, pred=refill)
            copy_rows(row_desc, row_ring, filled, last_stage, o_row, o_next, refill)
            copy_columns(
                column_desc, more_desc, column_ring, more_ring, filled, last_stage,
                o_column, o_next, refill,
            )  # fmt: skip
            i_step += 1
            last_stage = stage
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        if MORE > 0:
            b_part, b_more = warpgroup_mma_wait(num_outstanding=0, deps=(b_part, b_more))
        else:
            b_part = warpgroup_mma_wait(num_outstanding=0, deps=(b_part,))
        if SEGMENTS == 1:
            b_sum = b_part
            b_more_sum = b_more
        else:
            b_sum += b_part
            if MORE > 0:
                b_more_sum += b_more
    # Other warps' products may still read the rings, whose memory serves for exchanges from here.
    gl.thread_barrier()
    return b_sum, b_more_sum


@gluon.constexpr_function
def wgmma_layout(columns, num_warps):
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, columns, 16]
    )


@gluon.jit(do_not_specialize=["num_rows"])
def linear_hopper_kernel(
    row_desc,  # [N or num_rows, K], box [ROWS, DEPTH]
    column_desc,  # [num_rows or N, K], box [COLUMNS, DEPTH]
    more_desc,  # the same matrix, box [MORE, DEPTH]; None where MORE is 0
    y_ptr,  # [num_rows, N], or half as wide where GATED
    partials_ptr,  # float32 [tiles, SEGMENTS, TOKENS, OUTPUTS]
    arrivals_ptr,  # int32 [tiles], zero before and after
    num_rows,
    N,
    K,
    ROWS: gl.constexpr,  # a multiple of 64
    COLUMNS: gl.constexpr,
    MORE: gl.constexpr,  # columns besides; each of the two is a power of two
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    WEIGHTS_FIRST: gl.constexpr,  # rows are outputs and columns tokens, else the other way round
    SEGMENTS: gl.constexpr,
    SPREAD: gl.constexpr,
    GROUP: gl.constexpr,
    GATED: gl.constexpr,
):
    """y[m, n] = sum over segments i of (sum over k in segment i of x[m, k] w[n, k]).

    GATED: rows 2 i and 2 i + 1 of w are gate and up of output i, silu(gate) * up.
    """
    TOKENS: gl.constexpr = COLUMNS + MORE if WEIGHTS_FIRST else ROWS
    OUTPUTS: gl.constexpr = ROWS if WEIGHTS_FIRST else COLUMNS + MORE
    i_program = gl.program_id(0)
    i_segment = 0
    num_steps = gl.cdiv(K, DEPTH)
    if SPREAD:
        i_segment = i_program % SEGMENTS
        i_program = i_program // SEGMENTS
        num_steps = num_steps // SEGMENTS
    i_m, i_n = tile_indices(i_program, num_rows, N, TOKENS, OUTPUTS, GROUP)
    o_token = i_m * TOKENS
    o_output = i_n * OUTPUTS
    o_row = o_output if WEIGHTS_FIRST else o_token
    o_column = o_token if WEIGHTS_FIRST else o_output
    o_k = i_segment * num_steps * DEPTH

    row_ring = gl.allocate_shared_memory(row_desc.dtype, [STAGES, ROWS, DEPTH], row_desc.layout)
    column_ring = gl.allocate_shared_memory(
        column_desc.dtype, [STAGES, COLUMNS, DEPTH], column_desc.layout
    )
    more_ring = None
    if MORE > 0:
        more_ring = gl.allocate_shared_memory(
            more_desc.dtype, [STAGES, MORE, DEPTH], more_desc.layout
        )
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    STAGE_BYTES: gl.constexpr = (ROWS + COLUMNS + MORE) * DEPTH * 2
    for s in gl.static_range(STAGES):
        mbarrier.init(filled.index(s), count=1)
    # Weights are nobody's output. All else waits for the kernel in front.
    for s in gl.static_range(STAGES):
        inside = s < num_steps
        o_s = o_k + s * DEPTH
        mbarrier.expect(filled.index(s), STAGE_BYTES, pred=inside)
        if WEIGHTS_FIRST:
            copy_rows(row_desc, row_ring, filled, s, o_row, o_s, inside)
        else:
            copy_columns(
                column_desc, more_desc, column_ring, more_ring, filled, s, o_column, o_s, inside
            )
    gdc_launch_dependents()
    gdc_wait()
    for s in gl.static_range(STAGES):
        inside = s < num_steps
        o_s = o_k + s * DEPTH
        if WEIGHTS_FIRST:
            copy_columns(
                column_desc, more_desc, column_ring, more_ring, filled, s, o_column, o_s, inside
            )
        else:
            copy_rows(row_desc, row_ring, filled, s, o_row, o_s, inside)

    b_sum, b_more = accumulate(
        row_desc, column_desc, more_desc, row_ring, column_ring, more_ring, filled,
        o_row, o_column, o_k, num_steps, 1 if SPREAD else SEGMENTS,
    )  # fmt: skip
    PARTS: gl.constexpr = SEGMENTS if SPREAD else 1
    p_partials = partials_ptr
    is_last = True
    if SPREAD:
        rows_left = num_rows - o_token
        p_partials += i_program.to(gl.int64) * (SEGMENTS * TOKENS * OUTPUTS)
        p_own = p_partials + i_segment * (TOKENS * OUTPUTS)
        save_partial(b_sum, p_own, rows_left, OUTPUTS, 0, WEIGHTS_FIRST)
        if MORE > 0:
            save_partial(b_more, p_own, rows_left, OUTPUTS, COLUMNS, WEIGHTS_FIRST)
        gl.thread_barrier()
        num_before = gl.atomic_add(arrivals_ptr + i_program, 1, sem="acq_rel", scope="gpu")
        is_last = num_before == SEGMENTS - 1
        if is_last:
            gl.store(arrivals_ptr + i_program, 0)
    if is_last:
        place = (o_token, o_output, num_rows, N)
        finish(
            b_sum, y_ptr, p_partials, i_segment, *place,
            PARTS, TOKENS, OUTPUTS, 0, WEIGHTS_FIRST, GATED,
        )  # fmt: skip
        if MORE > 0:
            finish(
                b_more, y_ptr, p_partials, i_segment, *place,
                PARTS, TOKENS, OUTPUTS, COLUMNS, WEIGHTS_FIRST, GATED,
            )  # fmt: skip


def fits(weight: Tensor) -> bool:
    """Whether this file has a kernel for a weight: see the table in segments.py."""
    return weight.dtype in (torch.float16, torch.bfloat16) and can_copy(weight)


class Launch:
    """One tile shape for one product, ready to run again and again.

    The first run goes through Triton's own lookup and keeps the compiled kernel; later ones call
    that directly, which saves more than half of the time on the host. It holds because all that
    Triton specialises on is the same every time: N, K, the dtype, and aligned memory.
    """

    def __init__(self, product: Product, tile: Tile, gated: bool = False) -> None:
        """gated: see the kernel; y is [R, N / 2] then."""
        self.product, self.tile = product, tile
        num_tiles = product.num_programs(tile.tokens, tile.outputs, spread=False)
        self.grid = (product.num_programs(tile.tokens, tile.outputs, tile.spread), 1, 1)
        self.partials_shape = None
        if tile.spread:
            assert num_tiles <= MAX_COUNTERS, (num_tiles, tile)
            self.partials_shape = (num_tiles, product.segments, tile.outputs * tile.tokens)
        group = TOKENS_OF_GROUP // tile.tokens if product.num_rows > tile.tokens else 0
        # In the order of the kernel's parameters.
        self.constants = (
            *(tile.rows, *tile.columns, tile.depth, tile.stages),
            *(tile.weights_first, product.segments, tile.spread, group, gated),
        )
        self.options = {"num_warps": tile.num_warps, "launch_pdl": True}
        self.kernel: Any = None

    def arguments(self, x: Tensor, weight: Tensor, y: Tensor) -> tuple[Any, ...]:
        num_rows, n, k = self.product[:3]
        tile = self.tile
        rows = (weight.data_ptr(), x.dtype, n, k, row_stride(weight))
        columns = (x.data_ptr(), x.dtype, num_rows, k, row_stride(x))
        if not tile.weights_first:
            rows, columns = columns, rows
        descriptors = [
            matrix_descriptor(*matrix, box_rows, tile.depth) if box_rows else None
            for matrix, box_rows in ((rows, tile.rows), *((columns, c) for c in tile.columns))
        ]
        partials = arrivals = None
        if self.partials_shape is not None:
            partials = torch.empty(self.partials_shape, dtype=torch.float32, device=x.device)
            arrivals = arrival_counters(weight)
        return (*descriptors, y, partials, arrivals, num_rows, n, k, *self.constants)

    def __call__(self, x: Tensor, weight: Tensor, y: Tensor) -> None:
        """Write the product to y, contiguous; x and weight as `can_copy` demands."""
        arguments = self.arguments(x, weight, y)
        if self.kernel is None:
            self.kernel = linear_hopper_kernel[self.grid](*arguments, **self.options)
        else:
            self.kernel[self.grid](*arguments)

    def warmup(self, x: Tensor, weight: Tensor, y: Tensor) -> Any:
        """Compile, and return the kernel."""
        arguments = self.arguments(x, weight, y)
        return linear_hopper_kernel.warmup(*arguments, grid=self.grid, **self.options)


@lru_cache(maxsize=8192)
def launch_for(
    num_rows: int, n: int, k: int, dtype: torch.dtype, device: torch.device, gated: bool
) -> Launch:
    """The launch that serves a number of rows and a weight [n, k]."""
    del dtype  # compiled kernels differ in it
    product = Product(num_rows, n, k, num_segments(n, k), num_multiprocessors(device))
    return Launch(product, choose_tile(product), gated)


def linear_hopper(x: Tensor, weight: Tensor, *, gated: bool = False) -> Tensor:
    """x [R, K] with any strides, weight [N, K] for which `fits` holds -> [R, N].

    With gated, rows of weight alternate gate and up, and the result is silu(gate) * up [R, N / 2].
    """
    if not can_copy(x):
        x = x.clone(memory_format=torch.contiguous_format)
    (num_rows, k), n = x.shape, weight.shape[0]
    y = torch.empty((num_rows, n // 2 if gated else n), dtype=x.dtype, device=x.device)
    launch_for(num_rows, n, k, x.dtype, x.device, gated)(x, weight, y)
    return y
