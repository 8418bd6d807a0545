"""`outrider chat` with a model in this process, and with scripted answers."""

from __future__ import annotations

import io
from collections.abc import Generator, Sequence

import pytest

from outrider import LLM, SamplingParams, render
from outrider.chat import Screen, Session, turn_line
from outrider.chat_sources import Message, Span, Turn
from outrider.cli import main
from outrider.errors import RequestError, ServerError
from outrider.trace import SpeculationStats
from tests.trained import trained_folder

MODEL = str(trained_folder("tiny-qwen3.5"))
SMALL = ("--dtype", "float32", "--max-model-len", "256", "--kv-cache-memory-gib", "0.02")
SHORT = (*SMALL, "--temperature", "0", "--max-tokens", "12")
MTP = ("--speculative-algorithm", "mtp", "--speculative-num-draft-tokens", "3")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(MODEL, dtype="float32", max_model_len=256, kv_cache_memory_gib=0.02)


def says(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_lines_are_answered_one_after_the_other_and_each_knows_what_was_said_before(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    says(monkeypatch, "import os", "", "/etc/passwd: root", "//quit")
    assert main(["chat", MODEL, *SHORT, *MTP, "--system", "brief"]) == 0
    params = SamplingParams(temperature=0, max_tokens=12)
    messages: list[dict[str, str]] = [{"role": "system", "content": "brief"}]
    for question in ("import os", "/etc/passwd: root", "//quit"):  # no commands without a terminal
        messages.append({"role": "user", "content": question})
        answer = llm.chat(messages, params).text
        messages.append({"role": "assistant", "content": answer})
    wanted = "".join(m["content"] + "\n" for m in messages if m["role"] == "assistant")
    printed = capsys.readouterr()
    assert printed.out == wanted
    assert printed.err.count("[12 tokens, ") == 3 and "acceptance length" in printed.err


def test_colours_show_who_chose_a_token_and_change_no_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    says(monkeypatch, "import os")
    assert main(["chat", MODEL, *SHORT, *MTP]) == 0
    plain = capsys.readouterr().out
    says(monkeypatch, "import os")
    assert main(["chat", MODEL, *SHORT, *MTP, "--color", "always"]) == 0
    colored = capsys.readouterr().out
    assert f"\x1b[{render.DRAFTED[0]}m" in colored and render.REJECTED not in colored
    bare = "".join(part.partition("m")[2] for part in ("m" + colored).split("\x1b["))
    assert bare == plain


def test_what_the_model_cannot_take_is_said_and_the_next_message_is_answered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    says(monkeypatch, "word " * 400, "import os")
    assert main(["chat", MODEL, *SHORT]) == 1
    printed = capsys.readouterr()
    assert "outrider: error: prompt is too long: got" in printed.err
    assert printed.out.count("\n") >= 1 and "[12 tokens, " in printed.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nobody to talk to: name a MODEL, or a server with --url URL"),
        (["M", "--api-key", "k"], "--api-key goes with --url only"),
        (["M", "--model", "m"], "--model goes with --url only"),
        (["M", "--url", "http://h/v1"], "cannot be set from here: got 'MODEL'"),
        (["--url", "http://h/v1", "--seed", "1"], "cannot be set from here: got '--seed'"),
        (
            ["--url", "http://h/v1", "--speculative-algorithm", "mtp"],
            "cannot be set from here: got '--speculative-algorithm'",
        ),
        (["--url", "ftp://h/v1"], "url: got 'ftp://h/v1'; allowed: http://HOST:PORT/v1"),
        (["--url", "http://h:port/v1"], "url (Port could not be cast"),
        (["--url", "http://u:sécret@h/v1"], "url: no user or password can be sent: leave them out"),
        (["--url", "http://sécret@h/v1"], "url: no user or password can be sent"),
        (["--url", "http://u:sécret@h:port/v1"], "url: allowed: http://HOST:PORT/v1"),
        (["--url", "http://u:sécret/x@h/v1"], "url: allowed: http://HOST:PORT/v1"),
        (["--url", "u:sécret@h/v1"], "url: allowed: http://HOST:PORT/v1"),
        (["--url", "http://h/v1?key=sécret"], "url: allowed: http://HOST:PORT/v1"),
        (["--url", "http://h/v1", "--api-key", "sécret"], "api_key: allowed: printable ASCII"),
        (["M", "--draft-sampling", "coupled"], "there are no drafts: got '--draft-sampling'"),
        (["M", "--chat-template-kwargs", "[]"], "not a JSON object"),
        (["M", "--chat-template-kwargs", '{"messages": []}'], "own: got ['messages']"),
        (["M", "--n", "2"], "unrecognized arguments: --n 2"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_flags_that_make_no_sense_are_one_line_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert message in printed.err and "sécret" not in printed.err


class Script:
    """A source whose answers are given; an exception among the spans is raised at its place."""

    name = "script"

    def __init__(self, *answers: Sequence[Span | BaseException]) -> None:
        self._answers = list(answers)
        self.asked: list[list[Message]] = []
        self.num_closed = 0

    def answer(self, messages: Sequence[Message]) -> Generator[Span, None, Turn]:
        self.asked.append([dict(message) for message in messages])
        try:
            for item in self._answers.pop(0):
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self.num_closed += 1
        return Turn(SpeculationStats(num_tokens=4), 2.0)


def session(script: Script, color: bool = False) -> tuple[Session, io.StringIO, io.StringIO]:
    out, notes = io.StringIO(), io.StringIO()
    return Session(script, None, Screen(out, notes, color, color)), out, notes


def test_reasoning_is_dimmed_or_tagged_and_is_no_part_of_the_conversation() -> None:
    answer = [Span("why", is_reasoning=True), Span("yes", "38;5;28"), Span("\x1b[2J")]
    script = Script(answer, [Span("ok")])
    talk, out, _ = session(script)
    talk.handle("really?")
    assert out.getvalue() == "<think>\nwhy\n</think>\nyes\x1b[2J\n"
    talk.handle("sure")
    assert [m["content"] for m in script.asked[1]] == ["really?", "yes\x1b[2J", "sure"]
    talk, out, _ = session(Script(answer), color=True)
    talk.handle("really?")
    # A model must not steer the terminal: the escape became its picture.
    assert out.getvalue() == "\x1b[2mwhy\x1b[0m\n\n\x1b[38;5;28myes\x1b[0m␛[2J\n"


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_nobody_steers_a_terminal_that_shows_no_colours() -> None:
    out, notes = Tty(), Tty()
    talk = Session(
        Script([Span("why\x1b[2J", is_reasoning=True), Span("\x9b2Jyes")]), None, Screen(out, notes)
    )
    talk.handle("really?")
    assert out.getvalue() == "<think>\nwhy␛[2J\n</think>\n\ufffd2Jyes\n"
    assert talk.messages[1]["content"] == "\x9b2Jyes"  # what the model said is what it is told
    talk.screen.note("a model named \x1b]0;x\x07")
    assert notes.getvalue().endswith("a model named ␛]0;x␇\n")


def test_an_answer_that_is_stopped_is_kept_as_far_as_it_got_and_its_request_is_ended() -> None:
    script = Script([Span("par"), KeyboardInterrupt()], [KeyboardInterrupt()], [Span("ok")])
    talk, out, _ = session(script)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            talk.handle("go on")
    assert script.num_closed == 2 and out.getvalue() == "par\n"
    talk.handle("and now")
    assert [m["content"] for m in script.asked[2]] == ["go on", "par", "and now"]


def test_a_message_that_failed_is_no_part_of_the_conversation() -> None:
    script = Script([Span("par"), ServerError("gone")], [Span("ok")])
    talk, _, _ = session(script)
    with pytest.raises(ServerError):
        talk.handle("first")
    talk.handle("second")
    assert [m["content"] for m in script.asked[1]] == ["second"]


def test_commands() -> None:
    script = Script([Span("a")], [Span("b")], [Span("c")])
    talk, _, notes = session(script)
    talk.handle("/system be brief")
    talk.handle("one")
    assert script.asked[0][0] == {"role": "system", "content": "be brief"}
    talk.handle("/reset")
    talk.handle("/system")
    talk.handle("//slash")
    assert script.asked[1] == [{"role": "user", "content": "/slash"}]
    talk.handle("/stats")
    assert "tokens             8 " in notes.getvalue() and "2.0 tokens/s" in notes.getvalue()
    talk.handle("/help")
    for name in ("/reset", "/system", "/stats", "/help", "/quit"):
        assert f"\n{name}" in notes.getvalue()
    assert talk.handle("  ") and not talk.handle("/quit")
    with pytest.raises(RequestError, match="no such command: got '/exit'; allowed: /reset"):
        talk.handle("/exit")


def test_the_line_after_an_answer() -> None:
    stats = SpeculationStats(num_passes=4, num_rounds=3, num_drafted=9, num_accepted=6)
    turn = Turn(stats + SpeculationStats(num_tokens=10), 2.0, is_cut=True)
    assert turn_line(turn) == (
        "[10 tokens, 2.00 s, 5.0 tokens/s, acceptance length 3.00, cut at its limit of tokens]"
    )
