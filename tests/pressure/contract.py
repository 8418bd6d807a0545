"""What must hold of every plan, as the users of a world see it; see world.py.

Looks at plans and at what sequences say of themselves, never at how the scheduler or the cache do
their work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field

from outrider.batch import Batch, FinishReason, Span, SpanResult
from outrider.request import Sequence, Status
from tests.pressure.device import expect


@dataclass
class User:
    """Who waits for a sequence.

    Attributes:
        expected: what plain decoding answers.
        received: what has come of it.
        num_proposed: most drafts that may wait for the next round, as far as the host can know.
        num_reported: prompt positions whose log probabilities were asked of the device.
    """

    sequence: Sequence
    expected: tuple[int, ...]
    expected_reason: FinishReason
    received: list[int] = field(default_factory=list[int])
    num_proposed: int = 0
    num_reported: int = 0


@dataclass
class Flight:
    """A batch on the device; results are None until it has run."""

    batch: Batch
    results: list[SpanResult] | None = None


def rank(sequence: Sequence) -> tuple[int, int]:
    """Who comes first where not all can be served: the smaller one."""
    return -sequence.request.params.priority, sequence.sequence_id


def check_span(
    span: Span,
    user: User,
    num_drafts: int,
    block_ids: tuple[int, ...],
    drafts_of: Callable[[Span], SequenceABC[int]],
) -> None:
    """One sequence's part of a plan.

    Args:
        num_drafts: most drafts of a round.
        block_ids: what the cache says that the sequence has.
        drafts_of: what waits on the device for a round.
    """
    effects = span.effects
    sequence, params = user.sequence, user.sequence.request.params
    most = num_drafts if params.speculation else 0
    if params.max_draft_tokens is not None:
        most = min(most, params.max_draft_tokens)
    expect(effects.num_drafts <= most, "more drafts are verified than the request allows")
    expect(effects.num_drafts_next <= most, "more drafts are wanted than the request allows")
    feeds = params.speculation and num_drafts > 0
    expect(effects.feeds_draft == feeds, "the draft sees all of a text, or nothing")
    limit = sequence.request.length_limit
    start = span.start if span.is_prefill else sequence.num_committed - 1
    expect(start + span.num_rows <= limit, "rows stand past the length limit")
    expect(span.block_ids == block_ids, "a span has another block table than its sequence")
    if span.is_prefill:
        return
    expect(effects.num_drafts <= user.num_proposed, "drafts are verified that nobody proposed")
    if params.grammar is not None:
        expect(len(sequence.in_flight) == 1, "a grammar's drafts are still on the device")
        drafts = sequence.proposed_token_ids[: effects.num_drafts]
        known = drafts == drafts_of(span)[: effects.num_drafts]
        expect(known, "the host and the device hold other drafts")


def check_order(
    batch: Batch,
    sequences: SequenceABC[Sequence],
    was: dict[int, Status],
    owed: SequenceABC[Sequence],
    max_prefill_tokens: int,
) -> int:
    """Who is served, and at whose cost; returns how many gave way.

    Args:
        was: how each sequence stood before the plan.
        owed: who must have a round.
    """
    rounds = {span.sequence_id for span in batch.rounds}
    skipped = [s for s in owed if s.status is Status.DECODING and s.sequence_id not in rounds]
    expect(not skipped, "a decoding sequence has no round in a step")
    waiting = [s for s in sequences if s.status is Status.WAITING]
    lost = [s for s in waiting if was[s.sequence_id] is not Status.WAITING]
    expect(all(not s.in_flight for s in lost), "a sequence is preempted in flight")
    if lost:
        kept = [s for s in sequences if s.sequence_id in rounds]
        best_lost = min(map(rank, lost))
        in_order = all(rank(sequence) < best_lost for sequence in kept)
        expect(in_order, "a sequence gives way to one behind it")
    admitted = [
        s
        for s in sequences
        if was[s.sequence_id] is Status.WAITING and s.status is not Status.WAITING
    ]
    if admitted and waiting:
        in_order = max(map(rank, admitted)) < min(map(rank, waiting))
        expect(in_order, "a waiting sequence is overtaken")
    slots = sorted(setup.slot for setup in batch.setups)
    is_set_up = slots == sorted(sequence.slot or 0 for sequence in admitted)
    expect(is_set_up, "exactly those that are let in are set up")
    num_rows = sum(span.num_rows for span in batch.prefill)
    expect(num_rows <= max_prefill_tokens, "prompts take more than their budget")
    return len(lost)


def check_owners(
    batches: Iterable[Batch], sequences: SequenceABC[Sequence], block_size: int
) -> None:
    """Nobody in flight may write what is in the hands of another.

    The device runs batches in order, so that a block may be written by one that is submitted
    later than the last that reads it.

    Args:
        batches: those in flight, oldest first, and the one that was planned.
        sequences: by id, all that there ever were.
    """
    writers: dict[int, int] = {}
    slots: dict[int, int] = {}
    for batch in batches:
        readers: dict[int, set[int]] = {}
        for span in batch.spans:
            owner = slots.setdefault(span.slot, span.sequence_id)
            expect(owner == span.sequence_id, "two sequences in flight share a slot")
            for block in span.block_ids:
                readers.setdefault(block, set()).add(span.sequence_id)
        for span in batch.spans:
            computed = sequences[span.sequence_id].num_computed
            start = span.start if span.is_prefill else max(span.start, computed)
            for block in span.block_ids[start // block_size :]:
                writer = writers.setdefault(block, span.sequence_id)
                expect(writer == span.sequence_id, "two sequences in flight write a block")
        for block in readers.keys() & writers.keys():
            alone = readers[block] == {writers[block]}
            expect(alone, "a block is read that another sequence in flight may write")


def check_reports(user: User) -> None:
    """A text that has ended got all that was asked for beside it."""
    request = user.sequence.request
    if request.params.prompt_logprobs is not None:
        reported = user.num_reported >= len(request.prompt_token_ids)
        expect(reported, "a prompt's log probabilities are not all computed")
