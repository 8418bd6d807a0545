"""The asynchronous front: the same outputs as the synchronous one, and clean ends of every kind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from outrider import LLM, CapacityError, RequestError, SamplingParams
from outrider.async_llm import AsyncLLM
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine_messages import (
    Abort,
    Refused,
    RequestDelta,
    Stats,
    decode_from_engine,
    encode,
)
from outrider.engine_process import SocketPorts
from outrider.errors import EngineDeadError
from outrider.output import RequestOutput
from tests.trained import trained_folder

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "kv_cache_memory_gib": 0.02,
    "max_model_len": 512,
}
SPEC = SpeculativeConfig("mtp", num_speculative_tokens=3)
PROMPT = "def read_lines(path):"
LETTERS = {"kind": "regex", "text": "[ab]+"}
GREEDY = SamplingParams(temperature=0, max_tokens=24)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
MODEL = str(trained_folder("tiny-qwen3.5"))

Test = Callable[[AsyncLLM], Coroutine[Any, Any, None]]


class Notes:
    """An observer that writes everything down."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.stats: list[Stats] = []

    def request_started(self, request: Any) -> None:
        self.events.append(("started", request.request_id))

    def request_grew(self, request: Any, delta: RequestDelta) -> None:
        self.events.append(("grew", request.request_id))

    def request_ended(self, request: Any) -> None:
        self.events.append(("ended", request.request_id))

    def engine_reported(self, stats: Stats) -> None:
        self.stats.append(stats)


def run(test: Test, observer: Notes | None = None) -> None:
    """Run a test with a model of its own, and let nothing take for ever."""

    async def with_model() -> None:
        async with AsyncLLM(MODEL, speculative_config=SPEC, observer=observer, **OPTIONS) as llm:
            await test(llm)

    asyncio.run(asyncio.wait_for(with_model(), 60))


async def collect(outputs: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in outputs]


def test_outputs_are_those_of_the_synchronous_front() -> None:
    reference = LLM(MODEL, speculative_config=SPEC, **OPTIONS)
    cases = [
        (PROMPT, GREEDY),
        ([17, 20, 33], SamplingParams(seed=3, n=2, max_tokens=12, logprobs=2, prompt_logprobs=1)),
        ("import", SamplingParams(temperature=0, max_tokens=12, stop=["e"], logit_bias={5: 1.0})),
        ("x", SamplingParams(temperature=0, max_tokens=6, structured_output=LETTERS)),
    ]

    async def test(llm: AsyncLLM) -> None:
        all_outputs = await asyncio.gather(*(collect(llm.generate(*case)) for case in cases))
        for (prompt, params), outputs in zip(cases, all_outputs, strict=True):
            wanted = reference.generate(prompt, params)
            assert isinstance(wanted, RequestOutput)
            last = outputs[-1]
            assert last.finished and not any(output.finished for output in outputs[:-1])
            assert last.prompt_token_ids == wanted.prompt_token_ids
            for index, completion in enumerate(wanted.completions):
                mine = last.completions[index]
                assert (mine.text, mine.token_ids) == (completion.text, completion.token_ids)
                assert mine.finish_reason == completion.finish_reason
                pieces = [output.completions[index].new_text for output in outputs]
                assert "".join(pieces) == completion.text
                assert mine.rounds == completion.rounds
                for entry, other in zip(
                    mine.logprobs or (), completion.logprobs or (), strict=True
                ):
                    assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert (last.prompt_logprobs is None) == (wanted.prompt_logprobs is None)
            assert len(last.prompt_logprobs or ()) == len(wanted.prompt_logprobs or ())

    run(test)


def test_closing_the_iterator_ends_the_request_and_drain_waits_for_the_rest() -> None:
    notes = Notes()

    async def test(llm: AsyncLLM) -> None:
        async for _ in llm.generate(PROMPT, LONG):
            break
        outputs = llm.generate(PROMPT, LONG)
        await anext(outputs)
        await outputs.aclose()  # pyright: ignore[reportAttributeAccessIssue]
        waiting = asyncio.create_task(collect(llm.generate(PROMPT, GREEDY)))
        await asyncio.sleep(0.1)
        await llm.drain()
        assert not llm._streams
        assert len((await waiting)[-1].token_ids) == 24
        for _ in range(40):
            if notes.stats[-1].num_running == 0 and notes.stats[-1].kv_usage == 0:
                break
            await asyncio.sleep(0.05)
        assert (notes.stats[-1].num_running, notes.stats[-1].kv_usage) == (0, 0)

    run(test, notes)
    started = [request for kind, request in notes.events if kind == "started"]
    assert sorted(r for kind, r in notes.events if kind == "ended") == sorted(started)
    assert sum(len(stats.step_seconds) for stats in notes.stats) > 0


