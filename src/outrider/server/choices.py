"""One choice of a response as it grows: what a step adds, in the words of either endpoint.

A response that is not streamed is the one addition of a finished output, so both ways say the same.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from outrider.batch import FinishReason, TokenLogprobs
from outrider.output import Completion, RequestOutput
from outrider.server.parsing import CallParser, ChatParser, Content, Piece, Reasoning, ToolCall
from outrider.server.token_text import (
    CompletionLogprobs,
    OriginTrace,
    TokenTexts,
    chat_logprobs,
    round_entry,
)
from outrider.tokenizer import Tokenizer


@dataclass
class Addition:
    """What a choice gained.

    Attributes:
        index: of the choice.
        text: of a completion.
        reasoning, content, calls: of a chat.
        logprobs: in the endpoint's form; None where there is nothing to say.
        trace: of tokens, where it was asked for.
        round_traces: of passes that emitted tokens, likewise; tokens may be held back longer.
        finish_reason: set with the last addition.
    """

    index: int
    text: str = ""
    reasoning: str = ""
    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    logprobs: dict[str, Any] | None = None
    trace: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    round_traces: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    finish_reason: str | None = None

    @property
    def is_empty(self) -> bool:
        """There is nothing that a client would see."""
        return not (
            self.text
            or self.reasoning
            or self.content
            or self.calls
            or self.logprobs
            or self.trace
            or self.round_traces
            or self.finish_reason
        )


class _Choice:
    """What both endpoints do: follow one output, and say only what is new."""

    def __init__(self, index: int, tokenizer: Tokenizer, traces: bool) -> None:
        self._index = index
        self._num_given = 0
        self._num_logprobs = 0
        self._trace = OriginTrace(tokenizer) if traces else None
        self._num_rounds = 0

    def _begin(self, completion: Completion) -> tuple[Addition, str, tuple[TokenLogprobs, ...]]:
        new_text = completion.text[self._num_given :]
        self._num_given = len(completion.text)
        logprobs = (completion.logprobs or ())[self._num_logprobs :]
        self._num_logprobs += len(logprobs)
        addition = Addition(self._index)
        if self._trace is not None:
            addition.trace = self._trace.push(completion)
            new_rounds = completion.rounds[self._num_rounds :]
            addition.round_traces = [round_entry(trace) for trace in new_rounds]
            self._num_rounds = len(completion.rounds)
        return addition, new_text, logprobs


class CompletionChoice(_Choice):
    """A choice of /v1/completions."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        texts: TokenTexts,
        *,
        traces: bool,
        echo: str | None,
    ) -> None:
        """echo: the prompt's text, where it is to stand before the output's."""
        super().__init__(index, tokenizer, traces)
        self._echo = echo
        self._logprobs = CompletionLogprobs(texts, tokenizer)

    def push(self, output: RequestOutput, completion: Completion) -> Addition:
        """Take the output as it stands."""
        addition, new_text, logprobs = self._begin(completion)
        addition.text = new_text
        entries, first_prompt_id = list(logprobs), None
        if self._echo is not None:
            addition.text, self._echo = self._echo + new_text, None
            if output.prompt_logprobs is not None:
                entries = [*output.prompt_logprobs, *entries]
                first_prompt_id = output.prompt_token_ids[0]
        if completion.logprobs is not None and entries:
            addition.logprobs = self._logprobs.add(entries, first_prompt_id)
        if completion.finish_reason is not None:
            addition.finish_reason = _FINISH_REASONS[completion.finish_reason]
        return addition


class ChatChoice(_Choice):
    """A choice of /v1/chat/completions."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        texts: TokenTexts,
        *,
        traces: bool,
        parser: ChatParser | CallParser,
    ) -> None:
        super().__init__(index, tokenizer, traces)
        self._texts = texts
        self._parser = parser
        self._num_calls = 0

    def push(self, output: RequestOutput, completion: Completion) -> Addition:
        """Take the output as it stands."""
        addition, new_text, logprobs = self._begin(completion)
        pieces = self._parser.push(new_text)
        if completion.finished:
            pieces += self._parser.flush()
        for piece in pieces:
            self._add(addition, piece)
        if logprobs:
            addition.logprobs = {"content": chat_logprobs(self._texts, logprobs), "refusal": None}
        if completion.finish_reason is not None:
            reason = _FINISH_REASONS[completion.finish_reason]
            called = self._num_calls > 0 and reason == "stop"
            addition.finish_reason = "tool_calls" if called else reason
        return addition

    def _add(self, addition: Addition, piece: Piece) -> None:
        match piece:
            case Content(text):
                addition.content += text
            case Reasoning(text):
                addition.reasoning += text
            case ToolCall(name, arguments):
                addition.calls.append(
                    {
                        "index": self._num_calls,
                        "id": f"call_{uuid.uuid4().hex[:24]}",
                        "type": "function",
                        "function": {"name": name, "arguments": arguments},
                    }
                )
                self._num_calls += 1


Choice = CompletionChoice | ChatChoice

_FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
}
