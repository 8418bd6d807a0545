"""The report of a recorded run: the whole way from a model to what a browser shows."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from outrider import trace_file, trace_html
from outrider.cli import main
from outrider.trace_file import RecordedOutput, RecordedRound, RecordedRun, RecordedToken
from tests.browser import Browser

EVIL = "<img src=x onerror='alert(1)'></span><script>alert(1)</script>&amp;\"$title"


def run_of(*rounds: RecordedRound, prompt: str = "p", model: str = "a model") -> RecordedRun:
    output = RecordedOutput(0, 0, prompt, "length", rounds)
    return RecordedRun(model, "mtp", 2, "cpu", (output,))


def a_round(parts: tuple[float, float, float] | None, text: str = "t") -> RecordedRound:
    tokens = (RecordedToken(5, text), RecordedToken(6, ""))
    return RecordedRound((5, 7), 1, tokens, (text,), False, 0.25, 0.5, parts, 2)


class Collector(HTMLParser):
    """Elements and texts of a document."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def parsed(document: str) -> Collector:
    collector = Collector()
    collector.feed(document)
    return collector


def test_the_report_loads_nothing_runs_nothing_and_keeps_markup_as_text() -> None:
    run = run_of(a_round((0.1, 0.1, 0.3), EVIL), prompt=EVIL, model=EVIL)
    document = trace_html.report(run)
    found = parsed(document)
    assert not {"script", "img", "iframe", "object"} & set(found.tags)
    assert not [name for name, _ in found.attributes if name.startswith("on") or name == "src"]
    assert [value for name, value in found.attributes if name == "href"] == ["data:,"]
    assert found.texts.count(EVIL) == 4  # heading, prompt, refused guess, token
    policy = dict(found.attributes)["content"]
    assert policy is not None and "default-src 'none'" in policy and "script-src 'none'" in policy
    assert "http" not in document.replace("http-equiv", "")


def test_lanes_are_drawn_where_parts_are_known_and_one_where_they_are_not() -> None:
    known = trace_html.report(run_of(a_round((0.1, 0.1, 0.3))))
    assert re.findall(r'<rect class="(\w+)"', known) == ["verify", "commit", "draft"]
    assert "Wall times of a CPU" in known and '<th scope="col">Draft ms</th>' in known
    unknown = trace_html.report(run_of(a_round(None)))
    assert re.findall(r'<rect class="(\w+)"', unknown) == ["round"]
    assert "only its whole duration is known" in unknown and "Draft ms" not in unknown


def test_lanes_stand_at_their_times() -> None:
    first, second = a_round((0.1, 0.1, 0.3)), a_round((0.2, 0.1, 0.2))
    late = RecordedRound(**{**vars(second), "started": 1.25})
    rects = [
        (float(x), float(width))
        for x, width in re.findall(
            r'<rect [^>]*x="([\d.]+)" y="\d+" width="([\d.]+)"',
            trace_html.report(run_of(first, late)),
        )
    ]
    begin = rects[0][0]
    pixels = (rects[3][0] - begin) / 1.0  # the second round begins one second after the first
    wanted = [(0, 0.1), (0.1, 0.1), (0.2, 0.3), (1.0, 0.2), (1.2, 0.1), (1.3, 0.2)]
    for (x, width), (at, seconds) in zip(rects, wanted, strict=True):
        assert x - begin == pytest.approx(at * pixels, abs=0.02)
        assert width == pytest.approx(seconds * pixels, abs=0.02)


def test_a_run_without_outputs_or_drafts_has_a_report() -> None:
    empty = trace_html.report(RecordedRun("a model", None, 0, "cuda"))
    assert "Nothing was drafted." in empty and "no drafts, on cuda" in empty
    for kind in ("drafted", "corrected", "bonus", "plain"):
        assert f'<span class="token {kind}"' in empty  # the legend
    aborted = RecordedRun("m", "mtp", 2, "cpu", (RecordedOutput(0, 0, "p", "abort"),))
    assert "No round ran." in trace_html.report(aborted)


@pytest.fixture
def recorded(trained_model: Path, tmp_path: Path) -> Path:
    """A run of the trained model, recorded by the command."""
    path = tmp_path / "run.jsonl"
    words = [
        "generate",
        str(trained_model),
        "--prompt",
        "def read_lines(path):\n",
        "--prompt",
        "<b>",
    ]
    words += ["--max-tokens", "40", "--temperature", "0.6", "--request-seed", "3"]
    words += ["--dtype", "float32", "--kv-cache-memory-gib", "0.02", "--max-num-seqs", "2"]
    words += ["--speculative-algorithm", "mtp", "--speculative-num-draft-tokens", "3"]
    assert main([*words, "--trace-file", str(path)]) == 0
    return path


