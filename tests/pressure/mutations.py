"""Deliberate faults, one small change to the scheduler or the cache each.

A fault goes in at a function's boundary, so that most of them outlive a rewrite of what is inside;
one whose place is gone fails by name and has to be moved.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from typing import Any

import outrider.scheduler
import outrider.span_rules
from outrider.cache.id_pool import IdPool
from outrider.cache.manager import CacheManager
from outrider.cache.prefix_tree import PrefixTree
from outrider.request import Request, Sequence, Status
from outrider.scheduler import Scheduler
from outrider.span_rules import SpanRules
from tests.pressure.cache_mutations import CACHE_MUTATIONS
from tests.pressure.mutation import Mutation, Patch, fix, mutation, wrap

MUTATIONS: list[Mutation] = [*CACHE_MUTATIONS]
_mutation = partial(mutation, MUTATIONS)


@_mutation("One position fewer is reserved than a round writes.")
def _reserves_too_little(patch: Patch) -> None:
    def reserve(original: Any, cache: CacheManager, sequence_id: int, num_positions: int) -> bool:
        return original(cache, sequence_id, num_positions - 1)

    wrap(patch, CacheManager, "reserve", reserve)


@_mutation("The positions that a chain of draft steps writes are not reserved.")
def _forgets_the_chain(patch: Patch) -> None:
    def needed(original: Any, rules: SpanRules, sequence: Sequence, num_rows: int, _: int):
        return original(rules, sequence, num_rows, 0)

    wrap(patch, SpanRules, "positions_needed", needed)


@_mutation("A round is planned as if those in flight added nothing.")
def _forgets_what_is_in_flight(patch: Patch) -> None:
    def forgets(original: Any, sequence: Sequence, *args: Any) -> Any:
        result = original(sequence, *args)
        sequence.num_committed_at_most = sequence.num_committed
        return result

    for name in ("submitted_round", "submitted_chunk", "returned"):
        wrap(patch, Sequence, name, forgets)


@_mutation("A round is submitted once more though its text has outgrown its blocks.")
def _repeats_a_round_for_ever(patch: Patch) -> None:
    wrap(patch, SpanRules, "_holds_to", lambda original, *args: original(*args) + 1)


@_mutation("A round is submitted once more though one of its blocks was exchanged.")
def _repeats_a_round_with_the_old_block(patch: Patch) -> None:
    def publish(original: Any, *args: Any) -> bool:
        original(*args)
        return False

    wrap(patch, CacheManager, "publish", publish)


@_mutation("A round is submitted once more though fewer drafts were found for it.")
def _repeats_a_round_without_its_drafts(patch: Patch) -> None:
    def commit(original: Any, self: Scheduler, span: Any, result: Any, *rest: Any) -> None:
        sequence = self.sequence(span.sequence_id)
        holds_to = sequence.round_holds_to
        original(self, span, result, *rest)
        if sequence.status is Status.DECODING:
            sequence.round_holds_to = holds_to

    wrap(patch, Scheduler, "commit", commit)


@_mutation("A sequence that comes back runs the round from before it gave way.")
def _repeats_a_round_after_giving_way(patch: Patch) -> None:
    def preempt(original: Any, self: Scheduler, sequence: Sequence) -> None:
        holds_to = sequence.round_holds_to
        original(self, sequence)
        sequence.round_holds_to = holds_to

    wrap(patch, Scheduler, "_preempt", preempt)


@_mutation("A round gets the block table from before its own reservation.")
def _gives_the_old_table(patch: Patch) -> None:
    old: dict[tuple[int, int], tuple[int, ...]] = {}

    def reserve(original: Any, cache: CacheManager, sequence_id: int, num_positions: int) -> bool:
        old[id(cache), sequence_id] = table(cache, sequence_id)
        return original(cache, sequence_id, num_positions)

    def stale(original: Any, cache: CacheManager, sequence_id: int) -> tuple[int, ...]:
        return old.get((id(cache), sequence_id)) or original(cache, sequence_id)

    table = CacheManager.block_ids
    wrap(patch, CacheManager, "reserve", reserve)
    wrap(patch, CacheManager, "block_ids", stale)


@_mutation("A sequence that ends in flight is freed at once.")
def _frees_in_flight(patch: Patch) -> None:
    def finish(original: Any, scheduler: Scheduler, sequence: Sequence, reason: Any) -> None:
        original(scheduler, sequence, reason)
        if sequence.in_flight:
            scheduler.cache.release(sequence.sequence_id)

    def release(original: Any, cache: CacheManager, sequence_id: int) -> None:
        with contextlib.suppress(KeyError):  # freed before
            original(cache, sequence_id)

    wrap(patch, Scheduler, "finish", finish)
    wrap(patch, CacheManager, "release", release)


@_mutation("A sequence that ended is freed with the first of its results, not with the last.")
def _frees_with_the_first_result(patch: Patch) -> None:
    def discard(original: Any, scheduler: Scheduler, span: Any) -> None:
        scheduler._ending[span.sequence_id].in_flight[:] = [span]
        original(scheduler, span)

    wrap(patch, Scheduler, "discard", discard)


@_mutation("Releasing a sequence loses a block.")
def _loses_a_block(patch: Patch) -> None:
    def release(original: Any, cache: CacheManager, sequence_id: int) -> None:
        original(cache, sequence_id)
        cache.blocks.take(1)

    wrap(patch, CacheManager, "release", release)


@_mutation("A refused admission keeps the slot that it took first.")
def _loses_a_slot(patch: Patch) -> None:
    def admit(original: Any, cache: CacheManager, *args: Any) -> int | None:
        slot = original(cache, *args)
        if slot is None:
            cache.slots.take(1)
        return slot

    wrap(patch, CacheManager, "admit", admit)


@_mutation("An id that comes back is free twice.")
def _frees_twice(patch: Patch) -> None:
    def give_back(original: Any, pool: IdPool, ids: Any) -> None:
        ids = list(ids)
        original(pool, ids)
        pool._free.extend(ids[:1])

    wrap(patch, IdPool, "give_back", give_back)


@_mutation("A plan that is refused keeps what it had reserved by then.")
def _refuses_and_keeps(patch: Patch) -> None:
    def plan(original: Any, scheduler: Scheduler) -> Any:
        batch = original(scheduler)
        if batch is None:
            first, size = scheduler._running[0], scheduler.cache.block_size
            held = len(scheduler.cache.block_ids(first.sequence_id))
            scheduler.cache.reserve(first.sequence_id, (held + 1) * size)
        return batch

    wrap(patch, Scheduler, "plan", plan)


@_mutation("The newest request is served first.")
def _serves_the_newest(patch: Patch) -> None:
    patch.setattr(Scheduler, "add", lambda self, sequence: self._waiting.insert(0, sequence))


@_mutation("A sequence that was preempted queues up again at the end.")
def _requeues_at_the_end(patch: Patch) -> None:
    def add(original: Any, scheduler: Scheduler, sequence: Sequence) -> None:
        original(scheduler, sequence)
        if sequence.output_token_ids:
            scheduler._waiting.remove(sequence)
            scheduler._waiting.append(sequence)

    wrap(patch, Scheduler, "add", add)


@_mutation("The oldest of the others gives way, not the youngest.")
def _preempts_the_oldest(patch: Patch) -> None:
    def make_room(self: Scheduler, sequence: Sequence, num_positions: int) -> bool:
        while not self.cache.reserve(sequence.sequence_id, num_positions):
            victim = next((s for s in self._running if s is not sequence), sequence)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    patch.setattr(Scheduler, "_make_room", make_room)


@_mutation("Priorities are accepted and ignored.")
def _ignores_priorities(patch: Patch) -> None:
    patch.setattr(outrider.scheduler, "_by_rank", lambda sequence: (0, sequence.sequence_id))


@_mutation("A sequence that comes back prefills its prompt and forgets its output.")
def _prefills_the_prompt_alone(patch: Patch) -> None:
    def admit(original: Any, scheduler: Scheduler, sequence: Sequence, *args: Any) -> bool:
        admitted = original(scheduler, sequence, *args)
        sequence.num_prefill = len(sequence.request.prompt_token_ids)
        return admitted

    wrap(patch, Scheduler, "_admit", admit)


@_mutation("A sequence that comes back finds its slot as somebody else left it.")
def _sets_up_once(patch: Patch) -> None:
    def plan(original: Any, scheduler: Scheduler) -> Any:
        batch = original(scheduler)
        if batch is None:
            return None
        back = {
            span.slot
            for span in batch.prefill
            if scheduler.sequence(span.sequence_id).output_token_ids
        }
        return replace(batch, setups=tuple(s for s in batch.setups if s.slot not in back))

    wrap(patch, Scheduler, "plan", plan)


@_mutation("Chunks use the budget up and end anywhere.")
def _chunks_off_the_grid(patch: Patch) -> None:
    def chunk_end(_: SpanRules, start: int, num_prefill: int, _shared: int, budget: int) -> int:
        return min(start + budget, num_prefill)

    patch.setattr(SpanRules, "chunk_end", chunk_end)


@_mutation("A chunk inside a prompt names its own last token as the next one.")
def _names_the_wrong_next_token(patch: Patch) -> None:
    def span(original: Any, *args: Any) -> Any:
        made = original(*args)
        if made.next_token_id is None:
            return made
        return replace(made, next_token_id=made.token_ids[-1])

    wrap(patch, SpanRules, "chunk", span)


@_mutation("Drafts are verified past the length limit.")
def _verifies_past_the_limit(patch: Patch) -> None:
    patch.setattr(outrider.span_rules, "num_drafts_to_verify", lambda proposed, *_: proposed)


@_mutation("More drafts are verified than were asked for a round ago.")
def _verifies_what_nobody_proposed(patch: Patch) -> None:
    fix(patch, Sequence, "num_proposed", 8)


@_mutation("A request's own limit on drafts is ignored.")
def _ignores_the_draft_limit(patch: Patch) -> None:
    patch.setattr(SpanRules, "wanted_drafts", lambda self, _: self._config.num_speculative_tokens)


@_mutation("A grammar's round is planned before its drafts are known.")
def _does_not_wait_for_a_grammar(patch: Patch) -> None:
    fix(patch, Request, "needs_drafts_on_host", False)


@_mutation("Tokens behind a stop string are committed.")
def _commits_past_the_stop(patch: Patch) -> None:
    def commit(original: Any, self: Scheduler, span: Any, result: Any, _: Any, reason: Any) -> None:
        original(self, span, result, result.token_ids, reason)

    wrap(patch, Scheduler, "commit", commit)


@_mutation("After a failure, one of those that ran goes on as if nothing had happened.")
def _restarts_all_but_one(patch: Patch) -> None:
    def restart(original: Any, scheduler: Scheduler) -> None:
        spared = scheduler._running[:1]
        del scheduler._running[:1]
        original(scheduler)
        scheduler._running[:0] = spared

    wrap(patch, Scheduler, "restart", restart)


@_mutation("After a failure, cached blocks still count those who read them before.")
def _restarts_with_readers_of_before(patch: Patch) -> None:
    patch.setattr(PrefixTree, "leave_all", PrefixTree.nodes)


@_mutation("After a failure, ids that nobody holds any more stay taken.")
def _restarts_without_what_was_held(patch: Patch) -> None:
    def keep_only(original: Any, pool: IdPool, ids: Any) -> None:
        original(pool, {*ids, *pool._taken})

    wrap(patch, IdPool, "keep_only", keep_only)


@_mutation("A round's checkpoint is kept whether or not the text had come so far.")
def _keeps_a_state_too_early(patch: Patch) -> None:
    def commit(original: Any, self: Scheduler, span: Any, result: Any, *rest: Any) -> None:
        original(self, span, replace(result, checkpoint_kept=True), *rest)

    wrap(patch, Scheduler, "commit", commit)
