"""Deliberate faults, one small change to the scheduler or the cache each.

A fault goes in at a function's boundary, so that most of them outlive a rewrite of what is inside;
one whose place is gone fails by name and has to be moved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

import outrider.scheduler
import outrider.span_rules
from outrider.cache.id_pool import IdPool
from outrider.cache.manager import CacheManager
from outrider.cache.prefix_tree import PrefixTree
from outrider.request import Request, Sequence, Status
from outrider.scheduler import Scheduler
from outrider.span_rules import SpanRules

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutation:
    """Attributes:
    fault: what goes wrong, as a sentence.
    """

    name: str
    fault: str
    apply: Callable[[Patch], None]


MUTATIONS: list[Mutation] = []


def _mutation(fault: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def register(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTATIONS.append(Mutation(apply.__name__.strip("_"), fault, apply))
        return apply

    return register


def _wrap(patch: Patch, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function by `around`, whose first argument is the original."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))


def _fix(patch: Patch, owner: type, name: str, value: object) -> None:
    """Make an attribute read the same for ever, whether it is computed or kept."""
    patch.setattr(owner, name, property(lambda _: value, lambda *_: None), raising=False)


# --- Memory of a sequence ---


@_mutation("One position fewer is reserved than a round writes.")
def _reserves_too_little(patch: Patch) -> None:
    def reserve(original: Any, cache: CacheManager, sequence_id: int, num_positions: int) -> bool:
        return original(cache, sequence_id, num_positions - 1)

    _wrap(patch, CacheManager, "reserve", reserve)


@_mutation("The positions that a chain of draft steps writes are not reserved.")
def _forgets_the_chain(patch: Patch) -> None:
    def needed(original: Any, rules: SpanRules, sequence: Sequence, num_rows: int, _: int):
        return original(rules, sequence, num_rows, 0)

    _wrap(patch, SpanRules, "positions_needed", needed)


@_mutation("A round is planned as if those in flight added nothing.")
def _forgets_what_is_in_flight(patch: Patch) -> None:
    def forgets(original: Any, sequence: Sequence, *args: Any) -> None:
        original(sequence, *args)
        sequence.num_committed_at_most = sequence.num_committed

    _wrap(patch, Sequence, "submitted", forgets)
    _wrap(patch, Sequence, "returned", forgets)


@_mutation("A round is submitted once more though its text has outgrown its blocks.")
def _repeats_a_round_for_ever(patch: Patch) -> None:
    _wrap(patch, SpanRules, "_holds_to", lambda original, *args: original(*args) + 1)


@_mutation("A round is submitted once more though one of its blocks was exchanged.")
def _repeats_a_round_with_the_old_block(patch: Patch) -> None:
    def publish(original: Any, *args: Any) -> bool:
        original(*args)
        return False

    _wrap(patch, CacheManager, "publish", publish)


@_mutation("A round is submitted once more though fewer drafts were found for it.")
def _repeats_a_round_without_its_drafts(patch: Patch) -> None:
    def commit(original: Any, self: Scheduler, span: Any, result: Any, *rest: Any) -> None:
        sequence = self.sequence(span.sequence_id)
        holds_to = sequence.round_holds_to
        original(self, span, result, *rest)
        if sequence.status is Status.DECODING:
            sequence.round_holds_to = holds_to

    _wrap(patch, Scheduler, "commit", commit)


@_mutation("A sequence that comes back runs the round from before it gave way.")
def _repeats_a_round_after_giving_way(patch: Patch) -> None:
    def preempt(original: Any, self: Scheduler, sequence: Sequence) -> None:
        holds_to = sequence.round_holds_to
        original(self, sequence)
        sequence.round_holds_to = holds_to

    _wrap(patch, Scheduler, "_preempt", preempt)


@_mutation("A round gets the block table from before its own reservation.")
def _gives_the_old_table(patch: Patch) -> None:
    old: dict[tuple[int, int], tuple[int, ...]] = {}

    def reserve(original: Any, cache: CacheManager, sequence_id: int, num_positions: int) -> bool:
        old[id(cache), sequence_id] = table(cache, sequence_id)
        return original(cache, sequence_id, num_positions)

    def stale(original: Any, cache: CacheManager, sequence_id: int) -> tuple[int, ...]:
        return old.get((id(cache), sequence_id)) or original(cache, sequence_id)

    table = CacheManager.block_ids
    _wrap(patch, CacheManager, "reserve", reserve)
    _wrap(patch, CacheManager, "block_ids", stale)


@_mutation("A sequence that ends in flight is freed at once.")
def _frees_in_flight(patch: Patch) -> None:
    def finish(original: Any, scheduler: Scheduler, sequence: Sequence, reason: Any) -> None:
        original(scheduler, sequence, reason)
        if sequence.in_flight:
            scheduler.cache.release(sequence.sequence_id)

    def release(original: Any, cache: CacheManager, sequence_id: int) -> None:
        with contextlib.suppress(KeyError):  # freed before
            original(cache, sequence_id)

    _wrap(patch, Scheduler, "finish", finish)
    _wrap(patch, CacheManager, "release", release)


@_mutation("A sequence that ended is freed with the first of its results, not with the last.")
def _frees_with_the_first_result(patch: Patch) -> None:
    def discard(original: Any, scheduler: Scheduler, span: Any) -> None:
        scheduler._ending[span.sequence_id].in_flight[:] = [span]
        original(scheduler, span)

    _wrap(patch, Scheduler, "discard", discard)


@_mutation("Releasing a sequence loses a block.")
def _loses_a_block(patch: Patch) -> None:
    def release(original: Any, cache: CacheManager, sequence_id: int) -> None:
        original(cache, sequence_id)
        cache.blocks.take(1)

    _wrap(patch, CacheManager, "release", release)


@_mutation("A refused admission keeps the slot that it took first.")
def _loses_a_slot(patch: Patch) -> None:
    def admit(original: Any, cache: CacheManager, *args: Any) -> int | None:
        slot = original(cache, *args)
        if slot is None:
            cache.slots.take(1)
        return slot

    _wrap(patch, CacheManager, "admit", admit)


@_mutation("An id that comes back is free twice.")
def _frees_twice(patch: Patch) -> None:
    def give_back(original: Any, pool: IdPool, ids: Any) -> None:
        ids = list(ids)
        original(pool, ids)
        pool._free.extend(ids[:1])

    _wrap(patch, IdPool, "give_back", give_back)


@_mutation("A plan that is refused keeps what it had reserved by then.")
def _refuses_and_keeps(patch: Patch) -> None:
    def plan(original: Any, scheduler: Scheduler) -> Any:
        batch = original(scheduler)
        if batch is None:
            first, size = scheduler._running[0], scheduler.cache.block_size
            held = len(scheduler.cache.block_ids(first.sequence_id))
            scheduler.cache.reserve(first.sequence_id, (held + 1) * size)
        return batch

    _wrap(patch, Scheduler, "plan", plan)


# --- Order ---


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

    _wrap(patch, Scheduler, "add", add)


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


# --- What a span says ---


@_mutation("A sequence that comes back prefills its prompt and forgets its output.")
def _prefills_the_prompt_alone(patch: Patch) -> None:
    def admit(original: Any, scheduler: Scheduler, sequence: Sequence, *args: Any) -> bool:
        admitted = original(scheduler, sequence, *args)
        sequence.num_prefill = len(sequence.request.prompt_token_ids)
        return admitted

    _wrap(patch, Scheduler, "_admit", admit)


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

    _wrap(patch, Scheduler, "plan", plan)


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

    _wrap(patch, SpanRules, "chunk", span)


@_mutation("Drafts are verified past the length limit.")
def _verifies_past_the_limit(patch: Patch) -> None:
    patch.setattr(outrider.span_rules, "num_drafts_to_verify", lambda proposed, *_: proposed)


@_mutation("More drafts are verified than were asked for a round ago.")
def _verifies_what_nobody_proposed(patch: Patch) -> None:
    _fix(patch, Sequence, "num_proposed", 8)


@_mutation("A request's own limit on drafts is ignored.")
def _ignores_the_draft_limit(patch: Patch) -> None:
    patch.setattr(SpanRules, "wanted_drafts", lambda self, _: self._config.num_speculative_tokens)


@_mutation("A grammar's round is planned before its drafts are known.")
def _does_not_wait_for_a_grammar(patch: Patch) -> None:
    _fix(patch, Request, "needs_drafts_on_host", False)


# --- Results ---


@_mutation("Tokens behind a stop string are committed.")
def _commits_past_the_stop(patch: Patch) -> None:
    def commit(original: Any, self: Scheduler, span: Any, result: Any, _: Any, reason: Any) -> None:
        original(self, span, result, result.token_ids, reason)

    _wrap(patch, Scheduler, "commit", commit)


@_mutation("After a failure, one of those that ran goes on as if nothing had happened.")
def _restarts_all_but_one(patch: Patch) -> None:
    def restart(original: Any, scheduler: Scheduler) -> None:
        spared = scheduler._running[:1]
        del scheduler._running[:1]
        original(scheduler)
        scheduler._running[:0] = spared

    _wrap(patch, Scheduler, "restart", restart)


@_mutation("After a failure, cached blocks still count those who read them before.")
def _restarts_with_readers_of_before(patch: Patch) -> None:
    patch.setattr(PrefixTree, "leave_all", lambda self: None)


@_mutation("After a failure, ids that nobody holds any more stay taken.")
def _restarts_without_what_was_held(patch: Patch) -> None:
    def keep_only(original: Any, pool: IdPool, ids: Any) -> None:
        original(pool, {*ids, *pool._taken})

    _wrap(patch, IdPool, "keep_only", keep_only)


@_mutation("A round's checkpoint is kept whether or not the text had come so far.")
def _keeps_a_state_too_early(patch: Patch) -> None:
    def commit(original: Any, self: Scheduler, span: Any, result: Any, *rest: Any) -> None:
        original(self, span, replace(result, checkpoint_kept=True), *rest)

    _wrap(patch, Scheduler, "commit", commit)


# --- Prefix cache ---


@_mutation("A text is taken for another one that begins with the same token.")
def _takes_a_hash_for_identity(patch: Patch) -> None:
    seen: dict[tuple[int, int], Any] = {}

    def match(original: Any, cache: CacheManager, token_ids: Any) -> Any:
        key = id(cache), token_ids[0]
        found = original(cache, token_ids)
        if found.num_tokens == 0 and key in seen and len(seen[key]) <= len(token_ids):
            return original(cache, seen[key])
        seen[key] = token_ids
        return found

    _wrap(patch, CacheManager, "match", match)


@_mutation("Blocks that a sequence reads may be evicted.")
def _evicts_what_is_used(patch: Patch) -> None:
    def use(original: Any, tree: PrefixTree, node: Any) -> None:
        is_unused = node in tree._unused
        original(tree, node)
        if is_unused:
            tree._unused[node] = None

    _wrap(patch, PrefixTree, "use", use)


@_mutation("A sequence that leaves goes on using what it shared.")
def _never_leaves(patch: Patch) -> None:
    patch.setattr(PrefixTree, "leave", lambda self, node: None)


@_mutation("Blocks are shared before their last position is computed.")
def _publishes_early(patch: Patch) -> None:
    def commit(original: Any, cache: CacheManager, sequence_id: int, num_tokens: int) -> None:
        original(cache, sequence_id, num_tokens + 1)

    _wrap(patch, CacheManager, "commit", commit)


@_mutation("Blocks of a request without speculation are shared, which the draft never saw.")
def _publishes_what_the_draft_never_saw(patch: Patch) -> None:
    patch.setattr(SpanRules, "publishes", lambda self, sequence: True)


@_mutation("A hit does not restore the recurrent state.")
def _restores_nothing(patch: Patch) -> None:
    def plan(original: Any, scheduler: Scheduler) -> Any:
        batch = original(scheduler)
        if batch is None:
            return None
        return replace(batch, setups=tuple(replace(s, restore_from=None) for s in batch.setups))

    _wrap(patch, Scheduler, "plan", plan)


@_mutation("A recurrent state is kept one unit before the place where it was taken.")
def _keeps_a_state_elsewhere(patch: Patch) -> None:
    def keep(original: Any, cache: CacheManager, sequence_id: int, position: int, slot: int):
        unit = cache._prefix_unit or 0
        original(cache, sequence_id, max(position - unit, unit), slot)

    _wrap(patch, CacheManager, "keep_checkpoint", keep)


@_mutation("A result that is thrown away keeps its checkpoint's slot.")
def _loses_a_checkpoint(patch: Patch) -> None:
    patch.setattr(CacheManager, "drop_checkpoint", lambda self, slot: None)


@_mutation("Prompts whose log probabilities are wanted are read from the cache all the same.")
def _reads_what_must_be_reported(patch: Patch) -> None:
    def match(original: Any, rules: SpanRules, sequence: Sequence) -> Any:
        if sequence.wants_prompt_logprobs and sequence.status is Status.WAITING:
            return rules._cache.match(sequence.text)
        return original(rules, sequence)

    _wrap(patch, SpanRules, "match", match)
