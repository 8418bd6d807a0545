"""A gated delta net's recurrent part as one operation: convolution, norms, gates, delta rule.

    [q | k | v] = silu(conv(qkv));  q, k <- l2_normalise(q) K^-1/2, l2_normalise(k)
    g = -exp(A_log) softplus(a + dt_bias);  beta = sigmoid(b)

and then the rule of ops.gated_delta_rule, whose records and commit by replay are kept here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.ops.dispatch import capability, overlaps_launches, uses_kernels
from outrider.ops.gated_delta_net.reference import (
    delta_net_prefill_reference,
    delta_net_round_reference,
)
from outrider.ops.gated_delta_rule import DeltaState, PendingRecords

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of the rows; see DeltaState for what the recurrence keeps."""

_GLUON_HEAD_DIM = 128
_GLUON_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class DeltaNetRows:
    """Projections of R rows, views into one matrix: unit stride along the last dimension.

    Attributes:
        qkv: [R, C] raw inputs of the convolution, C = 2 HK K + HV V.
        a, b: [R, HV], inputs of decay and beta.
    """

    qkv: Tensor
    a: Tensor
    b: Tensor


@dataclass(frozen=True)
class DeltaNetWeights:
    """conv [C, W] in the rows' dtype; a_log, dt_bias [HV], float32 or the rows' dtype."""

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor


def delta_net_round(
    rows: DeltaNetRows,
    weights: DeltaNetWeights,
    conv_ring: Tensor,
    delta: DeltaState,
    pending: PendingRecords,
    slots: Tensor,
    starts: Tensor,
    num_rows: Tensor,
) -> Tensor:
    """Replay what the last round accepted, then run B sequences by T rows (R = B * T).

    Args:
        conv_ring: [slots, ring_size, C], raw inputs by absolute position; updated in place for the
            first num_rows[b] rows.
        delta: state advanced by the replay, records of the other parity overwritten.
        pending: read only.
        slots: [B] int64, distinct where num_rows is positive.
        starts: [B] int64, position of row 0.
        num_rows: [B] int64. A sequence with 0 rows is inert: nothing of its slot changes.

    Returns:
        [R, HV, V] in the rows' dtype; rows past num_rows come out unspecified.
    """
    _check(rows, weights, conv_ring)
    if uses_kernels(rows.qkv):
        return _round_kernels(rows, weights, conv_ring, delta, pending, slots, starts, num_rows)
    return delta_net_round_reference(
        rows, weights, conv_ring, delta, pending, slots, starts, num_rows
    )


def delta_net_prefill(
    rows: DeltaNetRows,
    weights: DeltaNetWeights,
    conv_ring: Tensor,
    delta: DeltaState,
    slot: Tensor,
    start: Tensor,
    piece_ends: tuple[int, ...],
    *,
    starts_sequence: bool,
) -> Tensor:
    """Run a chunk of one prompt, all R rows in use; the state of its slot advances past them.

    Args:
        slot, start: [1] int64; nothing is pending for the slot.
        piece_ends: row counts at which pieces of the chunked form end; see delta_prefill_reference.
        starts_sequence: the chunk begins at position 0: what the slot held before is ignored.

    Returns:
        [R, HV, V] in the rows' dtype.
    """
    _check(rows, weights, conv_ring)
    run = delta_net_prefill_reference
    if uses_kernels(rows.qkv):
        from outrider.ops.gated_delta_net.prefill import delta_net_prefill_kernels as run
    return run(rows, weights, conv_ring, delta, slot, start, piece_ends, starts_sequence)


def _round_kernels(
    rows: DeltaNetRows,
    weights: DeltaNetWeights,
    conv_ring: Tensor,
    delta: DeltaState,
    pending: PendingRecords,
    slots: Tensor,
    starts: Tensor,
    num_rows: Tensor,
) -> Tensor:
    """Two kernels: what the rule needs of each row, then the rule.

    Where launches overlap, both read slots, starts, num_rows, `pending` and the weights before they
    wait for the kernels in front, and the second also S and last round's records: some launch
    between whatever writes these and this call must not overlap.
    """
    from outrider.ops.gated_delta_net.triton import round_inputs

    num_sequences, history = slots.shape[0], weights.conv.shape[1] - 1
    assert rows.qkv.shape[0] // num_sequences <= min(
        delta.record_keys.shape[2], conv_ring.shape[1] - history
    ), "more rows than records, or than the ring keeps apart from what the first rows read"
    overlap = overlaps_launches(rows.qkv)
    inputs = round_inputs(
        rows, weights, conv_ring, delta, pending, slots, starts, num_rows, overlap=overlap
    )
    if (
        delta.state.shape[2:] == (_GLUON_HEAD_DIM, _GLUON_HEAD_DIM)
        and capability(rows.qkv.device) >= _GLUON_CAPABILITY
    ):
        from outrider.ops.gated_delta_rule.hopper import delta_rows
    else:
        from outrider.ops.gated_delta_rule.triton import delta_rows
    return delta_rows(inputs, delta, pending, slots, num_rows, overlap=overlap)


def _check(rows: DeltaNetRows, weights: DeltaNetWeights, conv_ring: Tensor) -> None:
    assert rows.qkv.dtype in SUPPORTED_DTYPES and rows.qkv.dtype == conv_ring.dtype, rows.qkv.dtype
    assert rows.qkv.shape[1] == conv_ring.shape[2] == weights.conv.shape[0], rows.qkv.shape
