"""The front's copy of a request that grows in another process. Plain values, no sockets."""

from __future__ import annotations

from collections.abc import Iterable

from outrider.batch import FinishReason, TokenLogprobs
from outrider.engine_messages import CompletionDelta, RequestDelta
from outrider.output import Completion, RequestOutput
from outrider.params import SamplingParams
from outrider.trace import RoundTrace


class _GrowingCompletion:
    def __init__(self, index: int, reports_logprobs: bool) -> None:
        self._index = index
        self._reports_logprobs = reports_logprobs
        self._text: list[str] = []
        self._new_text: list[str] = []
        self._token_ids: list[int] = []
        self._rounds: list[RoundTrace] = []
        self._logprobs: list[TokenLogprobs] = []
        self._finish_reason: FinishReason | None = None

    def add(self, delta: CompletionDelta) -> None:
        self._new_text.append(delta.text)
        self._token_ids += delta.token_ids
        self._rounds += delta.rounds
        self._logprobs += delta.logprobs
        self._finish_reason = delta.finish_reason

    def completion(self) -> Completion:
        """The output as it stands; its new text is new no longer."""
        new_text, self._new_text = "".join(self._new_text), []
        self._text.append(new_text)
        return Completion(
            index=self._index,
            text="".join(self._text),
            new_text=new_text,
            token_ids=tuple(self._token_ids),
            finish_reason=self._finish_reason,
            rounds=tuple(self._rounds),
            logprobs=tuple(self._logprobs) if self._reports_logprobs else None,
        )


class GrowingOutput:
    """Puts deltas together to what `Engine.step` would have reported."""

    def __init__(
        self, request_id: str, prompt_token_ids: tuple[int, ...], params: SamplingParams
    ) -> None:
        self._request_id = request_id
        self._prompt_token_ids = prompt_token_ids
        self._completions = [
            _GrowingCompletion(index, params.logprobs is not None) for index in range(params.n)
        ]
        self._prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self._num_cached_tokens = 0
        self._ends: dict[int, FinishReason] = {}
        self.finished = False

    @property
    def finish_reasons(self) -> tuple[FinishReason | None, ...]:
        """Of each output, as far as `note_ends` knows."""
        return tuple(self._ends.get(index) for index in range(len(self._completions)))

    def note_ends(self, delta: RequestDelta) -> bool:
        """Remember which outputs end with this delta; True once all of them have."""
        for completion in delta.completions:
            if completion.finish_reason is not None:
                self._ends[completion.index] = completion.finish_reason
        return len(self._ends) == len(self._completions)

    def add(self, deltas: Iterable[RequestDelta]) -> RequestOutput:
        """Take deltas in the order they came; returns the request as it stands."""
        for delta in deltas:
            for completion in delta.completions:
                self._completions[completion.index].add(completion)
            if delta.prompt_logprobs is not None:
                self._prompt_logprobs = delta.prompt_logprobs
            self._num_cached_tokens = delta.num_cached_tokens
        output = RequestOutput(
            request_id=self._request_id,
            prompt_token_ids=self._prompt_token_ids,
            completions=tuple(completion.completion() for completion in self._completions),
            prompt_logprobs=self._prompt_logprobs,
            num_cached_tokens=self._num_cached_tokens,
        )
        self.finished = output.finished
        return output
