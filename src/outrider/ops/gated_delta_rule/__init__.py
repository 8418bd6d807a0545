"""The gated delta rule: prompt chunks, and verification committed by replay.

Per value head and token, with S [V, K], decay e = exp(g), and key head j // (HV / HK) for head j:

    S <- e S;   u = beta (v - S k);   S <- S + u k^T;   o = S q

A round runs its rows on a copy of S and keeps (k, u, e) of every row as records. S itself moves
only when a later round replays the rows that were accepted, with the same operations in the same
order: whatever was refused, S is bit for bit what decoding one token at a time would hold.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.ops.dispatch import uses_kernels
from outrider.ops.gated_delta_rule.reference import (
    delta_gates_reference,
    delta_prefill_reference,
    delta_replay_reference,
    delta_round_reference,
    l2_normalise_reference,
)

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of the values, and of the state that is stored; records are float32."""


@dataclass(frozen=True)
class DeltaState:
    """Recurrent state of one layer for every slot.

    Attributes:
        state: [slots, HV, V, K]. One of 16 bits is rounded after every row, in rounds and in
            replay alike, so that it too stays what one-token decoding would hold.
        record_keys: [2, slots, rows, HK, K], float32, normalised keys by parity and row.
        record_updates: [2, slots, rows, HV, V] float32.
        record_decays: [2, slots, rows, HV] float32.
    """

    state: Tensor
    record_keys: Tensor
    record_updates: Tensor
    record_decays: Tensor


@dataclass(frozen=True)
class PendingRecords:
    """Which records a slot has yet to replay, shared by all layers; per-slot device tensors.

    Attributes:
        parity: [slots] int64, 0 or 1: the half of the record buffers that the last round wrote.
        last_num_rows: [slots] int64, rows that round had.
        num_accepted_rows: [slots] int64, how many of them, from row 0, belong to the text. Counts
            outside 0 .. last_num_rows are clamped.
    """

    parity: Tensor
    last_num_rows: Tensor
    num_accepted_rows: Tensor


def delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """(g, beta) = (-exp(A_log) softplus(a + dt_bias), sigmoid(b)); [..., HV] in, float32 out."""
    return delta_gates_reference(a, b, a_log, dt_bias)


def l2_normalise(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last dimension, in float32."""
    return l2_normalise_reference(x)


def delta_round(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    g: Tensor,
    beta: Tensor,
    delta: DeltaState,
    pending: PendingRecords,
    slots: Tensor,
    num_rows: Tensor,
) -> Tensor:
    """Replay what the last round accepted into the state, then run this round's rows on a copy.

    Args:
        queries, keys: [B, T, HK, K] float32, normalised (queries scaled as well).
        values: [B, T, HV, V].
        g, beta: [B, T, HV] float32.
        delta: state is advanced by the replay; records of the other parity are overwritten with
            this round's rows.
        pending: read only; the caller moves it on once every layer has run.
        slots: [B] int64, distinct where num_rows is positive.
        num_rows: [B] int64. A sequence with 0 rows is inert: nothing of its slot changes.

    Returns:
        [B, T, HV, V] in the values' dtype.
    """
    assert values.dtype in SUPPORTED_DTYPES, values.dtype
    assert queries.shape == keys.shape and values.shape[:3] == g.shape == beta.shape
    assert queries.shape[1] <= delta.record_keys.shape[2], "more rows than records"
    return delta_round_reference(queries, keys, values, g, beta, delta, pending, slots, num_rows)


def delta_replay(delta: DeltaState, pending: PendingRecords, slots: Tensor) -> None:
    """Advance the state of `slots` [B] over their accepted records; outputs nothing.

    The caller then marks the records as consumed (num_accepted_rows = 0).
    """
    if uses_kernels(delta.state):
        from outrider.ops.gated_delta_rule.triton import delta_replay_kernel

        delta_replay_kernel(delta, pending, slots)
        return
    delta_replay_reference(delta, pending, slots)


def delta_prefill(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    piece_ends: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """Run a chunk of one prompt, in pieces, in the chunked (WY) form.

    Args:
        queries, keys: [T, HK, K] float32, normalised (queries scaled as well).
        values: [T, HV, V].
        g, beta: [T, HV] float32.
        state: [HV, V, K] before row 0; not modified. One of 16 bits is rounded where pieces end.
        piece_ends: row counts at which pieces end, ascending, the last one T. They must lie at
            absolute positions that do not depend on load, for the bits not to.

    Returns:
        outputs [T, HV, V] in the values' dtype, and the state [HV, V, K] after the last row.
    """
    assert piece_ends[-1] == queries.shape[0], (piece_ends, queries.shape)
    return delta_prefill_reference(queries, keys, values, g, beta, state, piece_ends)


__all__ = [
    "DeltaState",
    "PendingRecords",
    "delta_gates",
    "delta_prefill",
    "delta_replay",
    "delta_round",
    "l2_normalise",
]
