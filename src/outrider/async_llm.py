"""The asynchronous front: the engine in a process of its own, outputs by async iteration.

Prompts become tokens here and token ids become text there, so that a round waits for neither
prompts nor HTTP. Needs the packages pyzmq and msgspec (`pip install 'outrider[server]'`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

from outrider.admission import check_prompt
from outrider.batch import FinishReason
from outrider.checks import check_type
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine_connection import EngineConnection
from outrider.engine_messages import (
    Abort,
    Accepted,
    Add,
    Failed,
    FromEngine,
    Progress,
    Ready,
    Refused,
    RequestDelta,
    Stats,
    params_to_fields,
    to_error,
)
from outrider.errors import EngineDeadError, OutriderError, RequestError
from outrider.growing import GrowingOutput
from outrider.models.files import resolve_checkpoint
from outrider.output import RequestOutput
from outrider.params import SamplingParams
from outrider.tokenizer import Tokenizer

logger = logging.getLogger("outrider.async_llm")

Prompt = str | Sequence[int]


class Observer(Protocol):
    """Is told what happens, in the event loop's thread; for metrics."""

    def request_started(self, request: RequestStream) -> None:
        """The request was sent to the engine."""
        ...

    def request_grew(self, request: RequestStream, delta: RequestDelta) -> None:
        """Tokens have come. Called before those who wait for them go on."""
        ...

    def request_ended(self, request: RequestStream) -> None:
        """The request has finished, was refused, aborted, or lost."""
        ...

    def engine_reported(self, stats: Stats) -> None:
        """The engine says how it stands."""
        ...


