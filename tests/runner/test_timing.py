"""What passes take: the parts by the host's clock on a CPU, the whole by events on a GPU."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
import torch

from outrider import LLM, RequestOutput, SamplingParams, SpeculativeConfig
from outrider.runner import timing
from outrider.runner.timing import PassClock, Phase, lap
from outrider.trace import PassTimes, RoundTrace

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def test_a_clock_gives_each_phase_what_was_done_before_its_lap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moments = iter([10.0, 13.0, 13.5, 15.5, 15.75])
    monkeypatch.setattr("outrider.runner.timing.time.perf_counter", lambda: next(moments))
    clock = PassClock(torch.device("cpu"), 4, is_round=True)
    for phase in (Phase.VERIFY, Phase.COMMIT, Phase.DRAFT, Phase.COMMIT):
        lap(clock, phase)
    assert clock.times(None) == PassTimes(10.0, 5.75, (3.0, 0.75, 2.0), 4, True)


def test_without_a_clock_a_lap_does_nothing() -> None:
    timing.lap(None, Phase.DRAFT)


def test_two_traces_are_equal_whatever_their_passes_took() -> None:
    slow = PassTimes(0.0, 9.0, None, 1, True)
    assert RoundTrace((1,), 1, 2, slow) == RoundTrace((1,), 1, 2)


def _outputs(model: Path, look_ahead: int, num_tokens: int = 12) -> tuple[list[RequestOutput], LLM]:
    llm = LLM(
        str(model),
        speculative_config=SpeculativeConfig("mtp", num_speculative_tokens=2),
        max_num_seqs=2,
        kv_cache_memory_gib=0.02,
        look_ahead=look_ahead,
    )
    outputs = llm.generate(["def f(", "import os\n"], GREEDY)
    assert isinstance(outputs, list)
    return outputs, llm


@pytest.mark.parametrize("look_ahead", [0, 1])
def test_rounds_carry_the_times_of_their_pass(trained_model: Path, look_ahead: int) -> None:
    begin = time.perf_counter()
    outputs, llm = _outputs(trained_model, look_ahead)
    end = time.perf_counter()
    passes: dict[float, PassTimes] = {}
    for output in outputs:
        for number, trace in enumerate(output.rounds):
            times = trace.times
            assert times is not None
            assert times.is_round == (number > 0)
            if torch.cuda.is_available():
                assert times.parts is None
            else:
                assert times.parts is not None and min(times.parts) > 0
                assert sum(times.parts) == pytest.approx(times.seconds)
            passes[times.started] = times
    ordered = [passes[started] for started in sorted(passes)]
    assert begin < ordered[0].started and ordered[-1].started + ordered[-1].seconds < end
    if not torch.cuda.is_available():  # one after the other
        for first, second in itertools.pairwise(ordered):
            assert first.started + first.seconds <= second.started
    shared = [sum(trace.times is times for o in outputs for trace in o.rounds) for times in ordered]
    assert all(count <= times.num_sequences for count, times in zip(shared, ordered, strict=True))
    assert max(shared) == 2
    taken = llm.engine.runner.take_times()
    assert {id(times) for times in taken} >= {id(times) for times in ordered}
    assert llm.engine.runner.take_times() == ()


@pytest.mark.gpu
def test_on_a_gpu_the_device_times_the_whole_of_a_graph(trained_model: Path) -> None:
    outputs, _ = _outputs(trained_model, look_ahead=1)
    for trace in outputs[0].rounds:
        assert trace.times is not None and trace.times.parts is None
        assert 0 < trace.times.seconds < 60
