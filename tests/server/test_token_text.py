"""Tokens as text and bytes, and where they came from."""

from __future__ import annotations

import math

from outrider.batch import FinishReason, TokenLogprobs
from outrider.output import Completion
from outrider.server.token_text import CompletionLogprobs, OriginTrace, TokenTexts, chat_logprobs
from outrider.trace import RoundTrace
from tests.tiny_tokenizer import byte_ids, tokenizer

EURO = byte_ids("€".encode())  # three tokens, one character


def ids(text: str) -> tuple[int, ...]:
    return byte_ids(text.encode())


def test_a_part_of_a_character_is_shown_by_its_bytes() -> None:
    texts = TokenTexts(tokenizer())
    assert [texts.text(token_id) for token_id in EURO] == [
        "bytes:\\xe2",
        "bytes:\\x82",
        "bytes:\\xac",
    ]
    assert b"".join(texts.bytes(token_id) for token_id in EURO) == "€".encode()
    assert (texts.text(ids("a")[0]), texts.bytes(ids("a")[0])) == ("a", b"a")


def test_completion_logprobs_are_four_lists_that_go_on_where_they_ended() -> None:
    made = tokenizer()
    lists = CompletionLogprobs(TokenTexts(made), made)
    (a, b) = ids("ab")
    first = lists.add([TokenLogprobs(b, -0.5, 2, ((a, -0.25),))], first_prompt_id=a)
    assert first == {
        "tokens": ["a", "b"],
        "token_logprobs": [None, -0.5],
        "top_logprobs": [None, {"a": -0.25, "b": -0.5}],
        "text_offset": [0, 1],
    }
    second = lists.add([TokenLogprobs(a, -math.inf, 9, ())])
    assert (second["text_offset"], second["token_logprobs"]) == ([2], [-9999.0])


def test_chat_logprobs_have_bytes_and_alternatives() -> None:
    (a, b) = ids("ab")
    (entry,) = chat_logprobs(TokenTexts(tokenizer()), [TokenLogprobs(a, -1.0, 1, ((b, -2.0),))])
    assert entry == {
        "token": "a",
        "logprob": -1.0,
        "bytes": [97],
        "top_logprobs": [{"token": "b", "logprob": -2.0, "bytes": [98]}],
    }


def test_what_guesses_would_have_added_is_shown_however_many_they_are() -> None:
    (a,) = ids("a")
    drafts = (*EURO, *ids("xyzxyz"), *EURO)  # beyond what one guess is decoded after
    whole = Completion(text="a", token_ids=(a,), rounds=(RoundTrace(drafts, 0, 1),))
    (entry,) = OriginTrace(tokenizer()).push(whole)
    euro = ["\ufffd", "\ufffd", "€"]
    assert entry["rejected"] == [*euro, *"xyzxyz", *euro]


def test_origins_follow_the_text_with_rejected_guesses_at_the_correction() -> None:
    a, b, c, x, y = ids("abcxy")
    rounds = (RoundTrace((), 0, 1), RoundTrace((b, x, y), 1, 2))
    whole = Completion(text="abc", token_ids=(a, b, c), rounds=rounds)
    entries = OriginTrace(tokenizer()).push(whole)
    shown = [(entry["text"], entry["origin"], entry["rejected"]) for entry in entries]
    assert shown == [
        ("a", "plain", []),
        ("b", "drafted:1", []),
        ("c", "corrected", ["x", "y"]),
    ]


def test_entries_wait_for_text_that_is_held_back_and_are_cut_with_it() -> None:
    trace = OriginTrace(tokenizer())
    a, b, c = ids("abc")
    rounds = (RoundTrace((), 0, 1), RoundTrace((b,), 1, 2))
    held = Completion(text="a", token_ids=(a, b, c), rounds=rounds)
    assert [entry["text"] for entry in trace.push(held)] == ["a"]
    ended = Completion(
        text="ab", token_ids=(a, b, c), rounds=rounds, finish_reason=FinishReason.STOP
    )
    assert [(entry["text"], entry["origin"]) for entry in trace.push(ended)] == [
        ("b", "drafted:1"),
        ("", "bonus"),
    ]


def test_a_split_character_belongs_to_the_token_that_completes_it() -> None:
    rounds = (RoundTrace((), 0, 1), RoundTrace(EURO[1:], 2, 2))
    whole = Completion(text="€", token_ids=EURO, rounds=rounds, finish_reason=FinishReason.LENGTH)
    assert [entry["text"] for entry in OriginTrace(tokenizer()).push(whole)] == ["", "", "€"]
