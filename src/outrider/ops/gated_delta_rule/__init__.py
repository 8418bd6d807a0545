"""The gated delta rule, and what it keeps: verification is committed by replay.

Per value head and token, with S [V, K], decay e = exp(g), and key head j // (HV / HK) for head j:

    S <- e S;   u = beta (v - S k);   S <- S + u k^T;   o = S q

A round runs its rows on a copy of S and keeps (k, u, e) of every row as records. S itself moves
only when a later round replays the rows that were accepted, with the same operations in the same
order: whatever was refused, S is bit for bit what decoding one token at a time would hold.

Rounds and prompt chunks are parts of ops.gated_delta_net; what defines them is in reference.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.ops.dispatch import uses_kernels
from outrider.ops.gated_delta_rule.reference import delta_replay_reference

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of the state that is stored; records are float32."""


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


def delta_replay(delta: DeltaState, pending: PendingRecords, slots: Tensor) -> None:
    """Advance the state of `slots` [B] over their accepted records; outputs nothing.

    The caller then marks the records as consumed (num_accepted_rows = 0).
    """
    assert delta.state.dtype in SUPPORTED_DTYPES, delta.state.dtype
    if uses_kernels(delta.state):
        from outrider.ops.gated_delta_rule.triton import delta_replay_kernel

        delta_replay_kernel(delta, pending, slots)
        return
    delta_replay_reference(delta, pending, slots)


__all__ = ["DeltaState", "PendingRecords", "delta_replay"]
