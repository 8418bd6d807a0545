"""The engine in a process of its own: requests come by one socket, what they gain goes by another.

Run as `python -m outrider.engine_process` by `AsyncLLM`, never by hand. Knows nothing of HTTP. The
process lives no longer than the one that started it: it ends when its standard input does.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol

import msgspec
import zmq

from outrider.config import EngineConfig
from outrider.engine import Engine
from outrider.engine_messages import (
    Abort,
    Accepted,
    Add,
    CompletionDelta,
    Failed,
    FromEngine,
    Progress,
    Ready,
    Refused,
    RequestDelta,
    Startup,
    Stats,
    Stop,
    ToEngine,
    decode_to_engine,
    encode,
    refuse_unreadable,
    to_fault,
)
from outrider.errors import OutriderError, StuckRoundError
from outrider.grammar_queue import GrammarQueue
from outrider.models.files import resolve_checkpoint
from outrider.output import RequestOutput
from outrider.params import SamplingParams
from outrider.tokenizer import Tokenizer

logger = logging.getLogger("outrider.engine_process")

STATS_SECONDS = 0.25
"""Least time between two messages about the engine's state."""

_COMPILING_SECONDS = 0.002
"""Most time between two looks at the grammars that compile, where there is nothing else to do."""

_LINGER_MS = 1000
_USER_ERROR, _CRASHED = 2, 1


class Ports(Protocol):
    """The way to the front process and back."""

    def receive(self, timeout: float | None) -> ToEngine | None:
        """The next message; None where none comes in `timeout` seconds. None waits for ever."""
        ...

    def send(self, message: FromEngine) -> None:
        """Never waits."""
        ...


class SocketPorts:
    """Ports over two ZeroMQ sockets, with queues that have no limit."""

    def __init__(self, to_engine: str, from_engine: str) -> None:
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.set_hwm(0)
        self._inbox.bind(to_engine)
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.set_hwm(0)
        self._outbox.setsockopt(zmq.LINGER, _LINGER_MS)
        self._outbox.bind(from_engine)

    def receive(self, timeout: float | None) -> ToEngine | None:
        while self._inbox.poll(None if timeout is None else round(timeout * 1000)):
            content = self._inbox.recv()
            try:
                return decode_to_engine(content)
            except msgspec.MsgspecError as error:  # one message, and not the others' fault
                logger.error("a message cannot be read (%s)", error)
                refusal = refuse_unreadable(content, error)
                if refusal is not None:
                    self.send(refusal)
        return None

    def send(self, message: FromEngine) -> None:
        self._outbox.send(encode(message))

    def close(self) -> None:
        """Hand over what is still queued, for a second at most."""
        self._inbox.close(linger=0)
        self._outbox.close()
        self._context.term()


@dataclass
class _Sent:
    """How much of an output has been sent."""

    num_tokens: int = 0
    num_rounds: int = 0
    num_logprobs: int = 0
    finished: bool = False


@dataclass
class _Open:
    """A request that runs, and what has been sent of it."""

    outputs: list[_Sent]
    prompt_logprobs_sent: bool = False

    @property
    def num_sequences(self) -> int:
        return sum(not output.finished for output in self.outputs)


