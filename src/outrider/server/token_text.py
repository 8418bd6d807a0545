"""Single tokens as text and bytes, log probabilities in both of OpenAI's forms, tokens' origins."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from outrider.batch import TokenLogprobs
from outrider.output import Completion
from outrider.tokenizer import REPLACEMENT, IncrementalDetokenizer, Tokenizer
from outrider.trace import Origin, RoundTrace

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def _bytes_of_letters() -> dict[str, int]:
    """Letter -> byte, as byte-level BPE spells tokens: printable bytes are themselves."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    letters = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    letters.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return letters


_BYTES = _bytes_of_letters()


class TokenTexts:
    """Text and bytes of single tokens, special ones shown."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._spellings: list[str] | None = None
        self._known: dict[int, tuple[str, bytes]] = {}

    def text(self, token_id: int) -> str:
        """The token's text; parts of characters are shown as "bytes:\\xe2\\x80"."""
        return self._entry(token_id)[0]

    def bytes(self, token_id: int) -> bytes:
        """UTF-8 of the token, which may be a part of a character."""
        return self._entry(token_id)[1]

    def _entry(self, token_id: int) -> tuple[str, bytes]:
        entry = self._known.get(token_id)
        if entry is None:
            entry = self._known[token_id] = self._make(token_id)
        return entry

    def _make(self, token_id: int) -> tuple[str, bytes]:
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        if REPLACEMENT not in text:
            return text, text.encode()
        if self._spellings is None:
            self._spellings = self._tokenizer.vocabulary(self._tokenizer.vocab_size)
        spelling = self._spellings[token_id] if token_id < len(self._spellings) else ""
        if not spelling or not all(letter in _BYTES for letter in spelling):
            return text, text.encode()
        raw = bytes(_BYTES[letter] for letter in spelling)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw


def logprob(value: float) -> float:
    """A log probability as JSON can hold it."""
    return max(value, LEAST_LOGPROB)


def chat_logprobs(texts: TokenTexts, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """Entries of `logprobs.content` of a chat's choice."""

    def shown(token_id: int, value: float) -> dict[str, Any]:
        return {
            "token": texts.text(token_id),
            "logprob": logprob(value),
            "bytes": list(texts.bytes(token_id)),
        }

    return [
        shown(entry.token_id, entry.logprob)
        | {"top_logprobs": [shown(token_id, value) for token_id, value in entry.top]}
        for entry in entries
    ]


class CompletionLogprobs:
    """The four lists of a completion's logprobs, entry by entry.

    Args:
        offset: characters before the first token.
    """

    def __init__(self, texts: TokenTexts, tokenizer: Tokenizer, offset: int = 0) -> None:
        self._texts = texts
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._offset = offset

    def add(
        self, entries: Sequence[TokenLogprobs], first_prompt_id: int | None = None
    ) -> dict[str, Any]:
        """The next tokens' part of the lists.

        Args:
            first_prompt_id: a prompt's first token, of which there is no probability.
        """
        lists: dict[str, list[Any]] = {
            name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        if first_prompt_id is not None:
            self._append(lists, first_prompt_id, None, None)
        for entry in entries:
            top = {self._texts.text(token_id): logprob(value) for token_id, value in entry.top}
            top.setdefault(self._texts.text(entry.token_id), logprob(entry.logprob))
            self._append(lists, entry.token_id, logprob(entry.logprob), top)
        return lists

    def _append(
        self,
        lists: dict[str, list[Any]],
        token_id: int,
        value: float | None,
        top: dict[str, float] | None,
    ) -> None:
        lists["tokens"].append(self._texts.text(token_id))
        lists["token_logprobs"].append(value)
        lists["top_logprobs"].append(top)
        lists["text_offset"].append(self._offset)
        self._offset += len(self._detokenizer.push([token_id]))


class OriginTrace:
    """Says of each token of one output who chose it, as far as its text has been given out.

    The texts of the entries together are the output's text. A character that is split over tokens
    belongs to the token that completes it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._waiting: deque[dict[str, Any]] = deque()
        self._num_rounds = 0
        self._num_tokens = 0
        self._num_given = 0

    def push(self, completion: Completion) -> list[dict[str, Any]]:
        """Take the output as it stands; returns the entries that became final."""
        for trace in completion.rounds[self._num_rounds :]:
            self._take(trace, completion.token_ids)
        self._num_rounds = len(completion.rounds)
        if completion.finished and self._waiting:
            self._waiting[-1]["text"] += self._detokenizer.flush()
        return list(self._ready(len(completion.text), completion.finished))

    def _take(self, trace: RoundTrace, token_ids: Sequence[int]) -> None:
        for origin in trace.origins:
            token_id = token_ids[self._num_tokens]
            position = "" if origin.position is None else f":{origin.position}"
            rejected: list[str] = []
            if origin.origin is Origin.CORRECTED:
                rejected = self._guesses(token_ids[: self._num_tokens], trace.rejected_token_ids)
            self._waiting.append(
                {
                    "text": self._detokenizer.push([token_id]),
                    "token_id": token_id,
                    "origin": f"{origin.origin.value}{position}",
                    "rejected": rejected,
                }
            )
            self._num_tokens += 1

    def _guesses(self, before: Sequence[int], rejected: Sequence[int]) -> list[str]:
        """What each rejected id would have added after those before it."""
        return [
            self._tokenizer.decode_after([*before, *rejected[:index]], [token_id])
            for index, token_id in enumerate(rejected)
        ]

    def _ready(self, num_characters: int, finished: bool) -> Iterator[dict[str, Any]]:
        """Entries within the text, which stop strings hold back or cut."""
        while self._waiting:
            left = num_characters - self._num_given
            entry = self._waiting[0]
            if len(entry["text"]) > left:
                if not finished:
                    return
                entry["text"] = entry["text"][:left]
            self._waiting.popleft()
            self._num_given += len(entry["text"])
            yield entry


def round_entry(trace: RoundTrace) -> dict[str, Any]:
    """One pass that emitted tokens, in numbers."""
    times = trace.times
    return {
        "drafted": len(trace.draft_token_ids),
        "accepted": trace.num_accepted,
        "emitted": trace.num_emitted,
        "prompt_pass": times is not None and not times.is_round,
        "seconds": None if times is None else times.seconds,
    }
