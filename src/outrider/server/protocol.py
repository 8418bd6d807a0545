"""What clients may send, as pydantic models: OpenAI's fields, and Outrider's own.

Types are strict and unknown fields are refused, so that nothing a client says is silently without
effect. The few fields that are accepted without effect are those of `WithoutEffect`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

MAX_DEPTH = 48
"""Levels of nesting in JSON that is handed on: schemas, tools, template variables."""

MAX_STRINGS = 64
"""Stop strings, bad words and the like in one request; each costs time in every round."""


def _check_depth(value: Any) -> Any:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [item for outer in level for item in _inside(outer)]
        if not level:
            return value
    raise ValueError(f"Input should have at most {MAX_DEPTH} levels of nesting")


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(cast(dict[Any, Any], value).values())
    return cast(list[Any], value) if isinstance(value, list) else []


JsonObject = Annotated[dict[str, Any], AfterValidator(_check_depth)]
Strings = Annotated[list[str], Field(max_length=MAX_STRINGS)]


class Model(BaseModel):
    """Strict types, no unknown fields, finite numbers."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )


class WithoutEffect(Model):
    """Fields that OpenAI's clients send and that mean nothing to a server of one's own."""

    user: str | None = None
    metadata: JsonObject | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class StreamOptions(Model):
    include_usage: bool = False


class Speculation(Model):
    """How this request is drafted for.

    Attributes:
        enabled: False decodes plainly.
        max_draft_tokens: most drafts in a round; the engine's own limit holds as well.
        draft_sampling: "argmax", "coupled" or "sampled".
    """

    enabled: bool = True
    max_draft_tokens: int | None = None
    draft_sampling: str | None = None


class Structured(Model):
    """A grammar for the text: kind is json_schema, json_object, regex or ebnf."""

    kind: str
    text: str = ""


class SamplingRequest(WithoutEffect):
    """What completions and chat completions have in common. What is None takes the checkpoint's
    recommendation, else OpenAI's default."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, description="-1 and 0 keep all tokens")
    min_p: float | None = None
    seed: int | None = None
    stop: str | Strings | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STRINGS)] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: Strings | None = None
    structured_output: Structured | None = None
    priority: int | None = Field(None, description="larger ones go first")
    speculation: Speculation | None = None
    outrider_trace: bool | None = Field(
        None, description="say of each token who chose it, with the rejected guesses"
    )


class CompletionRequest(SamplingRequest):
    """Body of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = Field(None, description="n, where it is given")


class TextPart(Model):
    type: Literal["text"]
    text: str


class FunctionCall(Model):
    name: str
    arguments: str = Field(description="a JSON object, as text")


class ToolCall(Model):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Model):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None


class FunctionDefinition(Model):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Model):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Model):
    name: str


class NamedTool(Model):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Model):
    name: str
    description: str | None = None
    schema_: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Model):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(SamplingRequest):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: Literal[True] | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool = True


class TokenizeRequest(Model):
    """Body of /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = Field(None, description="with messages; true by default")
    add_special_tokens: bool | None = Field(None, description="with prompt; true by default")
    return_token_strs: bool = False


class DetokenizeRequest(Model):
    """Body of /detokenize."""

    model: str | None = None
    tokens: list[int]
