"""Norm, rotary embedding and KV write in one kernel: a program takes some heads of a row.

A row has three kinds of heads. They go through the same operations in a tile [heads, D] and differ
in where the tile comes from and goes to, and in what is kept: values pass as they are. The other
dimension of a rotated pair is read a second time, from the first-level cache, so that no element
changes threads. A head's sum never leaves its own lanes and depends on D alone.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.ops.rms_norm.triton import inverse_rms, weighted

if TYPE_CHECKING:
    from outrider.ops.attention_inputs import HeadLayout, HeadNorms

TILE, NUM_WARPS = 1024, 4
"""A vector of 16 bytes for each thread, in 16 bits."""


@triton.jit(do_not_specialize_on_alignment=["p_kv_index"])  # one number for a row
def _attention_inputs(
    p_projected,  # [R, width], rows stride_row apart
    p_query_weight,  # [D]; unread where HAS_NORMS is false, like the next
    p_key_weight,  # [D]
    p_cos,  # [R, P] float32
    p_sin,  # [R, P] float32
    p_kv_index,  # [R] int64
    p_queries,  # [R, HQ, D]
    p_kv_pool,  # [2, num_blocks, HKV, BLOCK_SIZE, D], outer strides stride_values, stride_block
    stride_row,
    stride_values,
    stride_block,
    eps,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERY_STRIDE: tl.constexpr,  # columns between query heads: 2 D where gates stand between them
    HAS_NORMS: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,  # columns that are always neighbours in both halves of a rotation
    PDL: tl.constexpr,
):
    """x <- norm(x);  out[i] = x[i] cos[i] + s x[i'] sin[i], and out = x beyond P and for values.

    i' = i + P / 2 and s = -1 in the first half of the rotated dimensions, i - P / 2 and 1 in the
    second. Both products and their sum are rounded to the dtype.
    """
    QUERY_GROUPS: tl.constexpr = (HQ + HEADS - 1) // HEADS
    KV_GROUPS: tl.constexpr = (HKV + HEADS - 1) // HEADS
    DTYPE: tl.constexpr = p_queries.dtype.element_ty
    i_row = (tl.program_id(0) // (QUERY_GROUPS + 2 * KV_GROUPS)).to(tl.int64)
    i_group = tl.program_id(0) % (QUERY_GROUPS + 2 * KV_GROUPS)
    is_query = i_group < QUERY_GROUPS
    is_value = i_group >= QUERY_GROUPS + KV_GROUPS
    i_first = tl.where(is_query, i_group, (i_group - QUERY_GROUPS) % KV_GROUPS) * HEADS
    o_head = i_first + tl.arange(0, HEADS)[:, None]
    o_d = tl.arange(0, COLUMNS)
    o_pair = tl.where(o_d < P // 2, o_d + P // 2, o_d - P // 2)
    o_pair = tl.max_contiguous(tl.multiple_of(o_pair, VECTOR), VECTOR)
    o_d, o_pair = o_d[None, :], o_pair[None, :]
    inside = (o_head < tl.where(is_query, HQ, HKV)) & (o_d < D)
    rotated = inside & (o_d < P) & (is_value == 0)
    zeros = tl.zeros((HEADS, 1), tl.int32)  # spreads a vector: no change of layout after its load

    if PDL:
        gdc_launch_dependents()
    if HAS_NORMS:
        p_weight = tl.where(is_query, p_query_weight, p_key_weight) + zeros
        b_weight = tl.load(p_weight + o_d, mask=inside, other=0.0).to(tl.float32)
        b_pair_weight = tl.load(p_weight + o_pair, mask=rotated, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()

    i_kv = tl.load(p_kv_index + i_row)
    KEYS_AT: tl.constexpr = HQ * QUERY_STRIDE
    i_column = tl.where(is_query, 0, tl.where(is_value, KEYS_AT + HKV * D, KEYS_AT))
    o_column = i_column + o_head * tl.where(is_query, QUERY_STRIDE, D)
    p_x = p_projected + i_row * stride_row + o_column
    b_x = tl.load(p_x + o_d, mask=inside, other=0.0).to(tl.float32)
    b_pair = tl.load(p_x + o_pair, mask=rotated, other=0.0).to(tl.float32)
    p_cos_row, p_sin_row = p_cos + i_row * P + zeros, p_sin + i_row * P + zeros
    b_cos = tl.load(p_cos_row + o_d, mask=rotated, other=0.0).to(DTYPE).to(tl.float32)
    b_sin = tl.load(p_sin_row + o_d, mask=rotated, other=0.0).to(DTYPE).to(tl.float32)

    if HAS_NORMS:
        b_inverse = inverse_rms(b_x, eps, D, 1)[:, None]
        b_normed = weighted(b_x * b_inverse, b_weight, DTYPE, ZERO_CENTRED)
        b_x = tl.where(is_value, b_x, b_normed.to(DTYPE).to(tl.float32))
        b_pair = weighted(b_pair * b_inverse, b_pair_weight, DTYPE, ZERO_CENTRED)
        b_pair = b_pair.to(DTYPE).to(tl.float32)
    b_turned = tl.where(o_d < P // 2, -b_pair, b_pair) * b_sin
    b_sum = (b_x * b_cos).to(DTYPE).to(tl.float32) + b_turned.to(DTYPE).to(tl.float32)
    b_output = tl.where(rotated, b_sum, b_x).to(DTYPE)

    i_kv_row = (i_kv // BLOCK_SIZE) * stride_block + (i_kv % BLOCK_SIZE) * D
    i_kv_row += tl.where(is_value, stride_values, 0)
    if is_query:
        p_output = p_queries + i_row * (HQ * D)
    else:
        p_output = p_kv_pool + i_kv_row
    o_output = o_head * tl.where(is_query, D, BLOCK_SIZE * D) + o_d
    tl.store(p_output + o_output, b_output, mask=inside)


def attention_inputs_kernel(
    projected: Tensor,
    layout: HeadLayout,
    norms: HeadNorms | None,
    angles: tuple[Tensor, Tensor],
    kv_pool: Tensor,
    kv_index: Tensor,
    *,
    pdl: bool,
) -> tuple[Tensor, Tensor | None]:
    """projected [R, width] -> queries [R, Hq, D], gate or None; see the public function."""
    num_rows, size, (cos, sin) = projected.shape[0], layout.head_dim, angles
    num_heads, num_kv_heads = layout.num_heads, layout.num_kv_heads
    block_size, rotary_dim = kv_pool.shape[3], cos.shape[1]
    assert projected.stride(1) == 1 and cos.is_contiguous() and sin.is_contiguous()
    assert kv_pool.stride()[2:] == (block_size * size, size, 1) and kv_index.is_contiguous()
    assert norms is None or (
        norms.query_weight.is_contiguous() and norms.key_weight.is_contiguous()
    )
    queries = torch.empty(
        (num_rows, num_heads, size), dtype=projected.dtype, device=projected.device
    )
    columns = triton.next_power_of_2(size)
    heads = min(max(TILE // columns, 1), triton.next_power_of_2(num_heads))
    groups = triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads)
    _attention_inputs[(num_rows * groups,)](
        projected,
        projected if norms is None else norms.query_weight,
        projected if norms is None else norms.key_weight,
        cos,
        sin,
        kv_index,
        queries,
        kv_pool,
        projected.stride(0),
        kv_pool.stride(0),
        kv_pool.stride(1),
        0.0 if norms is None else norms.eps,
        num_heads,
        num_kv_heads,
        size,
        rotary_dim,
        block_size,
        2 * size if layout.gated else size,
        norms is not None,
        norms is not None and norms.zero_centred,
        heads,
        columns,
        gcd(rotary_dim // 2, 8),
        pdl,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )
    if not layout.gated:
        return queries, None
    pairs = projected[:, : 2 * num_heads * size].unflatten(1, (num_heads, 2 * size))
    return queries, pairs[..., size:]
