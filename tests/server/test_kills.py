"""Processes that are killed or stand still, and connections that stay half open: nothing hangs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from outrider import LLM, SamplingParams
from tests.server.serving import MODEL, MTP, Server, events, wait_until

COMPLETIONS = "/v1/completions"
LONG: dict[str, Any] = {
    **{"prompt": "def f", "max_tokens": 400, "temperature": 0, "ignore_eos": True},
    "stream": True,
}
SHORT: dict[str, Any] = {"prompt": "def f", "max_tokens": 3, "temperature": 0}


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds


@pytest.fixture(scope="module")
def wanted_text() -> str:
    llm = LLM(str(MODEL), dtype="float32", max_num_seqs=1, kv_cache_memory_gib=0.02)
    return llm.generate("def f", SamplingParams(temperature=0, max_tokens=3)).text


def text_of(server: Server) -> str:
    return server.post(COMPLETIONS, SHORT).json()["choices"][0]["text"]


def connect(server: Server, sent: bytes, room: int | None = None) -> socket.socket:
    """A connection that says this much and no more, and holds about `room` bytes unread."""
    host, port = server.url.removeprefix("http://").split(":")
    line = socket.socket()
    if room is not None:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    line.settimeout(10)
    line.connect((host, int(port)))
    line.sendall(sent)
    return line


def _posted(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


HALF_OPEN = {
    "says nothing": b"",
    "half of a head": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-",
    "half of a body": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n"
    b'Content-Type: application/json\r\n\r\n{"prompt": "def f", ',
    "half of a chunk": b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n40\r\n{",
    "reads nothing": _posted(LONG),
}


def test_half_open_connections_hold_up_neither_others_nor_the_end(wanted_text: str) -> None:
    with Server(*MTP, "--drain-timeout", "1") as server, contextlib.ExitStack() as lines:
        for sent in HALF_OPEN.values():
            lines.enter_context(connect(server, sent))
        half_closed = lines.enter_context(connect(server, HALF_OPEN["half of a body"]))
        half_closed.shutdown(socket.SHUT_WR)
        with within(10):
            wait_until(lambda: server.metric("num_requests_running") == 1, "a running request")
            assert text_of(server) == wanted_text
        with within(5):
            server.process.terminate()
            assert server.process.wait(10) == 0


def test_a_drain_does_not_wait_for_the_rest_of_a_request() -> None:
    halves = ("says nothing", "half of a head", "half of a body", "half of a chunk")
    with Server("--drain-timeout", "30") as server, contextlib.ExitStack() as lines:
        for name in halves:
            lines.enter_context(connect(server, HALF_OPEN[name]))
        assert server.get("/health").status_code == 200  # what was sent before has been read
        with within(5):
            server.process.terminate()
            assert server.process.wait(10) == 0
    assert "Traceback" not in server.log


def test_readers_that_do_not_read_give_their_places_back_when_the_engine_is_done() -> None:
    """Every chunk names the model, so a long name makes answers that no socket buffer holds."""
    name = "m" * 60_000  # 100 chunks are 6 MB; Linux buffers at most 4 MB of what is sent
    flags = ("--max-num-seqs", "2", "--max-waiting", "0", "--request-timeout", "2.5")
    with (
        Server(*flags, "--served-model-name", name, "--drain-timeout", "1") as server,
        contextlib.ExitStack() as lines,
    ):
        for max_tokens in (100, 400):  # one ends by itself, one takes too long
            body = LONG | {"model": name, "max_tokens": max_tokens}
            lines.enter_context(connect(server, _posted(body), 4096))
        wait_until(lambda: server.metric("num_requests_running") == 2, "two running requests")
        assert server.post(COMPLETIONS, SHORT).status_code == 429
        wait_until(server.is_idle, "an idle engine")
        assert server.post(COMPLETIONS, SHORT | {"n": 2}).status_code == 200
        with within(5):
            server.process.terminate()
            assert server.process.wait(10) == 0


def test_an_engine_that_stands_still_hangs_nobody() -> None:
    with Server(*MTP, "--request-timeout", "0.3", "--drain-timeout", "1") as server:
        pid = server.engine_pid()
        os.kill(pid, signal.SIGSTOP)
        with within(5):
            whole = server.post(COMPLETIONS, SHORT)
        assert (whole.status_code, whole.json()["error"]["code"]) == (408, "timeout")
        assert server.get("/health").status_code == 200
        with within(10):
            server.process.terminate()
            assert server.process.wait(10) == 0
        assert not os.path.exists(f"/proc/{pid}/fd/0"), "the engine is still there"


@pytest.mark.slow
def test_a_server_that_is_killed_can_be_started_again_at_its_port(wanted_text: str) -> None:
    server = Server(*MTP)
    try:
        with (
            within(10),
            httpx.stream("POST", f"{server.url}{COMPLETIONS}", json=LONG, timeout=10) as response,
        ):
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            server.process.kill()
            with pytest.raises(httpx.HTTPError):  # it breaks off, and is not mistaken for an end
                list(events(lines))
        with pytest.raises(httpx.ConnectError):
            server.post(COMPLETIONS, SHORT)
        server.process.wait(10)
        with Server(*MTP, "--port", server.url.rpartition(":")[2]) as again:
            assert again.url == server.url
            assert text_of(again) == wanted_text
            wait_until(again.is_idle, "an idle engine", 3)
            engine = again.engine_pid()
            # Ctrl-C at a terminal reaches both processes: the engine leaves the end to the server.
            os.kill(engine, signal.SIGINT)
            os.kill(engine, signal.SIGTERM)
            assert text_of(again) == wanted_text and again.engine_pid() == engine
            url = f"{again.url}{COMPLETIONS}"
            with httpx.stream("POST", url, json=LONG, timeout=10) as response, within(10):
                assert next(response.iter_lines()).startswith("data: ")
                again.process.send_signal(signal.SIGINT)
                wait_until(lambda: not _accepts(again), "a closed port")
                again.process.send_signal(signal.SIGTERM)  # the second one does not wait
                assert again.process.wait(10) == 0
    finally:
        server.stop()


def _accepts(server: Server) -> bool:
    try:
        connect(server, b"").close()
    except OSError:
        return False
    return True


@pytest.mark.slow
def test_an_engine_that_is_killed_while_it_loads_again_ends_the_server() -> None:
    server = Server(*MTP)
    try:
        first = server.engine_pid()
        os.kill(first, signal.SIGKILL)

        def second_engine() -> bool:
            with contextlib.suppress(AssertionError):
                return server.engine_pid() != first
            return False

        wait_until(second_engine, "another engine")
        assert server.get("/health/ready").status_code == 503
        with within(10):
            os.kill(server.engine_pid(), signal.SIGKILL)
            assert server.process.wait(10) == 1
        assert "giving up" in server.log
    finally:
        server.stop()
