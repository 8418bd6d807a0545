"""Reference: the separate operations, one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.ops.causal_conv.reference import causal_conv_reference
from outrider.ops.gated_delta_rule.reference import (
    delta_gates_reference,
    delta_prefill_reference,
    delta_round_reference,
    l2_normalise_reference,
)

if TYPE_CHECKING:
    from outrider.ops.gated_delta_net import DeltaNetRows, DeltaNetWeights
    from outrider.ops.gated_delta_rule import DeltaState, PendingRecords


def _recurrence_inputs(
    rows: DeltaNetRows,
    weights: DeltaNetWeights,
    conv_ring: Tensor,
    delta: DeltaState,
    slots: Tensor,
    starts: Tensor,
    num_rows: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """queries, keys [B, T, HK, K], values [B, T, HV, V], g, beta [B, T, HV]."""
    num_key_heads, key_dim = delta.record_keys.shape[3:]
    shape = (slots.shape[0], rows.qkv.shape[0] // slots.shape[0])
    mixed = causal_conv_reference(
        rows.qkv.reshape(*shape, -1), weights.conv, conv_ring, slots, starts, num_rows
    )
    key_size = num_key_heads * key_dim
    q, k, v = mixed.split((key_size, key_size, mixed.shape[-1] - 2 * key_size), dim=-1)
    g, beta = delta_gates_reference(
        rows.a.contiguous(), rows.b.contiguous(), weights.a_log, weights.dt_bias
    )
    return (
        l2_normalise_reference(q.view(*shape, num_key_heads, -1)) * key_dim**-0.5,
        l2_normalise_reference(k.view(*shape, num_key_heads, -1)),
        v.view(*shape, delta.state.shape[1], -1),
        g.view(*shape, -1),
        beta.view(*shape, -1),
    )


def delta_net_round_reference(
    rows: DeltaNetRows,
    weights: DeltaNetWeights,
    conv_ring: Tensor,
    delta: DeltaState,
    pending: PendingRecords,
    slots: Tensor,
    starts: Tensor,
    num_rows: Tensor,
) -> Tensor:
    """-> [R, HV, V]; see the public function for the contract."""
    inputs = _recurrence_inputs(rows, weights, conv_ring, delta, slots, starts, num_rows)
    return delta_round_reference(*inputs, delta, pending, slots, num_rows).flatten(0, 1)


def delta_net_prefill_reference(
    rows: DeltaNetRows,
    weights: DeltaNetWeights,
    conv_ring: Tensor,
    delta: DeltaState,
    slot: Tensor,
    start: Tensor,
    piece_ends: tuple[int, ...],
    starts_sequence: bool,
) -> Tensor:
    """-> [R, HV, V]; see the public function for the contract."""
    num_rows = torch.full_like(start, rows.qkv.shape[0])
    inputs = _recurrence_inputs(rows, weights, conv_ring, delta, slot, start, num_rows)
    state = delta.state[slot][0]
    if starts_sequence:
        state = torch.zeros_like(state)
    q, k, v, g, beta = (x[0] for x in inputs)
    output, state = delta_prefill_reference(q, k, v, g, beta, state, piece_ends)
    delta.state[slot] = state[None]
    return output
