"""The command: what it prints, where, and its exit codes."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider import demo
from outrider.cli import main
from outrider.llm import LLM
from outrider.params import SamplingParams
from tests.checkpoints import TinyShape
from tests.tiny_tokenizer import SHAPE, write_tokenizer

SMALL = ("--max-num-seqs", "4", "--kv-cache-memory-gib", "0.01", "--max-model-len", "128")
GREEDY = (*SMALL, "--temperature", "0", "--max-tokens", "12", "--ignore-eos")
MTP = ("--speculative-algorithm", "mtp", "--speculative-num-draft-tokens", "2")


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def model(random_checkpoint: Callable[[TinyShape], Path]) -> str:
    folder = random_checkpoint(SHAPE)
    write_tokenizer(folder)
    return str(folder)


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test if a model is loaded."""

    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(LLM, "__init__", load)


def test_one_prompt_prints_its_text_on_stdout_and_statistics_on_stderr(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", model, "--prompt", "def f", *GREEDY, *MTP]) == 0
    printed = capsys.readouterr()
    llm = LLM(model, max_num_seqs=1, kv_cache_memory_gib=0.01, max_model_len=128)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    assert printed.out == llm.generate("def f", params).text + "\n"
    labels = [line[:17].strip() for line in printed.err.splitlines() if line]
    assert labels == ["target passes", "tokens", "acceptance length", "accepted at", "time"]
    assert "tokens             12 (" in printed.err


def test_json_is_one_object_for_each_output(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", model, "--prompt", "a", "--prompt", "def b", "--json", *GREEDY, *MTP]
    assert main(words) == 0
    printed = capsys.readouterr()
    first, second = (json.loads(line) for line in printed.out.splitlines())
    assert printed.err == ""
    assert (first["index"], second["index"]) == (0, 1)
    for entry in (first, second):
        assert set(entry) == {
            "index",
            "completion",
            "text",
            "token_ids",
            "finish_reason",
            "speculation",
            "error",
        }
        assert len(entry["token_ids"]) == 12 and isinstance(entry["text"], str)
        assert entry["finish_reason"] == "length" and entry["error"] is None
        speculation = entry["speculation"]
        assert speculation["num_tokens"] == 12
        assert len(speculation["accepted_per_position"]) == 2
        drafts_kept = speculation["num_accepted"] / speculation["num_rounds"]
        assert speculation["acceptance_length"] == pytest.approx(1 + drafts_kept)


def test_one_bad_prompt_in_a_batch_fails_alone_with_exit_code_1(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", model, "--prompt", "a", "--prompt", "", "--prompt", "b", *GREEDY]
    assert main(words) == 1
    printed = capsys.readouterr()
    assert "--- prompt 1: 'a' ---" in printed.out and "--- prompt 3: 'b' ---" in printed.out
    assert "prompt 2" not in printed.out
    assert printed.err.splitlines()[0] == (
        "outrider: error: prompt 2: prompt is empty: got 0; allowed: at least one token"
    )


def test_a_bad_prompt_in_a_json_batch_is_an_object_with_its_error(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", model, "--prompt", "a", "--prompt", "", "--json", *GREEDY]) == 1
    good, bad = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert good["error"] is None and bad["error"].startswith("prompt is empty")
    assert (bad["text"], bad["token_ids"], bad["finish_reason"]) == ("", [], "error")


def test_a_single_bad_prompt_is_a_user_error(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", model, "--prompt", "", *GREEDY]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("outrider: error: prompt is empty") and _is_one_line(printed.err)


def _is_one_line(text: str) -> bool:
    return text.endswith("\n") and text.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: COMMAND: see outrider --help"),
        (["fly"], "invalid choice: 'fly'"),
        (["generate", "M"], "no prompt: give --prompt TEXT or --prompt-file FILE"),
        (["generate", "M", "--prompt", "x", "--top-p", "3"], "top_p: got 3.0; allowed: (0, 1]"),
        (["generate", "M", "--prompt", "x", "--max-tokens", "0"], "max_tokens: got 0; allowed"),
        (["generate", "M", "--prompt", "x", "--n", "0"], "n: got 0"),
        (
            ["generate", "M", "--prompt", "x", "--max-tokens", "a"],
            "argument --max-tokens: invalid int value: 'a': see outrider generate --help",
        ),
        (["generate", "M", "--prompt", "x", "--max-tok", "4"], "unrecognized arguments: --max-tok"),
        (
            ["generate", "M", "--prompt", "x", "--speculative-algorithm", "tea"],
            "speculative method is not known: got 'tea'",
        ),
        (["demo", "--method", "tea"], "speculative method is not known: got 'tea'"),
        (["demo", "--num-draft-tokens", "0"], "num_draft_tokens: got 0"),
        (["demo", "--tokens", "0"], "max_tokens: got 0"),
        (["generate", "M", "--prompt", "x", "--json", "--color", "always"], "JSON has no colours"),
        (
            ["generate", "M", "--prompt", "x", "--max-draft-tokens", "2"],
            "there are no drafts: got '--max-draft-tokens'",
        ),
        (
            [
                *("generate", "M", "--prompt", "x", "--speculative-algorithm", "mtp"),
                *("--no-speculation", "--draft-sampling", "coupled"),
            ],
            "--no-speculation leaves no drafts: got '--draft-sampling'; give either",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.usefixtures("no_model")
def test_what_the_user_got_wrong_is_one_line_and_exit_code_2_before_a_model_is_loaded(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and _is_one_line(printed.err)
    assert printed.err.startswith("outrider: error: ") and message in printed.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "./nowhere", "--prompt", "x"], "model folder does not exist"),
        (["demo", "--model", "./nowhere"], "model folder does not exist"),
        (
            ["generate", "~nosuchuser/m", "--prompt", "x"],
            "model: there is no home folder for this user: got '~nosuchuser/m'; write the path out",
        ),
        (
            ["draft-vocab", "~nosuchuser", "t", "--out", "o"],
            "model: there is no home folder for this user: got '~nosuchuser'",
        ),
        (
            ["serve", "~nosuchuser"],
            "model: there is no home folder for this user: got '~nosuchuser'",
        ),
        (["chat", "/" + "x" * 300], "model cannot be looked at (File name too long)"),
    ],
    ids=["generate", "demo", "no user", "draft-vocab", "serve", "long name"],
)
def test_a_model_that_is_not_there_is_one_line_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert _is_one_line(error) and message in error


def test_an_engine_setting_out_of_range_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "M", "--prompt", "x", "--block-size", "17"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("outrider: error: block_size: got 17;") and _is_one_line(error)


def test_prompts_and_prompt_files_keep_their_order_and_their_newlines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []

    def generate(self: LLM, prompts: list[str], *_: Any, **__: Any) -> Any:
        seen.append(prompts)
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "__init__", lambda self, **_: None)
    monkeypatch.setattr(LLM, "default_params", lambda self: SamplingParams())
    monkeypatch.setattr(LLM, "generate", generate)
    file = tmp_path / "prompt.py"
    file.write_bytes("def é():\n".encode())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"from stdin")))
    words = ["--prompt", "a", "--prompt-file", str(file), "--prompt", "b", "--prompt-file", "-"]
    main(["generate", "M", *words])
    assert seen == [["a", "def é():\n", "b", "from stdin"]]


