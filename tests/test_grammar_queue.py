"""Grammars compile beside the rounds: a slow one holds up its own request and nobody else's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from outrider import LLM
from outrider.engine import Engine
from outrider.engine_messages import (
    Abort,
    Accepted,
    Add,
    FromEngine,
    Progress,
    Refused,
    Stats,
    Stop,
    ToEngine,
)
from outrider.engine_process import EngineService
from outrider.errors import RequestError
from outrider.params import StructuredOutput
from outrider.structured import GrammarCompiler, GrammarMatcher
from tests.trained import trained_folder

pytest.importorskip("xgrammar")

SLOW, QUICK, BROKEN = "a+", "[ab]+", "b+"
Step = tuple[Callable[[], bool], ToEngine]
FIELDS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6}


def request(name: str, regex: str | None = None) -> Add:
    grammar = {} if regex is None else {"structured_output": {"kind": "regex", "text": regex}}
    return Add(name, (17, 20, 33), FIELDS | grammar)


class ScriptedPorts:
    """Each message comes as soon as the condition beside it holds."""

    def __init__(self, script: list[Step]) -> None:
        self.sent: list[FromEngine] = []
        self.script = script
        self._end = time.monotonic() + 30

    def receive(self, timeout: float | None) -> ToEngine | None:
        assert time.monotonic() < self._end, self.sent
        if self.script and self.script[0][0]():
            return self.script.pop(0)[1]
        time.sleep(min(timeout or 0.0, 0.01))
        return None

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)

    def accepted(self, name: str) -> bool:
        return Accepted(name) in self.sent

    def refused(self, name: str) -> bool:
        return any(isinstance(one, Refused) and one.request_id == name for one in self.sent)

    def finished(self, name: str) -> bool:
        return any(
            delta.request_id == name and delta.completions[0].finish_reason is not None
            for message in self.sent
            if isinstance(message, Progress)
            for delta in message.requests
        )

    def last_waiting(self) -> int:
        return [one.num_waiting for one in self.sent if isinstance(one, Stats)][-1]


@pytest.fixture(scope="module")
def engine() -> Engine:
    folder = str(trained_folder("tiny-qwen3.5"))
    return LLM(folder, dtype="float32", max_model_len=64, kv_cache_memory_gib=0.02).engine


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set, one grammar compiles; another one breaks the compiler."""
    event = threading.Event()
    compiles = GrammarCompiler.matcher

    def matcher(self: GrammarCompiler, wanted: StructuredOutput) -> GrammarMatcher:
        if wanted.text == SLOW and not event.wait(20):
            raise RequestError("the slow grammar was never released")
        if wanted.text == BROKEN:
            raise MemoryError("of the compiler")
        return compiles(self, wanted)

    monkeypatch.setattr(GrammarCompiler, "matcher", matcher)
    yield event
    event.set()


def always() -> bool:
    return True


def test_others_go_on_while_a_slow_grammar_compiles(
    engine: Engine, release: threading.Event
) -> None:
    def let_go() -> bool:
        release.set()
        return True

    ports = ScriptedPorts([])
    script: list[Step] = [
        (always, request("slow", SLOW)),
        (always, request("plain")),
        (lambda: ports.finished("plain"), request("quick", QUICK)),
        (lambda: ports.finished("quick"), request("broken", BROKEN)),
        (lambda: ports.refused("broken") and not ports.accepted("slow"), request("last")),
        (lambda: let_go() and ports.finished("slow") and ports.finished("last"), Stop()),
    ]
    ports.script = script
    EngineService(engine, ports).run()
    assert not script and ports.accepted("slow")


def test_a_client_that_leaves_takes_its_grammar_along(
    engine: Engine, release: threading.Event
) -> None:
    ports = ScriptedPorts([])
    leaving = [f"slow-{index}" for index in range(4)]  # more than there are threads
    script: list[Step] = [
        *((always, request(name, SLOW)) for name in leaving),
        (lambda: ports.last_waiting() == 4, Abort(leaving[0])),
        *((always, Abort(name)) for name in leaving[1:]),
        (lambda: ports.last_waiting() == 0, request("plain")),
        (lambda: ports.finished("plain"), Stop()),
    ]
    ports.script = script
    service = EngineService(engine, ports)
    service._send_stats()
    service.run()
    assert not any(ports.accepted(name) or ports.refused(name) for name in leaving)
