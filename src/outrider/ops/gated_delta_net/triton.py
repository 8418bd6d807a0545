"""Kernels in front of the delta rule, for rounds and prompt chunks alike.

A program takes one row and a few heads, so a row's bits do not depend on how many rows there are;
keys, queries and gates of a round and of a prompt come out of the same code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.ops.gated_delta_rule.triton import RuleInputs

if TYPE_CHECKING:
    from outrider.ops.gated_delta_net import DeltaNetRows, DeltaNetWeights
    from outrider.ops.gated_delta_rule import DeltaState, PendingRecords

HEADS_PER_PROGRAM = 4
"""One warp each: a head's sum of squares stays inside its warp."""


@triton.jit
def conv_tap(p_conv, b_packed, o_channel, m_channel, TAP: tl.constexpr, W: tl.constexpr,
             PACKED: tl.constexpr):  # fmt: skip
    """Weight [HEADS, D] float32 of one tap, out of a channel's four 16-bit taps where PACKED."""
    if PACKED:
        b_bits = (b_packed >> (16 * TAP)).to(tl.int16)
        return b_bits.to(p_conv.dtype.element_ty, bitcast=True).to(tl.float32)
    return tl.load(p_conv + o_channel * W + TAP, mask=m_channel, other=0.0).to(tl.float32)


@triton.jit
def conv_silu(p_x_row, p_ring_slot, p_conv, o_channel, m_channel, b_packed, i_t, start, stride_x,
              C: tl.constexpr, W: tl.constexpr, RING: tl.constexpr,
              PACKED: tl.constexpr):  # fmt: skip
    """silu(sum_j w_j x_{position - (W - 1) + j}), [HEADS, D] in x's dtype, and x at the position.

    Inputs of this call's own rows are read from x, earlier ones from the ring; before position 0
    they are zero.
    """
    b_total = tl.zeros(o_channel.shape, tl.float32)
    for tap in tl.static_range(W):
        back = W - 1 - tap
        position = start + i_t - back
        p_ring_entry = p_ring_slot + ((position + RING) % RING) * C
        p_source = tl.where(i_t >= back, p_x_row - back * stride_x, p_ring_entry)
        b_x = tl.load(p_source + o_channel, mask=m_channel & (position >= 0), other=0.0)
        b_weight = conv_tap(p_conv, b_packed, o_channel, m_channel, tap, W, PACKED)
        b_total += b_x.to(tl.float32) * b_weight
    b_y = b_total / (1.0 + tl.exp(-b_total))
    return b_y.to(b_x.dtype), b_x


