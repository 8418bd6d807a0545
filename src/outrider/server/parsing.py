"""Splits an answer into reasoning, content and tool calls while it grows.

What comes out does not depend on how the text was cut into pieces: text is given out once no later
text can change what it is. Knows text only, neither tokens nor HTTP.

Two ways of writing a call are read between <tool_call> and </tool_call>: a JSON object with name
and arguments, and <function=NAME> with <parameter=KEY> elements, as newer Qwen checkpoints do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, cast

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
TOOL_OPEN, TOOL_CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Content:
    """Text of the answer proper."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of the reasoning before it."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A whole call; arguments are a JSON object as text."""

    name: str
    arguments: str


Piece = Content | Reasoning | ToolCall


class _State(Enum):
    START = auto()
    REASONING = auto()
    CONTENT = auto()
    TOOL = auto()


class ChatParser:
    """Parses one answer. One that begins with <think> begins with reasoning.

    Args:
        starts_in_reasoning: the prompt has opened the reasoning already.
        tools: parameter schemas by name; None leaves calls in the text.
    """

    def __init__(
        self,
        *,
        starts_in_reasoning: bool = False,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self._tools = tools
        self._held = ""
        self._skips_newlines = starts_in_reasoning
        self._after_call = False
        self._state = _State.REASONING if starts_in_reasoning else _State.START

    def push(self, text: str) -> list[Piece]:
        """Take more text; returns what is certain by now."""
        self._held += text
        return self._advance(at_end=False)

    def flush(self) -> list[Piece]:
        """The answer has ended: returns the rest."""
        return self._advance(at_end=True)

    def _advance(self, at_end: bool) -> list[Piece]:
        steps: dict[_State, Callable[[list[Piece], bool], bool]] = {
            _State.START: self._start,
            _State.REASONING: self._reasoning,
            _State.CONTENT: self._content,
            _State.TOOL: self._tool,
        }
        pieces: list[Piece] = []
        while steps[self._state](pieces, at_end):
            pass
        return pieces

    def _start(self, pieces: list[Piece], at_end: bool) -> bool:
        """Is there reasoning? Each step returns whether there may be more to do."""
        begun = self._held.lstrip()
        if begun.startswith(THINK_OPEN):
            self._held = begun[len(THINK_OPEN) :]
            self._state, self._skips_newlines = _State.REASONING, True
        elif not at_end and THINK_OPEN.startswith(begun):
            return False
        else:
            self._state = _State.CONTENT
        return True

    def _reasoning(self, pieces: list[Piece], at_end: bool) -> bool:
        self._skip_newlines()
        before, closed, after = self._held.partition(THINK_CLOSE)
        if closed:
            self._held, self._state, self._skips_newlines = after, _State.CONTENT, True
        else:
            keep = 0 if at_end else overlap(before, THINK_CLOSE)
            before, self._held = before[: len(before) - keep], before[len(before) - keep :]
        shown = before.rstrip("\n")
        if not closed and not at_end:  # newlines before the end of the reasoning are not part of it
            self._held = before[len(shown) :] + self._held
        if shown:
            pieces.append(Reasoning(shown))
        return bool(closed)

    def _content(self, pieces: list[Piece], at_end: bool) -> bool:
        self._skip_newlines()
        if self._tools is None:
            self._give(pieces, self._held)
            self._held = ""
            return False
        before, opened, after = self._held.partition(TOOL_OPEN)
        if opened:
            self._give(pieces, before.rstrip())  # space around calls belongs to nothing
            self._held, self._state = after, _State.TOOL
            return True
        keep = 0 if at_end else overlap(before, TOOL_OPEN)
        certain = before[: len(before) - keep]
        shown = certain if at_end else certain.rstrip()
        if at_end and self._after_call and not shown.strip():
            shown = ""
        self._held = "" if at_end else before[len(shown) :]
        self._give(pieces, shown)
        return False

    def _give(self, pieces: list[Piece], text: str) -> None:
        if text:
            pieces.append(Content(text))
            self._after_call = False

    def _tool(self, pieces: list[Piece], at_end: bool) -> bool:
        body, closed, after = self._held.partition(TOOL_CLOSE)
        if not closed and not at_end:
            return False
        call = read_call(body, self._tools or {})
        if call is None:  # what is no call after all stays in the text as it was written
            self._give(pieces, TOOL_OPEN + body + closed)
        else:
            pieces.append(call)
            self._after_call = True
        self._held, self._state = after, _State.CONTENT
        return bool(closed)

    def _skip_newlines(self) -> None:
        if self._skips_newlines and self._held:
            self._held = self._held.lstrip("\n")
            self._skips_newlines = not self._held


class CallParser:
    """Parses an answer that a grammar makes one call, as a JSON object."""

    def __init__(self) -> None:
        self._text = ""

    def push(self, text: str) -> list[Piece]:
        self._text += text
        return []

    def flush(self) -> list[Piece]:
        """The call; the text where it was cut short."""
        call = read_call(self._text, {})
        if call is not None:
            return [call]
        return [Content(self._text)] if self._text else []


def read_call(body: str, tools: Mapping[str, Mapping[str, Any]]) -> ToolCall | None:
    """The call that stands between the tags; None where it is none."""
    if body.lstrip().startswith("<function="):
        return _read_elements(body, tools)
    try:
        value: object = json.loads(body)
    except (ValueError, RecursionError):
        return None
    match value:
        case {"name": str(name), "arguments": dict(arguments)}:
            return ToolCall(name, _dumps(arguments))
        case {"name": str(name), "arguments": str(text)}:
            return ToolCall(name, text)
        case {"name": str(name), **others} if not others:
            return ToolCall(name, "{}")
        case _:
            return None


_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>(.*?)</parameter>", re.DOTALL)


def _read_elements(body: str, tools: Mapping[str, Mapping[str, Any]]) -> ToolCall | None:
    function = _FUNCTION.fullmatch(body)
    if function is None:
        return None
    name, inner = function[1], function[2]
    properties: object = tools.get(name, {}).get("properties")
    schemas = cast(dict[str, Any], properties) if isinstance(properties, dict) else {}
    arguments: dict[str, Any] = {}
    end = 0
    for parameter in _PARAMETER.finditer(inner):
        if inner[end : parameter.start()].strip():
            return None
        text = parameter[2].removeprefix("\n").removesuffix("\n")
        arguments[parameter[1]] = _value(text, schemas.get(parameter[1]))
        end = parameter.end()
    return None if inner[end:].strip() else ToolCall(name, _dumps(arguments))


def _value(text: str, schema: object) -> Any:
    """An element's text as its schema wants it: a string stays one, the rest is JSON if it can."""
    match schema:
        case {"type": "string"} | {"type": ["string", *_]}:
            return text
        case _:
            pass
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _dumps(arguments: object) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def overlap(text: str, tag: str) -> int:
    """Length of the longest end of the text that begins the tag."""
    longest = min(len(tag) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(tag[:n])), 0)


def tool_schemas(tools: Sequence[tuple[str, Mapping[str, Any] | None]]) -> dict[str, Any]:
    """Parameter schemas by name, as ChatParser reads them."""
    return {name: parameters or {} for name, parameters in tools}
