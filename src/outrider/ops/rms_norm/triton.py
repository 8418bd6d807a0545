"""RMS norm kernels: a program holds whole rows in registers, so every element is read once.

The order of a row's sum follows from the row's size and alignment alone: tile and number of warps
are functions of the size, and a row never shares a sum with another. Products and sums are kept
apart (enable_fp_fusion=False) and rounded where the reference rounds.

With PDL, weights are loaded before the wait; they must be constants.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MAX_SIZE = 32768
"""Largest row that one program holds."""
GATED_TILE = 1024
"""Elements, of several heads, that a program of the gated norm holds."""


def row_tile(size: int) -> tuple[int, int]:
    """(columns, warps) of a program that holds one row: 16 elements a thread up to 8192 columns."""
    assert size <= MAX_SIZE, size
    columns = triton.next_power_of_2(size)
    return columns, min(max(columns // 512, 1), 16)


@triton.jit
def inverse_rms(b_x, eps, SIZE: tl.constexpr, AXIS: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of float32 rows along AXIS; x is 0 outside the row."""
    return tl.rsqrt(tl.sum(b_x * b_x, axis=AXIS) * (1.0 / SIZE) + eps)


@triton.jit
def weighted(b_normed, b_weight, DTYPE: tl.constexpr, ZERO_CENTRED: tl.constexpr):
    """Normed rows times 1 + weight, or rounded to DTYPE first and then times weight; float32."""
    if ZERO_CENTRED:
        return b_normed * (1.0 + b_weight)
    else:
        return b_normed.to(DTYPE).to(tl.float32) * b_weight


