"""A server in a process of its own for tests, and what it takes to talk to it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

MODEL = Path(__file__).parents[2] / "models" / "tiny-qwen3.5"

ENGINE_FLAGS = (
    *("--dtype", "float32", "--num-threads", "1", "--max-model-len", "512"),
    *("--max-num-seqs", "4", "--kv-cache-memory-gib", "0.02", "--served-model-name", "tiny"),
)
MTP = ("--speculative-algorithm", "mtp", "--speculative-num-draft-tokens", "3")

_PATIENCE = 60.0


class Server:
    """`outrider serve` at a free port of 127.0.0.1, ended by its own process id."""

    def __init__(
        self,
        *flags: str,
        model: Path = MODEL,
        environment: dict[str, str] | None = None,
        awaits_ready: bool = True,
    ) -> None:
        command = [sys.executable, "-m", "outrider", "serve", str(model), "--port", "0"]
        self.process = subprocess.Popen(
            [*command, *ENGINE_FLAGS, *flags],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self.wait_for_line(r"listening at (http://\S+)")[1]
        if awaits_ready:
            self.wait_for_line(r"ready at")

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def wait_for_line(self, pattern: str, count: int = 1) -> re.Match[str]:
        """The `count`-th place where the log matches; fails where it does not come."""
        found: list[re.Match[str]] = []

        def enough() -> bool:
            found[:] = re.finditer(pattern, self.log)
            return len(found) >= count or self.process.poll() is not None

        wait_until(enough, f"{pattern} in the log", _PATIENCE)
        assert len(found) >= count, self.log
        return found[count - 1]

    def post(self, path: str, body: object, **options: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=_PATIENCE, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=_PATIENCE, **options)

    def metric(self, name: str, **labels: str) -> float:
        """Value of one series of /metrics."""
        return metric_of(self.get("/metrics").text, name, **labels)

    def is_idle(self) -> bool:
        """The engine says that nobody holds or awaits anything."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return all(self.metric(name) == 0 for name in names)

    def engine_pid(self) -> int:
        """Of the engine process, the server's only child that runs one."""
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                command = (entry / "cmdline").read_text()
            except OSError:
                continue
            if parent == self.process.pid and "outrider.engine_process" in command:
                return int(entry.name)
        raise AssertionError("no engine process")

    def stop(self) -> int:
        """Drain and end; returns the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            code = self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        self._reader.join(5)
        return code

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def metric_of(scrape: str, name: str, **labels: str) -> float:
    """Value of one series in Prometheus' text format."""
    for line in scrape.splitlines():
        series, _, value = line.rpartition(" ")
        if series.partition("{")[0] == f"outrider:{name}" and all(
            f'{label}="{wanted}"' in series for label, wanted in labels.items()
        ):
            return float(value)
    raise AssertionError(f"no metric {name} {labels}")


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
    """Fails where the condition does not come true in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.02)


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Objects of a stream of server-sent events, which has to end with [DONE]."""
    for line in lines:
        if not line:
            continue
        assert line.startswith("data: "), line
        if line == "data: [DONE]":
            return
        yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream ended without [DONE]")


def streamed(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All chunks of a streamed answer."""
    body = body | {"stream": True}
    with httpx.stream("POST", f"{server.url}{path}", json=body, timeout=_PATIENCE) as response:
        assert response.status_code == 200, response.read()
        return list(events(response.iter_lines()))


def joined(chunks: Sequence[dict[str, Any]], index: int = 0) -> str:
    """Text of one choice of a completion's stream."""
    return "".join(
        choice["text"]
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index
    )
