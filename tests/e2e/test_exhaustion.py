"""Memory runs out at every place that asks for some: nobody's text changes, and nothing leaks.

A place is a function that takes ids from a pool or makes tensors or host values that last. Each is
made to fail at each of its calls in a run of four requests that share a beginning, with few blocks,
few states, and a round in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import outrider.runner.rounds
from outrider.admission import AdmissionRules
from outrider.engine import Engine
from outrider.errors import CapacityError
from outrider.output import OutputBuilder, RequestOutput
from outrider.params import SamplingParams
from tests.checkpoints import TinyShape
from tests.failing import (
    MOST_TOKENS,
    NUM_BLOCKS,
    PROMPTS,
    SHAPE,
    Place,
    assert_all_is_back,
    failing,
    serve,
    short_engine,
    texts_alone,
)
from tests.harness import tokens_of

ROUNDS = outrider.runner.rounds
PLACES = [
    Place(owner, name)
    for owner, name in (
        ("cache.blocks", "take"),
        ("cache.slots", "take"),
        ("cache.checkpoints", "take"),
        ("cache.blocks", "give_back"),
        ("cache", "admit"),
        ("cache", "reserve"),
        ("cache", "publish"),
        ("cache", "keep_checkpoint"),
        ("cache", "block_ids"),
        ("cache._tree", "insert"),
        ("cache._tree", "use"),
        ("scheduler", "_admit"),
        ("scheduler.rules", "match"),
        ("scheduler.rules", "slot_setup"),
        ("scheduler.rules", "chunk"),
        ("scheduler.rules", "set_round"),
        ("runner", "submit"),
        ("runner.slots", "set_up"),
        ("runner.slots.stop_token_ids", "store"),
        ("runner.slots.rules", "store"),
        ("runner._inputs", "prefill"),
        ("runner._inputs", "rounds"),
        ("runner._inputs", "chain"),
        ("runner", "_copy_states"),
        ("runner", "_keep_states"),
        ("runner", "_target_pass"),
        ("runner._decider", "decide"),
        ("runner.drafter", "feed"),
        ("runner.drafter", "propose"),
        (ROUNDS, "round_numbers"),
        (ROUNDS, "store_proposal"),
        (ROUNDS.PassReport, "of"),
        ("runner", "collect"),
    )
]


@pytest.fixture(scope="module")
def engine(random_checkpoint: Callable[[TinyShape], Path]) -> Engine:
    return short_engine(random_checkpoint(SHAPE))


@pytest.fixture(scope="module")
def expected(random_checkpoint: Callable[[TinyShape], Path]) -> list[tuple[int, ...]]:
    return texts_alone(random_checkpoint(SHAPE))


@pytest.fixture(scope="module")
def num_calls(engine: Engine) -> dict[str, int]:
    """Of each place, in a run in which nothing fails."""
    with ExitStack() as stack:
        calls = {
            place.label: stack.enter_context(failing(engine, place, lambda *_: False))
            for place in PLACES
        }
        serve(engine)
    return {label: number for label, [number] in calls.items()}


def check_one_failure(
    engine: Engine, place: Place, number: int, expected: list[tuple[int, ...]]
) -> None:
    with failing(engine, place, lambda call, _: call == number):
        outputs = serve(engine)
    assert tokens_of(outputs) == expected, number
    assert_all_is_back(engine)


def test_the_run_itself_preempts_shares_and_keeps_states(
    engine: Engine, expected: list[tuple[int, ...]]
) -> None:
    before = engine.scheduler.num_preemptions
    outputs = serve(engine)
    assert tokens_of(outputs) == expected
    assert engine.scheduler.num_preemptions > before
    assert sum(output.num_cached_tokens for output in outputs) > 0


@pytest.mark.parametrize("place", PLACES, ids=attrgetter("label"))
def test_memory_that_runs_out_once_changes_no_text(
    engine: Engine, expected: list[tuple[int, ...]], num_calls: dict[str, int], place: Place
) -> None:
    check_one_failure(engine, place, num_calls[place.label] // 2 + 1, expected)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES, ids=attrgetter("label"))
def test_memory_that_runs_out_at_any_call_changes_no_text(
    engine: Engine, expected: list[tuple[int, ...]], num_calls: dict[str, int], place: Place
) -> None:
    for number in range(1, num_calls[place.label] + 1):
        check_one_failure(engine, place, number, expected)


def run_with_a_dry_pool(
    engine: Engine, name: str, dry_step: int
) -> tuple[list[RequestOutput], bool]:
    """Nothing is free in a pool during one step; the outputs, and whether that step took place."""
    pool, step, steps = getattr(engine.cache, name), engine.step, 0

    def stepped() -> list[RequestOutput]:
        nonlocal steps
        steps += 1
        if steps != dry_step:
            return step()
        others = pool.take(pool.num_free)
        try:
            with mock.patch.object(engine.cache, "check_integrity"):  # others are not known to it
                return step()
        finally:
            pool.give_back(others)

    with mock.patch.object(engine, "step", stepped):
        return serve(engine), steps >= dry_step


@pytest.mark.parametrize("name", ["blocks", "slots", "checkpoints"])
def test_a_pool_that_is_empty_during_any_step_changes_no_text(
    engine: Engine, expected: list[tuple[int, ...]], name: str
) -> None:
    dry_step, num_failed, took_place = 1, 0, True
    while took_place:
        outputs, took_place = run_with_a_dry_pool(engine, name, dry_step)
        assert_all_is_back(engine)
        for output, text in zip(outputs, expected, strict=True):
            if output.error is None:
                assert output.token_ids == text, dry_step
                continue
            num_failed += 1
            assert isinstance(output.error, CapacityError)
            assert f" of {NUM_BLOCKS} blocks" in str(output.error)
        dry_step += 6
    # Only those fail that an idle engine could not let in: in the first step, or the last of all.
    assert dry_step > 15 and num_failed <= 2


def about(sequence_id: int, args: Any) -> bool:
    """Whether a call has to do with a sequence."""
    if any(value == sequence_id for value in args if isinstance(value, int)):
        return True
    spans = [getattr(getattr(value, "batch", value), "spans", value) for value in args]
    return any(
        getattr(span, "sequence_id", None) == sequence_id
        for value in spans
        for span in (value if isinstance(value, list | tuple) else [value])
    )


FOR_ONE = [
    Place("cache", "admit"),
    Place("cache", "reserve"),
    Place("scheduler.rules", "slot_setup"),
    Place("scheduler.rules", "chunk"),
    Place("runner._inputs", "prefill"),
    Place(ROUNDS, "round_numbers"),
    Place("runner", "collect"),
]


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("place", FOR_ONE, ids=attrgetter("label"))
def test_a_request_for_which_there_is_never_memory_fails_with_numbers_and_alone(
    engine: Engine, expected: list[tuple[int, ...]], place: Place, victim: int
) -> None:
    sequence_id = engine._num_sequences + victim
    with failing(engine, place, lambda _, args: about(sequence_id, args)):
        outputs = serve(engine)
    for index, output in enumerate(outputs):
        if index != victim:
            assert output.token_ids == expected[index] and output.error is None, index
    error = outputs[victim].error
    assert isinstance(error, CapacityError) and outputs[victim].finished
    least = len(PROMPTS[victim])
    assert any(f"{least + more} tokens" in str(error) for more in range(MOST_TOKENS + 1))
    assert f"{NUM_BLOCKS} blocks" in str(error) and f"request {victim} ran alone" in str(error)
    assert_all_is_back(engine)
    assert tokens_of(serve(engine)) == expected  # and the next ones are served


def test_where_there_is_no_memory_for_anybody_all_fail_and_nobody_waits(engine: Engine) -> None:
    with failing(engine, Place("runner", "_target_pass"), lambda *_: True):
        outputs = serve(engine)
    assert all(isinstance(output.error, CapacityError) for output in outputs)
    assert_all_is_back(engine)


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize(
    "place",
    [
        Place(AdmissionRules, "requests"),
        Place(OutputBuilder, "__init__"),
        Place("scheduler", "add"),
    ],
    ids=attrgetter("label"),
)
def test_a_request_that_cannot_even_be_queued_leaves_nothing_behind(
    engine: Engine, expected: list[tuple[int, ...]], place: Place, number: int
) -> None:
    wishes = SamplingParams(max_tokens=MOST_TOKENS, temperature=0, ignore_eos=True, n=3)
    with failing(engine, place, lambda call, _: call == number):
        if place.owner is AdmissionRules:  # asked once for all outputs
            for _ in range(number - 1):
                engine.add_request("before", PROMPTS[0], wishes)
                engine.abort("before")
        with pytest.raises(MemoryError, match=f"call {number}"):
            engine.add_request("late", PROMPTS[0], wishes)
    assert_all_is_back(engine)
    assert tokens_of(serve(engine)) == expected
