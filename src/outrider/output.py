"""The text side of a request: detokenising, stop strings, and what the user gets back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outrider.batch import FinishReason, SpanResult
from outrider.errors import OutriderError
from outrider.request import Request
from outrider.tokenizer import IncrementalDetokenizer, Tokenizer
from outrider.trace import RoundTrace, SpeculationStats


@dataclass(frozen=True)
class RequestOutput:
    """A request as far as it has got.

    Attributes:
        text: all of it so far; without the stop string or the token that ended it.
        new_text: what the newest step added. Never part of a character, and never text that a
            stop string may yet take back.
        token_ids: all committed tokens, the one that ended the text included.
        finish_reason: None while the request runs.
        error: why the request failed; its text is empty then.
        rounds: one entry for each target pass that emitted tokens.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    text: str
    new_text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    rounds: tuple[RoundTrace, ...] = ()
    error: OutriderError | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def speculation(self) -> SpeculationStats:
        """What speculation did for this request."""
        return SpeculationStats.of(list(self.rounds))

    @classmethod
    def failed(cls, request_id: str, error: OutriderError) -> RequestOutput:
        """The output of a request that was refused."""
        return cls(request_id, (), "", "", (), FinishReason.ERROR, (), error)


class _StopFinder:
    """Holds back the end of a text for as long as it may be the beginning of a stop string."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Text that is safe to show, and whether a stop string was completed after it."""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            safe, self._held = self._held[: min(found)], ""
            return safe, True
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        safe, self._held = self._held[:cut], self._held[cut:]
        return safe, False

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)

    def flush(self) -> str:
        safe, self._held = self._held, ""
        return safe


class OutputBuilder:
    """Turns the committed tokens of one request into text, and trims them at stop strings."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        """Without a tokenizer the text stays empty."""
        self.request = request
        self._detokenizer = None if tokenizer is None else IncrementalDetokenizer(tokenizer)
        self._stops = _StopFinder(request.params.stop_strings)
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._new_text: list[str] = []
        self._rounds: list[RoundTrace] = []

    def add(self, result: SpanResult) -> tuple[tuple[int, ...], FinishReason | None]:
        """Take a step's tokens; returns those that stay, and why the request ends if it does.

        The earliest end wins. At the same token a stop id comes before a stop string, and both
        before the length.
        """
        self._new_text = []
        kept: list[int] = []
        reason = None
        for index, token_id in enumerate(result.token_ids):
            is_last = index == len(result.token_ids) - 1
            kept.append(token_id)
            if is_last and result.finish_reason is FinishReason.STOP:
                reason = FinishReason.STOP
                self._finish_text()
                break
            if self._push(token_id):
                reason = FinishReason.STOP
                break
            if is_last:
                reason = result.finish_reason
        self._token_ids += kept
        if kept:
            self._rounds.append(RoundTrace(result.draft_token_ids, result.num_accepted, len(kept)))
        if reason is FinishReason.LENGTH:
            self._finish_text()
        return tuple(kept), reason

    def _push(self, token_id: int) -> bool:
        """Append a token's text; True where it completes a stop string."""
        if self._detokenizer is None:
            return False
        safe, stopped = self._stops.push(self._detokenizer.push([token_id]))
        self._show(safe)
        return stopped

    def _finish_text(self) -> None:
        """Show what was held back for a character or a stop string that will not come."""
        tail = "" if self._detokenizer is None else self._detokenizer.flush()
        safe, stopped = self._stops.push(tail)
        self._show(safe if stopped else safe + self._stops.flush())

    def _show(self, text: str) -> None:
        if text:
            self._text.append(text)
            self._new_text.append(text)

    def output(self, reason: FinishReason | None) -> RequestOutput:
        """The request as it stands."""
        return RequestOutput(
            request_id=self.request.request_id,
            prompt_token_ids=self.request.prompt_token_ids,
            text="".join(self._text),
            new_text="".join(self._new_text),
            token_ids=tuple(self._token_ids),
            finish_reason=reason,
            rounds=tuple(self._rounds),
        )


def total_speculation(outputs: Iterable[RequestOutput]) -> SpeculationStats:
    """Totals over many requests."""
    return sum((output.speculation for output in outputs), SpeculationStats())
