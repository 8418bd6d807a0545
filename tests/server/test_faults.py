"""Clients that leave, engines that die, servers that are told to end, keys, full queues."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.serving import MTP, Server, events, wait_until

LONG: dict[str, Any] = {"prompt": "def f", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
SHORT: dict[str, Any] = {"prompt": "def f", "max_tokens": 3, "temperature": 0}
STREAM = {"stream": True}
COMPLETIONS = "/v1/completions"


def begun(response: httpx.Response) -> Iterator[str]:
    """The lines of a stream that has sent something; the stream ends where they are dropped."""
    lines = response.iter_lines()
    assert next(lines).startswith("data: ")
    return lines


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be asked for its exit code does not."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_stream_whose_client_leaves_is_aborted(server: Server) -> None:
    aborted = server.metric("request_success_total", finished_reason="abort")
    with httpx.stream("POST", f"{server.url}{COMPLETIONS}", json=LONG | STREAM) as response:
        lines = begun(response)
        wait_until(lambda: server.metric("num_requests_running") == 1, "a running request")
        del lines
    wait_until(server.is_idle, "an idle engine", 3)
    assert server.metric("request_success_total", finished_reason="abort") == aborted + 1


def test_a_client_that_leaves_before_its_answer_is_aborted(server: Server) -> None:
    body = LONG | {"prompt": ["a", "b"], "n": 2}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}{COMPLETIONS}", json=body, timeout=0.8)
    wait_until(server.is_idle, "an idle engine", 3)
    assert server.post(COMPLETIONS, SHORT).status_code == 200


def test_a_client_that_reads_nothing_holds_up_nobody(server: Server) -> None:
    """Half open: the request is sent, the answer is never read, then the line is dropped."""
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps(LONG | STREAM).encode()
    with socket.create_connection((host, int(port))) as line:
        head = (
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        line.sendall(head.encode() + content)
        wait_until(lambda: server.metric("num_requests_running") == 1, "a running request")
        assert server.post(COMPLETIONS, SHORT).status_code == 200
        # A reset, not an orderly end.
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    wait_until(server.is_idle, "an idle engine", 3)


KEY = "sesame-4711"


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    """One sequence at a time, none waiting, a key, and little patience."""
    flags = ("--max-num-seqs", "1", "--max-waiting", "0", "--request-timeout", "2", "--verbose")
    environment = {"OUTRIDER_API_KEY": "other-key"}
    with Server(*flags, "--api-key", KEY, environment=environment) as running:
        yield running


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/version", "/openapi.json", "/x"])
def test_without_the_key_there_is_nothing_to_see(guarded: Server, path: str) -> None:
    for headers in (
        {},
        bearer("wrong"),
        {"Authorization": "Bearer"},
        {"Authorization": KEY},
        bearer(KEY + "1"),
    ):
        answer = guarded.get(path, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_api_key"
    wanted = 404 if path == "/x" else 200
    assert guarded.get(path, headers=bearer(KEY)).status_code == wanted
    assert guarded.get(path, headers=bearer("other-key")).status_code == wanted


def test_health_needs_no_key(guarded: Server) -> None:
    assert guarded.get("/health").status_code == guarded.get("/health/ready").status_code == 200


def test_a_full_queue_is_429_and_a_slow_request_408(guarded: Server) -> None:
    headers = bearer(KEY)
    url = f"{guarded.url}{COMPLETIONS}"
    with httpx.stream("POST", url, json=LONG | STREAM, headers=headers) as running:
        lines = begun(running)
        full = guarded.post(COMPLETIONS, SHORT, headers=headers)
        assert full.status_code == 429 and int(full.headers["retry-after"]) >= 1
        assert full.json()["error"]["code"] == "too_many_requests"
        del lines
    deadline = time.monotonic() + 5
    while (answer := guarded.post(COMPLETIONS, SHORT, headers=headers)).status_code == 429:
        assert time.monotonic() < deadline, "the place in the queue did not come back"
    assert answer.status_code == 200
    never = guarded.post(COMPLETIONS, SHORT | {"n": 2}, headers=headers)
    assert (never.status_code, never.json()["error"]["param"]) == (400, "n")

    started = time.monotonic()
    slow = guarded.post(COMPLETIONS, LONG | {"max_tokens": 480}, headers=headers)
    assert 1.9 < time.monotonic() - started < 4
    assert (slow.status_code, slow.json()["error"]["code"]) == (408, "timeout")
    with httpx.stream("POST", url, json=LONG | STREAM, headers=headers) as response:
        lines = [line for line in response.iter_lines() if line]
    error = json.loads(lines[-1].removeprefix("data: "))["error"]
    assert (error["code"], error["status"]) == ("timeout", 408)


def test_nothing_secret_is_logged(guarded: Server) -> None:
    guarded.get("/v1/models?token=in-the-query", headers=bearer("my-guess"))
    guarded.post(COMPLETIONS, SHORT | {"prompt": "private words"}, headers=bearer(KEY))
    wait_until(lambda: "POST '/v1/completions' 200" in guarded.log, "the request in the log")
    for secret in (KEY, "other-key", "my-guess", "in-the-query", "private words"):
        assert secret not in guarded.log


def test_an_engine_that_is_killed_is_replaced_once_and_then_the_server_gives_up() -> None:
    server = Server(*MTP)
    try:
        url = f"{server.url}{COMPLETIONS}"
        answers: list[httpx.Response] = []
        whole = threading.Thread(target=lambda: answers.append(server.post(COMPLETIONS, LONG)))
        with httpx.stream("POST", url, json=LONG | STREAM, timeout=10) as response:
            lines = begun(response)
            whole.start()
            wait_until(lambda: server.metric("num_requests_running") == 2, "two requests")
            first_pid = server.engine_pid()
            os.kill(first_pid, signal.SIGKILL)
            rest = [line for line in lines if line]
        error = json.loads(rest[-1].removeprefix("data: "))["error"]
        assert (error["status"], error["code"]) == (503, "engine_unavailable")
        whole.join(10)
        assert answers[0].status_code == 503 and "retry-after" in answers[0].headers
        assert server.get("/health").status_code == 200
        while_loading = server.post(COMPLETIONS, SHORT)
        assert while_loading.status_code == 503 == server.get("/health/ready").status_code
        server.wait_for_line("ready at", count=2)
        assert server.engine_pid() != first_pid
        assert server.post(COMPLETIONS, SHORT).status_code == 200
        assert server.metric("engine_restarts_total") == 1 and server.is_idle()
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert server.process.wait(10) == 1
        assert "giving up" in server.log
    finally:
        server.stop()


def test_sigterm_lets_running_requests_end() -> None:
    with Server(*MTP) as server:
        body = LONG | STREAM | {"max_tokens": 60}
        with httpx.stream("POST", f"{server.url}{COMPLETIONS}", json=body) as response:
            lines = begun(response)
            server.process.terminate()
            wait_until(lambda: not _accepts(server), "a closed port")
            chunks = list(events(lines))
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(10) == 0


def _accepts(server: Server) -> bool:
    host, port = server.url.removeprefix("http://").split(":")
    try:
        socket.create_connection((host, int(port)), 1).close()
    except OSError:
        return False
    return True


def test_a_drain_does_not_last_longer_than_it_may() -> None:
    with Server("--drain-timeout", "1") as server:
        url = f"{server.url}{COMPLETIONS}"
        with httpx.stream("POST", url, json=LONG | STREAM) as response:
            lines = begun(response)
            started = time.monotonic()
            server.process.terminate()
            assert server.process.wait(10) == 0
            del lines
            assert time.monotonic() - started < 4


def test_the_engine_does_not_outlive_a_server_that_is_killed() -> None:
    server = Server()
    pid = server.engine_pid()
    server.process.kill()
    server.process.wait(10)
    wait_until(lambda: not is_alive(pid), "the engine's end")


def test_a_model_that_cannot_be_loaded_ends_the_server_with_one_line() -> None:
    server = Server("--kv-cache-memory-gib", "0.000001", awaits_ready=False)
    assert server.process.wait(30) == 2
    server.stop()
    errors = [line for line in server.lines if "error" in line]
    assert len(errors) == 1 and errors[0].startswith("outrider: error: "), server.log


def test_an_address_in_use_is_a_user_error(server: Server) -> None:
    port = server.url.rpartition(":")[2]
    with pytest.raises(AssertionError, match=f"cannot listen .*{port}"):
        Server("--port", port)


def test_only_this_machine_can_reach_the_server(server: Server) -> None:
    port = int(server.url.rpartition(":")[2])
    listening = [
        line.split()[1]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and int(line.split()[1].rpartition(":")[2], 16) == port
    ]
    assert [address.partition(":")[0] for address in listening] == ["0100007F"]
