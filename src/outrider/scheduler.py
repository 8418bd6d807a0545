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
from dataclasses import dataclass, replace

from outrider.batch import Batch, Checkpoint, Effects, FinishReason, SlotSetup, Span, SpanResult
from outrider.cache.manager import NO_MATCH, CacheManager, Match
from outrider.request import Sequence, Status
from outrider.spec.policy import num_drafts_to_propose, num_drafts_to_verify


@dataclass(frozen=True)
class SchedulerConfig:
    """Budgets of a step.

    Attributes:
        max_prefill_tokens: prompt rows per step.
        prefill_grid: chunks that do not end a prompt end at multiples of this position.
        num_speculative_tokens: most drafts per round, 0 without speculation.
        prefix_unit: text is shared in multiples of this many tokens; None shares nothing.
        checkpoint_interval: recurrent states of prompts are kept at multiples of this many tokens,
            a multiple of prefix_unit, and at the last place where a prompt can be shared.
    """

    max_prefill_tokens: int
    prefill_grid: int
    num_speculative_tokens: int
    prefix_unit: int | None = None
    checkpoint_interval: int = 1024


def _by_rank(sequence: Sequence) -> tuple[int, int]:
    """Larger priorities first, then those that arrived first."""
    return -sequence.request.params.priority, sequence.sequence_id


