"""Reference gated delta rule. The row-by-row form is the definition; prompts use the chunked form.

Every product with the state is an elementwise product and a sum over the contiguous last dimension
(K), so that a row's bits do not depend on how many sequences or rows run beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.ops.elementwise import sigmoid, softplus

if TYPE_CHECKING:
    from outrider.ops.gated_delta_rule import DeltaState, PendingRecords


def delta_gates_reference(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """(g, beta) = (-exp(A_log) softplus(a + dt_bias), sigmoid(b)); [..., HV] in, float32 out."""
    g = -a_log.float().exp() * softplus(a.float() + dt_bias.float())
    return g, sigmoid(b.float())


def l2_normalise_reference(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last dimension, in float32."""
    x = x.float().contiguous()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _expand_heads(x: Tensor, num_value_heads: int) -> Tensor:
    """[..., HK, K] -> [..., HV, K]: value head j reads key head j // (HV / HK)."""
    return x.repeat_interleave(num_value_heads // x.shape[-2], dim=-2)


def _rank_one(state: Tensor, update: Tensor, key: Tensor) -> Tensor:
    """state [B, HV, V, K] + update [B, HV, V] key [B, HV, K]^T."""
    return state + update[..., None] * key[..., None, :]


def _as_stored(state: Tensor, storage: Tensor) -> Tensor:
    """What reading `state` back from `storage` would give, float32."""
    return state.to(storage.dtype).float()


def _num_pending(pending: PendingRecords, slots: Tensor) -> Tensor:
    accepted = pending.num_accepted_rows[slots].clamp(min=0)
    return torch.minimum(accepted, pending.last_num_rows[slots])


def _replayed(
    delta: DeltaState, pending: PendingRecords, slots: Tensor, num_pending: Tensor
) -> Tensor:
    """State of `slots` [B] advanced over their first num_pending [B] records, float32."""
    state, parity = delta.state[slots].float(), pending.parity[slots]
    for row in range(int(num_pending.max())):
        key = _expand_heads(delta.record_keys[parity, slots, row], state.shape[1])
        decay = delta.record_decays[parity, slots, row]
        advanced = _rank_one(
            state * decay[..., None, None], delta.record_updates[parity, slots, row], key
        )
        advanced = _as_stored(advanced, delta.state)
        state = torch.where((row < num_pending)[:, None, None, None], advanced, state)
    return state


def delta_replay_reference(delta: DeltaState, pending: PendingRecords, slots: Tensor) -> None:
    """Advance the state of `slots` over their accepted records, in place."""
    state = _replayed(delta, pending, slots, _num_pending(pending, slots))
    delta.state[slots] = state.to(delta.state.dtype)


def delta_round_reference(
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
    assert queries.shape == keys.shape and values.shape[:3] == g.shape == beta.shape
    assert queries.shape[1] <= delta.record_keys.shape[2], "more rows than records"
    num_pending = torch.where(num_rows > 0, _num_pending(pending, slots), 0)
    state = _replayed(delta, pending, slots, num_pending)
    live = num_rows > 0
    delta.state[slots[live]] = state[live].to(delta.state.dtype)

    num_value_heads = values.shape[2]
    parity = 1 - pending.parity[slots]
    outputs: list[Tensor] = []
    for row in range(queries.shape[1]):
        key = _expand_heads(keys[:, row], num_value_heads)
        query = _expand_heads(queries[:, row], num_value_heads)
        decay = g[:, row].exp()
        decayed = state * decay[..., None, None]
        recalled = (decayed * key[..., None, :]).sum(-1)
        update = beta[:, row, :, None] * (values[:, row].float() - recalled)
        state = _rank_one(decayed, update, key)
        outputs.append((state * query[..., None, :]).sum(-1))
        state = _as_stored(state, delta.state)
        kept = row < num_rows
        place = (parity[kept], slots[kept], row)
        delta.record_keys[place] = keys[kept, row]
        delta.record_updates[place] = update[kept]
        delta.record_decays[place] = decay[kept]
    return torch.stack(outputs, dim=1).to(values.dtype)


def _prefill_piece(
    queries: Tensor, keys: Tensor, values: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One piece, heads first: queries, keys [HV, C, K], values [HV, C, V], g, beta [HV, C].

    With G the running sum of g, row i's update solves the unit lower triangular system
    u_i + sum_{j<i} beta_i exp(G_i - G_j) (k_i . k_j) u_j = beta_i (v_i - exp(G_i) S k_i).
    """
    running = g.cumsum(-1)
    causal = torch.ones(g.shape[1], g.shape[1], dtype=torch.bool, device=g.device).tril()
    gaps = running[:, :, None] - running[:, None, :]
    decays = torch.where(causal, gaps, float("-inf")).exp()  # exp(G_i - G_j) for j <= i
    system = beta[..., None] * decays * (keys @ keys.transpose(1, 2))
    from_state = running.exp()[..., None] * (keys @ state.transpose(1, 2))  # [HV, C, V]
    wanted = beta[..., None] * (values - from_state)
    updates = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)

    outputs = running.exp()[..., None] * (queries @ state.transpose(1, 2))
    outputs = outputs + (decays * (queries @ keys.transpose(1, 2))) @ updates
    to_end = (running[:, -1:] - running).exp()[..., None]  # [HV, C, 1]
    state = running[:, -1].exp()[:, None, None] * state + (to_end * updates).transpose(1, 2) @ keys
    return outputs, state


def delta_prefill_reference(
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
    num_value_heads = values.shape[1]
    by_head = [
        x.transpose(0, 1).contiguous()
        for x in (
            _expand_heads(queries, num_value_heads),
            _expand_heads(keys, num_value_heads),
            values.float(),
            g,
            beta,
        )
    ]
    outputs: list[Tensor] = []
    begin = 0
    for end in piece_ends:
        q, k, v, decay, gate = (x[:, begin:end].contiguous() for x in by_head)
        output, final = _prefill_piece(q, k, v, decay, gate, state.float())
        state = final.to(state.dtype)
        outputs.append(output)
        begin = end
    return torch.cat(outputs, dim=1).transpose(0, 1).to(values.dtype), state
