"""The live page: what the browser shows against what the server sent, and what goes wrong."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser import Browser, find_browser
from tests.server.serving import Server, events, wait_until

KEY = "sesame"

SPY = """
window.sent = [];
window.extra = {};
const original = window.fetch;
window.fetch = async (path, options = {}) => {
  if (options.body) {
    options = {...options, body: JSON.stringify({...JSON.parse(options.body), ...window.extra})};
  }
  const answer = await original(path, options);
  if (path === "/v1/completions" && answer.ok) {
    const [ours, theirs] = answer.body.tee();
    new Response(ours).text().then((text) => window.sent.push(text), () => {});
    return new Response(theirs, {headers: answer.headers});
  }
  return answer;
};
"""
"""Keeps what the server sends, byte for byte, and lets a test add fields to a request."""

READY = "document.querySelector('#health').textContent === 'ready'"


def opened(browser: Browser, server: Server) -> Browser:
    """The page of a server, ready to be used."""
    browser.call("Page.addScriptToEvaluateOnNewDocument", source=SPY)
    browser.go(f"{server.url}/")
    return browser


def completed(browser: Browser, **fields: str) -> list[dict[str, Any]]:
    """Fill in the form, wait for the end; returns the chunks that the server sent."""
    for name, value in fields.items():
        browser.fill(f"#{name}", value)
    browser.evaluate("window.sent.length = 0")
    browser.click("#start")
    browser.wait_for("run && run.end && window.sent.length === 1 && !drawing")
    return list(events(iter(browser.evaluate("window.sent[0]").split("\n"))))


def tokens_of(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for chunk in chunks for entry in chunk.get("outrider", {}).get("tokens", [])]


def rounds_of(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for c in chunks for entry in c.get("outrider", {}).get("round_traces", [])]


def table(browser: Browser, name: str) -> list[list[str]]:
    """Texts of a table's body."""
    return browser.evaluate(
        f"[...document.querySelectorAll('#{name} tbody tr')]"
        ".map((row) => [...row.cells].map((cell) => cell.textContent))"
    )


