"""Recorded runs: written and read again, and what is said of files that are no such thing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider import trace_file
from outrider.batch import FinishReason
from outrider.cli import main
from outrider.output import Completion, RequestOutput
from outrider.trace import PassTimes, RoundTrace
from outrider.trace_fields import TraceFileError
from outrider.trace_file import RecordedOutput, RecordedRound, RecordedRun, RecordedToken
from tests.tiny_tokenizer import byte_ids, tokenizer

A, B, C, X, Y = byte_ids(b"abcxy")


def empty_run() -> RecordedRun:
    return RecordedRun("a model", "mtp", 3, "cpu")


def recorded() -> RecordedRun:
    """A text "abc" of two passes, the second of which was refused a guess."""
    times = (
        PassTimes(7.5, 0.25, (0.125, 0.0, 0.125), 1, False),
        PassTimes(8.0, 0.5, (0.25, 0.125, 0.125), 2, True),
    )
    rounds = (RoundTrace((), 0, 1, times[0]), RoundTrace((B, X, Y), 1, 2, times[1]))
    completion = Completion(
        text="abc", token_ids=(A, B, C), finish_reason=FinishReason.LENGTH, rounds=rounds
    )
    output = RequestOutput("request", (1,), (completion,))
    return trace_file.record(empty_run(), ["<p>"], [output], tokenizer())


def test_a_run_is_recorded_with_texts_and_times_from_its_first_pass() -> None:
    first, second = recorded().outputs[0].rounds
    assert first == RecordedRound(
        drafts=(),
        accepted=0,
        tokens=(RecordedToken(A, "a"),),
        rejected=(),
        prompt_pass=True,
        started=0.0,
        seconds=0.25,
        parts=(0.125, 0.0, 0.125),
        sequences=1,
    )
    assert (second.drafts, second.accepted) == ((B, X, Y), 1)
    assert second.tokens == (RecordedToken(B, "b"), RecordedToken(C, "c"))
    assert (second.rejected, second.started, second.sequences) == (("x", "y"), 0.5, 2)
    assert recorded().outputs[0].finish_reason == "length"


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    path, run = tmp_path / "run.jsonl", recorded()
    path.write_text("something older and longer\n" * 100)
    trace_file.write(run, path)
    assert trace_file.read(path) == run
    assert [json.loads(line)["type"] for line in path.read_text().splitlines()] == [
        "run",
        "output",
        "round",
        "round",
    ]


def test_a_request_that_failed_leaves_no_output() -> None:
    failed = RequestOutput.failed("request", TraceFileError("x"))
    assert trace_file.record(empty_run(), ["a"], [failed], tokenizer()).outputs == ()


def test_a_run_is_not_changed_by_what_is_recorded_of_it() -> None:
    run = empty_run()
    failed = RequestOutput.failed("request", TraceFileError("x"))
    done = RequestOutput("r", (1,), (Completion(finish_reason=FinishReason.ABORT),))
    whole = trace_file.record(run, ["a", "b"], [failed, done], tokenizer())
    assert whole.outputs == (RecordedOutput(1, 0, "b", "abort"),)
    assert run == empty_run() and run.outputs == ()


def test_a_text_that_has_not_ended_is_not_recorded_as_if_it_had() -> None:
    running = RequestOutput("r", (1,), (Completion(finish_reason=None),))
    with pytest.raises(AssertionError, match="where the text has ended"):
        trace_file.record(empty_run(), ["a"], [running], tokenizer())


def lines() -> list[dict[str, Any]]:
    return [dict(line) for line in trace_file._lines(recorded())]  # pyright: ignore[reportPrivateUsage]


FAULTS: list[tuple[int, dict[str, Any], str]] = [
    (1, {"version": 2}, "line 1: version: got 2; allowed: 1, what this Outrider reads"),
    (1, {"type": "round"}, "line 1: type: got 'round'; allowed: run, in the first line"),
    (1, {"type": "walk"}, "line 1: type: got 'walk'; allowed: run, output, round"),
    (1, {"device": 3}, "line 1: device: got 3; allowed: cpu, cuda"),
    (1, {"model": None}, "line 1: model: got None; allowed: a text"),
    (1, {"method": 1}, "line 1: method: got 1; allowed: a text or null"),
    (2, {"type": "run"}, "line 2: type: got 'run'; allowed: output or round"),
    (2, {"type": "round"}, "line 2: type: got 'round'; allowed: output, which its rounds follow"),
    (2, {"finish_reason": "tired"}, "line 2: finish_reason: got 'tired'; allowed: stop, length"),
    (2, {"prompt_index": True}, "line 2: prompt_index: got True; allowed: an integer of at least"),
    (2, {"colour": 1}, "line 2: no such field: got 'colour'"),
    (4, {"accepted": 4}, "line 4: accepted: got 4; allowed: an integer from 0 to 3, the number of"),
    (4, {"accepted": 0, "rejected": []}, "line 4: tokens: got 2; allowed: 1 to 1 tokens"),
    (4, {"drafts": [1, -1]}, "line 4: drafts: got [1, -1]; allowed: a list of integers"),
    (4, {"drafts": "abc"}, "line 4: drafts: got 'abc'; allowed: a list of integers"),
    (4, {"tokens": []}, "line 4: tokens: got 0; allowed: 1 to 2 tokens, accepted + 1"),
    (4, {"tokens": [3]}, "line 4: tokens[0]: got 3; allowed: an object"),
    (4, {"tokens": 3}, "line 4: tokens: got 3; allowed: a list of objects"),
    (4, {"tokens": [{"id": 3}]}, "line 4: tokens[0]: text is missing"),
    (4, {"tokens": [{"id": 3, "text": "", "x": 1}]}, "line 4: tokens[0]: no such field: got 'x'"),
    (4, {"rejected": ["x"]}, "line 4: rejected: got 1; allowed: 0 or 2 texts"),
    (4, {"rejected": [1, 2]}, "line 4: rejected: got [1, 2]; allowed: a list of texts"),
    (
        4,
        {"seconds": -1},
        "line 4: seconds: got -1; allowed: a number of seconds from 0 to 10000000",
    ),
    (4, {"seconds": 10**400}, "line 4: seconds: got 1000"),
    (4, {"seconds": 1e9}, "line 4: seconds: got 1000000000.0; allowed: a number of seconds from 0"),
    (4, {"started": 1e17}, "line 4: started: got 1e+17; allowed: a number of seconds from 0"),
    (1, {"model": "\ud800"}, "line 1: model: got '\\ud800'; allowed: a text"),
    (1, {"method": "a\udfff"}, "line 1: method: got 'a\\udfff'; allowed: a text or null"),
    (2, {"prompt": "\udc00\ud800"}, "line 2: prompt: got '\\udc00\\ud800'; allowed: a text"),
    (
        4,
        {"rejected": ["x", "\udbff"]},
        "line 4: rejected: got ['x', '\\udbff']; allowed: a list of",
    ),
    (4, {"tokens": [{"id": 3, "text": "\ud800"}]}, "line 4: tokens[0]: text: got '\\ud800'"),
    (4, {"seconds": float("nan")}, "line 4: seconds: got nan; allowed: a number of seconds"),
    (4, {"started": float("inf")}, "line 4: started: got inf; allowed: a number of seconds"),
    (4, {"parts": {"verify": 1, "commit": 1}}, "line 4: parts: draft is missing"),
    (4, {"parts": [1, 2, 3]}, "line 4: parts: got [1, 2, 3]; allowed: an object"),
    (4, {"prompt_pass": 0}, "line 4: prompt_pass: got 0; allowed: true or false"),
    (3, {"drafts": [1, 2], "accepted": 2}, "line 4: type: got 'round'; allowed: output or the end"),
]


@pytest.mark.parametrize(("number", "change", "message"), FAULTS, ids=lambda value: str(value)[:40])
def test_a_wrong_line_is_named_with_its_field(
    number: int, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    entries = lines()
    entries[number - 1] |= change
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    with pytest.raises(TraceFileError) as caught:
        trace_file.read(path)
    assert str(caught.value).startswith(f"{path}, {message}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "trace file is empty"),
        (b"\n \n", "trace file is empty"),
        (b"\xff\xfe", "trace file cannot be read ('utf-8' codec"),
        (b"{", "line 1: not JSON"),
        (b"[" * 100_000, "line 1: not JSON"),
        (b"[1]", "line 1: not a JSON object: got '[1]'"),
        (b"{}", "line 1: type is missing"),
    ],
    ids=["empty", "blank", "no UTF-8", "cut", "deep", "a list", "nothing"],
)
def test_what_is_no_recorded_run_is_one_line_and_exit_code_2(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(content)
    assert main(["trace", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert message in printed.err and str(path) in printed.err


@pytest.mark.parametrize(
    ("started", "seconds"),
    [(1e7, 0.0), (1e7, 1e-9), (0.0, 1e7), (1e7, 1e7), (9_999_999.5, 0.25), (0.1, 1e-6)],
)
@pytest.mark.parametrize("count", [1, 2000])
def test_whatever_can_be_read_can_be_reported(
    started: float, seconds: float, count: int, tmp_path: Path
) -> None:
    entries = lines()
    entries[-1] |= {"started": started, "seconds": seconds, "parts": None}
    entries[-1]["tokens"] = [{"id": 1, "text": "\U0010ffff"}] * 2
    path, page = tmp_path / "run.jsonl", tmp_path / "out.html"
    entries += [entries[-1]] * (count - 1)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert main(["trace", str(path)]) == 0
    assert main(["trace", str(path), "--html", str(page)]) == 0
    ticks = page.read_text().count('<line class="axis"')
    assert 3 <= ticks <= 3 + 24000 / 100  # three of the other chart; none closer than 110 pixels


def test_a_report_does_not_overwrite_its_recording(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, link, hard = (tmp_path / name for name in ("run.jsonl", "link", "hard"))
    trace_file.write(recorded(), path)
    link.symlink_to(path)
    hard.hardlink_to(path)
    before = path.read_bytes()
    for out in (path, link, hard, tmp_path / "." / "run.jsonl"):
        assert main(["trace", str(path), "--html", str(out)]) == 2
        assert "--html would overwrite what is read: got" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_a_run_that_fails_leaves_no_recording_and_no_prompt_is_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, old, link = (tmp_path / name for name in ("run.jsonl", "old.jsonl", "link"))
    old.write_text("an older run")
    link.symlink_to(tmp_path / "target")
    for out in (path, old, link):
        words = ["generate", str(tmp_path / "no-model"), "--prompt", "a", "--trace-file", str(out)]
        assert main(words) == 2
    assert not path.exists() and not (tmp_path / "target").exists()
    assert link.is_symlink() and old.read_text() == "an older run"
    words = ["generate", "M", "--prompt-file", str(old), "--trace-file", str(old)]
    assert main(words) == 2
    assert "--trace-file would overwrite what is read" in capsys.readouterr().err
    assert old.read_text() == "an older run"


def test_a_file_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl" in capsys.readouterr().err


def test_an_output_without_rounds_is_fine(tmp_path: Path) -> None:
    run = replace(empty_run(), outputs=(RecordedOutput(0, 0, "a", "abort"),))
    trace_file.write(run, tmp_path / "run.jsonl")
    assert trace_file.read(tmp_path / "run.jsonl") == run
