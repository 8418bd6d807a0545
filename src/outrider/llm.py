"""The synchronous front: prompts in, texts out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine import Engine
from outrider.errors import OutriderError, RequestError
from outrider.models.files import resolve_checkpoint
from outrider.output import RequestOutput
from outrider.params import SamplingParams
from outrider.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Progress = Callable[[int, int, int], None]
"""Called with (requests finished, requests in all, tokens so far)."""


class LLM:
    """A model ready to generate.

        llm = LLM("path-or-hub-id", speculative_config=SpeculativeConfig("mtp"))
        print(llm.generate("def main():").text)

    Not thread-safe, and one call runs at a time.

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
        self._num_requests = 0

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
            if isinstance(params, Sequence):
                raise RequestError(
                    "params for a single prompt", got=params, allowed="one SamplingParams or None"
                )
            output = self._run([prompts], [params or self.default_params()], progress)[0]  # pyright: ignore[reportArgumentType]
            if output.error is not None:
                raise output.error
            return output
        batch: list[Prompt] = list(prompts)  # pyright: ignore[reportArgumentType, reportAssignmentType]
        return self._run(batch, self._params_for(batch, params), progress)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Continue one prompt and yield after every step that brought tokens.

        Closing the iterator early ends the request.

        Raises:
            RequestError: the prompt cannot be served.
        """
        params = params or self.default_params()
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

    def _stream(self, token_ids: list[int], params: SamplingParams) -> Iterator[RequestOutput]:
        # Queued at the first step, so that an iterator that nobody starts holds nothing.
        request_id = self._add(token_ids, params)
        try:
            while self.engine.has_work:
                for output in self.engine.step():
                    if output.request_id == request_id:
                        yield output
        finally:
            self.engine.abort(request_id)

    def _params_for(
        self, prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or self.default_params()] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(
                "params", got=f"{len(params)} for {len(prompts)} prompts", allowed="one for each"
            )
        return list(params)

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if not isinstance(prompt, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RequestError("prompt", got=prompt, allowed="a string or a list of token ids")
        return list(prompt)

    def _add(self, prompt: Prompt, params: SamplingParams) -> str:
        request_id = f"request-{self._num_requests}"
        self._num_requests += 1
        self.engine.add_request(request_id, self._token_ids(prompt), params)
        return request_id

    def _run(
        self, prompts: list[Prompt], params: list[SamplingParams], progress: Progress | None
    ) -> list[RequestOutput]:
        outputs: list[RequestOutput | None] = [None] * len(prompts)
        places: dict[str, int] = {}
        for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            try:
                places[self._add(prompt, one)] = index
            except OutriderError as error:
                outputs[index] = RequestOutput.failed(f"prompt-{index}", error)
        num_tokens = {place: 0 for place in places.values()}
        try:
            while any(outputs[place] is None for place in places.values()):
                for output in self.engine.step():
                    if output.request_id not in places:
                        continue
                    place = places[output.request_id]
                    num_tokens[place] = sum(len(c.token_ids) for c in output.completions)
                    if output.finished:
                        outputs[place] = output
                if progress is not None:
                    finished = sum(output is not None for output in outputs)
                    progress(finished, len(outputs), sum(num_tokens.values()))
        finally:  # an interrupt must not leave half a batch running
            for request_id in places:
                self.engine.abort(request_id)
        return [output for output in outputs if output is not None]


def _is_single(prompts: object) -> bool:
    """A string, or a list whose first element is a token id."""
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, Sequence):
        raise RequestError(
            "prompts", got=prompts, allowed="a string, a list of token ids, or a list of these"
        )
    return len(prompts) > 0 and isinstance(prompts[0], int)
