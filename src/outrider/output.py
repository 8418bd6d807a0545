"""The text side of a request: detokenising, stop strings, and what the user gets back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outrider.batch import FinishReason, SpanResult, TokenLogprobs
from outrider.errors import OutriderError
from outrider.request import Request
from outrider.tokenizer import IncrementalDetokenizer, Tokenizer
from outrider.trace import RoundTrace, SpeculationStats


@dataclass(frozen=True)
class Completion:
    """One output of a request as far as it has got.

    Attributes:
        index: 0 to n - 1.
        text: all of it so far; without the stop string or the token that ended it.
        new_text: what came after the output before this one. Never part of a character, and never
            text that a stop string may yet take back.
        token_ids: all committed tokens, the one that ended the text included.
        finish_reason: None while it runs.
        rounds: one entry for each target pass that emitted tokens.
        logprobs: one entry for each token, where they were asked for.
    """

    index: int = 0
    text: str = ""
    new_text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    rounds: tuple[RoundTrace, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def speculation(self) -> SpeculationStats:
        """What speculation did for this output."""
        return SpeculationStats.of(list(self.rounds))


@dataclass(frozen=True)
class RequestOutput:
    """A request as far as it has got. With n = 1 its one completion can be read directly.

    Attributes:
        completions: n of them.
        prompt_logprobs: one entry for each prompt token but the first, where they were asked for.
        error: why the request failed; its completions are empty then.
        num_cached_tokens: how much of the prompt the prefix cache held.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    error: OutriderError | None = None
    num_cached_tokens: int = 0

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def new_text(self) -> str:
        return self.completions[0].new_text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.completions[0].finish_reason

    @property
    def rounds(self) -> tuple[RoundTrace, ...]:
        return self.completions[0].rounds

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        return self.completions[0].logprobs

    @property
    def finished(self) -> bool:
        """All completions have ended."""
        return all(completion.finished for completion in self.completions)

    @property
    def speculation(self) -> SpeculationStats:
        """What speculation did for this request, over all its completions."""
        return sum((c.speculation for c in self.completions), SpeculationStats())

    @classmethod
    def failed(cls, request_id: str, error: OutriderError) -> RequestOutput:
        """The output of a request that was refused."""
        return cls(request_id, (), (Completion(finish_reason=FinishReason.ERROR),), None, error)


_PROMPT_TAIL = 8
"""Prompt tokens that a decoder sees before the output, so as not to take it for a text's start."""


class _StopFinder:
    """Holds back the end of a text for as long as it may be the beginning of a stop string."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    @property
    def is_empty(self) -> bool:
        """There is nothing to find."""
        return not self._stops

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
    """Turns the committed tokens of one output into text, and trims them at stop strings.

    Attributes:
        finish_reason: None while it runs.
        is_whole: False while tokens are taken, and for good where that failed half way.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None, index: int = 0) -> None:
        """Without a tokenizer the text stays empty."""
        self.request = request
        self._index = index
        self._detokenizer = (
            None
            if tokenizer is None
            else IncrementalDetokenizer(
                tokenizer, prompt_tail=request.prompt_token_ids[-_PROMPT_TAIL:]
            )
        )
        self._stops = _StopFinder(request.params.stop_strings)
        self._token_ids: list[int] = []
        self._text = ""
        self._new_text = ""
        self._rounds: list[RoundTrace] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.is_whole = True

    def add(self, result: SpanResult, start: int = 0) -> tuple[int, ...]:
        """Take a step's tokens; returns those that stay. `finish_reason` is set if it ends.

        What is new stays new until it is `reported`, however many steps that takes. The earliest
        end wins. At the same token a stop id comes before a stop string, and both before the
        length.

        Args:
            start: position of the span's first row, which places its prompt_logprobs.
        """
        self.is_whole = False
        kept = self._take(result, start)
        self.is_whole = True
        return kept

    def _take(self, result: SpanResult, start: int) -> tuple[int, ...]:
        if result.prompt_logprobs:  # a prompt that begins again after a preemption says it anew
            self._prompt_logprobs[start:] = result.prompt_logprobs
        if not result.token_ids:
            return ()
        kept = self._take_all(result) if self._stops.is_empty else self._take_to_a_stop(result)
        self._token_ids += kept
        self._logprobs += result.logprobs[: len(kept)]
        self._rounds.append(
            RoundTrace(result.draft_token_ids, result.num_accepted, len(kept), result.times)
        )
        return kept

    def _take_all(self, result: SpanResult) -> tuple[int, ...]:
        """No stop string can end the text: all tokens become text at once."""
        reason, token_ids = result.finish_reason, result.token_ids
        if self._detokenizer is not None:
            shown = token_ids[:-1] if reason is FinishReason.STOP else token_ids
            self._show(self._detokenizer.push(shown))
        if reason is not None:
            self._end(reason)
        return token_ids

    def _take_to_a_stop(self, result: SpanResult) -> tuple[int, ...]:
        kept: list[int] = []
        for index, token_id in enumerate(result.token_ids):
            is_last = index == len(result.token_ids) - 1
            kept.append(token_id)
            num_output = len(self._token_ids) + len(kept)
            if is_last and result.finish_reason is FinishReason.STOP:
                self._end(FinishReason.STOP)
            elif self._push(token_id, may_stop=num_output > self.request.params.min_tokens):
                self.finish_reason = FinishReason.STOP
                break
            elif is_last and result.finish_reason is not None:
                self._end(result.finish_reason)
        return tuple(kept)

    def _push(self, token_id: int, *, may_stop: bool) -> bool:
        """Append a token's text; True where it completes a stop string that may end the output."""
        if self._detokenizer is None:
            return False
        text = self._detokenizer.push([token_id])
        if not may_stop:  # a stop string has to begin after the tokens that must be there
            self._show(text)
            return False
        safe, stopped = self._stops.push(text)
        self._show(safe)
        return stopped

    def _end(self, reason: FinishReason) -> None:
        """Show what was held back for a character or a stop string that will not come."""
        tail = "" if self._detokenizer is None else self._detokenizer.flush()
        safe, stopped = self._stops.push(tail)
        self._show(safe if stopped else safe + self._stops.flush())
        # Bytes that end as U+FFFD may complete a stop string, which comes before the length.
        self.finish_reason = FinishReason.STOP if stopped else reason

    def _show(self, text: str) -> None:
        self._text += text
        self._new_text += text

    @property
    def num_tokens(self) -> int:
        """Tokens that were taken."""
        return len(self._token_ids)

    def reported(self) -> None:
        """The completion has been handed out: its new text is new no longer."""
        self._new_text = ""

    def abort(self) -> None:
        """The output ends here; what was held back is shown."""
        self._end(FinishReason.ABORT)

    @property
    def completion(self) -> Completion:
        """The output as it stands."""
        return Completion(
            index=self._index,
            text=self._text,
            new_text=self._new_text,
            token_ids=tuple(self._token_ids),
            finish_reason=self.finish_reason,
            rounds=tuple(self._rounds),
            logprobs=None if self.request.params.logprobs is None else tuple(self._logprobs),
        )

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        wanted = self.request.params.prompt_logprobs is not None
        return tuple(self._prompt_logprobs) if wanted else None


def total_speculation(outputs: Iterable[RequestOutput]) -> SpeculationStats:
    """Totals over many requests."""
    return sum((output.speculation for output in outputs), SpeculationStats())
