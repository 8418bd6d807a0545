"""Reference bookkeeping, in plain PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from outrider.ops.philox.reference import Purpose, uniforms_reference

if TYPE_CHECKING:
    from outrider.ops.bookkeeping import ChainRows, RoundOutcome, RoundRows, SlotTensors, Verdict

NULL_PLACE = 0
"""Flat place in the null block, for rows that nobody keeps."""


def kv_index_reference(
    block_tables: Tensor, positions: Tensor, kept: Tensor, block_size: int
) -> Tensor:
    """block_tables [B, M], positions, kept [B, T] -> flat places [B, T]."""
    column = (positions // block_size).clamp(max=block_tables.shape[1] - 1)
    index = block_tables.gather(1, column) * block_size + positions % block_size
    return torch.where(kept, index, NULL_PLACE)


def round_rows_reference(
    numbers: Tensor, table: SlotTensors, num_verified: int, block_size: int
) -> RoundRows:
    """numbers [B, 3 + M] -> RoundRows; see the public function for the contract."""
    from outrider.ops.bookkeeping import NUM_COLUMNS, RoundRows

    slots = numbers[:, 0].contiguous()
    block_tables = numbers[:, NUM_COLUMNS:].contiguous()
    num_committed = table.num_committed[slots]
    room = table.length_limits[slots] - num_committed - 1
    num_drafts = torch.minimum(numbers[:, 1], table.num_proposed[slots])
    num_drafts = torch.minimum(num_drafts, room).clamp(min=0)
    drafts = table.draft_token_ids[slots, : num_verified - 1]
    starts = num_committed - 1
    num_rows = torch.where(table.finished[slots], 0, num_drafts + 1)
    row = torch.arange(num_verified, device=slots.device)
    positions = starts[:, None] + row
    kept = row < num_rows[:, None]
    return RoundRows(
        slots=slots,
        num_drafts=num_drafts,
        num_wanted=numbers[:, 2].contiguous(),
        starts=starts,
        num_rows=num_rows,
        block_tables=block_tables,
        draft_token_ids=drafts,
        token_ids=torch.cat((table.last_token_ids[slots][:, None], drafts), dim=1).flatten(),
        positions=positions.flatten(),
        kv_index=kv_index_reference(block_tables, positions, kept, block_size).flatten(),
    )


def accept_matching(sampled: Tensor, draft_token_ids: Tensor, num_drafts: Tensor) -> Tensor:
    """Length of the leading run of drafts that equal the target's own tokens.

    sampled [B, T], draft_token_ids [B, T - 1], num_drafts [B] -> [B] in 0 .. num_drafts.
    """
    index = torch.arange(draft_token_ids.shape[1], device=sampled.device)
    same = (sampled[:, :-1] == draft_token_ids) & (index < num_drafts[:, None])
    return same.long().cumprod(-1).sum(-1)


def accept_synthetic(uniform: Tensor, rates: Tensor, num_drafts: Tensor) -> Tensor:
    """uniform [B], rates [K] not increasing, num_drafts [B] -> i with probability rates[i - 1]."""
    return torch.minimum((uniform[:, None] < rates).sum(-1), num_drafts)


class Trimmed(NamedTuple):
    """What is left of a round: token_ids [B, T], num_emitted [B], stopped, at_limit [B] bool."""

    token_ids: Tensor
    num_emitted: Tensor
    stopped: Tensor
    at_limit: Tensor


def trim_round(
    token_ids: Tensor,
    num_accepted: Tensor,
    num_committed: Tensor,
    length_limits: Tensor,
    stop_token_ids: Tensor,
) -> Trimmed:
    """Cut the emitted tokens at the earliest stop id or the length limit.

    Args:
        token_ids: [B, T], of which a round emits the first num_accepted + 1.
        num_accepted, num_committed, length_limits: [B].
        stop_token_ids: [B, M], unused entries hold no token's id.
    """
    index = torch.arange(token_ids.shape[1], device=token_ids.device)
    num_emitted = torch.minimum(num_accepted + 1, length_limits - num_committed)
    is_stop = (token_ids[:, :, None] == stop_token_ids[:, None, :]).any(-1)
    is_stop &= index < num_emitted[:, None]
    stopped = is_stop.any(-1)
    first_stop = is_stop.long().argmax(-1) + 1
    num_emitted = torch.where(stopped, first_stop, num_emitted)
    at_limit = num_committed + num_emitted >= length_limits
    return Trimmed(token_ids, num_emitted, stopped, at_limit)


def commit_round_reference(
    sampled: Tensor,
    slots: Tensor,
    num_drafts: Tensor,
    draft_token_ids: Tensor,
    table: SlotTensors,
    is_round: bool,
    verdict: Verdict | None,
    synthetic_rates: Tensor | None,
) -> RoundOutcome:
    """sampled [B, T] -> RoundOutcome; see the public function for the contract."""
    from outrider.ops.bookkeeping import RoundOutcome

    num_committed = table.num_committed[slots]
    num_accepted = accept_matching(sampled, draft_token_ids, num_drafts)
    own = sampled.gather(1, num_accepted[:, None])[:, 0]
    if verdict is not None:
        num_accepted = torch.where(verdict.applies, verdict.num_accepted, num_accepted)
        own = torch.where(verdict.applies, verdict.own_token, own)
    if synthetic_rates is not None:
        uniform = uniforms_reference(table.seeds[slots], num_committed, 1, Purpose.SYNTHETIC)
        num_accepted = accept_synthetic(uniform[:, 0], synthetic_rates, num_drafts)
        own = sampled.gather(1, num_accepted[:, None])[:, 0]

    # Accepted drafts, the round's own token, and entries that nobody reads.
    token_ids = torch.cat((draft_token_ids, own[:, None]), dim=1)
    token_ids = token_ids.scatter(1, num_accepted[:, None], own[:, None])
    trimmed = trim_round(
        token_ids,
        num_accepted,
        num_committed,
        table.length_limits[slots],
        table.stop_token_ids[slots],
    )
    live = ~table.finished[slots]
    num_accepted = torch.where(live, num_accepted, 0)
    first_row = torch.arange(sampled.shape[0], device=slots.device) * sampled.shape[1]
    outcome = RoundOutcome(
        num_accepted=num_accepted,
        num_emitted=torch.where(live, trimmed.num_emitted, 0),
        stopped=trimmed.stopped & live,
        at_limit=trimmed.at_limit & live,
        token_ids=token_ids,
        own_token=own,
        last_row=first_row + num_accepted,
    )
    _move_on(outcome, slots, num_drafts, live, table, is_round)
    return outcome


def _move_on(
    outcome: RoundOutcome,
    slots: Tensor,
    num_drafts: Tensor,
    live: Tensor,
    table: SlotTensors,
    is_round: bool,
) -> None:
    """Counts and texts. Caches need nothing: what was refused is written over."""
    tokens, num_emitted = outcome.token_ids, outcome.num_emitted
    num_committed = table.num_committed[slots]
    index = torch.arange(tokens.shape[1], device=slots.device)
    place = num_committed[:, None] + index
    place = torch.where(index < num_emitted[:, None], place, table.token_ids.shape[1] - 1)
    table.token_ids[slots[:, None], place] = tokens.to(table.token_ids.dtype)
    newest = tokens.gather(1, (num_emitted - 1).clamp(min=0)[:, None])[:, 0]
    table.last_token_ids[slots] = torch.where(live, newest, table.last_token_ids[slots])
    table.num_committed[slots] = num_committed + num_emitted
    table.finished[slots] = table.finished[slots] | outcome.stopped | outcome.at_limit
    if is_round:
        pending = table.pending
        pending.parity[slots] = pending.parity[slots] ^ live.long()
        for counts, value in (
            (pending.last_num_rows, num_drafts + 1),
            (pending.num_accepted_rows, num_emitted),
        ):
            counts[slots] = torch.where(live, value, counts[slots])


def chain_rows_reference(
    slots: Tensor,
    num_wanted: Tensor,
    block_tables: Tensor,
    table: SlotTensors,
    max_drafts: int,
    block_size: int,
) -> ChainRows:
    """-> ChainRows of steps 2 .. max_drafts; see the public function for the contract."""
    from outrider.ops.bookkeeping import ChainRows

    step = torch.arange(2, max_drafts + 1, device=slots.device)
    positions = table.num_committed[slots][:, None] + step - 3  # [B, K - 1]
    alive = (step <= num_wanted[:, None]) & ~table.finished[slots][:, None]
    alive &= positions < table.length_limits[slots][:, None]
    index = kv_index_reference(block_tables, positions.clamp(min=0), alive, block_size)
    return ChainRows(
        positions=positions.t().contiguous(),
        num_rows=alive.long().t().contiguous(),
        kv_index=index.t().contiguous(),
    )


def store_proposal_reference(
    outcome: RoundOutcome,
    slots: Tensor,
    num_drafts: Tensor,
    draft_token_ids: Tensor,
    proposed: tuple[Tensor, Tensor] | None,
    table: SlotTensors,
) -> Tensor:
    """-> packed [B, 6 + T + (T - 1) + K']; see the public function for the contract."""
    num_proposed = torch.zeros_like(slots) if proposed is None else proposed[1]
    table.num_proposed[slots] = num_proposed
    parts = [outcome.token_ids, draft_token_ids]
    if proposed is not None:
        table.draft_token_ids[slots, : proposed[0].shape[1]] = proposed[0]
        parts.append(proposed[0])
    counts = (
        outcome.num_accepted,
        outcome.num_emitted,
        outcome.stopped.long(),
        outcome.at_limit.long(),
        num_drafts,
        num_proposed,
    )
    return torch.cat((torch.stack(counts, dim=1), *parts), dim=1)