@pytest.mark.usefixtures("no_model")
def test_a_prompt_file_that_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    binary = tmp_path / "image"
    binary.write_bytes(b"\xff\xfe")
    for file in (binary, tmp_path / "absent"):
        assert main(["generate", "M", "--prompt-file", str(file)]) == 2
        error = capsys.readouterr().err
        assert "prompt file cannot be read" in error and repr(str(file)) in error
        assert _is_one_line(error)


def test_the_checkpoint_recommends_what_the_flags_leave_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[SamplingParams] = []

    def generate(self: LLM, prompts: list[str], params: SamplingParams, **_: Any) -> Any:
        seen.append(params)
        raise KeyboardInterrupt

    recommended = SamplingParams(temperature=0.6, top_k=20)
    monkeypatch.setattr(LLM, "__init__", lambda self, **_: None)
    monkeypatch.setattr(LLM, "default_params", lambda self: recommended)
    monkeypatch.setattr(LLM, "generate", generate)
    main(["generate", "M", "--prompt", "x", "--top-k", "5"])
    assert seen == [SamplingParams(temperature=0.6, top_k=5)]


def test_a_terminal_gets_the_text_of_one_prompt_as_it_comes_and_in_colour(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["generate", model, "--prompt", "def f", *GREEDY, *MTP]
    assert main([*words, "--color", "always"]) == 0
    whole = capsys.readouterr().out

    writes: list[str] = []
    terminal = Tty()
    monkeypatch.setattr(terminal, "flush", lambda: writes.append(terminal.getvalue()))
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert main(words) == 0
    assert terminal.getvalue() == whole
    assert "\x1b[38;5;208m" in whole and "drafted at" in whole
    assert len(set(writes)) > 4  # several visible steps, not one at the end

    plain = Tty()
    monkeypatch.setattr("sys.stdout", plain)
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(words) == 0
    assert "\x1b" not in plain.getvalue()


@pytest.mark.parametrize("prompts", [("def f",), ("def f", "import")], ids=["one", "two"])
def test_a_model_steers_no_terminal_where_nothing_is_coloured(
    prompts: tuple[str, ...],
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    steering = json.dumps({"kind": "regex", "text": r"\x1b\[2J"})
    words = ["generate", model, *SMALL, "--color", "never", "--structured-output", steering]
    words += [word for prompt in prompts for word in ("--prompt", prompt)]
    assert main(words) == 0
    assert capsys.readouterr().out.count("\x1b[2J") == len(prompts)  # a pipe gets the text
    terminal = Tty()
    monkeypatch.setattr("sys.stdout", terminal)
    assert main(words) == 0
    assert terminal.getvalue().count("␛[2J") == len(prompts)
    assert "\x1b" not in terminal.getvalue()


def test_a_batch_shows_a_progress_bar_where_stderr_is_a_terminal(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["generate", model, "--prompt", "a", *GREEDY]
    terminal = Tty()
    monkeypatch.setattr("sys.stderr", terminal)
    assert main([*words, "--prompt", "b"]) == 0
    assert "] 2/2  24 tokens" in terminal.getvalue()
    terminal.truncate(0)
    assert main(words) == 0
    assert "1/1" not in terminal.getvalue()


def test_ctrl_c_ends_quietly_with_130(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "__init__", interrupted)
    assert main(["generate", "M", "--prompt", "x"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_closed_pipe_ends_the_command_quietly(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        assert main(["generate", model, "--prompt", "a", "--json", *GREEDY]) == 141
    # Leaving the block flushed what was still buffered, as the interpreter does when it ends.
    assert capsys.readouterr().err == ""


def test_python_m_outrider_is_the_command_and_hands_on_its_exit_code() -> None:
    words = [sys.executable, "-m", "outrider", "generate", "M"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "outrider: error: no prompt: give --prompt TEXT or --prompt-file FILE\n"


def test_a_terminal_that_lacks_a_character_gets_a_substitute(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main(["generate", model, "--prompt", "größer", "--prompt", "b", *GREEDY]) == 0
    assert raw.getvalue().startswith(b"--- prompt 1: 'gr??er' ---\n")


def test_version_and_help_exit_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--version"], ["--help"], ["generate", "--help"], ["demo", "--help"]):
        with pytest.raises(SystemExit) as exit_info:
            main(words)
        assert exit_info.value.code == 0
        assert "outrider" in capsys.readouterr().out


def test_the_demo_is_a_command(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "load_prompts", lambda: [demo.Prompt("short", "def f")])
    assert main(["demo", "--model", model, "--tokens", "4"]) == 0
