"""What a failure leaves to later steps: reports that were not made, and who ran out alone.

Nobody's text loses a character for it, and nobody is tried for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from outrider.engine import Engine
from outrider.errors import CapacityError, EngineFaultError
from outrider.live import LiveRequest
from outrider.output import OutputBuilder, RequestOutput
from outrider.params import SamplingParams
from tests.checkpoints import TinyShape
from tests.failing import (
    PROMPTS,
    SHAPE,
    Place,
    assert_all_is_back,
    failing,
    serve,
    short_engine,
    texts_alone,
    wish,
)
from tests.harness import Received, make_engine, random_tokens, run_requests, tokens_of


@pytest.fixture(scope="module")
def engine(random_checkpoint: Callable[[TinyShape], Path]) -> Engine:
    return short_engine(random_checkpoint(SHAPE))


@pytest.fixture(scope="module")
def expected(random_checkpoint: Callable[[TinyShape], Path]) -> list[tuple[int, ...]]:
    return texts_alone(random_checkpoint(SHAPE))


@pytest.mark.parametrize(
    "place",
    [Place(OutputBuilder, "add"), Place(OutputBuilder, "_show"), Place("scheduler", "commit")],
    ids=attrgetter("label"),
)
def test_a_text_whose_tokens_are_half_taken_in_for_want_of_memory_fails_alone(
    engine: Engine, expected: list[tuple[int, ...]], place: Place
) -> None:
    for number in (3, 5, 9):
        with failing(engine, place, lambda call, _, number=number: call == number):
            outputs = serve(engine)
        failed = [output for output in outputs if output.error is not None]
        # Prompt chunks bring no tokens, so nothing of them is taken in.
        assert len(failed) <= 1 and (failed or place.name == "commit")
        for output, text in zip(outputs, expected, strict=True):
            if output.error is None:
                assert output.token_ids == text
                continue
            assert isinstance(output.error, EngineFaultError)
            assert "tokens before" in str(output.error)
        assert_all_is_back(engine)


REPORT = Place(LiveRequest, "report")


def test_a_report_for_which_there_is_no_memory_is_made_by_a_later_step(
    engine: Engine, expected: list[tuple[int, ...]]
) -> None:
    for number in (1, 6):
        with failing(engine, REPORT, lambda call, _, number=number: call == number):
            outputs = serve(engine)
        assert tokens_of(outputs) == expected
        assert_all_is_back(engine)


@pytest.mark.parametrize("num_failures", [1, 2])
def test_a_last_report_for_which_there_is_no_memory_is_made_again(
    engine: Engine, expected: list[tuple[int, ...]], num_failures: int
) -> None:
    outputs = Received()
    engine.add_request("last", PROMPTS[0], SamplingParams(max_tokens=1, temperature=0))
    with failing(engine, REPORT, lambda call, _: call <= num_failures) as calls:
        while engine.has_work:
            outputs.take(engine.step())
    assert calls == [num_failures + 1]
    assert outputs["last"].token_ids == expected[0][:1] and outputs["last"].error is None
    assert_all_is_back(engine)


def test_a_request_that_can_never_be_reported_on_fails_alone_and_nobody_waits(
    engine: Engine, expected: list[tuple[int, ...]]
) -> None:
    with failing(engine, REPORT, lambda _, args: args[0].request_id == "1"):
        outputs = serve(engine)
    error = outputs[1].error
    assert isinstance(error, CapacityError) and "request 1 was reported" in str(error)
    assert [outputs[i].token_ids for i in (0, 2, 3)] == [expected[i] for i in (0, 2, 3)]
    assert_all_is_back(engine)


def test_an_abort_that_cannot_be_reported_on_is_reported_by_a_later_step(engine: Engine) -> None:
    engine.add_request("gone", PROMPTS[0], wish())
    engine.step()
    with failing(engine, REPORT, lambda call, _: call == 1):
        assert engine.abort("gone") is None
        [output] = engine.step()
    assert output.request_id == "gone" and output.finish_reason == "abort"
    assert_all_is_back(engine)


def test_a_step_that_has_only_reports_to_do_and_never_succeeds_is_told_to_the_caller(
    engine: Engine, expected: list[tuple[int, ...]]
) -> None:
    outputs = Received()
    engine.add_request("last", PROMPTS[0], SamplingParams(max_tokens=1, temperature=0))
    place = Place("cache", "check_integrity")  # asked in every step, with debug_checks
    with failing(engine, place, lambda *_: not engine.scheduler.has_work) as calls:
        while engine.scheduler.has_work:  # the last step of these is the first to fail
            assert engine.step() == []
        num_before = calls[0]
        assert engine.step() == []  # a second failure in a row is no reason to give up either
        with pytest.raises(MemoryError):
            engine.step()
    assert calls[0] == num_before + 2
    while engine.has_work:
        outputs.take(engine.step())
    assert outputs["last"].token_ids == expected[0][:1]
    assert_all_is_back(engine)


def test_failures_with_rounds_between_them_fail_nobody_who_runs_alone(
    engine: Engine, expected: list[tuple[int, ...]]
) -> None:
    with failing(engine, Place("runner", "collect"), lambda call, _: call % 6 == 0) as calls:
        [output] = run_requests(engine, PROMPTS[:1], wish())
    assert calls[0] >= 3 * 6  # one lets fewer run, and two more come while it is alone
    assert output.token_ids == expected[0] and output.error is None
    assert_all_is_back(engine)


def test_a_prompt_that_gets_further_after_a_failure_may_fail_once_more(
    random_checkpoint: Callable[[TinyShape], Path],
) -> None:
    prompt = random_tokens(70, 100, 9)  # five chunks
    options: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 1, "prefill_grid": 16}
    options |= {"max_prefill_tokens": 16, "look_ahead": 0}
    [expected] = run_requests(make_engine(random_checkpoint(SHAPE), **options), [prompt], wish())

    def serve_one(fails: Callable[[int, Any], bool]) -> RequestOutput:
        engine = make_engine(random_checkpoint(SHAPE), **options)
        with failing(engine, Place("runner", "submit"), fails):
            return run_requests(engine, [prompt], wish())[0]

    # At the second chunk; then, with one chunk computed again, at the fourth.
    assert serve_one(lambda call, _: call in (2, 6)).token_ids == expected.token_ids
    # At the fourth twice.
    assert isinstance(serve_one(lambda call, _: call in (4, 8)).error, CapacityError)
