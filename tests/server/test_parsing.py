"""Reasoning, content and tool calls, however the text is cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.server.parsing import CallParser, ChatParser, Content, Piece, Reasoning, ToolCall

TOOLS = {"add": {"properties": {"a": {"type": "integer"}, "note": {"type": "string"}}}}

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ELEMENTS = (
    "<tool_call>\n<function=add>\n<parameter=a>\n12\n</parameter>\n"
    "<parameter=note>\n12\n</parameter>\n</function>\n</tool_call>"
)
NO_NAME = '<tool_call>{"name": 1, "arguments": {}}</tool_call>'
ADD = ToolCall("add", '{"a": 1}')

CASES: list[tuple[str, list[Piece]]] = [
    ("", []),
    ("  plain <b>text</b> \n", [Content("  plain <b>text</b> \n")]),
    ("<think>\nwhy\n</think>\n\nso", [Reasoning("why"), Content("so")]),
    ("<think></think>so", [Content("so")]),
    ("<think>\nnever\n ended\n", [Reasoning("never\n ended")]),
    ("no <think>tag</think> here", [Content("no <think>tag</think> here")]),
    (CALL, [ADD]),
    (f"{CALL}\n{CALL}\n", [ADD, ADD]),
    (f"let me see \n{CALL}", [Content("let me see"), ADD]),
    (f"a\n{CALL}\nb ", [Content("a"), ADD, Content("\nb ")]),
    (f"<think>\nx\n\n</think>\n\n{CALL}", [Reasoning("x"), ADD]),
    (ELEMENTS, [ToolCall("add", '{"a": 12, "note": "12"}')]),
    ("<tool_call>{}</tool_call>!", [Content("<tool_call>{}</tool_call>!")]),
    ("<tool_call>\nnot json", [Content("<tool_call>\nnot json")]),
    ('<tool_call>{"name": "f"}', [ToolCall("f", "{}")]),
    ("<tool_cal", [Content("<tool_cal")]),
    ("a < b <t", [Content("a < b <t")]),
    (NO_NAME, [Content(NO_NAME)]),
]


def merged(pieces: list[Piece]) -> list[Piece]:
    """Neighbours of one kind as one."""
    result: list[Piece] = []
    for piece in pieces:
        last = result[-1] if result else None
        if isinstance(piece, Content) and isinstance(last, Content):
            result[-1] = Content(last.text + piece.text)
        elif isinstance(piece, Reasoning) and isinstance(last, Reasoning):
            result[-1] = Reasoning(last.text + piece.text)
        else:
            result.append(piece)
    return result


def parsed(text: str, cuts: list[int], **options: bool) -> list[Piece]:
    parser = ChatParser(tools=TOOLS, **options)
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    pieces: list[Piece] = []
    start = 0
    for end in ends:
        pieces += parser.push(text[start:end])
        start = end
    return merged(pieces + parser.flush())


@pytest.mark.parametrize(("text", "wanted"), CASES, ids=[repr(text[:30]) for text, _ in CASES])
def test_an_answer_is_split_into_reasoning_content_and_calls(
    text: str, wanted: list[Piece]
) -> None:
    assert parsed(text, []) == wanted
    assert parsed(text, list(range(len(text)))) == wanted, "cut into single characters"
    for cut in range(len(text)):
        assert parsed(text, [cut]) == wanted, f"cut at {cut}"


PARTS = ["<think>", "</think>", "\n", " ", "x", "<", CALL, ELEMENTS, "<tool_call>", "</tool_call>"]


@given(st.lists(st.sampled_from(PARTS), max_size=8), st.lists(st.integers(0, 200), max_size=8))
def test_what_comes_out_does_not_depend_on_the_cuts(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    assert parsed(text, cuts) == parsed(text, [])


def test_a_template_may_have_opened_the_reasoning() -> None:
    text = "so be it\n</think>\n\nyes"
    wanted = [Reasoning("so be it"), Content("yes")]
    assert parsed(text, [3, 11], starts_in_reasoning=True) == wanted


def test_without_tools_a_call_is_text() -> None:
    parser = ChatParser(tools=None)
    assert merged(parser.push(CALL) + parser.flush()) == [Content(CALL)]


def test_text_is_given_out_as_soon_as_it_is_certain() -> None:
    parser = ChatParser(tools=TOOLS)
    assert parser.push("Hello") == [Content("Hello")]
    assert parser.push(" <") == []
    assert parser.push("b") == [Content(" <b")]


def test_a_forced_call_comes_at_the_end_and_as_text_where_it_was_cut_short() -> None:
    parser = CallParser()
    assert parser.push('{"name": "add", "argu') == []
    assert parser.push('ments": {"a": "é"}}') == []
    (call,) = parser.flush()
    assert isinstance(call, ToolCall) and json.loads(call.arguments) == {"a": "é"}
    cut = CallParser()
    cut.push('{"name": "add", "argu')
    assert cut.flush() == [Content('{"name": "add", "argu')]
