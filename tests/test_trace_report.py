"""What a recorded run says, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from outrider.trace_file import RecordedOutput, RecordedRound, RecordedRun, RecordedToken
from outrider.trace_report import (
    acceptance,
    acceptance_length,
    stop_counts,
    stop_reason,
    summary_lines,
    wilson,
)


def a_round(drafted: int, accepted: int, emitted: int | None = None) -> RecordedRound:
    emitted = accepted + 1 if emitted is None else emitted
    return RecordedRound(
        drafts=tuple(range(drafted)),
        accepted=accepted,
        tokens=tuple(RecordedToken(index, "t") for index in range(emitted)),
        rejected=(),
        prompt_pass=drafted == 0,
        started=0.0,
        seconds=1.0,
        parts=None,
        sequences=1,
    )


def solved(successes: int, trials: int, z: float) -> tuple[float, float]:
    """The interval by what defines it: (share - p)^2 = z^2 p (1 - p) / n, solved by bisection."""
    share = successes / trials

    def inside(p: float) -> bool:
        return (share - p) ** 2 <= z * z * p * (1 - p) / trials + 1e-18

    def edge(good: float, bad: float) -> float:
        for _ in range(200):
            middle = (good + bad) / 2
            good, bad = (middle, bad) if inside(middle) else (good, middle)
        return good

    return edge(share, 0.0), edge(share, 1.0)


def test_the_name_of_a_model_does_not_steer_the_terminal() -> None:
    lines = summary_lines(RecordedRun("\x1b[2Jevil\x9b", None, 0, "cpu"))
    assert lines[0] == "␛[2Jevil\ufffd: 0 tokens in 0 passes"


@pytest.mark.parametrize(
    ("successes", "trials"), [(0, 1), (1, 1), (0, 10), (10, 10), (3, 7), (37, 52), (5000, 10_000)]
)
def test_intervals_are_the_shares_that_a_score_test_does_not_refuse(
    successes: int, trials: int
) -> None:
    low, high = wilson(successes, trials)
    assert (low, high) == pytest.approx(solved(successes, trials, 1.959963984540054), abs=1e-6)
    assert 0 <= low <= successes / trials <= high <= 1


def test_a_known_interval() -> None:
    # 8 of 10: p = (0.8 + 1.96^2 / 20 -+ 1.96 sqrt(0.016 + 1.96^2 / 400)) / (1 + 1.96^2 / 10)
    spread = 1.96 * math.sqrt(0.016 + 3.8416 / 400)
    below, above = (0.99208 - spread) / 1.38416, (0.99208 + spread) / 1.38416
    assert wilson(8, 10, 1.96) == pytest.approx((below, above))
    assert (below, above) == pytest.approx((0.4901, 0.9433), abs=5e-4)


def test_a_position_is_counted_where_a_round_drafted_that_far() -> None:
    rounds = [a_round(0, 0), a_round(3, 3), a_round(3, 1), a_round(1, 1), a_round(2, 0)]
    counts = [(entry.position, entry.rounds, entry.accepted) for entry in acceptance(rounds)]
    assert counts == [(1, 4, 3), (2, 3, 1), (3, 2, 1)]
    assert acceptance_length(rounds) == 1 + 5 / 4
    assert acceptance([a_round(0, 0)]) == [] and acceptance_length([a_round(0, 0)]) is None


@pytest.mark.parametrize(
    ("one", "finish_reason", "reason"),
    [
        (a_round(0, 0), "stop", "prompt pass"),
        (a_round(3, 0), "length", "rejected at 1"),
        (a_round(3, 2), "length", "rejected at 3"),
        (a_round(3, 3), "length", "all accepted"),
        (a_round(3, 3, 2), "stop", "end of text"),
        (a_round(3, 3, 3), "length", "length limit"),
        (a_round(3, 1, 1), "abort", "aborted"),
    ],
)
def test_why_a_round_stopped(one: RecordedRound, finish_reason: str, reason: str) -> None:
    assert stop_reason(one, finish_reason) == reason


def test_a_plain_round_had_no_draft() -> None:
    one = a_round(0, 0)
    plain = RecordedRound(one.drafts, 0, one.tokens, (), False, 0.0, 1.0, None, 1)
    assert stop_reason(plain, "length") == "no draft"


def test_the_summary_has_intervals_and_reasons() -> None:
    rounds = [a_round(0, 0), a_round(2, 2), a_round(2, 1), a_round(2, 1), a_round(2, 2, 1)]
    run = RecordedRun(
        "a model", "mtp", 2, "cpu", (RecordedOutput(0, 0, "p", "stop", tuple(rounds)),)
    )
    assert stop_counts(run.outputs) == {
        "rejected at 2": 2,
        "prompt pass": 1,
        "all accepted": 1,
        "end of text": 1,
    }
    assert summary_lines(run) == [
        "a model: 9 tokens in 5 passes",
        "",
        "acceptance length 2.50",
        "",
        "position  rounds  accepted   share    95 % (Wilson)",
        "1              4         4  100.0%  51.0% to 100.0%",
        "2              4         2   50.0%   15.0% to 85.0%",
        "",
        "rounds stopped by  rounds",
        "rejected at 2           2",
        "prompt pass             1",
        "all accepted            1",
        "end of text             1",
    ]
