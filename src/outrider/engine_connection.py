"""The line to the engine process: starting it, two local sockets, and word of its end.

Knows neither requests nor outputs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import zmq
import zmq.asyncio

from outrider.config import EngineConfig
from outrider.engine_messages import (
    FromEngine,
    Startup,
    Stop,
    ToEngine,
    decode_from_engine,
    encode,
)

_STOP_SECONDS = 5.0
"""How long the process may take to end before it is killed; a round at most, as a rule."""

_LAST_WORDS_SECONDS = 0.2
"""How long to listen for what the process said before it ended."""


class EngineConnection:
    """An engine process, started when the object is made.

    Attributes:
        ended: set once the process is gone, or was stopped.
    """

    def __init__(self, config: EngineConfig, log_level: int) -> None:
        # Local sockets in a folder that nobody else may enter: nothing listens on a network.
        self._folder = tempfile.mkdtemp(prefix="outrider-")
        self._process = _start_process(
            Startup(config, self._address("to-engine"), self._address("from-engine"), log_level)
        )
        self.ended = asyncio.Event()
        self._is_open = self._is_stopped = False

    def _address(self, name: str) -> str:
        return f"ipc://{self._folder}/{name}"

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def open(self, on_message: Callable[[FromEngine], None], on_end: Callable[[int], None]) -> None:
        """Listen, from the running event loop. May be repeated.

        Args:
            on_end: called with the exit code of a process that ended by itself.
        """
        if self._is_open or self._is_stopped:
            return
        self._is_open = True
        self._context = zmq.asyncio.Context()
        self._inbox = self._context.socket(zmq.PULL)
        # The side that connects has a queue from the beginning, so sending never waits.
        self._outbox: zmq.Socket[bytes] = zmq.Context(self._context).socket(zmq.PUSH)
        for socket, name in ((self._inbox, "from-engine"), (self._outbox, "to-engine")):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RECONNECT_IVL, 20)
            socket.connect(self._address(name))
        self._reader = asyncio.create_task(self._read(on_message))
        watch = (asyncio.get_running_loop(), on_end)
        threading.Thread(target=self._watch, args=watch, name="engine-watch", daemon=True).start()

    def send(self, message: ToEngine) -> None:
        """Does not wait; nothing comes of it once the process is gone."""
        assert self._is_open, "nothing is sent before somebody listens"
        if not self._is_stopped:
            self._outbox.send(encode(message), zmq.NOBLOCK)

    def stop(self) -> None:
        """End the process, by force where it does not answer. May be repeated."""
        if self._is_stopped:
            return
        if self._is_open:
            self.send(Stop())
        else:  # its life hangs on this pipe
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._is_stopped = True
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._is_open:
            self._reader.cancel()
            self._inbox.close()
            self._outbox.close()
            self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)
        self.ended.set()

    async def _read(self, on_message: Callable[[FromEngine], None]) -> None:
        while True:
            on_message(decode_from_engine(await self._inbox.recv()))

    def _watch(self, loop: asyncio.AbstractEventLoop, on_end: Callable[[int], None]) -> None:
        """In a thread of its own: nothing else tells at once that a process has ended."""
        code = self._process.wait()

        def tell() -> None:
            if not self._is_stopped:
                on_end(code)
            self.ended.set()

        with contextlib.suppress(RuntimeError):  # the loop has closed, and nobody asks any more
            loop.call_soon_threadsafe(loop.call_later, _LAST_WORDS_SECONDS, tell)


def _start_process(startup: Startup) -> subprocess.Popen[bytes]:
    # A process by its own command, not multiprocessing: a user's script needs no __main__ guard.
    source = str(Path(__file__).parents[1])
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "outrider.engine_process"],
        stdin=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # its end is noticed as every other one is
        process.stdin.write(pickle.dumps(startup))
        process.stdin.flush()
    return process
