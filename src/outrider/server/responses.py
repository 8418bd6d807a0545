"""Response objects: choices, usage, and what speculation did. Plain dicts in OpenAI's shape."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.output import Completion, RequestOutput, total_speculation
from outrider.server.choices import Addition
from outrider.trace import Origin


@dataclass(frozen=True)
class Heading:
    """What all objects of one response begin with."""

    is_chat: bool
    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def response(self) -> dict[str, Any]:
        """The beginning of a response that is not streamed."""
        return self._object("chat.completion" if self.is_chat else "text_completion")

    def chunk(self) -> dict[str, Any]:
        """The beginning of a chunk of a stream."""
        return self._object("chat.completion.chunk" if self.is_chat else "text_completion")

    def _object(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        return {
            "id": f"{prefix}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
        }


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Tokens of a whole response. An accepted prediction is a draft that is part of the text, a
    rejected one is a draft that is not; together they are all drafts that were verified."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completions = [completion for output in outputs for completion in output.completions]
    num_output = sum(len(completion.token_ids) for completion in completions)
    num_drafted = total_speculation(outputs).num_drafted
    num_kept = sum(_num_kept_drafts(completion) for completion in completions)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {
            "cached_tokens": sum(output.num_cached_tokens for output in outputs)
        },
        "completion_tokens_details": {
            "accepted_prediction_tokens": num_kept,
            "rejected_prediction_tokens": num_drafted - num_kept,
        },
    }


def _num_kept_drafts(completion: Completion) -> int:
    return sum(
        origin.origin is Origin.DRAFTED for trace in completion.rounds for origin in trace.origins
    )


def speculation(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """The `outrider` block: counts of SpeculationStats over a whole response."""
    stats = total_speculation(outputs)
    return {
        "passes": stats.num_passes,
        "rounds": stats.num_rounds,
        "drafted": stats.num_drafted,
        "accepted": stats.num_accepted,
        "accepted_per_position": list(stats.accepted_per_position),
        "acceptance_length": stats.acceptance_length,
    }


def whole_choice(addition: Addition, is_chat: bool) -> dict[str, Any]:
    """A choice of a response that is not streamed."""
    if not is_chat:
        return _completion_choice(addition)
    content = addition.content or (None if addition.calls else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if addition.reasoning:
        message["reasoning_content"] = addition.reasoning
    if addition.calls:
        message["tool_calls"] = [
            {name: value for name, value in call.items() if name != "index"}
            for call in addition.calls
        ]
    return {
        "index": addition.index,
        "message": message,
        "logprobs": addition.logprobs,
        "finish_reason": addition.finish_reason,
    }


def chunk_choice(addition: Addition, is_chat: bool) -> dict[str, Any]:
    """A choice of a chunk of a stream."""
    if not is_chat:
        return _completion_choice(addition)
    delta: dict[str, Any] = {}
    if addition.reasoning:
        delta["reasoning_content"] = addition.reasoning
    if addition.content:
        delta["content"] = addition.content
    if addition.calls:
        delta["tool_calls"] = addition.calls
    return {
        "index": addition.index,
        "delta": delta,
        "logprobs": addition.logprobs,
        "finish_reason": addition.finish_reason,
    }


def opening_choice(index: int) -> dict[str, Any]:
    """The choice of the chunk that opens a chat's stream."""
    return {
        "index": index,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }


def _completion_choice(addition: Addition) -> dict[str, Any]:
    return {
        "index": addition.index,
        "text": addition.text,
        "logprobs": addition.logprobs,
        "finish_reason": addition.finish_reason,
    }
