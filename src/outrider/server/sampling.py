"""From a client's fields to SamplingParams: names, defaults, and what cannot go together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from outrider.errors import RequestError
from outrider.params import SamplingParams, StructuredOutput
from outrider.server.errors import ApiError, bad_field, from_outrider
from outrider.server.protocol import (
    ChatRequest,
    CompletionRequest,
    NamedTool,
    SamplingRequest,
    Structured,
    Tool,
)

COMPLETION_MAX_TOKENS = 16
"""OpenAI's own default for completions; a chat may fill the context."""

MAX_TOP_LOGPROBS = 20
MAX_SCHEMA_CHARACTERS = 100_000

_SAME_NAMES = (
    "n",
    "min_tokens",
    "temperature",
    "top_p",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "bad_words",
    "priority",
)


def completion_params(body: CompletionRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """How a completion is sampled.

    Raises:
        ApiError: a field cannot be served.
    """
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_field(
            "best_of", f"best_of: got {body.best_of}; allowed: n; outputs are not ranked"
        )
    fields = _common_fields(body, defaults)
    fields["max_tokens"] = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if body.logprobs is not None:
        fields["logprobs"] = body.logprobs
        if body.echo:
            fields["prompt_logprobs"] = body.logprobs
    if body.structured_output is not None:
        fields["structured_output"] = _own_grammar(body.structured_output)
    return _build(fields, {})


def chat_params(body: ChatRequest, defaults: Mapping[str, Any], num_left: int) -> SamplingParams:
    """How a chat's answer is sampled.

    Args:
        num_left: tokens that fit behind the prompt.

    Raises:
        ApiError: a field cannot be served.
    """
    names: dict[str, str] = {}
    fields = _common_fields(body, defaults)
    fields["max_tokens"] = max(num_left, 1) if body.max_tokens is None else body.max_tokens
    if body.max_completion_tokens is not None:
        if body.max_tokens is not None:
            raise bad_field("max_tokens", "max_tokens: give this or max_completion_tokens")
        names["max_tokens"] = "max_completion_tokens"
        fields["max_tokens"] = body.max_completion_tokens
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise bad_field("top_logprobs", "top_logprobs: allowed with logprobs=true only")
        if not 0 <= body.top_logprobs <= MAX_TOP_LOGPROBS:
            raise bad_field(
                "top_logprobs",
                f"top_logprobs: got {body.top_logprobs}; allowed: 0 to {MAX_TOP_LOGPROBS}",
            )
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    name, grammar = _grammar(body)
    if grammar is not None:
        names["structured_output"] = name
        fields["structured_output"] = grammar
    return _build(fields, names)


def _build(fields: dict[str, Any], names: Mapping[str, str]) -> SamplingParams:
    try:
        return SamplingParams(**fields)
    except RequestError as error:
        raise from_outrider(error, names) from error


def _common_fields(body: SamplingRequest, defaults: Mapping[str, Any]) -> dict[str, Any]:
    if body.stream_options is not None and not body.stream:
        raise bad_field("stream_options", "stream_options: allowed with stream=true only")
    if body.outrider_trace and (body.n or 1) > 1:
        raise bad_field("outrider_trace", "outrider_trace: allowed with n=1 only")
    fields = dict(defaults)
    given = {name: getattr(body, name) for name in _SAME_NAMES}
    fields.update({name: value for name, value in given.items() if value is not None})
    if body.top_k is not None:
        fields["top_k"] = None if body.top_k in (-1, 0) else body.top_k
    if body.logit_bias is not None:
        fields["logit_bias"] = _logit_bias(body.logit_bias)
    if body.speculation is not None:
        for name in ("max_draft_tokens", "draft_sampling"):
            if not body.speculation.enabled and getattr(body.speculation, name) is not None:
                param = f"speculation.{name}"
                raise bad_field(param, f"{param}: allowed with enabled=true only")
        fields["speculation"] = body.speculation.enabled
        fields["max_draft_tokens"] = body.speculation.max_draft_tokens
        fields["draft_sampling"] = body.speculation.draft_sampling
    return fields


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 19):
            raise bad_field("logit_bias", f"logit_bias: got {key!r}; allowed: token ids as keys")
        bias[int(key)] = value
    return bias


