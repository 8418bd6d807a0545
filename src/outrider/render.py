"""What the terminal shows: coloured text, statistics, a progress bar. Strings out, no engine in.

A text in colour says of each token who chose it, and shows the guesses that were refused at the
place where the target put its own token.
"""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO

from outrider.output import Completion
from outrider.tokenizer import REPLACEMENT, IncrementalDetokenizer, Tokenizer
from outrider.trace import Origin, RoundTrace, SpeculationStats, TokenOrigin

RESET = "\x1b[0m"
REJECTED = "2;9"  # dim, struck through
DIM = "2"
BOLD = "1"
DRAFTED = tuple(f"38;5;{shade}" for shade in (28, 34, 40, 46, 83, 120, 157, 194))
"""Greens by position, the brighter the further ahead the guess was."""
_OWN = {Origin.PLAIN: "", Origin.CORRECTED: "38;5;208", Origin.BONUS: "38;5;33"}

_CONTROLS = (
    {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
    | {127: 0x2421}
    | dict.fromkeys(range(0x80, 0xA0), REPLACEMENT)
)
"""Control characters become their pictures, C1 ones, which have none, the replacement character:
neither a model nor a server may steer the terminal."""
_ON_ONE_LINE = _CONTROLS | {ord("\n"): "↵", ord("\t"): "⇥"}


def harmless(text: str) -> str:
    """Text that a terminal shows and does not obey."""
    return text.translate(_CONTROLS)


def use_color(mode: str, stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Whether to colour: `mode` is auto, always or never; auto heeds NO_COLOR (no-color.org)."""
    if mode != "auto":
        return mode == "always"
    dumb = environment.get("TERM") == "dumb"
    return stream.isatty() and not environment.get("NO_COLOR") and not dumb


def paint(text: str, code: str) -> str:
    """`text` between an escape sequence and a reset; empty text and no code stay bare."""
    return f"\x1b[{code}m{text}{RESET}" if text and code else text


def origin_code(origin: TokenOrigin) -> str:
    """SGR code of a committed token; "" is the terminal's own colour."""
    if origin.position is None:
        return _OWN[origin.origin]
    return DRAFTED[min(origin.position, len(DRAFTED)) - 1]


def legend(num_positions: int) -> str:
    """One line that explains the colours for drafts of up to `num_positions` tokens."""
    positions = [
        paint(str(i + 1), origin_code(TokenOrigin(Origin.DRAFTED, i + 1)))
        for i in range(num_positions)
    ]
    own = [paint(origin.value, _OWN[origin]) for origin in (Origin.CORRECTED, Origin.BONUS)]
    return (
        f"drafted at {' '.join(positions)}  {'  '.join(own)}  plain  {paint('rejected', REJECTED)}"
    )


class TextPainter:
    """Gives out the text of one growing request, each token in the colour of its origin.

    A character that is split over tokens has the colour of the token that completes it. Without
    the colours and the rejected guesses the pieces together are the request's text.

    Args:
        color: False gives the bare text.
        at_terminal: the bare text is made harmless too, as coloured text always is.
    """

    def __init__(self, tokenizer: Tokenizer, color: bool, at_terminal: bool = False) -> None:
        self._tokenizer = tokenizer
        self._color = color
        self._at_terminal = at_terminal
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._pieces: deque[tuple[str, str]] = deque()  # text and code, not given out yet
        self._num_rounds = 0
        self._num_tokens = 0
        self._num_given = 0  # characters of the request's text
        self._code = ""

    def push(self, output: Completion) -> str:
        """Take the request as it stands; returns what is new. It may end inside a line."""
        shown = harmless if self._color or self._at_terminal else str
        return "".join(paint(shown(text), code) for text, code in self.spans(output))

    def spans(self, output: Completion) -> list[tuple[str, str]]:
        """What `push` shows, as pieces of text and the SGR code of each."""
        if not self._color:
            new, self._num_given = output.text[self._num_given :], len(output.text)
            return [(new, "")]
        for trace in output.rounds[self._num_rounds :]:
            self._take(trace, output.token_ids)
        self._num_rounds = len(output.rounds)
        if output.finished:
            self._pieces.append((self._detokenizer.flush(), self._code))
        return list(self._ready(len(output.text)))

    def _take(self, trace: RoundTrace, token_ids: Sequence[int]) -> None:
        for origin in trace.origins:
            if origin.origin is Origin.CORRECTED:
                before = token_ids[: self._num_tokens]
                guess = self._tokenizer.decode_after(before, trace.rejected_token_ids)
                self._pieces.append((guess.translate(_ON_ONE_LINE), REJECTED))
            self._code = origin_code(origin)
            text = self._detokenizer.push([token_ids[self._num_tokens]])
            self._pieces.append((text, self._code))
            self._num_tokens += 1

    def _ready(self, num_characters: int) -> Iterator[tuple[str, str]]:
        """Pieces up to the end of the text, which stop strings hold back or cut."""
        while self._pieces:
            text, code = self._pieces.popleft()
            if code != REJECTED:
                left = num_characters - self._num_given
                self._num_given += min(len(text), left)
                if len(text) > left:
                    self._pieces.appendleft((text[left:], code))
                    yield text[:left], code
                    return
            yield text, code


def error_line(error: Exception, about: str = "") -> str:
    """An error as the command reports it: one line, whatever the message holds."""
    return harmless(f"outrider: error: {about}{' '.join(str(error).splitlines())}")


def acceptance_line(stats: SpeculationStats) -> str:
    """Tokens, passes and acceptance in one line."""
    parts = [f"{stats.num_tokens} tokens in {stats.num_passes} target passes"]
    if stats.acceptance_length is not None:
        parts.append(f"acceptance length {stats.acceptance_length:.2f}")
        parts.append(f"accepted at {_rates(stats)}")
    return ", ".join(parts)


def statistics_lines(stats: SpeculationStats, seconds: float) -> list[str]:
    """What a run did, one figure a line.

    Args:
        seconds: wall time of the run, the prompts' included and loading not.
    """
    per_pass = stats.num_tokens / max(stats.num_passes, 1)
    lines = [f"target passes      {stats.num_passes}"]
    lines.append(f"tokens             {stats.num_tokens} ({per_pass:.2f} a pass)")
    if stats.acceptance_length is not None:
        lines += [
            f"acceptance length  {stats.acceptance_length:.2f} over {stats.num_rounds} rounds",
            f"accepted at        {_rates(stats)}",
        ]
    speed = stats.num_tokens / seconds if seconds > 0 else 0.0
    lines.append(f"time               {seconds:.2f} s, {speed:.1f} tokens/s")
    return lines


def _rates(stats: SpeculationStats) -> str:
    """Share of the verifying rounds that accepted the draft at each position."""
    return ", ".join(
        f"{position}: {count / stats.num_rounds:.0%}"
        for position, count in enumerate(stats.accepted_per_position, start=1)
    )


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines: list[str] = []
    for first, *rest in rows:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return lines


class ProgressBar:
    """A bar on one line of a terminal, redrawn at most ten times a second; LLM's `progress`."""

    _SECONDS_BETWEEN = 0.1
    _WIDTH = 24

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._started = time.monotonic()
        self._drawn_at: float | None = None

    def __call__(self, num_finished: int, num_requests: int, num_tokens: int) -> None:
        """Show how far a batch has got."""
        now = time.monotonic()
        recent = self._drawn_at is not None and now - self._drawn_at < self._SECONDS_BETWEEN
        if recent and num_finished < num_requests:
            return
        self._drawn_at = now
        filled = self._WIDTH * num_finished // max(num_requests, 1)
        bar = "#" * filled + "." * (self._WIDTH - filled)
        speed = num_tokens / max(now - self._started, 1e-9)
        line = f"[{bar}] {num_finished}/{num_requests}  {num_tokens} tokens  {speed:.0f} tokens/s"
        self._stream.write(f"\r{line[: shutil.get_terminal_size().columns - 1]}\x1b[K")
        self._stream.flush()

    def close(self) -> None:
        """Wipe the bar, where one was drawn."""
        if self._drawn_at is not None:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