@triton.jit
def packed_taps(p_conv, o_channel, m_channel, PACKED: tl.constexpr):
    """A channel's four 16-bit taps as one integer: a quarter of the loads. Zero if not PACKED."""
    if PACKED:
        return tl.load(p_conv.to(tl.pointer_type(tl.int64)) + o_channel, mask=m_channel, other=0)
    return tl.zeros(o_channel.shape, tl.int64)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), accurate to rounding also where exp(x) is tiny; x itself from 20 on."""
    grown = tl.exp(tl.minimum(x, 20.0))
    one_more = 1.0 + grown
    # The log's relative error is undone by dividing by what was really added to 1.
    added = tl.where(one_more == 1.0, 1.0, one_more - 1.0)
    bent = tl.where(one_more == 1.0, grown, tl.log(one_more) * (grown / added))
    return tl.where(x > 20.0, x, bent)


@triton.jit(
    do_not_specialize=["num_slots", "rows_per_sequence"],
    do_not_specialize_on_alignment=["p_a", "p_b", "p_slots", "p_starts", "p_num_rows"],
)
def delta_inputs_kernel(
    p_x,  # [R, C] with a row stride, C = 2 HK K + HV V
    p_a,  # [R, HV] with a row stride
    p_b,  # [R, HV] with a row stride
    p_conv,  # [C, W]
    p_a_log,  # [HV]
    p_dt_bias,  # [HV]
    p_ring,  # [slots, RING, C]
    p_slots,  # [B] int64
    p_starts,  # [B] int64
    p_num_rows,  # [B] int64, unused where PREFILL
    p_parity,  # [slots] int64, unused where PREFILL
    p_queries,  # [R, HK, K]
    p_keys,  # records [2, slots, MAX_ROWS, HK, K]; PREFILL: [R, HK, K]
    p_values,  # [R, HV, V]
    p_decays,  # records [2, slots, MAX_ROWS, HV], exp(g); PREFILL: [R, HV], g
    p_beta,  # [R, HV]
    p_key_query,  # [R, HK], unused where PREFILL
    num_slots,
    rows_per_sequence,
    stride_x,
    stride_a,
    stride_b,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    RING: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    QUERY_SCALE: tl.constexpr,
    PACKED: tl.constexpr,
    PREFILL: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row; HEADS key heads (their q and k), or HEADS value heads and their gates.

        [q | k | v] = silu(conv(x));  q <- q / |q| K^-1/2;  k <- k / |k|;  |y|^2 = sum(y^2) + 1e-6
        g = -exp(A_log) softplus(a + dt_bias);  beta = sigmoid(b)

    A round also puts x into the ring (a prompt chunk could overwrite what its own first rows
    read). With PDL it reads slots, starts, num_rows, parity and the weights before it waits.
    """
    if PDL:
        gdc_launch_dependents()
    row, i_block = tl.program_id(0), tl.program_id(1)
    i_b = row // rows_per_sequence
    i_t = row % rows_per_sequence
    C: tl.constexpr = 2 * HK * K + HV * V
    slot = tl.load(p_slots + i_b)
    start = tl.load(p_starts + i_b).to(tl.int32)
    record = row.to(tl.int64)
    live = True
    if not PREFILL:
        live = i_t < tl.load(p_num_rows + i_b)
        parity = tl.load(p_parity + slot) & 1
        record = ((1 - parity) * num_slots + slot) * MAX_ROWS + i_t
    p_x_row = p_x + row.to(tl.int64) * stride_x
    p_ring_slot = p_ring + slot * (RING * C)
    p_ring_entry = p_ring_slot + ((start + i_t) % RING) * C
    KEY_BLOCKS: tl.constexpr = (HK + HEADS - 1) // HEADS

    if i_block < KEY_BLOCKS:
        o_h = i_block * HEADS + tl.arange(0, HEADS)
        o_k = tl.arange(0, BLOCK_K)
        m_h = (o_h < HK) & live
        m_key = m_h[:, None] & (o_k < K)[None, :]
        o_q = o_h[:, None] * K + o_k[None, :]
        b_q_taps = packed_taps(p_conv, o_q, m_key, PACKED)
        b_k_taps = packed_taps(p_conv + HK * K * W, o_q, m_key, PACKED)
        if PDL:
            gdc_wait()
        b_q, b_q_raw = conv_silu(p_x_row, p_ring_slot, p_conv, o_q, m_key, b_q_taps, i_t, start,
                                 stride_x, C, W, RING, PACKED)  # fmt: skip
        b_k, b_k_raw = conv_silu(p_x_row + HK * K, p_ring_slot + HK * K, p_conv + HK * K * W, o_q,
                                 m_key, b_k_taps, i_t, start, stride_x, C, W, RING,
                                 PACKED)  # fmt: skip
        b_q, b_k = b_q.to(tl.float32), b_k.to(tl.float32)
        b_q = b_q * (tl.rsqrt(tl.sum(b_q * b_q, 1) + 1e-6) * QUERY_SCALE)[:, None]
        b_k = b_k * tl.rsqrt(tl.sum(b_k * b_k, 1) + 1e-6)[:, None]
        p_q = p_queries + row.to(tl.int64) * (HK * K) + o_q
        tl.store(p_q, b_q.to(p_queries.dtype.element_ty), mask=m_key)
        p_k = p_keys + record * (HK * K) + o_q
        tl.store(p_k, b_k.to(p_keys.dtype.element_ty), mask=m_key)
        if not PREFILL:
            tl.store(p_key_query + row * HK + o_h, tl.sum(b_k * b_q, 1), mask=m_h)
            tl.store(p_ring_entry + o_q, b_q_raw, mask=m_key)
            tl.store(p_ring_entry + HK * K + o_q, b_k_raw, mask=m_key)
    else:
        o_h = (i_block - KEY_BLOCKS) * HEADS + tl.arange(0, HEADS)
        o_v = tl.arange(0, BLOCK_V)
        m_h = (o_h < HV) & live
        m_value = m_h[:, None] & (o_v < V)[None, :]
        o_value = o_h[:, None] * V + o_v[None, :]
        b_taps = packed_taps(p_conv + 2 * HK * K * W, o_value, m_value, PACKED)
        b_rate = tl.exp(tl.load(p_a_log + o_h, mask=m_h, other=0.0).to(tl.float32))
        b_bias = tl.load(p_dt_bias + o_h, mask=m_h, other=0.0).to(tl.float32)
        if PDL:
            gdc_wait()
        b_v, b_raw = conv_silu(p_x_row + 2 * HK * K, p_ring_slot + 2 * HK * K,
                               p_conv + 2 * HK * K * W, o_value, m_value, b_taps, i_t, start,
                               stride_x, C, W, RING, PACKED)  # fmt: skip
        b_a = tl.load(p_a + row.to(tl.int64) * stride_a + o_h, mask=m_h, other=0.0).to(tl.float32)
        b_b = tl.load(p_b + row.to(tl.int64) * stride_b + o_h, mask=m_h, other=0.0).to(tl.float32)
        b_g = -b_rate * softplus(b_a + b_bias)
        tl.store(p_values + row.to(tl.int64) * (HV * V) + o_value, b_v, mask=m_value)
        tl.store(p_beta + row * HV + o_h, 1.0 / (1.0 + tl.exp(-b_b)), mask=m_h)
        tl.store(p_decays + record * HV + o_h, b_g if PREFILL else tl.exp(b_g), mask=m_h)
        if not PREFILL:
            tl.store(p_ring_entry + 2 * HK * K + o_value, b_raw, mask=m_value)


