"""y = x W^T on SM90: wgmma fed by a ring of bulk tensor copies, for any number of rows.

One kernel in two orientations. wgmma multiplies 64 rows of one operand by 8 to 256 rows of the
other. For few tokens the weights are the 64 rows (`weights_first`), so that 1 to 8 tokens cost no
more than 8; for many the tokens are. Neither the orientation nor the tile changes a bit, see
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.ops.dispatch import num_multiprocessors
from outrider.ops.linear.hopper_tiles import Product, Tile, choose_tile
from outrider.ops.linear.segments import MAX_COUNTERS, arrival_counters, num_segments

GROUP = 16
"""Rows of tiles that pass over the weight together: 2048 tokens, 16 MB at K = 4096."""


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
def multiply(w_stage, x_stage, b_sum, WEIGHTS_FIRST: gl.constexpr):
    """Start the products of one stage, w [OUTPUTS, DEPTH] and x [TOKENS, DEPTH]."""
    if WEIGHTS_FIRST:
        return warpgroup_mma(w_stage, x_stage.permute((1, 0)), b_sum, is_async=True)
    else:
        return warpgroup_mma(x_stage, w_stage.permute((1, 0)), b_sum, is_async=True)


@gluon.jit
def store_tile(b_sum, y_ptr, o_token, o_output, num_rows, N, WEIGHTS_FIRST: gl.constexpr):
    """Round a tile of sums and store it in rows of y, 16 bytes per thread."""
    b_y = b_sum.to(y_ptr.dtype.element_ty)
    if WEIGHTS_FIRST:
        b_y = gl.permute(b_y, (1, 0))
    TOKENS: gl.constexpr = b_y.shape[0]
    OUTPUTS: gl.constexpr = b_y.shape[1]
    LANES: gl.constexpr = min(32, OUTPUTS // 8)
    ROWS_OF_Y: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0]
    )
    b_y = gl.convert_layout(b_y, ROWS_OF_Y)
    o_m = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, ROWS_OF_Y))
    o_n = o_output + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, ROWS_OF_Y))
    p_y = y_ptr + o_token.to(gl.int64) * N + o_m[:, None] * N + o_n[None, :]
    gl.store(p_y, b_y, mask=(o_m[:, None] < num_rows - o_token) & (o_n[None, :] < N))


@gluon.jit(do_not_specialize=["num_rows"])
def linear_hopper_kernel(
    w_desc,  # [N, K], box [OUTPUTS, DEPTH]
    x_desc,  # [num_rows, K], box [TOKENS, DEPTH]
    y_ptr,  # [num_rows, N]
    partials_ptr,  # float32 [tiles, SEGMENTS, OUTPUTS * TOKENS]
    arrivals_ptr,  # int32 [tiles], zero before and after
    num_rows,
    N,
    K,
    TOKENS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    WEIGHTS_FIRST: gl.constexpr,
    SEGMENTS: gl.constexpr,
    SPREAD: gl.constexpr,
    GROUP: gl.constexpr,
):
    """y[m, n] = sum over segments i of (sum over k in segment i of x[m, k] w[n, k])."""
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
    o_k = i_segment * num_steps * DEPTH

    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, OUTPUTS, DEPTH], w_desc.layout)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, TOKENS, DEPTH], x_desc.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    STAGE_BYTES: gl.constexpr = (OUTPUTS + TOKENS) * DEPTH * 2
    for s in gl.static_range(STAGES):
        mbarrier.init(filled.index(s), count=1)
    for s in gl.static_range(STAGES):
        inside = s < num_steps
        mbarrier.expect(filled.index(s), STAGE_BYTES, pred=inside)
        tma.async_copy_global_to_shared(
            w_desc, [o_output, o_k + s * DEPTH], filled.index(s), w_ring.index(s), pred=inside
        )
    # Weights are nobody's output. All else waits for the kernel in front.
    gdc_launch_dependents()
    gdc_wait()
    for s in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(
            x_desc, [o_token, o_k + s * DEPTH], filled.index(s), x_ring.index(s), pred=s < num_steps
        )

    OWN: gl.constexpr = 1 if SPREAD else SEGMENTS
    ROWS: gl.constexpr = OUTPUTS if WEIGHTS_FIRST else TOKENS
    COLUMNS: gl.constexpr = TOKENS if WEIGHTS_FIRST else OUTPUTS
    WGMMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, COLUMNS, 16]
    )
    b_sum = gl.zeros((ROWS, COLUMNS), gl.float32, WGMMA)
    stage = 0
    last_stage = STAGES - 1
    phase = 0
    i_step = 0
    for _ in range(OWN):
        b_segment = gl.zeros((ROWS, COLUMNS), gl.float32, WGMMA)
        for _ in range(num_steps // OWN):
            mbarrier.wait(filled.index(stage), phase)
            b_segment = multiply(w_ring.index(stage), x_ring.index(stage), b_segment, WEIGHTS_FIRST)
            # With one product in flight the one before has ended, and its stage can be refilled.
            b_segment = warpgroup_mma_wait(num_outstanding=1, deps=(b_segment,))
            i_next = i_step - 1 + STAGES
            refill = (i_step >= 1) & (i_next < num_steps)
            o_next = o_k + i_next * DEPTH
            p_filled = filled.index(last_stage)
            mbarrier.expect(p_filled, STAGE_BYTES, pred=refill)
            tma.async_copy_global_to_shared(
                w_desc, [o_output, o_next], p_filled, w_ring.index(last_stage), pred=refill
            )
            tma.async_copy_global_to_shared(
                x_desc, [o_token, o_next], p_filled, x_ring.index(last_stage), pred=refill
            )
            i_step += 1
            last_stage = stage
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        b_segment = warpgroup_mma_wait(num_outstanding=0, deps=(b_segment,))
        if OWN == 1:
            b_sum = b_segment
        else:
            b_sum += b_segment

    if SPREAD:
        # Partials lie as the threads hold them: they are read back by the same threads of a
        # program of the same tile.
        o_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, WGMMA))
        o_column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, WGMMA))
        p_partials = (
            partials_ptr
            + i_program.to(gl.int64) * (SEGMENTS * ROWS * COLUMNS)
            + o_row[:, None] * COLUMNS
            + o_column[None, :]
        )
        gl.store(p_partials + i_segment * (ROWS * COLUMNS), b_sum)
        gl.thread_barrier()
        num_before = gl.atomic_add(arrivals_ptr + i_program, 1, sem="acq_rel", scope="gpu")
        if num_before == SEGMENTS - 1:
            b_sum = gl.zeros((ROWS, COLUMNS), gl.float32, WGMMA)
            for i in gl.static_range(SEGMENTS):
                b_sum += gl.load(p_partials + i * (ROWS * COLUMNS), cache_modifier=".cg")
            store_tile(b_sum, y_ptr, o_token, o_output, num_rows, N, WEIGHTS_FIRST)
            gl.store(arrivals_ptr + i_program, 0)
    else:
        store_tile(b_sum, y_ptr, o_token, o_output, num_rows, N, WEIGHTS_FIRST)


class Address:
    """What a tensor descriptor needs of a tensor, without keeping its memory alive."""

    def __init__(self, data_ptr: int, dtype: torch.dtype) -> None:
        self._data_ptr = data_ptr
        self.dtype = dtype

    def data_ptr(self) -> int:
        return self._data_ptr


@lru_cache(maxsize=8192)
def matrix_descriptor(
    data_ptr: int,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    stride: int,
    box_rows: int,
    box_columns: int,
) -> TensorDescriptor:
    """Descriptor of a matrix [rows, columns], read in boxes; what lies outside reads as zero.

    It is made of numbers alone, so that one for an address that has been freed does no harm and is
    right for the next matrix of that shape there: weights always hit the cache, activations often.
    """
    box = [box_rows, box_columns]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.float16)  # or any 16-bit type
    return TensorDescriptor(Address(data_ptr, dtype), [rows, columns], [stride, 1], box, layout)


def can_copy(matrix: Tensor) -> bool:
    """Whether bulk tensor copies can read a matrix: 16-byte rows, contiguous within a row."""
    stride = row_stride(matrix)
    return (
        matrix.stride(1) == 1
        and stride >= matrix.shape[1]
        and stride % 8 == 0
        and matrix.data_ptr() % 16 == 0
    )


def row_stride(matrix: Tensor) -> int:
    """Stride between rows. That of a single row means nothing and may not suit a descriptor."""
    return matrix.stride(0) if matrix.shape[0] > 1 else matrix.shape[1]


def fits(weight: Tensor) -> bool:
    """Whether this file has a kernel for a weight: see the table in segments.py."""
    return weight.dtype in (torch.float16, torch.bfloat16) and can_copy(weight)


class Launch:
    """One tile shape for one product, ready to run again and again.

    The first run goes through Triton's own lookup and keeps the compiled kernel; later ones call
    that directly, which saves more than half of the time on the host. It holds because all that
    Triton specialises on is the same every time: N, K, the dtype, and fresh, hence aligned, memory.
    """

    def __init__(self, product: Product, tile: Tile) -> None:
        self.product, self.tile = product, tile
        num_tiles = product.num_programs(tile.tokens, tile.outputs, spread=False)
        self.grid = (product.num_programs(tile.tokens, tile.outputs, tile.spread), 1, 1)
        self.partials_shape = None
        if tile.spread:
            assert num_tiles <= MAX_COUNTERS, (num_tiles, tile)
            self.partials_shape = (num_tiles, product.segments, tile.outputs * tile.tokens)
        group = GROUP if product.num_rows > tile.tokens else 0
        # In the order of the kernel's parameters.
        self.constants = (
            *(tile.tokens, tile.outputs, tile.depth, tile.stages, tile.weights_first),
            *(product.segments, tile.spread, group),
        )
        self.options = {"num_warps": tile.num_warps, "launch_pdl": True}
        self.kernel: Any = None

    def arguments(self, x: Tensor, weight: Tensor, y: Tensor) -> tuple[Any, ...]:
        num_rows, n, k = self.product[:3]
        tile = self.tile
        w_desc = matrix_descriptor(
            weight.data_ptr(), x.dtype, n, k, row_stride(weight), tile.outputs, tile.depth
        )
        x_desc = matrix_descriptor(
            x.data_ptr(), x.dtype, num_rows, k, row_stride(x), tile.tokens, tile.depth
        )
        partials = arrivals = None
        if self.partials_shape is not None:
            partials = torch.empty(self.partials_shape, dtype=torch.float32, device=x.device)
            arrivals = arrival_counters(weight)
        return (w_desc, x_desc, y, partials, arrivals, num_rows, n, k, *self.constants)

    def __call__(self, x: Tensor, weight: Tensor, y: Tensor) -> None:
        """Write x W^T to y, contiguous; x and weight as `can_copy` demands."""
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
def launch_for(num_rows: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> Launch:
    """The launch that serves a number of rows and a weight [n, k]."""
    del dtype  # compiled kernels differ in it
    product = Product(num_rows, n, k, num_segments(n, k), num_multiprocessors(device))
    return Launch(product, choose_tile(product))


def linear_hopper(x: Tensor, weight: Tensor) -> Tensor:
    """x [R, K] with any strides, weight [N, K] for which `fits` holds -> [R, N]."""
    if not can_copy(x):
        x = x.clone(memory_format=torch.contiguous_format)
    (num_rows, k), n = x.shape, weight.shape[0]
    y = torch.empty((num_rows, n), dtype=x.dtype, device=x.device)
    launch_for(num_rows, n, k, x.dtype, x.device)(x, weight, y)
    return y
