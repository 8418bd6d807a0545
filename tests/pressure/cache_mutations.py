"""Deliberate faults of the prefix cache and of what others may read; see mutations.py."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from outrider.cache.manager import CacheManager
from outrider.cache.prefix_tree import PrefixTree
from outrider.request import Sequence, Status
from outrider.scheduler import Scheduler
from outrider.span_rules import SpanRules
from tests.pressure.mutation import Mutation, Patch, mutation, wrap

CACHE_MUTATIONS: list[Mutation] = []
_mutation = partial(mutation, CACHE_MUTATIONS)


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

    wrap(patch, CacheManager, "match", match)


@_mutation("Blocks that a sequence reads may be evicted.")
def _evicts_what_is_used(patch: Patch) -> None:
    def use(original: Any, tree: PrefixTree, node: Any) -> None:
        is_unused = node in tree._unused
        original(tree, node)
        if is_unused:
            tree._unused[node] = None

    wrap(patch, PrefixTree, "use", use)


@_mutation("A sequence that leaves goes on using what it shared.")
def _never_leaves(patch: Patch) -> None:
    patch.setattr(PrefixTree, "leave", lambda self, node: None)


@_mutation("Blocks are shared before their last position is computed.")
def _publishes_early(patch: Patch) -> None:
    def commit(original: Any, cache: CacheManager, sequence_id: int, num_tokens: int) -> None:
        original(cache, sequence_id, num_tokens + 1)

    wrap(patch, CacheManager, "commit", commit)


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

    wrap(patch, Scheduler, "plan", plan)


@_mutation("A recurrent state is kept one unit before the place where it was taken.")
def _keeps_a_state_elsewhere(patch: Patch) -> None:
    def keep(original: Any, cache: CacheManager, sequence_id: int, position: int, slot: int):
        unit = cache._prefix_unit or 0
        original(cache, sequence_id, max(position - unit, unit), slot)

    wrap(patch, CacheManager, "keep_checkpoint", keep)


@_mutation("A result that is thrown away keeps its checkpoint's slot.")
def _loses_a_checkpoint(patch: Patch) -> None:
    patch.setattr(CacheManager, "drop_checkpoint", lambda self, slot: None)


@_mutation("Prompts whose log probabilities are wanted are read from the cache all the same.")
def _reads_what_must_be_reported(patch: Patch) -> None:
    def match(original: Any, rules: SpanRules, sequence: Sequence) -> Any:
        if sequence.wants_prompt_logprobs and sequence.status is Status.WAITING:
            return rules._cache.match(sequence.text)
        return original(rules, sequence)

    wrap(patch, SpanRules, "match", match)
