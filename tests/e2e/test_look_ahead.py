"""Rounds that are submitted before earlier results are known change no text and lose nothing."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from outrider.engine import Engine
from outrider.params import SamplingParams
from tests.harness import make_engine, random_tokens, run_requests, tokens_of
from tests.pools import is_idle
from tests.trained import trained_folder, trained_pair

METHODS = ["plain", "mtp", "eagle3", "ngram"]
NUM_TOKENS = 24
PROMPTS = [random_tokens(length, 4096, length) for length in (1, 30, 7, 64, 65, 12)]


def engine_for(method: str, **options: Any) -> Engine:
    defaults: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, **options}
    if method == "plain":
        return make_engine(trained_folder("tiny-qwen3.5"), **defaults)
    if method == "eagle3":
        target, draft = trained_pair()
        return make_engine(target, 3, method=method, draft=draft, **defaults)
    return make_engine(trained_folder("tiny-qwen3.5"), 3, method=method, **defaults)


def wishes(temperature: float, **options: Any) -> list[SamplingParams]:
    return [
        SamplingParams(
            max_tokens=NUM_TOKENS + index,
            temperature=temperature,
            seed=index,
            draft_sampling="coupled" if temperature else None,
            **{"ignore_eos": True, **options},
        )
        for index in range(len(PROMPTS))
    ]


@cache
def expected(method: str, temperature: float) -> list[tuple[int, ...]]:
    engine = engine_for(method, look_ahead=0)
    return tokens_of(run_requests(engine, PROMPTS, wishes(temperature)))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("look_ahead", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_text_does_not_depend_on_look_ahead(
    method: str, look_ahead: int, temperature: float
) -> None:
    engine = engine_for(method, look_ahead=look_ahead)
    outputs = run_requests(engine, PROMPTS, wishes(temperature), arrivals=[0, 0, 1, 5, 5, 9])
    assert tokens_of(outputs) == expected(method, temperature)
    assert is_idle(engine.cache) and not engine.has_work


@pytest.mark.parametrize("look_ahead", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_memory_that_runs_out_in_flight_loses_nobody(method: str, look_ahead: int) -> None:
    engine = engine_for(method, look_ahead=look_ahead, num_kv_blocks=9, max_model_len=130)
    outputs = run_requests(engine, PROMPTS, wishes(0.0))
    assert tokens_of(outputs) == expected(method, 0.0)
    assert engine.scheduler.num_preemptions > 0 and is_idle(engine.cache)


@pytest.mark.parametrize("look_ahead", [1, 2])
def test_an_abort_in_flight_frees_its_place_once_nothing_of_it_runs(look_ahead: int) -> None:
    engine = engine_for("mtp", look_ahead=look_ahead)
    params = wishes(0.0)
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(str(index), prompt, params[index])
    outputs: dict[str, tuple[int, ...]] = {}
    for step in range(400):
        if step == 5:
            aborted = engine.abort("1")
            assert aborted is not None and aborted.finished
            engine.cache.check_integrity()
            # The same id may come back while the old one is still in flight.
            engine.add_request("1", PROMPTS[1], params[1])
        for output in engine.step():
            outputs[output.request_id] = output.token_ids
        if not engine.has_work:
            break
    assert [outputs[str(index)] for index in range(len(PROMPTS))] == expected("mtp", 0.0)
    assert is_idle(engine.cache)


@pytest.mark.parametrize("look_ahead", [0, 1, 2])
def test_texts_end_where_they_end_without_look_ahead(look_ahead: int) -> None:
    """A stop id that the text holds, which the device sees first and the host later."""
    whole = expected("mtp", 0.0)
    params = [
        SamplingParams(
            max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, stop_token_ids=[text[9]]
        )
        for text in whole
    ]
    outputs = run_requests(engine_for("mtp", look_ahead=look_ahead), PROMPTS, params)
    for output, text, each in zip(outputs, whole, params, strict=True):
        end = text.index(each.stop_token_ids[0]) + 1
        assert output.token_ids == text[:end]


def test_rounds_really_overlap() -> None:
    engine = engine_for("mtp", look_ahead=1)
    most = 0
    engine.add_request("0", PROMPTS[1], wishes(0.0)[0])
    while engine.has_work:
        engine.step()
        most = max(most, len(engine._in_flight))
    assert most == 1
