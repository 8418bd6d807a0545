"""The synchronous front: prompts in, texts out."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, overload

from outrider.checks import as_tuple
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine import Engine
from outrider.errors import ConcurrentCallError, OutriderError, RequestError
from outrider.models.files import resolve_checkpoint
from outrider.output import RequestOutput
from outrider.params import SamplingParams
from outrider.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Progress = Callable[[int, int, int], None]
"""Called with (requests finished, requests in all, tokens so far)."""


_REQUEST_NUMBERS = itertools.count()


class LLM:
    """A model ready to generate.

        llm = LLM("path-or-hub-id", speculative_config=SpeculativeConfig("mtp"))
        print(llm.generate("def main():").text)

    One thread calls it: a call that meets another thread's inside the engine is refused with
    ConcurrentCallError. Calls may be nested and streams interleaved: they share the engine.

    Args:
        model: local folder or hub id.
        speculative_config: how to draft; None decodes plainly.
        options: any other field of EngineConfig.
    """

    def __init__(
        self, model: str, *, speculative_config: SpeculativeConfig | None = None, **options: Any
    ) -> None:
        config = EngineConfig(model, speculative_config=speculative_config, **options)
        # A revision names a commit of the model's repository, not of another one.
        revision = config.revision if config.tokenizer is None else None
        self.tokenizer = Tokenizer.from_pretrained(
            resolve_checkpoint(config.tokenizer_source, revision)
        )
        self.engine = Engine(config, self.tokenizer)
        self._inboxes: dict[str, _Inbox] = {}
        self._abandoned: set[str] = set()

    def default_params(self) -> SamplingParams:
        """What is used where a call gives no parameters: the checkpoint's own recommendation."""
        defaults: dict[str, Any] = dict(self.engine.model_config.sampling_defaults)
        return SamplingParams(**defaults)

    @overload
    def generate(
        self,
        prompts: str,
        params: SamplingParams | None = None,
        *,
        progress: Progress | None = None,
    ) -> RequestOutput: ...

    @overload
    def generate(
        self,
        prompts: Sequence[int] | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Progress | None = None,
    ) -> RequestOutput | list[RequestOutput]: ...

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Progress | None = None,
    ) -> RequestOutput | list[RequestOutput]:
        """Continue one prompt, or a batch of them together.

        Args:
            prompts: a string or a list of token ids for one request; a list of such for a batch.
            params: one for all requests, or one for each.

        Returns:
            One output for a single prompt, else a list in the order of the prompts. In a batch a
            request that cannot be served has `error` set and the others go on.

        Raises:
            RequestError: a single prompt that cannot be served, or a call that makes no sense.
        """
        if _is_single(prompts):
            one = self.default_params() if params is None else params
            output = self._run([prompts], [one], progress)[0]  # pyright: ignore[reportArgumentType]
            if output.error is not None:
                raise output.error
            return output
        batch: list[Prompt] = list(prompts)  # pyright: ignore[reportArgumentType, reportAssignmentType]
        return self._run(batch, self._params_for(batch, params), progress)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Generator[RequestOutput]:
        """Continue one prompt and yield after every step that brought tokens.

        Closing the iterator early ends the request. Several streams, and calls between their
        steps, share the engine.

        Raises:
            RequestError: the prompt cannot be served.
        """
        params = self.default_params() if params is None else params
        token_ids = self._token_ids(prompt)
        self.engine.check_request(token_ids, params)
        return self._stream(token_ids, params)

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        params: SamplingParams | None = None,
        **template_options: Any,
    ) -> RequestOutput:
        """Answer a conversation, put into words by the checkpoint's chat template."""
        text = self.tokenizer.apply_chat_template(messages, **template_options)
        # The template has put every special token where it belongs.
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        output = self.generate(token_ids, params)
        assert isinstance(output, RequestOutput)
        return output

    def _stream(self, token_ids: list[int], params: SamplingParams) -> Generator[RequestOutput]:
        # Queued at the first step, so that an iterator that nobody starts holds nothing.
        with self._inbox() as inbox:
            inbox.add(token_ids, params)
            while inbox.is_open:
                yield from inbox.receive()

    def _params_for(
        self, prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [self.default_params() if params is None else params] * len(prompts)
        given = list(as_tuple(RequestError, "params", params))
        if len(given) != len(prompts):
            raise RequestError(
                "params", got=f"{len(given)} for {len(prompts)} prompts", allowed="one for each"
            )
        return given  # pyright: ignore[reportReturnType]

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if not isinstance(prompt, list | tuple):
            raise RequestError("prompt", got=prompt, allowed="a string or a list of token ids")
        return list(prompt)

    def _run(
        self, prompts: list[Prompt], params: list[SamplingParams], progress: Progress | None
    ) -> list[RequestOutput]:
        outputs: dict[int, RequestOutput] = {}
        places: dict[str, int] = {}
        num_tokens: dict[str, int] = {}
        with self._inbox() as inbox:
            for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
                try:
                    places[inbox.add(self._token_ids(prompt), one)] = index
                except ConcurrentCallError:
                    raise
                except OutriderError as error:
                    outputs[index] = RequestOutput.failed(f"prompt-{index}", error)
            while inbox.is_open:
                for output in inbox.receive():
                    num_tokens[output.request_id] = sum(
                        len(completion.token_ids) for completion in output.completions
                    )
                    if output.finished:
                        outputs[places[output.request_id]] = output
                if progress is not None:
                    progress(len(outputs), len(prompts), sum(num_tokens.values()))
        return [outputs[index] for index in range(len(prompts))]

    @contextmanager
    def _inbox(self) -> Generator[_Inbox]:
        inbox = _Inbox(self.engine, self._inboxes, self._abandoned)
        try:
            yield inbox
        finally:  # an interrupt must not leave anything running
            inbox.close()


class _Inbox:
    """The requests of one call: whoever steps the engine delivers to everybody.

    Args:
        inboxes: by request id, of all calls.
        abandoned: requests of all calls that could not be ended, as another call was inside the
            engine; the next one that steps it ends them.
    """

    def __init__(self, engine: Engine, inboxes: dict[str, _Inbox], abandoned: set[str]) -> None:
        self._engine = engine
        self._inboxes = inboxes
        self._abandoned = abandoned
        self._open: set[str] = set()
        self._received: deque[RequestOutput] = deque()

    @property
    def is_open(self) -> bool:
        """Whether outputs are still to come, or wait to be received."""
        return bool(self._open or self._received)

    def add(self, token_ids: list[int], params: SamplingParams) -> str:
        """Queue a request; returns its id."""
        request_id = f"request-{next(_REQUEST_NUMBERS)}"
        self._open.add(request_id)
        self._inboxes[request_id] = self
        try:
            self._engine.add_request(request_id, token_ids, params)
        except OutriderError:
            self._forget(request_id)
            raise
        return request_id

    def receive(self) -> list[RequestOutput]:
        """What has come for this call, after a step of the engine if nothing had."""
        if not self._received:
            if not self._engine.has_work:
                raise RequestError("the request was ended, or its outputs taken, by somebody else")
            self._end_abandoned()
            for output in self._engine.step():
                inbox = self._inboxes.get(output.request_id)
                if inbox is not None:
                    inbox._received.append(output)
                    if output.finished:
                        inbox._forget(output.request_id)
        return [self._received.popleft() for _ in range(len(self._received))]

    def close(self) -> None:
        """End what still runs."""
        for request_id in list(self._open):
            self._abandoned.add(request_id)
            self._forget(request_id)
        with suppress(ConcurrentCallError):
            self._end_abandoned()

    def _end_abandoned(self) -> None:
        for request_id in list(self._abandoned):
            self._engine.abort(request_id)
            self._abandoned.discard(request_id)

    def _forget(self, request_id: str) -> None:
        self._open.discard(request_id)
        self._inboxes.pop(request_id, None)


def _is_single(prompts: object) -> bool:
    """A string, or a list whose first element is a token id."""
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, list | tuple):
        raise RequestError(
            "prompts", got=prompts, allowed="a string, a list of token ids, or a list of these"
        )
    return len(prompts) > 0 and isinstance(prompts[0], int)