@triton.jit(do_not_specialize=["first_row"], do_not_specialize_on_alignment=["p_slot", "p_start"])
def ring_store_kernel(
    p_x,  # [R, C] with a row stride
    p_ring,  # [slots, RING, C]
    p_slot,  # [1] int64
    p_start,  # [1] int64
    first_row,
    stride_x,
    C: tl.constexpr,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Raw inputs of rows first_row .. into ring entries by position, [BLOCK] channels a program."""
    row = first_row + tl.program_id(0)
    o_channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = o_channel < C
    entry = tl.load(p_slot) * RING + (tl.load(p_start).to(tl.int32) + row) % RING
    b_x = tl.load(p_x + row.to(tl.int64) * stride_x + o_channel, mask=mask)
    tl.store(p_ring + entry * C + o_channel, b_x, mask=mask)


def _aligned(qkv: Tensor) -> Tensor:
    """qkv with rows that begin on 16 bytes: one binary, and so one order of sums, for all calls."""
    regular = qkv.stride(0) % 16 == 0 and qkv.data_ptr() % 16 == 0
    return qkv if regular else qkv.contiguous()


def _num_conv_taps(weights: DeltaNetWeights) -> int:
    assert weights.conv.is_contiguous(), weights.conv.stride()
    return weights.conv.shape[1]


def launch_inputs(
    rows: DeltaNetRows,
    weights: DeltaNetWeights,
    conv_ring: Tensor,
    delta: DeltaState,
    pending: PendingRecords | None,
    slots: Tensor,
    starts: Tensor,
    num_rows: Tensor | None,
    results: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None],
    *,
    overlap: bool,
    warmup: bool = False,
) -> Any:
    """Launch delta_inputs_kernel; results: queries, keys, values, decays, beta, key_query.

    A prompt chunk has neither `pending` nor `num_rows`.
    """
    queries, keys, values, decays, beta, key_query = results
    num_slots, num_value_heads, value_dim, key_dim = delta.state.shape
    max_rows, num_key_heads = delta.record_keys.shape[2:4]
    qkv, width = _aligned(rows.qkv), _num_conv_taps(weights)
    num_all = qkv.shape[0]
    arguments = (
        qkv,
        rows.a,
        rows.b,
        weights.conv,
        weights.a_log,
        weights.dt_bias,
        conv_ring,
        slots,
        starts,
        slots if num_rows is None else num_rows,
        slots if pending is None else pending.parity,
        queries,
        keys,
        values,
        decays,
        beta,
        beta if key_query is None else key_query,
        num_slots,
        num_all // slots.shape[0],
        qkv.stride(0),
        rows.a.stride(0),
        rows.b.stride(0),
    )
    heads = HEADS_PER_PROGRAM
    options: dict[str, Any] = {
        "HK": num_key_heads,
        "HV": num_value_heads,
        "K": key_dim,
        "V": value_dim,
        "W": width,
        "RING": conv_ring.shape[1],
        "MAX_ROWS": max_rows,
        "HEADS": heads,
        "BLOCK_K": triton.next_power_of_2(key_dim),
        "BLOCK_V": triton.next_power_of_2(value_dim),
        "QUERY_SCALE": key_dim**-0.5,
        "PACKED": width == 4 and weights.conv.element_size() == 2,
        "PREFILL": pending is None,
        "PDL": overlap,
        "num_warps": 4,
        "enable_fp_fusion": False,
        "launch_pdl": overlap,
    }
    grid = (num_all, triton.cdiv(num_key_heads, heads) + triton.cdiv(num_value_heads, heads))
    if warmup:
        return delta_inputs_kernel.warmup(*arguments, grid=grid, **options)
    return delta_inputs_kernel[grid](*arguments, **options)


def round_inputs(
    rows: DeltaNetRows,
    weights: DeltaNetWeights,
    conv_ring: Tensor,
    delta: DeltaState,
    pending: PendingRecords,
    slots: Tensor,
    starts: Tensor,
    num_rows: Tensor,
    *,
    overlap: bool,
) -> RuleInputs:
    """Fill the ring and this round's records of keys and decays; the rest is returned."""
    num_all, num_value_heads, value_dim = rows.qkv.shape[0], *delta.state.shape[1:3]
    num_key_heads, key_dim = delta.record_keys.shape[3:]

    def floats(*shape: int) -> Tensor:
        return torch.empty((num_all, *shape), dtype=torch.float32, device=rows.qkv.device)

    inputs = RuleInputs(
        queries=floats(num_key_heads, key_dim),
        values=rows.qkv.new_empty((num_all, num_value_heads, value_dim)),
        beta=floats(num_value_heads),
        key_query=floats(num_key_heads),
    )
    results = (inputs.queries, delta.record_keys, inputs.values, delta.record_decays, inputs.beta)
    launch_inputs(
        rows, weights, conv_ring, delta, pending, slots, starts, num_rows,
        (*results, inputs.key_query), overlap=overlap,
    )  # fmt: skip
    return inputs


def prefill_inputs(
    rows: DeltaNetRows,
    weights: DeltaNetWeights,
    conv_ring: Tensor,
    delta: DeltaState,
    slot: Tensor,
    start: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """queries, keys [T, HK, K] in `dtype`, values [T, HV, V], g, beta [T, HV] float32.

    Then the chunk's newest raw inputs go into the ring.
    """
    num_rows, num_value_heads, value_dim = rows.qkv.shape[0], *delta.state.shape[1:3]
    num_key_heads, key_dim = delta.record_keys.shape[3:]
    device = rows.qkv.device
    queries, keys = (
        torch.empty((num_rows, num_key_heads, key_dim), dtype=dtype, device=device)
        for _ in range(2)
    )
    values = rows.qkv.new_empty((num_rows, num_value_heads, value_dim))
    g, beta = (
        torch.empty((num_rows, num_value_heads), dtype=torch.float32, device=device)
        for _ in range(2)
    )
    launch_inputs(
        rows, weights, conv_ring, delta, None, slot, start, None,
        (queries, keys, values, g, beta, None), overlap=False,
    )  # fmt: skip
    launch_ring_store(rows.qkv, conv_ring, slot, start)
    return queries, keys, values, g, beta


def launch_ring_store(
    qkv: Tensor, conv_ring: Tensor, slot: Tensor, start: Tensor, *, warmup: bool = False
) -> Any:
    """Store the newest rows of a chunk; older ones would wrap onto them."""
    ring_size, channels = conv_ring.shape[1:]
    count = min(qkv.shape[0], ring_size)
    arguments = (qkv, conv_ring, slot, start, qkv.shape[0] - count, qkv.stride(0))
    options: dict[str, Any] = {"C": channels, "RING": ring_size, "BLOCK": 1024, "num_warps": 4}
    grid = (count, triton.cdiv(channels, 1024))
    if warmup:
        return ring_store_kernel.warmup(*arguments, grid=grid, **options)
    return ring_store_kernel[grid](*arguments, **options)
