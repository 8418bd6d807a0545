"""LLM: calls that share the engine, and arguments that make no sense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, RequestError, SamplingParams, SpeculativeConfig
from outrider.batch import FinishReason, Span, SpanResult
from tests.pools import is_idle

GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(trained_model: Path) -> LLM:
    return LLM(
        str(trained_model),
        speculative_config=SpeculativeConfig("mtp"),
        dtype="float32",
        device="cpu",
        max_num_seqs=4,
        kv_cache_memory_gib=0.1,
    )


def assert_idle(llm: LLM) -> None:
    assert not llm.engine.has_work and is_idle(llm.engine.cache)
    llm.engine.cache.check_integrity()


def test_streams_and_calls_between_their_steps_lose_nothing(llm: LLM) -> None:
    alone = [llm.generate(prompt, GREEDY).text for prompt in ("import os", "The weather", "def f")]
    one, other = llm.stream("import os", GREEDY), llm.stream("The weather", GREEDY)
    pieces = ["", ""]
    pieces[0] += next(one).new_text
    assert llm.generate("def f", GREEDY).text == alone[2]
    open_streams = [(0, one), (1, other)]
    while open_streams:
        for index, stream in list(open_streams):
            output = next(stream, None)
            if output is None:
                open_streams.remove((index, stream))
            else:
                pieces[index] += output.new_text
    assert pieces == alone[:2]
    assert_idle(llm)


def test_a_call_inside_a_progress_callback_ends(llm: LLM) -> None:
    seen: list[str] = []

    def progress(*_: int) -> None:
        if not seen:
            seen.append(llm.generate("def f", GREEDY).text)

    outputs = llm.generate(["import os", "The weather"], GREEDY, progress=progress)
    assert isinstance(outputs, list) and all(output.finished for output in outputs)
    assert seen == [llm.generate("def f", GREEDY).text]
    assert_idle(llm)


def test_new_text_of_every_output_adds_up_to_its_text(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=8, n=4, seed=0, ignore_eos=True, temperature=1, stop=["e", "a", "o"]
    )
    pieces: dict[int, str] = {}
    output = None
    for output in llm.stream("The weather is", params):
        for completion in output.completions:
            pieces[completion.index] = pieces.get(completion.index, "") + completion.new_text
    assert output is not None
    assert pieces == {completion.index: completion.text for completion in output.completions}


@pytest.mark.parametrize("wrong", [{"max_tokens": 4}, 5, "ab", [GREEDY, None], [GREEDY]])
def test_params_that_are_none_are_typed_errors_and_leave_nothing_behind(
    llm: LLM, wrong: Any
) -> None:
    if isinstance(wrong, list) and len(wrong) == 2:
        first, second = llm.generate(["a", "b"], wrong)
        assert first.error is None and isinstance(second.error, RequestError)
    else:
        with pytest.raises(RequestError):
            outputs = llm.generate(["a", "b"], wrong)
            raise outputs[0].error  # type: ignore[misc]
    assert_idle(llm)


@pytest.mark.parametrize("prompt", [b"abc", 5, None, {1: 2}, (x for x in [1])])
def test_prompts_that_are_no_text_and_no_token_ids_are_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError):
        llm.generate(prompt, GREEDY)
    good, bad = llm.generate(["a", prompt], GREEDY)
    assert good.error is None and isinstance(bad.error, RequestError)
    assert_idle(llm)


def test_an_interrupt_while_a_text_ends_leaves_an_engine_that_serves(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = llm.generate("import os", GREEDY).text
    commit = llm.engine.scheduler.commit

    def interrupted(
        span: Span, result: SpanResult, ids: tuple[int, ...], reason: FinishReason | None
    ) -> None:
        if reason is not None:
            raise KeyboardInterrupt
        commit(span, result, ids, reason)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.scheduler, "commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("import os", GREEDY)
    assert_idle(llm)
    assert llm.generate("import os", GREEDY).text == expected


def test_synthetic_acceptance_says_so_and_keeps_to_its_length(
    trained_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = SpeculativeConfig("mtp", num_speculative_tokens=3, synthetic_acceptance_length=2.5)
    options = {"dtype": "float32", "device": "cpu", "kv_cache_memory_gib": 0.25}
    llm = LLM(str(trained_model), speculative_config=spec, **options)
    assert "acceptance is synthetic" in caplog.text
    params = SamplingParams(max_tokens=150, temperature=1, ignore_eos=True)
    outputs = llm.generate(["import os", "The weather", "def f", "A"] * 2, params)
    assert isinstance(outputs, list)
    rounds = [
        trace for output in outputs for trace in output.rounds if len(trace.draft_token_ids) == 3
    ]
    mean = 1 + sum(trace.num_accepted for trace in rounds) / len(rounds)
    # About 470 rounds whose lengths spread by 1.2: four standard errors are 0.22.
    assert len(rounds) > 350 and abs(mean - 2.5) < 0.22