class Scheduler:
    """Owns every sequence's state and plans one step at a time."""

    def __init__(self, config: SchedulerConfig, cache: CacheManager) -> None:
        self.config = config
        self.cache = cache
        self.num_preemptions = 0
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []  # by rank, as the waiting ones are
        self._by_id: dict[int, Sequence] = {}  # the running ones
        self._ending: dict[int, Sequence] = {}  # ended, and still in flight

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

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence now; what it holds is freed once nothing of it is in flight."""
        if sequence.status is Status.WAITING:
            self._waiting.remove(sequence)
        else:
            self._stop_running(sequence)
            if sequence.in_flight:
                self._ending[sequence.sequence_id] = sequence
            else:
                self.cache.release(sequence.sequence_id)
        sequence.status, sequence.finish_reason, sequence.slot = Status.FINISHED, reason, None

    def plan(self) -> Batch | None:
        """Choose the rows of the next step and reserve every position they may write.

        Returns:
            None where the results in flight must be known first; nothing has been submitted then.
        """
        if any(s.request.needs_drafts_on_host and s.in_flight for s in self._running):
            return None
        num_preemptions = self.num_preemptions
        rounds = self._plan_rounds()
        if rounds is None:
            return None
        # Memory was just short: let it settle before somebody new, or the same one, takes it.
        setups, prefill = self._plan_prefill(may_admit=num_preemptions == self.num_preemptions)
        batch = Batch(setups, prefill, rounds)
        for span in batch.spans:
            sequence = self.sequence(span.sequence_id)
            sequence.submitted(span)
            if span.is_prefill:
                sequence.num_submitted = span.start + span.num_rows
            if span.effects.samples:
                sequence.status = Status.DECODING
        return batch

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
        sequence = self.sequence(span.sequence_id)
        sequence.returned(span)
        advanced = span.num_rows if span.is_prefill else len(token_ids)
        sequence.num_computed_before = sequence.num_computed
        sequence.num_computed += advanced
        sequence.proposed_token_ids = result.proposed_token_ids
        sequence.append(token_ids)
        filled = self.cache.commit(sequence.sequence_id, advanced)
        self._share(sequence, span, result, filled)
        if finish_reason is not None:
            self.finish(sequence, finish_reason)

    def _share(self, sequence: Sequence, span: Span, result: SpanResult, filled: bool) -> None:
        """Publish what stands by now, where the draft has seen it too."""
        if filled and self._publishes(sequence):
            self.cache.publish(sequence.sequence_id, sequence.committed)
        checkpoint = span.effects.checkpoint
        if checkpoint is None:
            return
        if span.is_prefill or result.checkpoint_kept:
            self.cache.keep_checkpoint(sequence.sequence_id, checkpoint.position, checkpoint.slot)
            sequence.num_kept = checkpoint.position
        else:
            self.cache.drop_checkpoint(checkpoint.slot)

    def _publishes(self, sequence: Sequence) -> bool:
        if self.config.prefix_unit is None or sequence.wants_prompt_logprobs:
            return False  # the latter computes everything itself, and would be given others' blocks
        return sequence.request.params.speculation or self.config.num_speculative_tokens == 0

    def discard(self, span: Span) -> None:
        """Forget what a span of an ended sequence did, and free it with its last one."""
        self._drop_checkpoint(span)
        sequence = self._ending[span.sequence_id]
        sequence.in_flight.remove(span)
        if not sequence.in_flight:
            del self._ending[span.sequence_id]
            self.cache.release(span.sequence_id)

    def restart(self) -> None:
        """Begin again with everybody who runs, from the text that the host knows.

        Only while the device works on nothing of theirs; what was in flight never returns.
        """
        for sequence in self._ending.values():
            self.cache.release(sequence.sequence_id)
        self._ending.clear()
        for sequence in list(self._running):
            sequence.lost()
            self._preempt(sequence)
        self.cache.reclaim()

    def _drop_checkpoint(self, span: Span) -> None:
        if span.effects.checkpoint is not None:
            self.cache.drop_checkpoint(span.effects.checkpoint.slot)

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

    def _wanted_drafts(self, sequence: Sequence) -> int:
        params, most = sequence.request.params, self.config.num_speculative_tokens
        if not params.speculation:
            return 0
        return most if params.max_draft_tokens is None else min(most, params.max_draft_tokens)

    def _positions_needed(self, sequence: Sequence, num_rows: int, num_drafts_next: int) -> int:
        """Positions written by a round of num_rows rows that then proposes num_drafts_next."""
        most = sequence.num_committed + sequence.max_new_tokens
        bound = most - 1 + num_rows + max(num_drafts_next - 1, 0)
        return min(bound, sequence.request.length_limit)

    def _effects(self, sequence: Sequence, num_drafts: int) -> Effects:
        request = sequence.request
        num_next = num_drafts_to_propose(
            self._wanted_drafts(sequence), sequence.num_committed_at_least, request.length_limit
        )
        known = sequence.known_effects.get((num_drafts, num_next))
        if known is not None:
            return known
        speculates = request.params.speculation and self.config.num_speculative_tokens > 0
        effects = sequence.known_effects[num_drafts, num_next] = Effects(
            samples=True,
            num_drafts=num_drafts,
            feeds_draft=speculates,
            num_drafts_next=num_next,
            tier=request.tier,
            draft_sampling=request.draft_sampling,
            num_logprobs=request.params.logprobs,
            processed_logprobs=request.params.logprobs_mode == "processed",
        )
        return effects

    def _plan_rounds(self) -> tuple[Span, ...] | None:
        """None where memory is short and results in flight may still free some."""
        wanted: list[tuple[Sequence, int, Effects, int]] = []
        num_missing = 0
        for sequence in self._running:  # first come those that give way last
            if sequence.status is not Status.DECODING:
                continue  # still prefilling, or preempted for another one just now
            limit = sequence.request.length_limit
            if sequence.num_committed_at_least >= limit:
                continue  # what is in flight ends it
            num_drafts = num_drafts_to_verify(
                min(sequence.num_proposed, self._wanted_drafts(sequence)),
                sequence.num_committed_at_least,
                limit,
            )
            effects = self._effects(sequence, num_drafts)
            needed = self._positions_needed(sequence, num_drafts + 1, effects.num_drafts_next)
            num_missing += self.cache.num_missing(sequence.sequence_id, needed)
            wanted.append((sequence, num_drafts, effects, needed))
        if num_missing > self.cache.num_available and self.is_in_flight:
            return None
        planned: list[tuple[Sequence, int, Effects]] = []
        for sequence, num_drafts, effects, needed in wanted:
            # It may have given way for one before it just now.
            if sequence.status is Status.DECODING and self._make_room(sequence, needed):
                planned.append((sequence, num_drafts, effects))
        # Somebody planned early may have given way since.
        running = [one for one in planned if one[0].status is Status.DECODING]
        return tuple(self._round_span(*one) for one in running)

    def _round_span(self, sequence: Sequence, num_drafts: int, effects: Effects) -> Span:
        assert sequence.slot is not None
        checkpoint = self._checkpoint_of_round(sequence)
        return Span(
            sequence_id=sequence.sequence_id,
            slot=sequence.slot,
            start=sequence.num_committed - 1,
            num_rows=num_drafts + 1,
            token_ids=(),
            next_token_id=None,
            block_ids=self.cache.block_ids(sequence.sequence_id),
            effects=effects if checkpoint is None else replace(effects, checkpoint=checkpoint),
            max_new_tokens=sequence.max_new_tokens,
        )

    def _make_room(self, sequence: Sequence, num_positions: int) -> bool:
        """Reserve for a running sequence; those behind it give way, and at the last itself."""
        while not self.cache.reserve(sequence.sequence_id, num_positions):
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._stop_running(sequence)
        self.cache.release(sequence.sequence_id)
        sequence.status, sequence.slot = Status.WAITING, None
        sequence.num_computed = sequence.num_submitted = 0
        sequence.proposed_token_ids = ()
        self.num_preemptions += 1
        self.add(sequence)

    def _plan_prefill(self, may_admit: bool) -> tuple[tuple[SlotSetup, ...], tuple[Span, ...]]:
        setups: list[SlotSetup] = []
        spans: list[Span] = []
        budget = self.config.max_prefill_tokens
        prefilling = [s for s in self._running if s.status is Status.PREFILLING]
        may_admit = may_admit and self.cache.slots.num_free > 0
        for sequence in prefilling + (list(self._waiting) if may_admit else []):
            if sequence.status is Status.WAITING:
                match = self._match(sequence)
                end = self._chunk_end(
                    match.num_tokens, sequence.num_committed, match.num_shared, budget
                )
                if end == match.num_tokens or not self._admit(sequence, match):
                    break
                setups.append(_setup(sequence, match))
            start = sequence.num_submitted
            end = self._chunk_end(start, sequence.num_prefill, sequence.num_shared, budget)
            if end == start:
                break
            spans.append(self._prefill_span(sequence, start, end))
            budget -= end - start
        return tuple(setups), tuple(spans)

    def _chunk_end(self, start: int, num_prefill: int, num_shared: int, budget: int) -> int:
        """Where a chunk from `start` may end: the prompt's end, or a point of the grid."""
        end = min(num_prefill, self._next_checkpoint(start, num_prefill, num_shared))
        if end - start <= budget:
            return end
        return max((start + budget) // self.config.prefill_grid * self.config.prefill_grid, start)

    def _next_checkpoint(self, start: int, num_prefill: int, num_shared: int) -> int:
        """The first position past `start` at which the recurrent state is worth keeping.

        Args:
            num_shared: where the text parts from what is cached; others may part there too.
        """
        unit, interval = self.config.prefix_unit, self.config.checkpoint_interval
        if unit is None or not self.cache.wants_checkpoints:
            return num_prefill
        last = (num_prefill - 1) // unit * unit  # a token must be left to compute
        places = (last, (start // interval + 1) * interval, num_shared)
        return min((place for place in places if start < place <= last), default=num_prefill)

    def _take_checkpoint(self, sequence: Sequence, position: int) -> Checkpoint | None:
        slot = self.cache.take_checkpoint(sequence.sequence_id, position)
        return None if slot is None else Checkpoint(position, slot)

    def _checkpoint_of_round(self, sequence: Sequence) -> Checkpoint | None:
        """At a multiple of the interval that the text may have reached since the last result."""
        if not self.cache.wants_checkpoints or not self._publishes(sequence):
            return None
        interval = self.config.checkpoint_interval
        # The device keeps a state between the tokens that its last round began with and those that
        # it ended with; these bound them.
        least = sequence.num_computed if sequence.in_flight else sequence.num_computed_before
        most = sequence.num_committed + sequence.max_new_tokens - 1
        position = most // interval * interval
        is_new = position > max(sequence.num_prefill, sequence.num_kept)
        if not is_new or position < least:
            return None
        return self._take_checkpoint(sequence, position)

    def _match(self, sequence: Sequence) -> Match:
        """What of a waiting sequence's text is cached, and may be used."""
        if self.config.prefix_unit is None or sequence.wants_prompt_logprobs:
            return NO_MATCH
        return self.cache.match(sequence.text)

    def _admit(self, sequence: Sequence, match: Match) -> bool:
        wanted = self._wanted_drafts(sequence)
        needed = self._positions_needed(sequence, 1, wanted)
        slot = self.cache.admit(sequence.sequence_id, needed, match)
        if slot is None:
            return False
        self._waiting.remove(sequence)
        sequence.slot, sequence.status = slot, Status.PREFILLING
        sequence.num_prefill = sequence.num_committed
        sequence.num_shared = match.num_shared
        sequence.num_computed = sequence.num_submitted = match.num_tokens
        if not sequence.output_token_ids:
            sequence.num_cached = match.num_tokens
        insort(self._running, sequence, key=_by_rank)
        self._by_id[sequence.sequence_id] = sequence
        return True

    def _prefill_span(self, sequence: Sequence, start: int, end: int) -> Span:
        assert sequence.slot is not None
        ends_prompt = end == sequence.num_prefill
        effects = self._effects(sequence, 0)
        if not ends_prompt:
            effects = replace(effects, samples=False, num_drafts_next=0)
        is_due = end == self._next_checkpoint(start, sequence.num_prefill, sequence.num_shared)
        if is_due and not ends_prompt and self._publishes(sequence):
            effects = replace(effects, checkpoint=self._take_checkpoint(sequence, end))
        if sequence.wants_prompt_logprobs:
            wanted = sequence.request.params.prompt_logprobs
            effects = replace(effects, num_prompt_logprobs=wanted)
        return Span(
            sequence_id=sequence.sequence_id,
            slot=sequence.slot,
            start=start,
            num_rows=end - start,
            token_ids=sequence.committed(start, end),
            next_token_id=None if ends_prompt else sequence.committed(end, end + 1)[0],
            block_ids=self.cache.block_ids(sequence.sequence_id),
            effects=effects,
        )


def _setup(sequence: Sequence, match: Match) -> SlotSetup:
    request, params = sequence.request, sequence.request.params
    assert sequence.slot is not None
    return SlotSetup(
        slot=sequence.slot,
        num_committed=sequence.num_committed,
        length_limit=request.length_limit,
        stop_token_ids=request.stop_token_ids,
        temperature=0.0 if params.greedy else params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=request.seed,
        rules=request.rules,
        draft_sampling=request.draft_sampling,
        cached_token_ids=sequence.committed(0, match.num_tokens),
        restore_from=match.checkpoint,
    )
