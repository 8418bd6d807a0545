"""What a recorded run says: acceptance with intervals, why rounds stopped, times. Numbers only."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.batch import FinishReason
from outrider.render import harmless, table
from outrider.trace import SpeculationStats
from outrider.trace_file import RecordedOutput, RecordedRound, RecordedRun

Z_95 = 1.959963984540054
"""Quantile of the normal distribution that leaves 2.5 % on either side."""

ENDINGS = {
    FinishReason.STOP.value: "end of text",
    FinishReason.LENGTH.value: "length limit",
    FinishReason.ABORT.value: "aborted",
    FinishReason.ERROR.value: "error",
}


@dataclass(frozen=True)
class Acceptance:
    """How a position fared.

    Attributes:
        position: from 1.
        rounds: those that verified a draft there.
        accepted: those of them that accepted it, and so all before it.
        low, high: Wilson's 95 % interval of the share.
    """

    position: int
    rounds: int
    accepted: int
    low: float
    high: float

    @property
    def share(self) -> float:
        return self.accepted / self.rounds


def wilson(successes: int, trials: int, z: float = Z_95) -> tuple[float, float]:
    """Wilson's score interval of a proportion (E. B. Wilson, JASA 22, 1927).

    p = successes / trials; centre (p + z^2 / 2n) / (1 + z^2 / n), half width
    z / (1 + z^2 / n) * sqrt(p (1 - p) / n + z^2 / 4n^2), n = trials.
    """
    share, square = successes / trials, z * z / trials
    centre = (share + square / 2) / (1 + square)
    spread = z * math.sqrt(share * (1 - share) / trials + square / (4 * trials)) / (1 + square)
    # At 0 and at all the edge is the share itself, which rounding may miss.
    return max(min(centre - spread, share), 0.0), min(max(centre + spread, share), 1.0)


def acceptance(rounds: Iterable[RecordedRound]) -> list[Acceptance]:
    """By position, as far as any round drafted."""
    tried: Counter[int] = Counter()
    right: Counter[int] = Counter()
    for one in rounds:
        tried.update(range(1, len(one.drafts) + 1))
        right.update(range(1, one.accepted + 1))
    return [
        Acceptance(position, tried[position], right[position], *wilson(right[position], trials))
        for position, trials in sorted(tried.items())
    ]


def stop_reason(one: RecordedRound, finish_reason: str) -> str:
    """Why a round emitted no more than it did; `finish_reason` is that of its output."""
    if one.was_cut:
        return ENDINGS[finish_reason]
    if not one.drafts:
        return "prompt pass" if one.prompt_pass else "no draft"
    if one.accepted < len(one.drafts):
        return f"rejected at {one.accepted + 1}"
    return "all accepted"


def stop_counts(outputs: Iterable[RecordedOutput]) -> dict[str, int]:
    """How often each reason stopped a round, the most frequent first."""
    reasons = (stop_reason(one, out.finish_reason) for out in outputs for one in out.rounds)
    return dict(Counter(reasons).most_common())


def acceptance_length(rounds: Sequence[RecordedRound]) -> float | None:
    """Mean tokens of a round that verified drafts, before cutting; None where none did."""
    return SpeculationStats.of([one.trace for one in rounds]).acceptance_length


def all_rounds(run: RecordedRun) -> list[RecordedRound]:
    """Of every output, one after the other."""
    return [one for output in run.outputs for one in output.rounds]


def summary_lines(run: RecordedRun) -> list[str]:
    """The report for a terminal."""
    rounds = all_rounds(run)
    num_tokens = sum(len(one.tokens) for one in rounds)
    lines = [f"{harmless(run.model)}: {num_tokens} tokens in {len(rounds)} passes", ""]
    length = acceptance_length(rounds)
    if length is not None:
        rows = [("position", "rounds", "accepted", "share", "95 % (Wilson)")]
        rows += [
            (
                str(entry.position),
                str(entry.rounds),
                str(entry.accepted),
                f"{entry.share:.1%}",
                f"{entry.low:.1%} to {entry.high:.1%}",
            )
            for entry in acceptance(rounds)
        ]
        lines += [f"acceptance length {length:.2f}", "", *table(rows), ""]
    counts = [(reason, str(count)) for reason, count in stop_counts(run.outputs).items()]
    return [*lines, *table([("rounds stopped by", "rounds"), *counts])]
