"""Portable kernel of the gated delta rule: replay of accepted records, then a round's rows.

Arithmetic with the state is elementwise, with explicit fused multiply-adds and without contraction
(enable_fp_fusion=False), so that replaying a row gives the bits that running it gave, whichever
kernel did either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

if TYPE_CHECKING:
    from outrider.ops.gated_delta_rule import DeltaState, PendingRecords

BLOCK_VALUES = 32
"""Rows of v in a program. Fixed: the order of the sums over k follows from it."""


@dataclass(frozen=True)
class RuleInputs:
    """What the rule needs of R rows besides the keys and decays that stand in the records.

    Attributes:
        queries: [R, HK, K] float32, normalised and scaled.
        values: [R, HV, V].
        beta: [R, HV] float32.
        key_query: [R, HK] float32, k . q.
    """

    queries: Tensor
    values: Tensor
    beta: Tensor
    key_query: Tensor


@triton.jit
def num_pending_rows(p_last_num_rows, p_num_accepted_rows, slot, MAX_ROWS: tl.constexpr):
    """Records of a slot to replay, 0 .. MAX_ROWS whatever the counters hold."""
    last = tl.minimum(tl.load(p_last_num_rows + slot), MAX_ROWS)
    return tl.minimum(tl.maximum(tl.load(p_num_accepted_rows + slot), 0), last).to(tl.int32)


@triton.jit
def advanced_state(b_state, b_update, b_key, decay, STORAGE: tl.constexpr):
    """S <- e S + u k^T, rounded to what the state is stored in. [BV, K], [BV], [K], scalar."""
    b_state = tl.fma(
        tl.broadcast_to(b_update[:, None], b_state.shape),
        tl.broadcast_to(b_key[None, :], b_state.shape),
        b_state * decay,
    )
    return b_state.to(STORAGE).to(tl.float32)


@triton.jit(
    do_not_specialize=["num_slots", "rows_per_sequence"],
    do_not_specialize_on_alignment=["p_slots", "p_num_rows"],
)
def delta_rule_kernel(
    p_state,  # [slots, HV, V, K]
    p_record_keys,  # [2, slots, MAX_ROWS, HK, K] float32
    p_record_updates,  # [2, slots, MAX_ROWS, HV, V] float32
    p_record_decays,  # [2, slots, MAX_ROWS, HV] float32
    p_parity,  # [slots] int64
    p_last_num_rows,  # [slots] int64
    p_num_accepted_rows,  # [slots] int64
    p_slots,  # [B] int64
    p_num_rows,  # [B] int64
    p_queries,  # [R, HK, K] float32
    p_values,  # [R, HV, V]
    p_beta,  # [R, HV] float32
    p_key_query,  # [R, HK] float32
    p_output,  # [R, HV, V]
    num_slots,
    rows_per_sequence,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One (sequence, value head, block of v): S [BLOCK_V, K] in registers from load to last row.

    For every pending record S <- e S + u k^T, and S is stored. Then for this round's rows, on a
    copy, with both dot products taken from the old S:

        u = beta (v - e S k);   o = e S q + u (k . q);   S <- e S + u k^T

    The loop over rows has a bound read from memory, so one binary serves any number of rows.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i_b, i_h, i_v = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_rows = rows_per_sequence
    if HAS_ROWS:
        num_rows = tl.load(p_num_rows + i_b).to(tl.int32)
        if num_rows <= 0:
            return
    slot = tl.load(p_slots + i_b)
    parity = tl.load(p_parity + slot) & 1
    num_pending = num_pending_rows(p_last_num_rows, p_num_accepted_rows, slot, MAX_ROWS)

    STORAGE: tl.constexpr = p_state.dtype.element_ty
    i_hk = i_h // (HV // HK)
    o_k = tl.arange(0, BLOCK_K)
    o_v = i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    m_k, m_v = o_k < K, o_v < V
    m_s = m_v[:, None] & m_k[None, :]
    p_s = p_state + (slot * HV + i_h) * (V * K) + o_v[:, None] * K + o_k[None, :]
    b_s = tl.load(p_s, mask=m_s, other=0.0).to(tl.float32)

    replayed = (parity * num_slots + slot) * MAX_ROWS
    for i in range(num_pending):
        record = replayed + i
        b_k = tl.load(p_record_keys + (record * HK + i_hk) * K + o_k, mask=m_k, other=0.0)
        b_u = tl.load(p_record_updates + (record * HV + i_h) * V + o_v, mask=m_v, other=0.0)
        decay = tl.load(p_record_decays + record * HV + i_h)
        b_s = advanced_state(b_s, b_u, b_k, decay, STORAGE)
    if num_pending > 0:
        tl.store(p_s, b_s.to(STORAGE), mask=m_s)

    if HAS_ROWS:
        written = ((1 - parity) * num_slots + slot) * MAX_ROWS
        first_row = i_b.to(tl.int64) * rows_per_sequence
        for t in range(num_rows):
            record, row = written + t, first_row + t
            b_k = tl.load(p_record_keys + (record * HK + i_hk) * K + o_k, mask=m_k, other=0.0)
            b_q = tl.load(p_queries + (row * HK + i_hk) * K + o_k, mask=m_k, other=0.0)
            b_v = tl.load(p_values + (row * HV + i_h) * V + o_v, mask=m_v, other=0.0)
            decay = tl.load(p_record_decays + record * HV + i_h)
            beta = tl.load(p_beta + row * HV + i_h)
            key_query = tl.load(p_key_query + row * HK + i_hk)
            b_recalled = decay * tl.sum(b_s * b_k[None, :], 1)
            b_o = decay * tl.sum(b_s * b_q[None, :], 1)
            b_u = beta * (b_v.to(tl.float32) - b_recalled)
            b_o += b_u * key_query
            p_u = p_record_updates + (record * HV + i_h) * V + o_v
            tl.store(p_u, b_u, mask=m_v)
            p_o = p_output + (row * HV + i_h) * V + o_v
            tl.store(p_o, b_o.to(p_output.dtype.element_ty), mask=m_v)
            b_s = advanced_state(b_s, b_u, b_k, decay, STORAGE)


def launch_rule(
    inputs: RuleInputs | None,
    output: Tensor | None,
    delta: DeltaState,
    pending: PendingRecords,
    slots: Tensor,
    num_rows: Tensor | None,
    *,
    overlap: bool,
    warmup: bool = False,
) -> Any:
    """Replay, and run the rows of `inputs` where given; see delta_rule_kernel."""
    num_slots, num_value_heads, value_dim, key_dim = delta.state.shape
    max_rows, num_key_heads = delta.record_keys.shape[2:4]
    unused = delta.record_decays
    rows = (inputs.queries, inputs.values, inputs.beta, inputs.key_query) if inputs else ()
    arguments = (
        delta.state,
        delta.record_keys,
        delta.record_updates,
        delta.record_decays,
        pending.parity,
        pending.last_num_rows,
        pending.num_accepted_rows,
        slots,
        slots if num_rows is None else num_rows,
        *(rows or (unused,) * 4),
        unused if output is None else output,
        num_slots,
        inputs.queries.shape[0] // slots.shape[0] if inputs else 0,
    )
    options: dict[str, Any] = {
        "HK": num_key_heads,
        "HV": num_value_heads,
        "K": key_dim,
        "V": value_dim,
        "MAX_ROWS": max_rows,
        "BLOCK_K": triton.next_power_of_2(key_dim),
        "BLOCK_V": BLOCK_VALUES,
        "HAS_ROWS": inputs is not None,
        "PDL": overlap,
        "num_warps": 4,
        "enable_fp_fusion": False,
        "launch_pdl": overlap,
    }
    grid = (slots.shape[0], num_value_heads, triton.cdiv(value_dim, BLOCK_VALUES))
    if warmup:
        return delta_rule_kernel.warmup(*arguments, grid=grid, **options)
    return delta_rule_kernel[grid](*arguments, **options)


def delta_rows(
    inputs: RuleInputs,
    delta: DeltaState,
    pending: PendingRecords,
    slots: Tensor,
    num_rows: Tensor,
    *,
    overlap: bool,
) -> Tensor:
    """[R, HV, V] outputs of rows whose keys and decays were recorded already."""
    output = torch.empty_like(inputs.values)
    launch_rule(inputs, output, delta, pending, slots, num_rows, overlap=overlap)
    return output


def delta_replay_kernel(delta: DeltaState, pending: PendingRecords, slots: Tensor) -> None:
    """Advance the state of `slots` over their accepted records; a launch that overlaps nothing."""
    if slots.shape[0]:
        launch_rule(None, None, delta, pending, slots, None, overlap=False)