def test_the_page_needs_nothing_but_the_server(server: Server) -> None:
    answer = server.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    addresses = set(re.findall(r"\bhttps?://[^\s\"'<]+", answer.text))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, which nobody loads
    assert not re.search(r"<(script|link|img)[^>]*\b(src|href)=\"(?!data:)", answer.text)
    policy = answer.headers["content-security-policy"]
    (script,) = re.findall("<script>(.*?)</script>", answer.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "legend.html" not in answer.text
    for kind in ("drafted", "corrected", "bonus", "plain"):  # the legend has its place
        assert f'<span class="token {kind}"' in answer.text


def test_tokens_and_curves_are_those_that_the_server_sent(browser: Browser, server: Server) -> None:
    opened(browser, server).wait_for(READY)
    assert browser.evaluate("document.querySelector('#model').textContent") == "tiny"
    chunks = completed(browser, max_tokens="60", temperature="0.4", seed="3")
    tokens, rounds = tokens_of(chunks), rounds_of(chunks)
    assert len(tokens) == 60
    kinds = {entry["origin"].partition(":")[0] for entry in tokens}
    assert kinds == {"plain", "drafted", "corrected", "bonus"}

    shown = browser.evaluate(
        "[...document.querySelectorAll('#tokens .token')].map((token) => ({"
        "text: token.textContent, classes: token.className, ahead: token.dataset.ahead ?? null}))"
    )
    for entry, seen in zip(tokens, shown, strict=True):
        kind, _, position = entry["origin"].partition(":")
        assert seen["text"] == entry["text"]
        assert seen["classes"].split()[:2] == ["token", kind]
        assert seen["ahead"] == (position or None)

    wanted: list[list[str]] = []
    for position in (1, 2, 3):
        asked = [entry for entry in rounds if entry["drafted"] >= position]
        right = sum(entry["accepted"] >= position for entry in asked)
        share = f"{100 * right / len(asked):.1f}%"
        wanted.append([str(position), str(len(asked)), str(right), share])
    assert table(browser, "acceptance-table") == wanted
    dots = browser.evaluate(
        "[...document.querySelectorAll('#acceptance .dot')].map((dot) => +dot.dataset.share)"
    )
    assert [f"{100 * share:.1f}%" for share in dots] == [row[3] for row in wanted]

    block = chunks[-2]["outrider"]
    stats = browser.evaluate(
        "Object.fromEntries([...document.querySelectorAll('#stats div')]"
        ".map((pair) => [pair.children[0].textContent, pair.children[1].textContent]))"
    )
    assert stats["Tokens"] == "60" and stats["End"] == "length limit"
    assert stats["Target passes"] == str(block["passes"])
    assert stats["Tokens a round"] == f"{block['acceptance_length']:.2f}"
    assert stats["Guesses accepted"] == f"{block['accepted']} of {block['drafted']}"
    check_speeds(browser, chunks)
    assert browser.console == []


def check_speeds(browser: Browser, chunks: list[dict[str, Any]]) -> None:
    """The curve of speed: tokens as they came, over the second before."""
    counts: list[int] = []
    for chunk in chunks:
        new = len(chunk.get("outrider", {}).get("tokens", []))
        if new:
            counts.append(new + (counts[-1] if counts else 0))
    points = [(p["at"], p["tokens"]) for p in browser.evaluate("run.points")]
    assert [tokens for _, tokens in points] == counts
    first = points[0][0]
    wanted: list[list[str]] = []
    for at, tokens in points:
        if at - first < 0.1:
            continue
        begin = max(at - 1, first)
        before = max(count for when, count in points if when <= begin)
        speed = (tokens - before) / (at - begin)
        wanted.append([f"{at - first:.3f}", str(tokens), f"{speed:.1f}"])
    seen = table(browser, "speed-table")
    assert len(seen) == len(wanted) > 3
    for ours, theirs in zip(wanted, seen, strict=True):
        assert ours[1] == theirs[1]
        # Rounding of a half may differ in the last digit.
        assert float(ours[0]) == pytest.approx(float(theirs[0]), abs=0.0011)
        assert float(ours[2]) == pytest.approx(float(theirs[2]), abs=0.11)


def test_rejected_guesses_show_under_the_pointer_and_by_keyboard(
    browser: Browser, server: Server
) -> None:
    opened(browser, server).wait_for(READY)
    tokens = tokens_of(completed(browser, max_tokens="40", temperature="0.4", seed="3"))
    index, entry = next((i, e) for i, e in enumerate(tokens) if e["origin"] == "corrected")
    guesses = "[...document.querySelectorAll('#detail li')].map((item) => item.textContent)"
    hidden = "document.querySelector('#detail').hidden"
    assert entry["rejected"] and browser.evaluate(hidden)

    browser.point_at(f"#tokens [data-index='{index}']")
    browser.wait_for(f"!{hidden}")
    assert [json.loads(text) for text in browser.evaluate(guesses)] == entry["rejected"]
    browser.press("Escape")
    assert browser.evaluate(hidden)

    browser.evaluate("document.querySelector('#marks').focus()")
    browser.press("Tab")  # the tokens are one stop
    for _ in range(index):
        browser.press("ArrowRight")
    focused = browser.evaluate("document.activeElement.dataset.index")
    assert (focused, browser.evaluate(hidden)) == (str(index), False)
    assert [json.loads(text) for text in browser.evaluate(guesses)] == entry["rejected"]
    label = browser.evaluate("document.activeElement.getAttribute('aria-label')")
    assert label.startswith(json.dumps(entry["text"], ensure_ascii=False))
    assert all(json.dumps(guess, ensure_ascii=False) in label for guess in entry["rejected"])
    browser.press("End")
    assert browser.evaluate("document.activeElement.dataset.index") == str(len(tokens) - 1)


def test_markup_in_prompt_and_completion_stays_text(browser: Browser, server: Server) -> None:
    opened(browser, server).wait_for(READY)
    evil = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>\n<b>&amp;"
    grammar = {"kind": "ebnf", "text": f"root ::= {json.dumps(evil)}"}
    browser.evaluate(f"window.extra = {json.dumps({'structured_output': grammar})}")
    chunks = completed(browser, prompt=evil, max_tokens="200", temperature="0")
    assert "".join(entry["text"] for entry in tokens_of(chunks)) == evil
    text = "document.querySelector('{}').textContent"
    assert browser.evaluate(text.format("#tokens")) == evil
    assert browser.evaluate(text.format("#prompt-shown")) == evil
    for inside in ("#text", "#history", "#detail"):
        found = f"document.querySelectorAll('{inside} :is(img, script, b)').length"
        assert browser.evaluate(found) == 0
    assert browser.evaluate("window.hacked === undefined")
    assert browser.console == []


def test_without_speculation_there_is_nothing_to_curve(browser: Browser, server: Server) -> None:
    opened(browser, server).wait_for(READY)
    browser.click("#speculation")
    tokens = tokens_of(completed(browser, max_tokens="8", temperature="0"))
    assert {entry["origin"] for entry in tokens} == {"plain"}
    assert table(browser, "acceptance-table") == []
    row = table(browser, "history")[0]
    assert row[1:5] == ["off", "8", "8", "–"]


def test_stop_ends_the_request_in_the_engine(browser: Browser, server: Server) -> None:
    opened(browser, server).wait_for(READY)
    before = server.metric("request_success_total", finished_reason="abort")
    browser.fill("#max_tokens", "480")
    browser.evaluate("window.extra = {ignore_eos: true}")
    browser.click("#start")
    browser.wait_for("run.tokens.length > 3")
    browser.click("#stop")
    browser.wait_for("run.end === 'stopped' && document.querySelector('#stop').disabled")
    assert browser.evaluate("run.tokens.length") < 480
    wait_until(
        lambda: server.metric("request_success_total", finished_reason="abort") == before + 1,
        "the request to be aborted",
    )
    wait_until(server.is_idle, "the engine to be idle")
    assert len(tokens_of(completed(browser, max_tokens="5"))) == 5


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    if find_browser() is None:  # before a server is started for nothing
        pytest.skip("needs Chromium on the PATH")
    with Server("--api-key", KEY) as running:
        yield running


def test_errors_are_shown_in_the_servers_words_at_their_field(
    browser: Browser, guarded: Server
) -> None:
    error = "document.querySelector('#error').textContent"
    invalid = "document.querySelector('[aria-invalid=true]')?.id ?? null"
    shown = "!document.querySelector('#error').hidden"
    opened(browser, guarded).wait_for(
        "document.querySelector('#health').textContent === 'ready; asks for an API key'"
    )
    browser.click("#start")
    browser.wait_for(shown)
    assert browser.evaluate(error).startswith("no valid API key")
    assert browser.evaluate(invalid) == "key"
    assert completed(browser, key=KEY, max_tokens="4")
    assert not browser.evaluate(shown) and browser.evaluate(invalid) is None

    for name, value, start in (
        ("temperature", "-1", "temperature: got -1"),
        ("max_tokens", "1.5", 'max_tokens: got "1.5"; allowed: a whole number'),
        ("seed", "9007199254740993", 'seed: got "9007199254740993"; allowed on this page: what a'),
        ("seed", "-9007199254740992", 'seed: got "-9007199254740992"; allowed on this page'),
        ("seed", "+5", 'seed: got "+5"; allowed: a whole number'),
        ("temperature", "9" * 400, f'temperature: got "{"9" * 400}"; allowed on this page'),
        ("prompt", "", "prompt is empty"),
        ("max_draft_tokens", "-3", "max_draft_tokens: got -3"),
    ):
        good = browser.evaluate(f"document.querySelector('#{name}').value")
        browser.fill(f"#{name}", value)
        browser.click("#start")
        browser.wait_for(shown)
        assert start in browser.evaluate(error)
        assert browser.evaluate(invalid) == name
        browser.fill(f"#{name}", good)
        assert completed(browser, max_tokens="4")

    browser.fill("#seed", "9007199254740991")  # the largest that every reader of JSON holds
    asked = 'JSON.stringify(body()).match(/"seed":(\\d+)/)[1]'
    assert browser.evaluate(asked) == "9007199254740991"
    assert completed(browser, max_tokens="4")

    browser.evaluate("window.extra = {ignore_eos: true}")
    browser.fill("#max_tokens", "480")
    browser.click("#start")
    browser.wait_for("run.tokens.length > 3")
    os.kill(guarded.engine_pid(), signal.SIGKILL)
    browser.wait_for(shown)
    assert browser.evaluate(error).startswith("the engine process has ended")
    assert browser.evaluate("run.end") == "error"

    guarded.stop()
    browser.click("#start")
    browser.wait_for(shown)
    assert browser.evaluate(error) == "the server cannot be reached"
    time.sleep(0.1)
    assert not browser.evaluate("document.querySelector('#start').disabled")
