"""Which rows run in the next step. Pure Python: sequences, budgets and the cache in, a Batch out.

Rounds of running sequences come first and all of them run. The prompt budget is spent oldest first;
the first sequence that cannot be served ends the pass, so nobody is overtaken for ever. When a
running sequence cannot get a block, the youngest one gives up its place and is prefilled again
later; the law of its text does not change.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, replace

from outrider.batch import Batch, Effects, FinishReason, SlotSetup, Span, SpanResult
from outrider.cache.manager import CacheManager
from outrider.request import Sequence, Status
from outrider.spec.policy import num_drafts_to_propose, num_drafts_to_verify


@dataclass(frozen=True)
class SchedulerConfig:
    """Budgets of a step.

    Attributes:
        max_prefill_tokens: prompt rows per step.
        prefill_grid: chunks that do not end a prompt end at multiples of this position.
        num_speculative_tokens: most drafts per round, 0 without speculation.
    """

    max_prefill_tokens: int
    prefill_grid: int
    num_speculative_tokens: int


def _by_arrival(sequence: Sequence) -> int:
    return sequence.sequence_id


class Scheduler:
    """Owns every sequence's state and plans one step at a time."""

    def __init__(self, config: SchedulerConfig, cache: CacheManager) -> None:
        self.config = config
        self.cache = cache
        self.num_preemptions = 0
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []  # oldest first

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind those that arrived before it."""
        insort(self._waiting, sequence, key=_by_arrival)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence now and free what it holds."""
        if sequence.status is Status.WAITING:
            self._waiting.remove(sequence)
        else:
            self._running.remove(sequence)
            self.cache.release(sequence.sequence_id)
        sequence.status, sequence.finish_reason, sequence.slot = Status.FINISHED, reason, None

    def plan(self) -> Batch:
        """Choose the rows of the next step and reserve every position they may write."""
        num_preemptions = self.num_preemptions
        rounds = self._plan_rounds()
        # Memory was just short: let it settle before somebody new, or the same one, takes it.
        setups, prefill = self._plan_prefill(may_admit=num_preemptions == self.num_preemptions)
        return Batch(setups, prefill, rounds)

    def commit(
        self,
        span: Span,
        result: SpanResult,
        token_ids: tuple[int, ...],
        finish_reason: FinishReason | None,
    ) -> None:
        """Take over what a span did.

        Args:
            token_ids: the result's tokens, or fewer where a stop string cut them.
            finish_reason: set when the sequence ends with these tokens.
        """
        sequence = self.sequence(span.sequence_id)
        advanced = len(token_ids) if sequence.status is Status.DECODING else span.num_rows
        sequence.num_computed += advanced
        sequence.proposed_token_ids = result.proposed_token_ids
        sequence.output_token_ids.extend(token_ids)
        self.cache.commit(sequence.sequence_id, advanced)
        if span.effects.samples:
            sequence.status = Status.DECODING
        if finish_reason is not None:
            self.finish(sequence, finish_reason)

    def sequence(self, sequence_id: int) -> Sequence:
        """The running sequence of that id."""
        return next(s for s in self._running if s.sequence_id == sequence_id)

    def _wanted_drafts(self, sequence: Sequence) -> int:
        params, most = sequence.request.params, self.config.num_speculative_tokens
        if not params.speculation:
            return 0
        return most if params.max_draft_tokens is None else min(most, params.max_draft_tokens)

    def _positions_needed(self, sequence: Sequence, num_rows: int, num_drafts_next: int) -> int:
        """Positions written by a round of num_rows rows that then proposes num_drafts_next."""
        bound = sequence.num_committed - 1 + num_rows + max(num_drafts_next - 1, 0)
        return min(bound, sequence.request.length_limit)

    def _effects(self, sequence: Sequence, num_drafts: int) -> Effects:
        wanted = self._wanted_drafts(sequence)
        feeds_draft = sequence.request.params.speculation and self.config.num_speculative_tokens > 0
        limit = sequence.request.length_limit
        request = sequence.request
        return Effects(
            samples=True,
            num_drafts=num_drafts,
            feeds_draft=feeds_draft,
            num_drafts_next=num_drafts_to_propose(wanted, sequence.num_committed, limit),
            tier=request.tier,
            draft_sampling=request.draft_sampling,
            num_logprobs=request.params.logprobs,
            processed_logprobs=request.params.logprobs_mode == "processed",
        )

    def _plan_rounds(self) -> tuple[Span, ...]:
        spans: list[Span] = []
        for sequence in list(self._running):  # oldest first
            if sequence.status is not Status.DECODING:
                continue  # still prefilling, or preempted for an older one just now
            limit = sequence.request.length_limit
            num_drafts = num_drafts_to_verify(
                min(len(sequence.proposed_token_ids), self._wanted_drafts(sequence)),
                sequence.num_committed,
                limit,
            )
            effects = self._effects(sequence, num_drafts)
            needed = self._positions_needed(sequence, num_drafts + 1, effects.num_drafts_next)
            if not self._reserve(sequence, needed):
                continue
            assert sequence.slot is not None
            spans.append(
                Span(
                    sequence_id=sequence.sequence_id,
                    slot=sequence.slot,
                    start=sequence.num_committed - 1,
                    num_rows=num_drafts + 1,
                    token_ids=(),
                    next_token_id=None,
                    block_ids=self.cache.block_ids(sequence.sequence_id),
                    effects=effects,
                )
            )
        return tuple(spans)

    def _reserve(self, sequence: Sequence, num_positions: int) -> bool:
        """Reserve for a running sequence; younger ones give way, and at the last itself."""
        while not self.cache.reserve(sequence.sequence_id, num_positions):
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self.cache.release(sequence.sequence_id)
        sequence.status, sequence.slot = Status.WAITING, None
        sequence.num_computed, sequence.proposed_token_ids = 0, ()
        self.num_preemptions += 1
        self.add(sequence)

    def _plan_prefill(self, may_admit: bool) -> tuple[tuple[SlotSetup, ...], tuple[Span, ...]]:
        setups: list[SlotSetup] = []
        spans: list[Span] = []
        budget = self.config.max_prefill_tokens
        prefilling = [s for s in self._running if s.status is Status.PREFILLING]
        for sequence in prefilling + (list(self._waiting) if may_admit else []):
            if sequence.status is Status.WAITING:
                end = self._chunk_end(0, sequence.num_committed, budget)
                if end == 0 or not self._admit(sequence):
                    break
                setups.append(_setup(sequence))
            start = sequence.num_computed
            end = self._chunk_end(start, sequence.num_prefill, budget)
            if end == start:
                break
            spans.append(self._prefill_span(sequence, start, end))
            budget -= end - start
        return tuple(setups), tuple(spans)

    def _chunk_end(self, start: int, num_prefill: int, budget: int) -> int:
        """Where a chunk from `start` may end: the prompt's end, or a point of the grid."""
        if num_prefill - start <= budget:
            return num_prefill
        return max((start + budget) // self.config.prefill_grid * self.config.prefill_grid, start)

    def _admit(self, sequence: Sequence) -> bool:
        wanted = self._wanted_drafts(sequence)
        slot = self.cache.admit(sequence.sequence_id, self._positions_needed(sequence, 1, wanted))
        if slot is None:
            return False
        self._waiting.remove(sequence)
        sequence.slot, sequence.status = slot, Status.PREFILLING
        sequence.num_prefill = sequence.num_committed
        insort(self._running, sequence, key=_by_arrival)
        return True

    def _prefill_span(self, sequence: Sequence, start: int, end: int) -> Span:
        assert sequence.slot is not None
        ends_prompt = end == sequence.num_prefill
        effects = self._effects(sequence, 0)
        if not ends_prompt:
            effects = replace(effects, samples=False, num_drafts_next=0)
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


def _setup(sequence: Sequence) -> SlotSetup:
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
    )