class AsyncLLM:
    """A model ready to generate in another process.

        async with AsyncLLM("path-or-hub-id") as llm:
            async for output in llm.generate("def main():"):
                print(output.new_text, end="")

    Belongs to one event loop. The engine process starts when the object is made, and the model
    loads while the caller goes on; the first request waits for it.

    Args:
        model: local folder or hub id, or the whole configuration.
        speculative_config: how to draft; None decodes plainly.
        observer: is told of requests and of the engine's state.
        options: any other field of EngineConfig.

    Raises:
        ConfigError: an option is not allowed.
        CheckpointError: the tokenizer cannot be read.
    """

    def __init__(
        self,
        model: str | EngineConfig,
        *,
        speculative_config: SpeculativeConfig | None = None,
        observer: Observer | None = None,
        **options: Any,
    ) -> None:
        if isinstance(model, EngineConfig):
            if speculative_config is not None or options:
                raise RequestError(
                    "options beside a whole EngineConfig", got=sorted(options), allowed="none"
                )
            self.config = model
        else:
            self.config = EngineConfig(model, speculative_config=speculative_config, **options)
        revision = self.config.revision if self.config.tokenizer is None else None
        self.tokenizer = Tokenizer.from_pretrained(
            resolve_checkpoint(self.config.tokenizer_source, revision)
        )
        self._observer = observer
        self._request_numbers = itertools.count()
        self._streams: dict[str, RequestStream] = {}
        self._ended = asyncio.Event()  # set at every end of a request; `drain` waits on it
        self._facts: Ready | None = None
        self._error: OutriderError | None = None
        self._settled = asyncio.Event()  # the model is loaded, or never will be
        self._connection = EngineConnection(self.config, logging.getLogger().getEffectiveLevel())

    @property
    def pid(self) -> int:
        """Of the engine process."""
        return self._connection.pid

    @property
    def error(self) -> OutriderError | None:
        """Why nothing can be served any more; None while the engine loads or lives."""
        return self._error

    @property
    def is_ready(self) -> bool:
        """The model is loaded and the engine lives."""
        return self._facts is not None and self._error is None

    @property
    def facts(self) -> Ready | None:
        """What the engine said of itself when it had loaded the model; None before."""
        return self._facts

    async def ready(self) -> Ready:
        """Wait until the model is loaded; returns what the engine says of itself.

        Raises:
            OutriderError: what kept the engine from loading, or EngineDeadError once it has ended.
        """
        self._connection.open(self._receive, self._process_ended)
        await self._settled.wait()
        if self._error is not None:
            raise self._error
        assert self._facts is not None
        return self._facts

    async def dead(self) -> OutriderError:
        """Wait until the engine has ended; returns why."""
        self._connection.open(self._receive, self._process_ended)
        await self._connection.ended.wait()
        assert self._error is not None
        return self._error

    async def default_params(self) -> SamplingParams:
        """What is used where a call gives no parameters: the checkpoint's own recommendation."""
        return SamplingParams(**(await self.ready()).sampling_defaults)

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Continue one prompt and yield whenever tokens have come, all that have come at once.

        Closing the iterator early ends the request.

        Raises:
            RequestError: the prompt or a parameter cannot be served.
            EngineDeadError: the engine process has ended.
        """
        stream = await self.submit(prompt, params)
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    async def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> RequestStream:
        """Queue a request and return once the engine has accepted it.

        The caller iterates over the stream or closes it.

        Raises:
            RequestError: the prompt or a parameter cannot be served; nothing is queued then.
            EngineDeadError: the engine process has ended.
        """
        if params is None:
            params = await self.default_params()
        check_type(RequestError, "params", params, SamplingParams)
        token_ids: object = prompt
        if isinstance(prompt, str):
            token_ids = await asyncio.to_thread(self.tokenizer.encode, prompt)
        facts = await self.ready()
        # The engine checks as well, but what is no list of ids does not get as far as there.
        token_ids = check_prompt(token_ids, facts.max_model_len, facts.vocab_size)
        request_id = f"request-{next(self._request_numbers)}"
        stream = RequestStream(self, request_id, token_ids, params)
        self._streams[request_id] = stream
        if self._observer is not None:
            self._observer.request_started(stream)
        try:
            self._connection.send(
                Add(request_id, stream.prompt_token_ids, params_to_fields(params))
            )
            await stream.accepted()
        except BaseException:
            stream.close()
            raise
        return stream

    async def drain(self) -> None:
        """Wait until no request is open, those that come meanwhile included."""
        while self._streams:
            self._ended.clear()
            await self._ended.wait()

    def shutdown(self) -> None:
        """End the engine process; what is in flight fails with EngineDeadError. May be repeated."""
        self._die(EngineDeadError("the engine was shut down"))
        self._connection.stop()

    async def __aenter__(self) -> AsyncLLM:
        try:
            await self.ready()
        except BaseException:
            self.shutdown()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def cancel(self, stream: RequestStream) -> bool:
        """Abort a request; False where it has ended already. For RequestStream."""
        if stream.request_id not in self._streams:
            return False
        self._connection.send(Abort(stream.request_id))
        self.forget(stream)
        return True

    def forget(self, stream: RequestStream) -> None:
        """A request has ended. For RequestStream."""
        if self._streams.pop(stream.request_id, None) is not None:
            self._ended.set()
            if self._observer is not None:
                self._observer.request_ended(stream)
            stream.note_end()

    def _receive(self, message: FromEngine) -> None:
        match message:
            case Progress(requests):
                for delta in requests:
                    stream = self._streams.get(delta.request_id)
                    if stream is not None:
                        self._deliver(stream, delta)
            case Accepted(request_id):
                if request_id in self._streams:
                    self._streams[request_id].accept()
            case Refused(request_id, fault):
                if request_id in self._streams:
                    self._streams[request_id].fail(to_error(fault))
            case Stats() as stats:
                if self._observer is not None:
                    self._observer.engine_reported(stats)
            case Ready() as facts:
                self._facts = facts
                self._settled.set()
            case Failed(fault):
                self._die(to_error(fault))

    def _deliver(self, stream: RequestStream, delta: RequestDelta) -> None:
        if self._observer is not None:
            self._observer.request_grew(stream, delta)
        stream.deliver(delta)

    def _process_ended(self, code: int) -> None:
        if self._error is None:
            logger.error("the engine process has ended with code %d", code)
        while_loading = " while it loaded the model" if self._facts is None else ""
        self._die(
            EngineDeadError(
                f"the engine process has ended{while_loading}",
                got=f"exit code {code}",
                hint="see its messages on standard error",
            )
        )

    def _die(self, error: OutriderError) -> None:
        """Nothing is served from now on; the first reason is the one that is told."""
        if self._error is None:
            self._error = error
        self._settled.set()
        for stream in list(self._streams.values()):
            stream.fail(self._error)


class RequestStream:
    """One request in flight: an async iterator over its outputs, each with all that has come.

    Attributes:
        request_id: unique within its AsyncLLM.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        request_id: str,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self._llm = llm
        self._growing = GrowingOutput(request_id, prompt_token_ids, params)
        self._deltas: list[RequestDelta] = []
        self._news = asyncio.Event()
        self._accepted = False
        self._has_ended = False
        self._at_end: Callable[[], None] | None = None
        self._error: OutriderError | None = None

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._growing.finished:
            raise StopAsyncIteration
        while not self._deltas:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        deltas, self._deltas = self._deltas, []
        return self._growing.add(deltas)

    async def accepted(self) -> None:
        """Wait until the engine has accepted the request, or raise why it did not."""
        while not self._accepted:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()

    def close(self) -> None:
        """End the request, if it runs, within a round."""
        self._llm.cancel(self)

    def cancel(self, error: OutriderError) -> None:
        """End the request, if it runs, and let who waits for it have the error."""
        if self._llm.cancel(self):
            self.fail(error)

    def call_at_end(self, callback: Callable[[], None]) -> None:
        """Call once the engine has nothing more to do for the request, however it ended.

        What has come may not have been taken by then. Called at once where it has ended already.
        """
        if self._has_ended:
            callback()
        else:
            self._at_end = callback

    @property
    def finish_reasons(self) -> tuple[FinishReason | None, ...]:
        """Of each output, as far as the deltas were taken."""
        return self._growing.finish_reasons

    def accept(self) -> None:
        """The engine has accepted the request. For AsyncLLM."""
        self._accepted = True
        self._news.set()

    def deliver(self, delta: RequestDelta) -> None:
        """Tokens have come. For AsyncLLM."""
        self._deltas.append(delta)
        self._news.set()
        if self._growing.note_ends(delta):
            self._llm.forget(self)

    def note_end(self) -> None:
        """The request has ended. For AsyncLLM."""
        self._has_ended = True
        if self._at_end is not None:
            self._at_end()

    def fail(self, error: OutriderError) -> None:
        """Nothing more will come. For AsyncLLM."""
        self._error = error
        self._news.set()
        self._llm.forget(self)
