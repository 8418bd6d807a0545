"""Pictures of a recorded run, as SVG. Colours are the page's, by class."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from outrider.trace_file import RecordedRound
from outrider.trace_report import Acceptance

_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 412, 16, 172
_LANES = ("verify", "commit", "draft")
_LANE_HEIGHT, _LANE_LEFT, _LANE_TOP = 26, 64, 8
_PIXELS_A_ROUND = 16
_NARROWEST, _WIDEST = 900, 24000
_TICK_PIXELS = 110


def acceptance_chart(entries: Sequence[Acceptance]) -> str:
    """Share by position with its interval."""
    parts = [
        '<svg class="whole" id="acceptance-chart" viewBox="0 0 420 200" role="img" '
        'aria-label="Acceptance by position, with intervals; the table says the same">'
    ]
    for share in (0.0, 0.5, 1.0):
        y = _height(share)
        parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{share:.0%}", "end"))
    step = (_RIGHT - _LEFT) / max(len(entries), 1)
    for index, entry in enumerate(entries):
        x = _LEFT + step * (index + 0.5)
        low, high, y = _height(entry.low), _height(entry.high), _height(entry.share)
        parts.append(
            f'<path class="interval" d="M{x:.1f} {low:.1f}V{high:.1f}'
            f'M{x - 5:.1f} {low:.1f}h10M{x - 5:.1f} {high:.1f}h10"/>'
            f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4" data-share="{entry.share}"/>'
        )
        parts.append(_text(x + 9, y + 4, f"{entry.share:.0%}", "start", ""))
        parts.append(_text(x, _BOTTOM + 20, str(entry.position), "middle"))
    return "".join([*parts, "</svg>"])


def _height(share: float) -> float:
    return _BOTTOM + (_TOP - _BOTTOM) * share


def _text(x: float, y: float, text: str, anchor: str, classes: str = "quiet") -> str:
    return f'<text class="{classes}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def timeline(rounds: Sequence[RecordedRound]) -> str:
    """One lane for each part of a round, or one in all where the parts are not known."""
    if not rounds:
        return '<p class="quiet">No round ran.</p>'
    known = all(one.parts is not None for one in rounds)
    lanes = _LANES if known else ("round",)
    begin = min(one.started for one in rounds)
    length = max(max(one.started + one.seconds for one in rounds) - begin, 1e-6)
    width = min(max(len(rounds) * _PIXELS_A_ROUND, _NARROWEST), _WIDEST)
    scale = (width - _LANE_LEFT - 12) / length
    bottom = _LANE_TOP + len(lanes) * _LANE_HEIGHT
    parts = [
        f'<div class="scroll" tabindex="0" role="group" aria-label="Timeline, scrolls sideways">'
        f'<svg class="timeline" width="{width}" height="{bottom + 26}" role="img" '
        f'aria-label="When each part of each round ran; the table of rounds has the numbers">'
    ]
    for index, lane in enumerate(lanes):
        y = _LANE_TOP + index * _LANE_HEIGHT
        parts.append(_text(_LANE_LEFT - 8, y + 16, lane, "end", ""))
    parts += _ticks(begin, length, scale, bottom)
    for number, one in enumerate(rounds, start=1):
        at = _LANE_LEFT + (one.started - begin) * scale
        for index, seconds in enumerate(one.parts if known and one.parts else (one.seconds,)):
            y = _LANE_TOP + index * _LANE_HEIGHT + 3
            parts.append(
                f'<rect class="{lanes[index]}" x="{at:.2f}" y="{y}" '
                f'width="{max(seconds * scale, 1):.2f}" height="{_LANE_HEIGHT - 6}">'
                f"<title>round {number}, {lanes[index]}: {1000 * seconds:.2f} ms</title></rect>"
            )
            at += seconds * scale
    return "".join([*parts, "</svg></div>"])


def _ticks(begin: float, length: float, scale: float, bottom: int) -> Iterator[str]:
    """Seconds at round numbers; a recording holds none above trace_fields.MOST_SECONDS."""
    wanted = _TICK_PIXELS / scale
    step = next(
        size * 10.0**power
        for power in range(-6, 7)
        for size in (1, 2, 5)
        if size * 10.0**power >= wanted
    )
    for number in range(math.ceil(begin / step), math.floor((begin + length) / step) + 1):
        x = _LANE_LEFT + (number * step - begin) * scale
        yield f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{_LANE_TOP}" y2="{bottom}"/>'
        yield _text(x, bottom + 16, f"{number * step:g} s", "middle")
