"""What a round does to its sequences besides arithmetic: which rows run, what is committed.

All of it is on the device, so that a round can be submitted before the one in front of it has
ended. In the order of a round: `round_rows` (what the target pass runs), `commit_round` (accept,
trim, move the counts on), `chain_rows` (where the draft's steps run), `store_proposal` (keep the
drafts, and pack everything that the host wants to know), and `transfer` to bring it there.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from outrider.ops.bookkeeping.reference import (
    commit_round_reference,
    round_rows_reference,
    store_proposal_reference,
)
from outrider.ops.dispatch import uses_kernels
from outrider.ops.gated_delta_rule import PendingRecords

NUM_COLUMNS = 3
"""Columns of a round's host numbers before the block table: slot, drafts to verify, wanted next."""

NUM_COUNTS = 6
"""Packed counts: num_accepted, num_emitted, stopped, at_limit, num_drafts, num_proposed."""


@dataclass(frozen=True)
class SlotTensors:
    """What the device knows of every slot's sequence. int64 unless said otherwise.

    Attributes:
        num_committed: [slots], tokens of the text.
        last_token_ids: [slots], the newest of them.
        token_ids: [slots, L + 1] int32, the text; the last column is written by rows that commit
            nothing, and never read.
        draft_token_ids: [slots, K], proposed for the next round.
        num_proposed: [slots], how many of them there are.
        length_limits: [slots], the sequence ends when it holds this many tokens.
        finished: [slots] bool; rows of such a slot do nothing.
        stop_token_ids: [slots, M], the sequence ends after any of these; unused entries hold no
            token's id.
        seeds: [slots].
        pending: records of recurrent layers that the next round replays.
    """

    num_committed: Tensor
    last_token_ids: Tensor
    token_ids: Tensor
    draft_token_ids: Tensor
    num_proposed: Tensor
    length_limits: Tensor
    finished: Tensor
    stop_token_ids: Tensor
    seeds: Tensor
    pending: PendingRecords


@dataclass(frozen=True)
class RoundRows:
    """The rows of a round: B sequences by T rows.

    Attributes:
        slots, num_drafts, num_wanted: [B].
        starts: [B], position of each sequence's first row.
        num_rows: [B], rows in use; 0 for a finished slot.
        block_tables: [B, M].
        draft_token_ids: [B, T - 1].
        token_ids, positions, kv_index: [B * T]; see ops.attention_inputs for the last.
    """

    slots: Tensor
    num_drafts: Tensor
    num_wanted: Tensor
    starts: Tensor
    num_rows: Tensor
    block_tables: Tensor
    draft_token_ids: Tensor
    token_ids: Tensor
    positions: Tensor
    kv_index: Tensor


@dataclass(frozen=True)
class Verdict:
    """What a rule other than `match` decided, and which sequences it decides for.

    Attributes:
        applies: [B] bool.
        num_accepted: [B].
        own_token: [B], the round's own token behind the accepted drafts.
    """

    applies: Tensor
    num_accepted: Tensor
    own_token: Tensor


@dataclass(frozen=True)
class RoundOutcome:
    """What a round commits, trimmed at stop ids and the length limit.

    Attributes:
        num_accepted: [B], before trimming; 0 for a finished slot.
        num_emitted: [B], in 1 .. num_accepted + 1; 0 for a finished slot.
        stopped: [B] bool, the last emitted token is a stop id.
        at_limit: [B] bool, the sequence holds as many tokens as it may.
        token_ids: [B, T], valid up to num_emitted: the accepted drafts, behind them the round's own
            token, and garbage. So entry t is the token after row t, as far as the text goes.
        own_token: [B], the token that follows the accepted drafts.
        last_row: [B], b T + num_accepted, the flat row that the own token follows.
    """

    num_accepted: Tensor
    num_emitted: Tensor
    stopped: Tensor
    at_limit: Tensor
    token_ids: Tensor
    own_token: Tensor
    last_row: Tensor


@dataclass(frozen=True)
class ChainRows:
    """One row per sequence for every chain step 2 .. K; entry s - 2 along the first dimension.

    Attributes:
        positions: [K - 1, B].
        num_rows: [K - 1, B], 0 or 1.
        kv_index: [K - 1, B].
    """

    positions: Tensor
    num_rows: Tensor
    kv_index: Tensor