class EngineService:
    """Serves an engine over ports: takes messages in between two steps, never during one."""

    def __init__(self, engine: Engine, ports: Ports) -> None:
        self._engine = engine
        self._ports = ports
        self._open: dict[str, _Open] = {}
        self._grammars = GrammarQueue(engine.check_request)
        self._steps = _StepTimes()
        self._is_stuck = False

    def run(self) -> None:
        """Until a Stop comes.

        Raises:
            StuckRoundError: the device does not answer; every request has been told.
        """
        try:
            self._run()
        finally:
            self._grammars.close()

    def _run(self) -> None:
        while self._take_messages():
            for checked in self._grammars.take_checked():
                if checked.error is None:
                    self._queue(checked.message, checked.params)
                else:
                    self._fail(checked.message.request_id, checked.error)
            if self._engine.has_work:
                self._step()
            if self._is_stuck:
                raise StuckRoundError("the device does not answer", hint="start another engine")
            if self._steps.is_due():
                self._send_stats()

    def _take_messages(self) -> bool:
        """Handle what has come, and wait for something where there is nothing to do."""
        timeout = 0.0 if self._engine.has_work else self._steps.idle_timeout()
        if self._grammars:
            timeout = _COMPILING_SECONDS if timeout is None else min(timeout, _COMPILING_SECONDS)
        while (message := self._ports.receive(timeout)) is not None:
            timeout = 0.0
            match message:
                case Add():
                    self._add(message)
                case Abort(request_id):
                    self._grammars.drop(request_id)
                    self._engine.abort(request_id)
                    self._open.pop(request_id, None)
                    self._steps.changed = True
                case Stop():
                    return False
        return True

    def _add(self, message: Add) -> None:
        try:
            params = SamplingParams(**message.params)
        except OutriderError as error:
            self._fail(message.request_id, error)
            return
        self._steps.changed = True
        if params.grammar is None:
            self._queue(message, params)
        else:
            self._grammars.add(message, params)

    def _queue(self, message: Add, params: SamplingParams) -> None:
        """Hand a request to the engine, which finds its grammar compiled."""
        try:
            self._engine.add_request(message.request_id, message.token_ids, params)
        except OutriderError as error:
            self._fail(message.request_id, error)
            return
        self._open[message.request_id] = _Open([_Sent() for _ in range(params.n)])
        self._steps.changed = True
        self._ports.send(Accepted(message.request_id))

    def _step(self) -> None:
        started = time.perf_counter()
        outputs = self._engine.step()
        self._steps.add(time.perf_counter() - started)
        deltas: list[RequestDelta] = []
        for output in outputs:
            if output.error is not None:
                self._fail(output.request_id, output.error)
            elif output.request_id in self._open:
                deltas.append(self._delta(output))
        if deltas:
            self._ports.send(Progress(tuple(deltas)))

    def _fail(self, request_id: str, error: OutriderError) -> None:
        self._open.pop(request_id, None)
        self._ports.send(Refused(request_id, to_fault(error)))
        self._is_stuck |= isinstance(error, StuckRoundError)

    def _delta(self, output: RequestOutput) -> RequestDelta:
        request = self._open[output.request_id]
        prompt_logprobs = None
        # The first output's prompt is the one that reports; it is whole once a token has come.
        if not request.prompt_logprobs_sent and output.completions[0].token_ids:
            request.prompt_logprobs_sent = True
            prompt_logprobs = output.prompt_logprobs
        if output.finished:
            del self._open[output.request_id]
        completions = tuple(_completion_deltas(output, request.outputs))
        return RequestDelta(
            output.request_id, completions, prompt_logprobs, output.num_cached_tokens
        )

    def _send_stats(self) -> None:
        cache = self._engine.cache
        num_running = cache.slots.size - cache.slots.num_free
        num_sequences = sum(request.num_sequences for request in self._open.values())
        num_sequences += self._grammars.num_sequences
        self._ports.send(
            Stats(
                num_running=num_running,
                num_waiting=max(num_sequences - num_running, 0),
                kv_usage=1 - cache.num_available / cache.blocks.size,
                num_preemptions=self._engine.scheduler.num_preemptions,
                step_seconds=self._steps.take(),
                pass_times=self._engine.runner.take_times(),
            )
        )


@dataclass
class _StepTimes:
    """Durations of steps, and when they are to be told."""

    changed: bool = True
    seconds: list[float] = field(default_factory=list[float])
    told_at: float = 0.0

    def add(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self.changed = True

    def is_due(self) -> bool:
        return self.changed and time.monotonic() - self.told_at >= STATS_SECONDS

    def idle_timeout(self) -> float | None:
        """How long to wait for messages where there is no work; None is for ever."""
        if not self.changed:
            return None
        return max(self.told_at + STATS_SECONDS - time.monotonic(), 0.0)

    def take(self) -> tuple[float, ...]:
        taken, self.seconds = tuple(self.seconds), []
        self.changed, self.told_at = False, time.monotonic()
        return taken


def _completion_deltas(output: RequestOutput, sent: list[_Sent]) -> Iterator[CompletionDelta]:
    for completion, before in zip(output.completions, sent, strict=True):
        if before.finished or (
            len(completion.token_ids) == before.num_tokens and not completion.finished
        ):
            continue
        logprobs = completion.logprobs or ()
        yield CompletionDelta(
            completion.index,
            completion.new_text,
            completion.token_ids[before.num_tokens :],
            completion.rounds[before.num_rounds :],
            logprobs[before.num_logprobs :],
            completion.finish_reason,
        )
        before.num_tokens = len(completion.token_ids)
        before.num_rounds = len(completion.rounds)
        before.num_logprobs = len(logprobs)
        before.finished = completion.finished


def main() -> int:
    """Load the model, serve until told to stop; returns the exit code."""
    startup: Startup = pickle.load(sys.stdin.buffer)
    _live_with_parent(sys.stdin.buffer)
    logging.basicConfig(
        level=startup.log_level, format="outrider engine: %(message)s", stream=sys.stderr
    )
    ports = SocketPorts(startup.to_engine, startup.from_engine)
    try:
        engine = _load(startup.config)
    except OutriderError as error:
        ports.send(Failed(to_fault(error)))
        ports.close()
        return _USER_ERROR
    ports.send(
        Ready(
            max_model_len=engine.max_model_len,
            vocab_size=engine.model_config.vocab_size,
            max_num_seqs=startup.config.max_num_seqs,
            sampling_defaults=dict(engine.model_config.sampling_defaults),
        )
    )
    try:
        EngineService(engine, ports).run()
    except Exception:
        # The state of the device is not known any more: end, and let the front say so.
        logger.exception("the engine has failed")
        ports.close()
        return _CRASHED
    ports.close()
    return 0


def _load(config: EngineConfig) -> Engine:
    revision = config.revision if config.tokenizer is None else None
    folder = resolve_checkpoint(config.tokenizer_source, revision)
    return Engine(config, Tokenizer.from_pretrained(folder))


def _live_with_parent(stdin: BinaryIO) -> None:
    """End when the parent ends, and not by the signals that a terminal sends to both."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the parent drains first, then says Stop

    def watch() -> None:
        stdin.read()
        os._exit(_CRASHED)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # the watching thread sits in a read that nothing else ends
