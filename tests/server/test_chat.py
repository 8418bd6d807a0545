"""`outrider chat` in a terminal and against a running server."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider import render
from outrider.cli import main
from tests.server.serving import MODEL, MTP, Server, wait_until

GREEDY = ("--temperature", "0", "--max-tokens", "16")


class Terminal:
    """A program at a terminal of its own: keys in, what it shows out.

    Args:
        at_interrupt: what it inherits for SIGINT, however the tests themselves were started.
    """

    def __init__(
        self, *words: str, at_interrupt: signal.Handlers = signal.SIG_DFL, no_color: str = ""
    ) -> None:
        self._master, slave = pty.openpty()

        def prepare() -> None:
            # Ctrl-C reaches the programs whose controlling terminal this is.
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            signal.signal(signal.SIGINT, at_interrupt)

        self.process = subprocess.Popen(
            [sys.executable, "-m", "outrider", *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TERM": "xterm", "NO_COLOR": no_color},
            start_new_session=True,
            preexec_fn=prepare,
        )
        os.close(slave)
        self.shown = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 4096)
            except OSError:  # nobody holds the other side any more
                return
            self.shown += data.decode("utf-8", "replace")

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait_for(self, text: str, count: int = 1, seconds: float = 60) -> None:
        wait_until(lambda: self.shown.count(text) >= count, f"{text!r} in {self.shown!r}", seconds)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(5)
        os.close(self._master)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


def talk(terminal: Terminal, server: Server | None = None) -> None:
    """A long answer that is stopped, a short command, an end; the same for both kinds of source."""
    terminal.wait_for("> ")
    terminal.type("import os\n")
    terminal.wait_for(f"\x1b[{render.DRAFTED[0]}m")  # an accepted draft: the answer has begun
    terminal.type("\x03")
    terminal.wait_for("[stopped; /quit or Ctrl-D ends]", seconds=10)
    if server is not None:
        wait_until(server.is_idle, "an idle engine", 3)
    terminal.type("/stats\n")
    terminal.wait_for("target passes")
    terminal.wait_for("time  ")
    # A model here tells what it wrote of a stopped answer; a server tells at an answer's end only.
    tokens = re.search(r"tokens +(\d+) ", terminal.shown.split("target passes")[1])
    assert tokens is not None and (int(tokens[1]) > 0) == (server is None)
    terminal.type("half a line\x03")
    terminal.wait_for("[stopped", count=2)
    terminal.type("/nothing\n")
    terminal.wait_for("outrider: error: no such command: got '/nothing'")
    terminal.type("\x04")
    assert terminal.process.wait(10) == 0


ENDLESS = ("--temperature", "0", "--max-tokens", "400", "--frequency-penalty", "-2")
"""A text that goes on: what it holds becomes more and more likely."""


def test_ctrl_c_stops_the_answer_of_a_server_and_not_the_program(
    server: Server, terminals: list[Terminal]
) -> None:
    aborted = server.metric("request_success_total", finished_reason="abort")
    terminals.append(Terminal("chat", "--url", f"{server.url}/v1", *ENDLESS))
    talk(terminals[0], server)
    assert server.metric("request_success_total", finished_reason="abort") == aborted + 1


def test_ctrl_c_stops_the_answer_of_a_local_model_even_where_it_is_inherited_as_ignored(
    terminals: list[Terminal],
) -> None:
    flags = ("--dtype", "float32", "--max-model-len", "512", "--kv-cache-memory-gib", "0.02")
    words = ("chat", str(MODEL), *flags, *MTP, *ENDLESS)
    terminals.append(Terminal(*words, at_interrupt=signal.SIG_IGN))
    talk(terminals[0])


def says(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_a_server_and_a_local_model_say_the_same(
    server: Server,
    model_with_tools: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    local = (str(model_with_tools), "--dtype", "float32", "--max-model-len", "512", *MTP)
    said: list[str] = []
    for words in (("--url", f"{server.url}/v1"), (*local, "--kv-cache-memory-gib", "0.02")):
        for color in ("never", "always"):
            says(monkeypatch, "import os", "and sys")
            assert main(["chat", *words, *GREEDY, "--system", "x", "--color", color]) == 0
            printed = capsys.readouterr()
            assert printed.err.count("[16 tokens, ") == 2
            assert printed.err.count("acceptance length ") == 2
            said.append(printed.out)
    assert said[0] == said[2] and said[1] == said[3] and said[0] != said[1]


def test_opened_reasoning_is_told_from_the_answer(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    says(monkeypatch, "import os")
    words = ["chat", "--url", f"{server.url}/v1", *GREEDY]
    assert main([*words, "--chat-template-kwargs", '{"enable_thinking": true}']) == 0
    out = capsys.readouterr().out
    assert out.startswith("<think>\n") and out.endswith("</think>\n")


def test_what_the_server_refuses_is_said_and_the_next_message_is_answered(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    says(monkeypatch, "word " * 600, "import os")
    assert main(["chat", "--url", f"{server.url}/v1", *GREEDY]) == 1
    printed = capsys.readouterr()
    assert (
        "outrider: error: the server answers 400 Bad Request: messages is too long" in printed.err
    )
    assert printed.err.count("[16 tokens, ") == 1
    assert main(["chat", "--url", f"{server.url}/v1", "--model", "other"]) == 2
    assert "the server has no such model: got 'other'; allowed: tiny" in capsys.readouterr().err


def test_fields_of_the_request_reach_the_server(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    says(monkeypatch, "import os")
    words = ["chat", "--url", f"{server.url}/v1", *GREEDY, "--no-speculation"]
    assert main(words) == 0
    assert "acceptance length" not in capsys.readouterr().err
    says(monkeypatch, "import os")
    assert main([*words[:-1], "--top-p", "0.5", "--stop", "import", "--request-seed", "3"]) == 0
    assert "import" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_server_that_is_killed_during_an_answer_is_an_error_and_not_the_end(
    terminals: list[Terminal],
) -> None:
    server = Server(*MTP)
    try:
        terminals.append(Terminal("chat", "--url", f"{server.url}/v1", *ENDLESS))
        terminals[0].wait_for("> ")
        terminals[0].type("import os\n")
        terminals[0].wait_for(f"\x1b[{render.DRAFTED[0]}m")
        server.process.kill()
        terminals[0].wait_for("outrider: error: ", seconds=10)
        terminals[0].type("again\n")
        terminals[0].wait_for("is the server running there?", seconds=10)
        terminals[0].type("/quit\n")
        assert terminals[0].process.wait(10) == 0
    finally:
        server.stop()