def _grammar(body: ChatRequest) -> tuple[str, StructuredOutput | None]:
    """The grammar of an answer, and the field that asks for it."""
    wanted: dict[str, StructuredOutput] = {}
    if body.structured_output is not None:
        wanted["structured_output"] = _own_grammar(body.structured_output)
    if body.response_format is not None and body.response_format.type != "text":
        wanted["response_format"] = _format_grammar(body)
    forced = forced_tools(body)
    if forced:
        schema = json.dumps(_call_schema(forced), ensure_ascii=False)
        wanted["tool_choice"] = _build_grammar("tool_choice", "json_schema", schema)
    if len(wanted) > 1:
        first, second = list(wanted)[:2]
        raise bad_field(second, f"{second}: {first} already says what the text looks like")
    return next(iter(wanted.items()), ("", None))


def _own_grammar(given: Structured) -> StructuredOutput:
    return _build_grammar("structured_output", given.kind, given.text)


def _build_grammar(param: str, kind: str, text: str) -> StructuredOutput:
    """A grammar that the field `param` asks for."""
    if len(text) > MAX_SCHEMA_CHARACTERS:
        raise bad_field(
            param,
            f"{param}: got {len(text)} characters; allowed: {MAX_SCHEMA_CHARACTERS} or fewer",
        )
    try:
        return StructuredOutput(kind, text)
    except RequestError as error:
        raise from_outrider(error, {"structured_output": param}) from error


def _format_grammar(body: ChatRequest) -> StructuredOutput:
    assert body.response_format is not None
    schema = body.response_format.json_schema
    if body.response_format.type == "json_object":
        if schema is not None:
            raise bad_field(
                "response_format.json_schema",
                "response_format.json_schema: allowed with type=json_schema only",
            )
        return StructuredOutput("json_object")
    if schema is None or schema.schema_ is None:
        name = "response_format.json_schema" + ("" if schema is None else ".schema")
        raise bad_field(name, f"{name} is missing", "missing")
    text = json.dumps(schema.schema_, ensure_ascii=False)
    return _build_grammar("response_format", "json_schema", text)


def forced_tools(body: ChatRequest) -> list[Tool]:
    """The tools of which the answer has to call one; none where it may be text.

    Raises:
        ApiError: tool_choice does not fit the tools.
    """
    choice, tools = body.tool_choice, body.tools or []
    if choice in (None, "none", "auto"):
        return []
    if not tools:
        raise bad_field("tool_choice", "tool_choice: there are no tools to choose from")
    if not isinstance(choice, NamedTool):
        return tools
    named = [tool for tool in tools if tool.function.name == choice.function.name]
    if not named:
        raise bad_field(
            "tool_choice.function.name",
            f"tool_choice.function.name: got {choice.function.name!r}; "
            f"allowed: {', '.join(tool.function.name for tool in tools)}",
        )
    return named


def _call_schema(tools: list[Tool]) -> dict[str, Any]:
    """Schema of one call of one of the tools."""
    definitions: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for tool in tools:
        parameters = dict(tool.function.parameters or {"type": "object"})
        # References count from the root, so what they point to has to stay there.
        for key in ("$defs", "definitions"):
            named = parameters.pop(key, None)
            if not isinstance(named, dict):
                continue
            for name, definition in cast(dict[str, Any], named).items():
                if definitions.setdefault(key, {}).setdefault(name, definition) != definition:
                    raise ApiError(
                        400,
                        f"tool_choice: the tools define {name} differently",
                        param="tool_choice",
                    )
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, "arguments": parameters},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return (calls[0] if len(calls) == 1 else {"anyOf": calls}) | definitions
