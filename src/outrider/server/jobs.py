"""A client's request while it runs: one engine request for each prompt, ended whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from outrider.async_llm import RequestStream
from outrider.errors import OutriderError
from outrider.output import RequestOutput
from outrider.params import SamplingParams
from outrider.server.choices import Addition, Choice
from outrider.server.errors import ApiError, DeadlineError, from_outrider
from outrider.server.responses import (
    Heading,
    chunk_choice,
    opening_choice,
    speculation,
    usage,
    whole_choice,
)
from outrider.server.service import Place, Service

_SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_DONE = b"data: [DONE]\n\n"

Result = TypeVar("Result")


@dataclass
class Job:
    """What it takes to answer one client.

    Attributes:
        prompts: token ids, one engine request each.
        choices: one for each output; those of prompt i are the n from i * n.
        include_usage: a stream ends with a chunk that holds the usage.
        names: the client's names of fields that the engine calls otherwise.
    """

    heading: Heading
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    choices: Sequence[Choice]
    include_usage: bool
    traces: bool
    names: dict[str, str]

    @property
    def num_sequences(self) -> int:
        return len(self.choices)


class _Deadline:
    """When a request that begins now has to have ended.

    Attributes:
        at: by the event loop's clock; None where there is no limit.
        error: what who waits is told then.
    """

    def __init__(self, seconds: float | None) -> None:
        self.at = None if seconds is None else asyncio.get_running_loop().time() + seconds
        self.error = DeadlineError(
            "the request took too long", got=f"more than {seconds} s", hint="lower max_tokens"
        )


class RunningJob:
    """A job that the engine has accepted.

    It leaves its place in the queue when the engine is done with it, which may be long before a
    client that reads slowly has its answer.
    """

    def __init__(
        self, job: Job, streams: list[RequestStream], place: Place, deadline: _Deadline
    ) -> None:
        self._job = job
        self._place = place
        self._streams = streams
        self._num_running = len(streams)
        self._outputs: list[RequestOutput | None] = [None] * len(streams)
        self._timer: asyncio.TimerHandle | None = None
        if deadline.at is not None:
            self._timer = asyncio.get_running_loop().call_at(
                deadline.at, self._expire, deadline.error
            )
        for stream in streams:
            stream.call_at_end(self._stream_ended)

    @classmethod
    async def start(cls, job: Job, service: Service) -> RunningJob:
        """Submit every prompt, and return once the engine has accepted them.

        Raises:
            ApiError: one of them cannot be served, or the engine took too long; none runs then.
        """
        place = service.take_place(job.num_sequences, "prompt" if len(job.prompts) > 1 else "n")
        deadline = _Deadline(service.options.request_timeout)
        streams: list[RequestStream] = []
        try:
            async with asyncio.timeout_at(deadline.at):
                for prompt in job.prompts:
                    streams.append(await service.llm.submit(prompt, job.params))
        except BaseException as error:
            place.leave()
            for stream in streams:
                stream.close()
            if isinstance(error, TimeoutError):  # an engine that does not even take requests
                raise from_outrider(deadline.error) from error
            if isinstance(error, OutriderError):
                raise from_outrider(error, job.names) from error
            raise
        return cls(job, streams, place, deadline)

    def _stream_ended(self) -> None:
        self._num_running -= 1
        if self._num_running == 0:
            self._place.leave()

    def _expire(self, error: DeadlineError) -> None:
        for stream in self._streams:
            stream.cancel(error)

    def close(self) -> None:
        """End what still runs."""
        if self._timer is not None:
            self._timer.cancel()
        for stream in self._streams:
            stream.close()

    async def _grown(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(prompt's index, its output) whenever one has grown."""
        if len(self._streams) == 1:
            async for output in self._streams[0]:
                self._outputs[0] = output
                yield 0, output
            return
        queue: asyncio.Queue[tuple[int, RequestOutput] | OutriderError | None] = asyncio.Queue()

        async def read(index: int, stream: RequestStream) -> None:
            try:
                async for output in stream:
                    queue.put_nowait((index, output))
            except OutriderError as error:
                queue.put_nowait(error)
            queue.put_nowait(None)

        readers = [asyncio.create_task(read(i, stream)) for i, stream in enumerate(self._streams)]
        try:
            num_reading = len(readers)
            while num_reading:
                item = await queue.get()
                if item is None:
                    num_reading -= 1
                elif isinstance(item, OutriderError):
                    raise item
                else:
                    self._outputs[item[0]] = item[1]
                    yield item
        finally:
            for reader in readers:
                reader.cancel()

    def _finished(self) -> list[RequestOutput]:
        return [output for output in self._outputs if output is not None]

    def _push(self, index: int, output: RequestOutput) -> list[Addition]:
        first = index * self._job.params.n
        return [
            self._job.choices[first + completion.index].push(output, completion)
            for completion in output.completions
        ]

    async def whole(self) -> dict[str, Any]:
        """The response, once everything has ended."""
        async for _ in self._grown():
            pass
        outputs = self._finished()
        additions = [
            addition
            for index, output in enumerate(outputs)
            for addition in self._push(index, output)
        ]
        job = self._job
        block = speculation(outputs)
        if job.traces:
            block["tokens"] = [entry for addition in additions for entry in addition.trace]
            block["round_traces"] = [
                entry for addition in additions for entry in addition.round_traces
            ]
        return job.heading.response() | {
            "choices": [whole_choice(addition, job.heading.is_chat) for addition in additions],
            "usage": usage(outputs),
            "outrider": block,
        }

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a stream."""
        job = self._job
        is_chat = job.heading.is_chat
        extra: dict[str, Any] = {"usage": None} if job.include_usage else {}
        if is_chat:
            for index in range(job.num_sequences):
                yield job.heading.chunk() | {"choices": [opening_choice(index)]} | extra
        ended: set[int] = set()
        async for index, output in self._grown():
            for addition in self._push(index, output):
                if addition.is_empty or addition.index in ended:
                    continue
                chunk = job.heading.chunk() | {"choices": [chunk_choice(addition, is_chat)]} | extra
                block: dict[str, Any] = {}
                if job.traces:
                    block = {"tokens": addition.trace, "round_traces": addition.round_traces}
                if addition.finish_reason is not None:
                    ended.add(addition.index)
                    if len(ended) == job.num_sequences:
                        block |= speculation(self._finished())
                if block:
                    chunk["outrider"] = block
                yield chunk
        if job.include_usage:
            yield job.heading.chunk() | {"choices": [], "usage": usage(self._finished())}


async def answer(request: Request, job: Job, service: Service, streams: bool) -> Response:
    """The response of a job; a client that leaves ends it."""
    running = await _unless_gone(request, RunningJob.start(job, service))
    if streams:
        return _EventStream(running)
    try:
        content = await _unless_gone(request, running.whole())
    finally:
        running.close()
    return Response(msgspec.json.encode(content), media_type="application/json")


async def _unless_gone(request: Request, result: Coroutine[Any, Any, Result]) -> Result:
    """The result; ApiError where nobody waits for it any more."""
    work = asyncio.create_task(result)
    gone = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return await work
        raise ApiError(499, "the client has gone")  # for the log: nobody reads it
    finally:
        work.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _EventStream(StreamingResponse):
    """Server-sent events. Starlette stops the iteration when the client leaves."""

    def __init__(self, running: RunningJob) -> None:
        self._running = running
        super().__init__(_events(running), headers=_SSE_HEADERS, media_type="text/event-stream")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._running.close()


async def _events(running: RunningJob) -> AsyncIterator[bytes]:
    try:
        async for chunk in running.chunks():
            yield b"data: " + msgspec.json.encode(chunk) + b"\n\n"
    except OutriderError as error:
        # The status has been sent long ago; clients know an error by its key.
        body = from_outrider(error).body()
        body["error"]["status"] = from_outrider(error).status
        yield b"data: " + msgspec.json.encode(body) + b"\n\n"
        return
    yield _DONE
