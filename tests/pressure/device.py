"""A stand-in for the runner and its GPU: knows the truth, and distrusts the scheduler.

It does what sections "round" and "chunk" of the engine do to lengths, drafts and caches, on plain
lists. Whatever a span reads is compared with what its text must have left there; whatever it writes
must lie in the blocks that the span was given.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outrider.batch import NULL_BLOCK, NULL_SLOT, Batch, FinishReason, SlotSetup, Span, SpanResult
from tests.pressure.text import START, VOCAB_SIZE, Text, draft_value, next_token, value_after


class Violation(AssertionError):
    """The scheduler or the cache broke its contract."""


def expect(holds: bool, broken: str) -> None:
    """Raise Violation unless a part of the contract holds."""
    if not holds:
        raise Violation(broken)


@dataclass
class _Slot:
    """The device's view of a sequence.

    Attributes:
        num_prefill: tokens that the chunks have to cover.
        num_computed: how far they have got.
        num_committed: tokens of the text, which the host learns later.
        num_pending: those that the last round added: the recurrent state is in front of them, and
            can be had anywhere among them.
    """

    sequence_id: int
    num_prefill: int
    num_computed: int
    num_committed: int
    length_limit: int
    stop_token_ids: tuple[int, ...]
    num_pending: int = 0
    drafts: list[int] = field(default_factory=list[int])
    finished: bool = False


@dataclass(frozen=True)
class DeviceShape:
    """Attributes:
    is_recurrent: the model has a state besides keys and values.
    acceptance: probability that a draft behind right ones is right.
    finds_less: the method proposes fewer drafts than it may, as a look-up does.
    """

    num_blocks: int
    block_size: int
    prefill_grid: int
    num_drafts: int
    is_recurrent: bool
    acceptance: float
    finds_less: bool


class FakeDevice:
    """Runs batches in the order of submission."""

    def __init__(self, shape: DeviceShape, rng: random.Random) -> None:
        self.texts: dict[int, Text] = {}  # of every sequence that was ever added
        self._shape = shape
        self._rng = rng
        self._slots: dict[int, _Slot] = {}
        # Of each block, one value for each of its positions.
        self._values = self._memory()
        self._draft_values = self._memory()
        # Of each slot, checkpoints included: how many tokens the state covers, and its value.
        self._states: dict[int, tuple[int, int]] = {}

    def _memory(self) -> list[list[int | None]]:
        return [[None] * self._shape.block_size for _ in range(self._shape.num_blocks + 1)]

    def run(self, batch: Batch) -> list[SpanResult]:
        """One result for each span, in the order of batch.spans."""
        self._check_batch(batch)
        chunks = {span.slot: span for span in batch.prefill}
        for setup in batch.setups:
            expect(setup.slot in chunks, "a slot is set up and nothing runs in it")
            self._set_up(setup, chunks[setup.slot].sequence_id)
        results = [self._chunk(span) for span in batch.prefill]
        kept = [self._keep_state(span) for span in batch.rounds]
        for span, is_kept in zip(batch.rounds, kept, strict=True):
            results.append(replace(self._round(span), checkpoint_kept=is_kept))
        return results

    def drafts(self, span: Span) -> tuple[int, ...]:
        """What waits on the device for the span's sequence."""
        return tuple(self._slots[span.slot].drafts)

    def is_finished(self, span: Span) -> bool:
        slot = self._slots[span.slot]
        return slot.sequence_id == span.sequence_id and slot.finished

    def _check_batch(self, batch: Batch) -> None:
        slots = [span.slot for span in batch.spans]
        expect(len(set(slots)) == len(slots), "two spans of a batch share a slot")
        expect(NULL_SLOT not in slots, "a span runs in the null slot")
        for span in batch.spans:
            blocks = span.block_ids
            expect(len(set(blocks)) == len(blocks), "a block occurs twice in a table")
            valid = all(NULL_BLOCK < block <= self._shape.num_blocks for block in blocks)
            expect(valid, "a table names a block that there is not")

    def _set_up(self, setup: SlotSetup, sequence_id: int) -> None:
        num_cached, text = len(setup.cached_token_ids), self.texts[sequence_id]
        begins = list(setup.cached_token_ids) == text.token_ids[:num_cached]
        expect(begins, "what is said to be cached is not the beginning of the text")
        self._slots[setup.slot] = _Slot(
            sequence_id,
            num_prefill=setup.num_committed,
            num_computed=num_cached,
            num_committed=setup.num_committed,
            length_limit=setup.length_limit,
            stop_token_ids=setup.stop_token_ids,
        )
        self._states[setup.slot] = (0, START)
        if setup.restore_from is not None:
            self._states[setup.slot] = self._states.get(setup.restore_from, (0, -1))

    def _slot(self, span: Span) -> _Slot:
        slot = self._slots.get(span.slot)
        if slot is None or slot.sequence_id != span.sequence_id:
            raise Violation("a span runs in a slot that was not set up for its sequence")
        return slot

    def _chunk(self, span: Span) -> SpanResult:
        slot, text = self._slot(span), self.texts[span.sequence_id]
        end = span.start + span.num_rows
        expect(span.start == slot.num_computed, "a chunk does not follow the one before it")
        expect(len(span.token_ids) == span.num_rows, "a chunk's tokens are not its rows")
        is_last = end == slot.num_prefill
        expect(end <= slot.num_prefill, "a chunk runs past the prompt")
        expect(is_last or end % self._shape.prefill_grid == 0, "a chunk ends off the grid")
        expect(is_last == span.effects.samples, "tokens come out exactly where a prompt ends")
        right = list(span.token_ids) == text.token_ids[span.start : end]
        expect(right, "a chunk's tokens are not the text's")
        self._check_read(span, text, span.start)

        value = self._value_before(span, span.start)
        values: list[int] = []
        for token_id in span.token_ids:
            value = value_after(value, token_id)
            values.append(value)
        sampled = next_token(value) if is_last else span.next_token_id
        if sampled is None:
            raise Violation("a chunk inside a prompt must know the token behind it")
        self._write(span, span.start, values, [*span.token_ids[1:], sampled])
        self._states[span.slot] = (end, value)
        if span.effects.checkpoint is not None:
            expect(
                span.effects.checkpoint.position == end, "a chunk does not end at its checkpoint"
            )
            self._states[span.effects.checkpoint.slot] = (end, value)
        slot.num_computed = end
        if not is_last:
            return SpanResult(span.sequence_id)
        return self._commit(span, slot, (), 0, [sampled], [value])

    def _keep_state(self, span: Span) -> bool:
        """The checkpoint of a round, from before its rows; False where the text is not there."""
        checkpoint, slot = span.effects.checkpoint, self._slot(span)
        if checkpoint is None:
            return False
        covered, position = slot.num_committed - 1, checkpoint.position
        if not covered - slot.num_pending <= position <= covered:
            self._states[checkpoint.slot] = (0, -1)
            return False
        self._states[checkpoint.slot] = (position, self._value_before(span, position))
        return True

    def _value_before(self, span: Span, position: int) -> int:
        return self.texts[span.sequence_id].values[position - 1] if position else START

    def _round(self, span: Span) -> SpanResult:
        slot, text = self._slot(span), self.texts[span.sequence_id]
        expect(slot.num_computed == slot.num_prefill, "a round begins before the prompt has ended")
        expect(span.num_rows == span.effects.num_drafts + 1, "a round has a row for each draft")
        if slot.finished:
            return SpanResult(span.sequence_id)
        start = slot.num_committed - 1
        expect(span.start <= start, "a text is shorter than the host takes it for")
        self._check_read(span, text, start)
        room = slot.length_limit - slot.num_committed - 1
        num_drafts = max(min(span.effects.num_drafts, len(slot.drafts), room), 0)
        drafts = tuple(slot.drafts[:num_drafts])

        value = self._value_before(span, start)
        values: list[int] = []
        for token_id in (text.token_ids[start], *drafts):
            value = value_after(value, token_id)
            values.append(value)
        num_accepted = 0
        while num_accepted < num_drafts and drafts[num_accepted] == next_token(
            values[num_accepted]
        ):
            num_accepted += 1
        emitted = [*drafts[:num_accepted], next_token(values[num_accepted])]
        behind = emitted + [VOCAB_SIZE] * (num_drafts - num_accepted)  # garbage behind refused rows
        self._write(span, start, values, behind)
        return self._commit(span, slot, drafts, num_accepted, emitted, values)

    def _commit(
        self,
        span: Span,
        slot: _Slot,
        drafts: tuple[int, ...],
        num_accepted: int,
        emitted: list[int],
        values: list[int],
    ) -> SpanResult:
        """Trim, move the counts on, propose."""
        emitted = emitted[: slot.length_limit - slot.num_committed]
        ends = [index for index, token in enumerate(emitted) if token in slot.stop_token_ids]
        reason = None
        if ends:
            emitted, reason = emitted[: ends[0] + 1], FinishReason.STOP
        elif slot.num_committed + len(emitted) == slot.length_limit:
            reason = FinishReason.LENGTH
        slot.num_committed += len(emitted)
        longest = len(span.block_ids) * self._shape.block_size + 1
        expect(slot.num_committed <= longest, "a text is longer than its blocks let the runner see")
        slot.num_pending = 0 if span.is_prefill else len(emitted)
        slot.finished = reason is not None
        self._states[span.slot] = (slot.num_committed - 1, values[len(emitted) - 1])
        slot.drafts = [] if slot.finished else self._propose(span, slot)
        return SpanResult(
            span.sequence_id, tuple(emitted), reason, drafts, num_accepted, tuple(slot.drafts)
        )

    def _propose(self, span: Span, slot: _Slot) -> list[int]:
        """Right drafts up to a random place, then wrong ones; writes what a chain of steps does."""
        wanted, begin = span.effects.num_drafts_next, slot.num_committed
        for step in range(2, wanted + 1):
            position = begin + step - 3
            if position < slot.length_limit:
                self._store(self._draft_values, span, position, -1)
        if self._shape.finds_less:
            wanted = self._rng.randint(0, wanted)
        drafts: list[int] = []
        is_right = True
        for token_id in self.texts[span.sequence_id].token_ids[begin : begin + wanted]:
            is_right = is_right and self._rng.random() < self._shape.acceptance
            drafts.append(token_id if is_right else self._rng.randrange(VOCAB_SIZE))
        return drafts

    def _check_read(self, span: Span, text: Text, length: int) -> None:
        """Everything in front of a span stands as its text left it."""
        self._compare(self._values, span, text.values, length, "keys of the target")
        if span.effects.feeds_draft:
            self._compare(self._draft_values, span, text.draft_values, length, "keys of the draft")
        if self._shape.is_recurrent:
            expected = (length, self._value_before(span, length))
            expect(self._states[span.slot] == expected, "a recurrent state is not the text's")

    def _compare(
        self,
        memory: Sequence[list[int | None]],
        span: Span,
        expected: Sequence[int],
        length: int,
        what: str,
    ) -> None:
        size = self._shape.block_size
        expect(length <= len(span.block_ids) * size, f"{what}: read outside the sequence's blocks")
        for index in range(-(-length // size)):
            begin, end = index * size, min(index * size + size, length)
            if memory[span.block_ids[index]][: end - begin] != expected[begin:end]:
                raise Violation(f"{what}: those of positions {begin} to {end - 1} are not the text")

    def _write(self, span: Span, start: int, values: list[int], behind: list[int]) -> None:
        for row, (value, token_id) in enumerate(zip(values, behind, strict=True)):
            self._store(self._values, span, start + row, value)
            if span.effects.feeds_draft:
                fed = draft_value(value, token_id)
                self._store(self._draft_values, span, start + row, fed)

    def _store(
        self, memory: Sequence[list[int | None]], span: Span, position: int, value: int
    ) -> None:
        index, offset = divmod(position, self._shape.block_size)
        expect(index < len(span.block_ids), "a position is written that was not reserved")
        memory[span.block_ids[index]][offset] = value
