"""From a conversation to the prompt that the checkpoint's chat template makes of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from outrider.errors import RequestError
from outrider.server.errors import bad_field, from_outrider
from outrider.server.parsing import THINK_OPEN
from outrider.server.protocol import Message, Tool
from outrider.tokenizer import CONVERSATION_VARIABLES, Tokenizer


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as tokens.

    Attributes:
        starts_in_reasoning: the template has opened the reasoning that the answer begins with.
    """

    token_ids: list[int]
    starts_in_reasoning: bool


def chat_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    template_variables: Mapping[str, Any],
    add_generation_prompt: bool,
) -> ChatPrompt:
    """Render and tokenise. Takes a while for long conversations: call it in a thread.

    Raises:
        ApiError: the template refuses the messages, or has no place for what was given.
    """
    for name in CONVERSATION_VARIABLES:
        if name in template_variables:
            param = f"chat_template_kwargs.{name}"
            raise bad_field(param, f"{param}: give it as a field of the request")
    plain = [_as_dict(index, message) for index, message in enumerate(messages)]
    listed = [tool.model_dump(exclude_none=True) for tool in tools]

    def render(tools: list[dict[str, Any]]) -> str:
        given = {"tools": tools} if tools else {}
        try:
            return tokenizer.apply_chat_template(
                plain, add_generation_prompt, **given, **template_variables
            )
        except RequestError as error:
            raise from_outrider(error) from error
        except RecursionError as error:
            raise bad_field("messages", "messages: nested too deeply for the template") from error

    text = render(listed)
    if listed and text == render([]):
        raise bad_field("tools", "tools: the checkpoint's chat template has no place for them")
    try:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
    except RequestError as error:
        raise from_outrider(error, {"prompt": "messages"}) from error
    return ChatPrompt(token_ids, text.rstrip().endswith(THINK_OPEN))


def _as_dict(index: int, message: Message) -> dict[str, Any]:
    """What a template reads: content is a string, arguments of calls are objects."""
    content = message.content
    if content is None:
        if message.role != "assistant" or not message.tool_calls:
            param = f"messages[{index}].content"
            raise bad_field(param, f"{param} is missing", "missing")
        content = ""
    elif not isinstance(content, str):
        content = "\n".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": content}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            plain[name] = getattr(message, name)
    if message.tool_calls is not None:
        if message.role != "assistant":
            param = f"messages[{index}].tool_calls"
            raise bad_field(param, f"{param}: allowed for role assistant only")
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(
                        f"messages[{index}].tool_calls[{place}].function.arguments",
                        call.function.arguments,
                    ),
                },
            }
            for place, call in enumerate(message.tool_calls)
        ]
    return plain


def _arguments(param: str, text: str) -> dict[str, Any]:
    try:
        value: object = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise bad_field(param, f"{param}: got {text[:100]!r}; allowed: a JSON object as text")
    return cast(dict[str, Any], value)