def entries_of(path: Path, kind: str) -> list[dict[str, Any]]:
    return [e for line in path.read_text().splitlines() if (e := json.loads(line))["type"] == kind]


def test_a_browser_shows_what_the_file_holds(
    browser: Browser, recorded: Path, tmp_path: Path
) -> None:
    page = tmp_path / "out.html"
    assert main(["trace", str(recorded), "--html", str(page)]) == 0
    browser.go(page.as_uri())
    rounds = entries_of(recorded, "round")
    tokens = [token["text"] for one in rounds for token in one["tokens"]]
    texts = "[...document.querySelectorAll('.transcript {}')].map((e) => e.textContent)"
    assert browser.evaluate(texts.format(".token")) == tokens
    guesses = [guess for one in rounds for guess in one["rejected"]]
    shown = browser.evaluate(texts.format(".rejected"))
    assert shown == [text.replace("\n", "↵").replace("\t", "⇥") for text in guesses]
    assert browser.evaluate(texts.format(".prompt")) == ["def read_lines(path):\n", "<b>"]
    kinds = [
        "drafted" if index < one["accepted"] else own
        for one in rounds
        for own in [_own(one)]
        for index in range(len(one["tokens"]))
    ]
    assert (
        browser.evaluate(
            "[...document.querySelectorAll('.transcript .token')].map((e) => e.classList[1])"
        )
        == kinds
    )

    table = "[...document.querySelectorAll('#acceptance tbody tr')].map((r) => r.innerText)"
    for position, line in enumerate(browser.evaluate(table), start=1):
        tried = [one for one in rounds if len(one["drafts"]) >= position]
        right = sum(one["accepted"] >= position for one in tried)
        cells = line.split("\t")
        assert cells[:4] == [
            str(position),
            str(len(tried)),
            str(right),
            f"{100 * right / len(tried):.1f}%",
        ]
    assert browser.evaluate("document.querySelectorAll('#acceptance tbody tr').length") == 3
    took = browser.evaluate(
        "[...document.querySelectorAll('.rounds tbody tr')].map((r) => r.cells[2].textContent)"
    )
    assert took == [f"{1000 * one['seconds']:.2f}" for one in rounds]
    visible = "getComputedStyle(document.querySelector('.transcript .rejected')).display !== 'none'"
    assert browser.evaluate(visible)
    browser.click("#guesses")
    assert not browser.evaluate(visible)
    assert browser.console == []


def _own(one: dict[str, Any]) -> str:
    if not one["drafts"]:
        return "plain"
    return "corrected" if one["accepted"] < len(one["drafts"]) else "bonus"


def test_a_recorded_run_is_what_was_printed(
    trained_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    words = ["generate", str(trained_model), "--prompt", "a", "--prompt", "", "--n", "2"]
    words += ["--max-tokens", "16", "--temperature", "0.8", "--request-seed", "5", "--stop", "e"]
    words += ["--dtype", "float32", "--kv-cache-memory-gib", "0.02", "--max-num-seqs", "2"]
    words += ["--speculative-algorithm", "mtp", "--speculative-num-draft-tokens", "3", "--json"]
    assert main([*words, "--trace-file", str(path)]) == 1  # one prompt is empty
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    texts = [entry for entry in printed if entry["error"] is None]
    outputs = trace_file.read(path).outputs
    assert len(outputs) == len(texts) == 2
    for output, entry in zip(outputs, texts, strict=True):
        tokens = [token for one in output.rounds for token in one.tokens]
        assert "".join(token.text for token in tokens) == entry["text"]
        assert [token.id for token in tokens] == entry["token_ids"]
        assert output.finish_reason == entry["finish_reason"]
        stats = entry["speculation"]
        assert sum(len(one.drafts) for one in output.rounds) == stats["num_drafted"]
        assert sum(one.accepted for one in output.rounds) == stats["num_accepted"]
        assert all(one.seconds > 0 and one.sequences >= 1 for one in output.rounds)
    assert sum(output.rounds[0].prompt_pass for output in outputs) == 2


def test_a_place_that_cannot_be_written_is_refused_before_anything_runs(
    trained_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "nowhere" / "run.jsonl"
    words = ["generate", str(trained_model), "--prompt", "a", "--trace-file", str(path)]
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "cannot write the trace (No such file" in printed.err
    good = tmp_path / "run.jsonl"
    good.write_text("x")
    assert main(["trace", str(good), "--html", str(path)]) == 2
