"""What one sequence asks of a step: drafts, positions, where a chunk ends, which state is kept.

Knows one sequence at a time and what the cache holds for it; nothing of queues, of who is served
first, or of who gives way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.batch import Checkpoint, Effects, SlotSetup, Span
from outrider.cache.manager import NO_MATCH, CacheManager, Match
from outrider.request import NEVER, Sequence
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


class SpanRules:
    """Makes spans.

    Of a sequence it writes down the next round and the effects that were made once. `chunk` and
    `set_round` also take a checkpoint's slot where one is due, for which the cache may give up
    another state; it belongs to the span then. Everything else changes nothing.
    """

    def __init__(self, config: SchedulerConfig, cache: CacheManager) -> None:
        self._config = config
        self._cache = cache

    def wanted_drafts(self, sequence: Sequence) -> int:
        """Most drafts that the request and the engine allow."""
        params, most = sequence.request.params, self._config.num_speculative_tokens
        if not params.speculation:
            return 0
        return most if params.max_draft_tokens is None else min(most, params.max_draft_tokens)

    def positions_needed(self, sequence: Sequence, num_rows: int, num_drafts_next: int) -> int:
        """Positions written by a round of num_rows rows that then proposes num_drafts_next."""
        bound = sequence.num_committed_at_most - 1 + num_rows + max(num_drafts_next - 1, 0)
        return min(bound, sequence.request.length_limit)

    def round_effects(self, sequence: Sequence) -> Effects:
        """Of the coming round: as many drafts as were proposed and there is room for."""
        num_drafts = num_drafts_to_verify(
            min(sequence.num_proposed, self.wanted_drafts(sequence)),
            sequence.num_committed_at_least,
            sequence.request.length_limit,
        )
        return self._effects(sequence, num_drafts)

    def _effects(self, sequence: Sequence, num_drafts: int) -> Effects:
        request = sequence.request
        num_next = num_drafts_to_propose(
            self.wanted_drafts(sequence), sequence.num_committed_at_least, request.length_limit
        )
        known = sequence.known_effects.get((num_drafts, num_next))
        if known is not None:
            return known
        effects = sequence.known_effects[num_drafts, num_next] = Effects(
            samples=True,
            num_drafts=num_drafts,
            feeds_draft=request.params.speculation and self._config.num_speculative_tokens > 0,
            num_drafts_next=num_next,
            tier=request.tier,
            draft_sampling=request.draft_sampling,
            num_logprobs=request.params.logprobs,
            processed_logprobs=request.params.logprobs_mode == "processed",
        )
        return effects

    def set_round(self, sequence: Sequence, effects: Effects) -> None:
        """Write down the sequence's next round, and as long as what it stands on stays the same.

        What it may write has been reserved.
        """
        assert sequence.slot is not None
        position = self._due_in_round(sequence)
        sequence.round_holds_to = self._holds_to(sequence, effects) if position is None else NEVER
        if position is not None:
            checkpoint = self._take_checkpoint(sequence, position)
            effects = replace(effects, checkpoint=checkpoint)
        sequence.round = Span(
            sequence_id=sequence.sequence_id,
            slot=sequence.slot,
            start=sequence.num_committed - 1,
            num_rows=effects.num_drafts + 1,
            token_ids=(),
            next_token_id=None,
            block_ids=self._cache.block_ids(sequence.sequence_id),
            effects=effects,
        )

    def _holds_to(self, sequence: Sequence, effects: Effects) -> int:
        """Most tokens that the text may have for the same round to be right once more."""
        num_drafts, request = effects.num_drafts, sequence.request
        if num_drafts != effects.num_drafts_next or request.needs_drafts_on_host:
            return NEVER
        reserved = len(self._cache.block_ids(sequence.sequence_id)) * self._cache.block_size
        # Where positions_needed is all of what is reserved, and where room for drafts gets short.
        most = min(
            reserved - num_drafts - max(num_drafts - 1, 0), request.length_limit - num_drafts - 2
        )
        if self._keeps_states(sequence):
            interval = self._config.checkpoint_interval
            reached = (sequence.num_committed_at_most - 1) // interval
            most = min(most, (reached + 1) * interval)
        return most

    def match(self, sequence: Sequence) -> Match:
        """What of a waiting sequence's text is cached, and may be used."""
        if self._config.prefix_unit is None or sequence.wants_prompt_logprobs:
            return NO_MATCH
        return self._cache.match(sequence.text)

    def chunk_end(self, start: int, num_prefill: int, num_shared: int, budget: int) -> int:
        """Where a chunk from `start` may end: the prompt's end, or a point of the grid."""
        end = min(num_prefill, self._next_checkpoint(start, num_prefill, num_shared))
        if end - start <= budget:
            return end
        grid = self._config.prefill_grid
        return max((start + budget) // grid * grid, start)

    def chunk(self, sequence: Sequence, start: int, end: int) -> Span:
        """Positions start .. end - 1 of a text that is prefilled."""
        assert sequence.slot is not None
        ends_prompt = end == sequence.num_prefill
        effects = self._effects(sequence, 0)
        if not ends_prompt:
            effects = replace(effects, samples=False, num_drafts_next=0)
        is_due = end == self._next_checkpoint(start, sequence.num_prefill, sequence.num_shared)
        if is_due and not ends_prompt and self.publishes(sequence):
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
            block_ids=self._cache.block_ids(sequence.sequence_id),
            effects=effects,
        )

    def slot_setup(self, sequence: Sequence, match: Match) -> SlotSetup:
        """What the device must know of a sequence that was just admitted."""
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

    def publishes(self, sequence: Sequence) -> bool:
        """Whether others may read its blocks: those that the draft has seen too."""
        if self._config.prefix_unit is None or sequence.wants_prompt_logprobs:
            return False  # the latter computes everything itself, and would be given others' blocks
        return sequence.request.params.speculation or self._config.num_speculative_tokens == 0

    def _keeps_states(self, sequence: Sequence) -> bool:
        return self._cache.wants_checkpoints and self.publishes(sequence)

    def _take_checkpoint(self, sequence: Sequence, position: int) -> Checkpoint | None:
        slot = self._cache.take_checkpoint(sequence.sequence_id, position)
        return None if slot is None else Checkpoint(position, slot)

    def _next_checkpoint(self, start: int, num_prefill: int, num_shared: int) -> int:
        """The first position past `start` at which the recurrent state is worth keeping.

        Args:
            num_shared: where the text parts from what is cached; others may part there too.
        """
        unit, interval = self._config.prefix_unit, self._config.checkpoint_interval
        if unit is None or not self._cache.wants_checkpoints:
            return num_prefill
        last = (num_prefill - 1) // unit * unit  # a token must be left to compute
        places = (last, (start // interval + 1) * interval, num_shared)
        return min((place for place in places if start < place <= last), default=num_prefill)

    def _due_in_round(self, sequence: Sequence) -> int | None:
        """A multiple of the interval that the text may have reached since the last result."""
        if not self._keeps_states(sequence):
            return None
        interval = self._config.checkpoint_interval
        # The device keeps a state between the tokens that its last round began with and those that
        # it ended with; these bound them.
        least = sequence.num_computed if sequence.in_flight else sequence.num_computed_before
        position = (sequence.num_committed_at_most - 1) // interval * interval
        is_new = position > max(sequence.num_prefill, sequence.num_kept)
        return position if is_new and position >= least else None