@triton.jit
def _rms_norm(
    p_x,  # [R, SIZE], rows stride_x apart
    p_weight,  # [SIZE]
    p_output,  # [R, SIZE]
    stride_x,
    eps,
    SIZE: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """output = weighted(x * inverse_rms(x)); one program per row."""
    i_row = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, COLUMNS)
    inside = o_d < SIZE
    if PDL:
        gdc_launch_dependents()
    b_weight = tl.load(p_weight + o_d, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    b_x = tl.load(p_x + i_row * stride_x + o_d, mask=inside, other=0.0).to(tl.float32)
    b_normed = b_x * inverse_rms(b_x, eps, SIZE, 0)
    DTYPE: tl.constexpr = p_output.dtype.element_ty
    b_output = weighted(b_normed, b_weight, DTYPE, ZERO_CENTRED)
    tl.store(p_output + i_row * SIZE + o_d, b_output.to(DTYPE), mask=inside)


@triton.jit
def _add_rms_norm(
    p_x,  # [R, SIZE], rows stride_x apart
    p_residual,  # [R, SIZE], rows stride_residual apart
    p_weight,  # [SIZE]
    p_output,  # [R, SIZE]
    p_total,  # [R, SIZE]
    stride_x,
    stride_residual,
    eps,
    SIZE: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """total = residual + x, rounded; output = weighted(total * inverse_rms(total))."""
    i_row = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, COLUMNS)
    inside = o_d < SIZE
    if PDL:
        gdc_launch_dependents()
    b_weight = tl.load(p_weight + o_d, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    b_x = tl.load(p_x + i_row * stride_x + o_d, mask=inside, other=0.0).to(tl.float32)
    p_old = p_residual + i_row * stride_residual + o_d
    b_residual = tl.load(p_old, mask=inside, other=0.0).to(tl.float32)
    DTYPE: tl.constexpr = p_output.dtype.element_ty
    b_total = (b_residual + b_x).to(DTYPE)
    tl.store(p_total + i_row * SIZE + o_d, b_total, mask=inside)
    b_total = b_total.to(tl.float32)
    b_normed = b_total * inverse_rms(b_total, eps, SIZE, 0)
    b_output = weighted(b_normed, b_weight, DTYPE, ZERO_CENTRED)
    tl.store(p_output + i_row * SIZE + o_d, b_output.to(DTYPE), mask=inside)


@triton.jit
def _gated_rms_norm(
    p_x,  # [R, NUM_HEADS, SIZE], strides stride_x and stride_x_head
    p_gate,  # [R, NUM_HEADS, SIZE], strides stride_gate and stride_gate_head
    p_weight,  # [SIZE]
    p_output,  # [R, NUM_HEADS, SIZE]
    stride_x,
    stride_x_head,
    stride_gate,
    stride_gate_head,
    eps,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """output = weight * (x * inverse_rms(x)) * gate * sigmoid(gate); HEADS heads of a row."""
    GROUPS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    i_row = (tl.program_id(0) // GROUPS).to(tl.int64)
    o_head = (tl.program_id(0) % GROUPS) * HEADS + tl.arange(0, HEADS)[:, None]
    o_d = tl.arange(0, COLUMNS)[None, :]
    inside = (o_head < NUM_HEADS) & (o_d < SIZE)
    if PDL:
        gdc_launch_dependents()
    # One copy for each head: a vector would be loaded in another layout, and then moved.
    p_weights = p_weight + tl.broadcast_to(o_d, (HEADS, COLUMNS))
    b_weight = tl.load(p_weights, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
    p_heads = p_x + i_row * stride_x + o_head * stride_x_head + o_d
    b_x = tl.load(p_heads, mask=inside, other=0.0).to(tl.float32)
    p_gates = p_gate + i_row * stride_gate + o_head * stride_gate_head + o_d
    b_gate = tl.load(p_gates, mask=inside, other=0.0).to(tl.float32)
    b_normed = b_x * inverse_rms(b_x, eps, SIZE, 1)[:, None]
    DTYPE: tl.constexpr = p_output.dtype.element_ty
    b_normed = weighted(b_normed, b_weight.to(tl.float32), DTYPE, False)
    if p_weight.dtype.element_ty == DTYPE:  # a wider weight widens the product
        b_normed = b_normed.to(DTYPE).to(tl.float32)
    b_output = b_normed * (b_gate / (1.0 + tl.exp(-b_gate)))
    p_outputs = p_output + (i_row * NUM_HEADS + o_head) * SIZE + o_d
    tl.store(p_outputs, b_output.to(DTYPE), mask=inside)


def rms_norm_kernel(
    x: Tensor, weight: Tensor, eps: float, zero_centred: bool, *, pdl: bool
) -> Tensor:
    """x [..., D] -> [..., D]; see the public function. Dimensions before the last are rows."""
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    assert rows.stride(1) == 1 and weight.is_contiguous()
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    columns, num_warps = row_tile(size)
    _rms_norm[(rows.shape[0],)](
        rows,
        weight,
        output,
        rows.stride(0),
        eps,
        size,
        zero_centred,
        columns,
        pdl,
        num_warps=num_warps,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )
    return output


def add_rms_norm_kernel(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centred: bool, *, pdl: bool
) -> tuple[Tensor, Tensor]:
    """x, residual [R, D] -> normed, total [R, D]; see the public function."""
    num_rows, size = x.shape
    assert x.stride(1) == 1 and residual.stride(1) == 1 and weight.is_contiguous()
    output, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    columns, num_warps = row_tile(size)
    _add_rms_norm[(num_rows,)](
        x,
        residual,
        weight,
        output,
        total,
        x.stride(0),
        residual.stride(0),
        eps,
        size,
        zero_centred,
        columns,
        pdl,
        num_warps=num_warps,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )
    return output, total


def gated_rms_norm_kernel(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, pdl: bool
) -> Tensor:
    """x, gate [R, heads, D] -> [R, heads, D] in gate's dtype; see the public function."""
    num_rows, num_heads, size = x.shape
    assert x.stride(2) == 1 and gate.stride(2) == 1 and weight.is_contiguous()
    output = torch.empty(x.shape, dtype=gate.dtype, device=x.device)
    columns = triton.next_power_of_2(size)
    heads = min(max(GATED_TILE // columns, 1), triton.next_power_of_2(num_heads))
    _gated_rms_norm[(num_rows * triton.cdiv(num_heads, heads),)](
        x,
        gate,
        weight,
        output,
        x.stride(0),
        x.stride(1),
        gate.stride(0),
        gate.stride(1),
        eps,
        num_heads,
        size,
        heads,
        columns,
        pdl,
        num_warps=4,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )
    return output