def test_a_request_that_cannot_be_served_fails_alone() -> None:
    async def test(llm: AsyncLLM) -> None:
        running = asyncio.create_task(collect(llm.generate(PROMPT, GREEDY)))
        for prompt, params, what in [
            ([], GREEDY, "prompt is empty"),
            ([5000], GREEDY, "prompt token 0"),
            ([1] * 512, GREEDY, "prompt is too long"),
            ("a", SamplingParams(logit_bias={9999: 1.0}), "logit_bias token id"),
            ("a", SamplingParams(structured_output={"kind": "ebnf", "text": "("}), "structured"),
        ]:
            with pytest.raises(RequestError) as caught:
                await collect(llm.generate(prompt, params))
            assert caught.value.what.startswith(what) and "got " in str(caught.value)
        assert len((await running)[-1].token_ids) == 24

    run(test)


WRONG_PROMPTS: list[Any] = [["a"], [1.5], [None], [True], [2**70], {"a": 1}, b"ab", 5, None]


def test_arguments_of_the_wrong_type_are_refused_as_the_synchronous_front_does() -> None:
    async def test(llm: AsyncLLM) -> None:
        running = asyncio.create_task(collect(llm.generate(PROMPT, GREEDY)))
        for prompt in WRONG_PROMPTS:
            with pytest.raises(RequestError, match=r"^prompt( token 0)?: got "):
                await collect(llm.generate(prompt, GREEDY))
        params: Any
        for params in (5, {}, "greedy"):
            with pytest.raises(RequestError, match=r"^params: got "):
                await collect(llm.generate("a", params))
        assert len((await running)[-1].token_ids) == 24
        # A subclass is as good as the type itself.
        halves = SamplingParams(temperature=np.float64(0), top_p=np.float64(0.5), max_tokens=2)
        assert len((await collect(llm.generate("a", halves)))[-1].token_ids) == 2

    run(test)


def test_a_message_that_cannot_be_read_costs_its_own_request_only(tmp_path: Path) -> None:
    addresses = [f"ipc://{tmp_path}/{name}" for name in ("to", "from")]
    ports = SocketPorts(*addresses)
    context = zmq.Context()
    sender, receiver = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    try:
        sender.connect(addresses[0])
        receiver.connect(addresses[1])
        for content in (b"", b"\xc1", msgspec.msgpack.encode(["Nothing", "x"])):
            sender.send(content)
        sender.send(msgspec.msgpack.encode(["Add", "lost", ["a"], {}]))
        sender.send(encode(Abort("next")))
        assert ports.receive(10) == Abort("next")
        assert ports.receive(0) is None
        assert receiver.poll(10_000)
        answer = decode_from_engine(receiver.recv())
        assert isinstance(answer, Refused) and answer.request_id == "lost"
        assert "cannot be read" in answer.fault.what and not receiver.poll(0)
    finally:
        ports.close()
        context.destroy(linger=0)


def test_an_engine_that_is_killed_fails_everything_in_flight_at_once() -> None:
    async def test(llm: AsyncLLM) -> None:
        running = [llm.generate(PROMPT, LONG) for _ in range(2)]
        for outputs in running:
            await anext(outputs)
        os.kill(llm.pid, signal.SIGKILL)
        for outputs in running:
            with pytest.raises(EngineDeadError, match="exit code -9"):
                await asyncio.wait_for(collect(outputs), 5)
        with pytest.raises(EngineDeadError):
            await collect(llm.generate(PROMPT, GREEDY))
        assert isinstance(await llm.dead(), EngineDeadError) and not llm.is_ready

    run(test)


def test_shutdown_fails_what_is_in_flight_and_may_be_repeated() -> None:
    async def test(llm: AsyncLLM) -> None:
        outputs = llm.generate(PROMPT, LONG)
        await anext(outputs)
        llm.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await collect(outputs)
        llm.shutdown()

    run(test)


def test_a_model_that_cannot_be_loaded_says_why_as_the_synchronous_front_does() -> None:
    options = OPTIONS | {"kv_cache_memory_gib": 1e-6}  # found out by the engine process
    with pytest.raises(CapacityError) as wanted:
        LLM(MODEL, **options)

    async def load() -> None:
        async with AsyncLLM(MODEL, **options):
            pass

    with pytest.raises(type(wanted.value)) as caught:
        asyncio.run(asyncio.wait_for(load(), 60))
    assert str(caught.value) == str(wanted.value)


def test_options_beside_a_whole_configuration_are_refused() -> None:
    with pytest.raises(RequestError, match="beside a whole EngineConfig"):
        AsyncLLM(EngineConfig(MODEL), max_num_seqs=2)


def test_the_engine_process_imports_nothing_of_http() -> None:
    program = (
        "import sys, outrider.engine_process\n"
        "heavy = {'fastapi', 'uvicorn', 'starlette', 'pydantic', 'prometheus_client'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_script_needs_no_main_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import asyncio\n"
        "from outrider import SamplingParams\n"
        "from outrider.async_llm import AsyncLLM\n"
        "async def main():\n"
        f"    async with AsyncLLM({MODEL!r}, dtype='float32', kv_cache_memory_gib=0.02) as llm:\n"
        "        async for output in llm.generate('a', SamplingParams(max_tokens=2)):\n"
        "            pass\n"
        "        print(len(output.token_ids))\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("2\n", 0), done.stderr
