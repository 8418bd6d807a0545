"""However a text's tokens fall into rounds, a stream says what the whole answer says.

Every way of cutting up to a dozen tokens into rounds is tried, and ways in which several rounds
reach the client at once. What is wanted was written down by hand.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from outrider.batch import FinishReason, SpanResult, TokenLogprobs
from outrider.output import Completion, OutputBuilder, RequestOutput
from outrider.params import SamplingParams
from outrider.request import Request
from outrider.server.choices import Addition, ChatChoice, CompletionChoice
from outrider.server.parsing import ChatParser
from outrider.server.token_text import TokenTexts
from outrider.tokenizer import Tokenizer
from tests.tiny_tokenizer import backend, byte_ids

END_ID = 1
PIECES = [
    *("<think>", "</thi", "nk>", "<tool_", "call>", "</tool_call>", "why", "yes", "so ", "ab"),
    *('{"name": "add", ', '"arguments": ', '{"a": 1}}', "c E", "N", "D", " more", "<", "b>"),
]
BACKEND = backend()
BACKEND.add_tokens(PIECES)
TOKENIZER = Tokenizer(BACKEND)
TEXTS = TokenTexts(TOKENIZER)
EURO = ["\xe2", "\x82", "\xac"]
"""Three tokens, one character."""


@dataclass(frozen=True)
class Case:
    """Tokens by what they hold (one byte, where it is one character), and what they say."""

    pieces: Sequence[str]
    text: str
    reasoning: str = ""
    content: str = ""
    calls: Sequence[tuple[str, str]] = ()
    stop: Sequence[str] = ()
    reason: str = "length"
    num_kept: int | None = None
    token_ids: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        ids: list[int] = []
        for piece in self.pieces:
            if piece == "END":
                ids.append(END_ID)
            else:
                one_byte = len(piece) == 1 and piece not in PIECES
                found = byte_ids(bytes([ord(piece)]))[0] if one_byte else None
                ids.append(BACKEND.token_to_id(piece) if found is None else found)
        object.__setattr__(self, "token_ids", tuple(ids))


CALL = ["<tool_", "call>", '{"name": "add", ', '"arguments": ', '{"a": 1}}', "</tool_call>"]
CASES = {
    "reasoning": Case(
        ["<think>", "\n", "why", *EURO, "</thi", "nk>", "\n", "yes", "END"],
        "<think>\nwhy€</think>\nyes",
        reasoning="why€",
        content="yes",
        reason="stop",
    ),
    "a call": Case(
        ["so ", *CALL, "\n", "END"],
        'so <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n',
        content="so",
        calls=[("add", '{"a": 1}')],
        reason="stop",
    ),
    "reasoning and a call": Case(
        ["<think>", "why", "</thi", "nk>", *CALL],
        '<think>why</think><tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
        reasoning="why",
        calls=[("add", '{"a": 1}')],
    ),
    "almost tags": Case(
        ["<", "b>", "<tool_", "b>", "</thi", "nk>", "<", "\n"],
        "<b><tool_b></think><\n",
        content="<b><tool_b></think><\n",
    ),
    "a stop string": Case(
        ["ab", "c E", "N", "so ", "c E", "N", "D", " more", "yes"],
        "abc ENso c ",
        content="abc ENso c ",
        stop=["END", "zzz"],
        reason="stop",
        num_kept=7,
    ),
    "a stop string that does not come": Case(
        ["ab", *EURO, "c E", "N"], "ab€c EN", content="ab€c EN", stop=["END"]
    ),
    "an end inside a character": Case(
        ["ab", *EURO, *EURO[:2], "END"], "ab€\ufffd", content="ab€\ufffd", reason="stop"
    ),
}


def cuts(num_tokens: int) -> Iterator[list[int]]:
    """The sizes of rounds, in every way."""
    for pattern in range(2 ** (num_tokens - 1)):
        sizes, size = [], 1
        for place in range(num_tokens - 1):
            if pattern >> place & 1:
                sizes.append(size)
                size = 0
            size += 1
        yield [*sizes, size]


def completions(case: Case, sizes: Sequence[int]) -> Iterator[Completion]:
    """The output after each round, as the engine makes it."""
    params = SamplingParams(stop=tuple(case.stop), logprobs=0)
    request = Request("r", (5,), params, (END_ID,), 1 + len(case.token_ids), seed=0)
    builder = OutputBuilder(request, TOKENIZER)
    start = 0
    for size in sizes:
        ids = case.token_ids[start : start + size]
        start += size
        at_end = start == len(case.token_ids)
        reason = FinishReason.STOP if ids[-1] == END_ID else FinishReason.LENGTH
        logprobs = tuple(TokenLogprobs(token_id, -1.0, 1, ()) for token_id in ids)
        drafts = (*ids[:-1], 7)
        builder.add(
            SpanResult(0, ids, reason if at_end else None, drafts, size - 1, logprobs=logprobs)
        )
        yield builder.completion
        if builder.finish_reason is not None:
            return


def added(choice: ChatChoice | CompletionChoice, grown: Sequence[Completion]) -> list[Addition]:
    return [choice.push(RequestOutput("r", (5,), (one,)), one) for one in grown]


def chat() -> ChatChoice:
    parser = ChatParser(tools={"add": {}})
    return ChatChoice(0, TOKENIZER, TEXTS, traces=True, parser=parser)


def completion() -> CompletionChoice:
    return CompletionChoice(0, TOKENIZER, TEXTS, traces=True, echo=None)


def check(case: Case, grown: Sequence[Completion]) -> None:
    chunks = added(chat(), grown)
    assert "".join(chunk.reasoning for chunk in chunks) == case.reasoning
    assert "".join(chunk.content for chunk in chunks) == case.content
    calls = [call["function"] for chunk in chunks for call in chunk.calls]
    assert [(call["name"], call["arguments"]) for call in calls] == list(case.calls)
    reason = "tool_calls" if case.calls and case.reason == "stop" else case.reason
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [reason]
    num_kept = case.num_kept or len(case.token_ids)
    entries = [e for chunk in chunks for e in (chunk.logprobs or {"content": []})["content"]]
    assert len(entries) == num_kept
    pieces = added(completion(), grown)
    assert "".join(piece.text for piece in pieces) == case.text
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [case.reason]
    for trace in ([e for one in found for e in one.trace] for found in (chunks, pieces)):
        assert "".join(entry["text"] for entry in trace) == case.text
        assert [entry["token_id"] for entry in trace] == list(case.token_ids[:num_kept])


@pytest.mark.parametrize("name", CASES)
def test_every_way_of_splitting_tokens_into_rounds_streams_the_same(name: str) -> None:
    case = CASES[name]
    draw = random.Random(0)
    num_ways = 0
    for sizes in cuts(len(case.token_ids)):
        num_ways += 1
        grown = list(completions(case, sizes))
        check(case, grown)
        # The client sees several rounds at once where it is slow; the last one it always sees.
        check(case, [one for one in grown[:-1] if draw.random() < 0.5] + grown[-1:])
    assert num_ways == 2 ** (len(case.token_ids) - 1)