def round_rows(
    numbers: Tensor, table: SlotTensors, num_verified: int, block_size: int
) -> RoundRows:
    """The newest token and the drafts of every sequence, as one rectangle of rows.

    The device decides what is true by now: a finished slot runs no row, and there are no more
    drafts to verify than were proposed and than the text has room for.

    Args:
        numbers: [B, NUM_COLUMNS + M] int64, see NUM_COLUMNS; the rest is the block table.
        num_verified: T.
    """
    if uses_kernels(numbers):
        from outrider.ops.bookkeeping.triton import round_rows_kernel

        return round_rows_kernel(numbers, table, num_verified, block_size)
    return round_rows_reference(numbers, table, num_verified, block_size)


def commit_round(
    sampled: Tensor,
    slots: Tensor,
    num_drafts: Tensor,
    draft_token_ids: Tensor,
    table: SlotTensors,
    *,
    is_round: bool,
    verdict: Verdict | None = None,
    synthetic_rates: Tensor | None = None,
) -> RoundOutcome:
    """Accept drafts, trim, and move the table on.

    Rule `match`: drafts are accepted while they equal the target's own token, see spec.verify.

    Args:
        sampled: [B, T], the target's token after each row.
        slots, num_drafts: [B].
        draft_token_ids: [B, T - 1].
        is_round: the rows left records behind, which the next round replays.
        verdict: overrides the rule where it applies.
        synthetic_rates: [K] float32, for benchmarks: accept i drafts or more with probability
            rates[i - 1] instead of by a rule.
    """
    if uses_kernels(sampled):
        from outrider.ops.bookkeeping.triton import commit_round_kernel as commit
    else:
        commit = commit_round_reference
    return commit(
        sampled, slots, num_drafts, draft_token_ids, table, is_round, verdict, synthetic_rates
    )


def chain_rows(
    slots: Tensor,
    num_wanted: Tensor,
    block_tables: Tensor,
    table: SlotTensors,
    max_drafts: int,
    block_size: int,
) -> ChainRows:
    """Where a draft's steps 2 .. max_drafts run, once the round is committed.

    Step s stands at the position of the newest token plus s - 2, and is inert where the sequence
    wants fewer drafts, has finished, or has no room: drafts there would never be verified.

    Args:
        slots, num_wanted: [B].
        block_tables: [B, M].
    """
    if uses_kernels(slots):
        from outrider.ops.bookkeeping.triton import chain_rows_kernel as place
    else:
        from outrider.ops.bookkeeping.reference import chain_rows_reference as place
    return place(slots, num_wanted, block_tables, table, max_drafts, block_size)


def store_proposal(
    outcome: RoundOutcome,
    slots: Tensor,
    num_drafts: Tensor,
    draft_token_ids: Tensor,
    proposed: tuple[Tensor, Tensor] | None,
    table: SlotTensors,
) -> Tensor:
    """Keep the drafts for the next round, and pack what the host is told.

    Args:
        slots, num_drafts: [B], of the round that ends.
        draft_token_ids: [B, T - 1], likewise.
        proposed: token ids [B, K'] and how many of them are meant [B]; None for no drafts.

    Returns:
        [B, NUM_COUNTS + T + (T - 1) + K'] int64: counts, emitted tokens, the round's drafts, the
        proposed ones.
    """
    if uses_kernels(slots):
        from outrider.ops.bookkeeping.triton import store_proposal_kernel as store
    else:
        store = store_proposal_reference
    return store(outcome, slots, num_drafts, draft_token_ids, proposed, table)


def transfer(source: Tensor, target: Tensor) -> None:
    """Copy integers between a GPU and pinned host memory, in the order of the stream.

    A kernel that reaches over the bus: copying engines take longer to hand over to kernels and back
    than these few numbers take to move. Neither tensor's memory may be given back before the copy
    has happened, which the host allocator does not know of.

    Args:
        source, target: contiguous int64 of one shape, one on the GPU and one pinned.
    """
    from outrider.ops.bookkeeping.triton import transfer_kernel

    assert source.shape == target.shape and source.is_contiguous() and target.is_contiguous()
    transfer_kernel(source, target)
