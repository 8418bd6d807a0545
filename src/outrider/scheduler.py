"""Which rows run in the next step. Pure Python: sequences, budgets and the cache in, a Batch out.

Rounds of running sequences come first and all of them run. The prompt budget is spent in the order
of priority and then of arrival; the first sequence that cannot be served ends the pass, so nobody
of the same priority is overtaken. When a running sequence cannot get a block, the last one in that
order gives up its place and is prefilled again later; the law of its text does not change.

A step may be planned while the results of earlier ones are still to come. Then a sequence's length
is known between bounds: blocks are reserved for the upper one, and the device, which knows the
truth, does what there is room for. What needs the truth on the host waits for it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from outrider.batch import Batch, Checkpoint, Effects, FinishReason, SlotSetup, Span, SpanResult
from outrider.cache.manager import CacheManager, Match
from outrider.request import NEVER, Sequence, Status
from outrider.span_rules import SchedulerConfig, SpanRules


def _by_rank(sequence: Sequence) -> tuple[int, int]:
    """Larger priorities first, then those that arrived first."""
    return -sequence.request.params.priority, sequence.sequence_id


class Scheduler:
    """Owns every sequence's state and plans one step at a time."""

    def __init__(self, config: SchedulerConfig, cache: CacheManager) -> None:
        self.config = config
        self.cache = cache
        self.rules = SpanRules(config, cache)
        self.num_preemptions = 0
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []  # by rank, as the waiting ones are
        self._by_id: dict[int, Sequence] = {}  # the running ones
        self._ending: dict[int, Sequence] = {}  # ended, and still in flight
        self._most_running = cache.slots.size

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def is_in_flight(self) -> bool:
        """Whether results of a submitted span are still to come."""
        return bool(self._ending) or any(sequence.in_flight for sequence in self._running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind those that arrived before it."""
        insort(self._waiting, sequence, key=_by_rank)

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """Take back sequences that were just queued, as far as they were."""
        gone = {sequence.sequence_id for sequence in sequences}
        self._waiting = [s for s in self._waiting if s.sequence_id not in gone]

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence now; what it holds is freed once nothing of it is in flight."""
        was_waiting = sequence.status is Status.WAITING
        sequence.status, sequence.finish_reason, sequence.slot = Status.FINISHED, reason, None
        self._most_running = min(self._most_running + 1, self.cache.slots.size)
        if was_waiting:
            self._waiting.remove(sequence)
            return
        self._stop_running(sequence)
        if sequence.in_flight:
            self._ending[sequence.sequence_id] = sequence
        else:
            self.cache.release(sequence.sequence_id)

    def plan(self) -> Batch | None:
        """Choose the rows of the next step and reserve every position they may write.

        Returns:
            None where the results in flight must be known first; nothing has been submitted then.
        """
        num_preemptions = self.num_preemptions
        rounds = self._plan_rounds()
        if rounds is None:
            return None
        # Memory was just short: let it settle before somebody new, or the same one, takes it.
        settled = num_preemptions == self.num_preemptions
        setups, prefill = self._plan_prefill(len(rounds), may_admit=settled)
        return Batch(setups, prefill, tuple([sequence.submitted_round() for sequence in rounds]))

    def commit(
        self,
        span: Span,
        result: SpanResult,
        token_ids: tuple[int, ...],
        finish_reason: FinishReason | None,
    ) -> None:
        """Take over what the oldest span in flight of a sequence did.

        Args:
            token_ids: the result's tokens, or fewer where a stop string cut them.
            finish_reason: set when the sequence ends with these tokens.
        """
        sequence = self._by_id[span.sequence_id]
        sequence.returned(span, token_ids)
        sequence.proposed_token_ids = proposed = result.proposed_token_ids
        if not sequence.in_flight and len(proposed) < span.effects.num_drafts_next:
            sequence.round_holds_to = NEVER  # it would verify as many as were asked for
        if sequence.num_computed >= sequence.block_end:
            self._fill(sequence)
        if span.effects.checkpoint is not None:
            self._settle_checkpoint(sequence, span, span.effects.checkpoint, result)
        if finish_reason is not None:
            self.finish(sequence, finish_reason)

    def _fill(self, sequence: Sequence) -> None:
        """Another block is full: publish it, where the draft has seen it too."""
        size = self.cache.block_size
        sequence.block_end = (sequence.num_computed // size + 1) * size
        self.cache.commit(sequence.sequence_id, sequence.num_computed)
        if not self.rules.publishes(sequence):
            return
        if self.cache.publish(sequence.sequence_id, sequence.committed):
            sequence.round_holds_to = NEVER  # its block table is another one now

    def _settle_checkpoint(
        self, sequence: Sequence, span: Span, checkpoint: Checkpoint, result: SpanResult
    ) -> None:
        """Let the cache have the state, if the span got as far as its position."""
        if span.is_prefill or result.checkpoint_kept:
            self.cache.keep_checkpoint(sequence.sequence_id, checkpoint.position, checkpoint.slot)
            sequence.num_kept = checkpoint.position
        else:
            self.cache.drop_checkpoint(checkpoint.slot)

    def discard(self, span: Span) -> None:
        """Forget what a span of an ended sequence did, and free it with its last one."""
        if span.effects.checkpoint is not None:
            self.cache.drop_checkpoint(span.effects.checkpoint.slot)
        sequence = self._ending[span.sequence_id]
        sequence.in_flight.remove(span)
        if not sequence.in_flight:
            del self._ending[span.sequence_id]
            self.cache.release(span.sequence_id)

    def restart(self) -> None:
        """Begin again with everybody who runs, from the text that the host knows.

        Only while the device works on nothing of theirs; what was in flight never returns. A
        failure may have come anywhere in `plan`, `commit` or `finish`.
        """
        known = (*self._waiting, *self._running, *self._by_id.values())
        unfinished = {s.sequence_id: s for s in known if s.status is not Status.FINISHED}
        self._running.clear()
        self._by_id.clear()
        self._ending.clear()
        self.cache.release_all()
        for sequence in unfinished.values():
            self.num_preemptions += sequence.status is not Status.WAITING
            sequence.lost()
            sequence.gave_way()
        self._waiting = sorted(unfinished.values(), key=_by_rank)

    def run_fewer(self) -> Sequence | None:
        """Memory ran out in a step: let half as many run, one more whenever somebody finishes.

        Returns:
            The sequence that had the step to itself already, or was about to have.
        """
        if self._most_running == 1:
            return self._running[0] if self._running else self.head
        self._most_running = max(len(self._running) // 2, 1)
        return None

    def has_ended(self, span: Span) -> bool:
        """Whether the span's sequence ended while it was in flight."""
        return span.sequence_id in self._ending

    def sequence(self, sequence_id: int) -> Sequence:
        """The running sequence of that id."""
        return self._by_id[sequence_id]

    @property
    def head(self) -> Sequence | None:
        """Who is next to be admitted."""
        return self._waiting[0] if self._waiting else None

    def describe(self) -> list[str]:
        """The state of every sequence, for a report."""
        sequences = [*self._running, *self._ending.values(), *self._waiting]
        return [
            f"{s.request.request_id}: {s.status.value}, slot {s.slot}, {s.num_committed} tokens, "
            f"{s.num_computed} computed, {len(s.in_flight)} spans in flight"
            for s in sequences
        ]

    def _stop_running(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        del self._by_id[sequence.sequence_id]

    def _plan_rounds(self) -> list[Sequence] | None:
        """Who runs its next round; None where results in flight must be known first.

        Most rounds are those of the step before: a few are set anew.
        """
        rounds: list[Sequence] = []
        anew: list[tuple[Sequence, Effects, int]] = []
        num_missing = 0
        for sequence in self._running:  # first come those that give way last
            if sequence.num_committed_at_most <= sequence.round_holds_to:
                rounds.append(sequence)
                continue
            if sequence.status is not Status.DECODING:
                continue
            if sequence.num_committed_at_least >= sequence.request.length_limit:
                continue  # what is in flight ends it
            if sequence.request.needs_drafts_on_host and sequence.in_flight:
                return None
            effects = self.rules.round_effects(sequence)
            needed = self.rules.positions_needed(
                sequence, effects.num_drafts + 1, effects.num_drafts_next
            )
            num_missing += self.cache.num_missing(sequence.sequence_id, needed)
            rounds.append(sequence)
            anew.append((sequence, effects, needed))
        if num_missing > self.cache.num_available and self.is_in_flight:
            return None
        num_preemptions = self.num_preemptions
        for sequence, effects, needed in anew:
            # It may have given way for one before it just now.
            if sequence.status is Status.DECODING and self._make_room(sequence, needed):
                self.rules.set_round(sequence, effects)
        if self.num_preemptions > num_preemptions:
            return [sequence for sequence in rounds if sequence.status is Status.DECODING]
        return rounds

    def _make_room(self, sequence: Sequence, num_positions: int) -> bool:
        """Reserve for a running sequence; those behind it give way, and at the last itself."""
        while not self.cache.reserve(sequence.sequence_id, num_positions):
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        assert not sequence.in_flight, "somebody gives way whose results are still to come"
        self.add(sequence)
        self._stop_running(sequence)
        self.cache.release(sequence.sequence_id)
        sequence.gave_way()
        self.num_preemptions += 1

    def _plan_prefill(
        self, num_rounds: int, may_admit: bool
    ) -> tuple[tuple[SlotSetup, ...], tuple[Span, ...]]:
        """Spend the budget on those that are being prefilled, and then on those that wait."""
        setups: list[SlotSetup] = []
        spans: list[Span] = []
        budget = self.config.max_prefill_tokens
        prefilling: list[Sequence] = []
        if num_rounds < len(self._running):
            prefilling = [s for s in self._running if s.status is Status.PREFILLING]
        may_admit = may_admit and self.cache.slots.num_free > 0
        for sequence in prefilling + (self._waiting[:] if may_admit else []):
            if sequence.status is Status.WAITING:
                match = self.rules.match(sequence)
                end = self.rules.chunk_end(
                    match.num_tokens, sequence.num_committed, match.num_shared, budget
                )
                if end == match.num_tokens or not self._admit(sequence, match):
                    break
                setups.append(self.rules.slot_setup(sequence, match))
            start = sequence.num_submitted
            end = self.rules.chunk_end(start, sequence.num_prefill, sequence.num_shared, budget)
            if end == start:
                break
            span = self.rules.chunk(sequence, start, end)
            sequence.submitted_chunk(span)
            spans.append(span)
            budget -= end - start
        return tuple(setups), tuple(spans)

    def _admit(self, sequence: Sequence, match: Match) -> bool:
        if len(self._running) >= self._most_running:
            return False
        needed = self.rules.positions_needed(sequence, 1, self.rules.wanted_drafts(sequence))
        slot = self.cache.admit(sequence.sequence_id, needed, match)
        if slot is None:
            return False
        self._by_id[sequence.sequence_id] = sequence
        self._waiting.remove(sequence)
        sequence.slot, sequence.status = slot, Status.PREFILLING
        sequence.num_prefill = sequence.num_committed
        sequence.num_shared = match.num_shared
        sequence.num_computed = sequence.num_submitted = match.num_tokens
        sequence.block_end = match.num_tokens + self.cache.block_size
        if not sequence.output_token_ids:
            sequence.num_cached = match.num_tokens
        insort(self._running, sequence, key=_by_rank)
        return True
