"""The demo: both runs compared, and where it finds its model."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider import demo
from outrider.batch import FinishReason
from outrider.cli import main
from outrider.demo import Comparison, Prompt, summary_lines
from outrider.errors import ConfigError
from outrider.output import Completion, RequestOutput
from outrider.trace import RoundTrace
from tests.checkpoints import TinyShape
from tests.tiny_tokenizer import SHAPE, write_tokenizer


@pytest.fixture
def model(random_checkpoint: Callable[[TinyShape], Path]) -> Path:
    folder = random_checkpoint(SHAPE)
    write_tokenizer(folder)
    return folder


def output(token_ids: tuple[int, ...], *rounds: RoundTrace, text: str = "text") -> RequestOutput:
    completion = Completion(0, text, "", token_ids, FinishReason.LENGTH, rounds)
    return RequestOutput("r", (), (completion,))


PLAIN = output((5, 6, 7, 8), *[RoundTrace((), 0, 1)] * 4)
SPECULATIVE = output((5, 6, 7, 8), RoundTrace((), 0, 1), RoundTrace((6, 7), 2, 3))
SAME = Comparison(Prompt("a title", "a prompt"), SPECULATIVE, PLAIN, 0.5, 2.0)


def test_the_summary_gives_passes_and_speed_of_both_runs() -> None:
    assert summary_lines([SAME, SAME], "mtp, k = 2") == [
        "total: 8 tokens in 4 target passes, acceptance length 3.00, accepted at 1: 100%, 2: 100%",
        "",
        "            target passes  tokens  seconds  tokens/s",
        "plain                   8       8     4.00       2.0",
        "mtp, k = 2              4       8     1.00       8.0",
        "",
        "Both runs gave the same text for all 2 prompts, token by token.",
        "Target passes saved: 4 of 8 (50%). Measured speed: 4.00 times plain decoding.",
    ]


def test_the_first_token_that_differs_is_found() -> None:
    assert SAME.first_difference is None
    assert replace(SAME, plain=output((5, 6, 9, 8))).first_difference == 2
    assert replace(SAME, plain=output((5, 6, 7))).first_difference == 3


def test_a_difference_is_called_a_bug_and_names_the_prompt() -> None:
    different = replace(SAME, plain=output((5, 6, 9, 8), *PLAIN.rounds))
    verdict = summary_lines([SAME, different], "mtp, k = 2")[-2]
    assert verdict == "The two runs DIFFER in prompt 2: this is a bug."


def test_texts_that_differ_make_the_demo_fail_and_show_both(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compare(*_: Any) -> Iterator[Comparison]:
        other = output((5, 6, 9, 8), *PLAIN.rounds, text="another text")
        yield replace(SAME, plain=other)

    monkeypatch.setattr(demo, "compare", compare)
    assert main(["demo", "--model", str(model)]) == 1
    printed = capsys.readouterr().out
    assert "ANOTHER TEXT from output token 2 on:\nanother text\n" in printed


def test_a_random_model_gives_the_same_text_with_speculation_and_without(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["demo", "--model", str(model), "--tokens", "6", "--num-draft-tokens", "2"]
    assert main([*words, "--color", "always"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("with speculation:    ") == 5
    assert printed.count(", the same text\n") == 5
    assert "Both runs gave the same text for all 5 prompts, token by token." in printed
    assert "\x1b[2;9m" in printed and "drafted at" in printed

    monkeypatch.setattr(demo, "load_prompts", lambda: [Prompt("short", "def f")])
    assert main(words) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_the_built_in_prompts_are_a_handful_of_code_and_prose() -> None:
    prompts = demo.load_prompts()
    assert 4 <= len(prompts) <= 6
    assert len({prompt.title for prompt in prompts}) == len(prompts)
    assert all(0 < len(prompt.text) < 400 for prompt in prompts)


def test_the_bundled_model_is_looked_for_in_the_checkout_and_then_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="the demo's model is not here") as error_info:
        demo.bundled("models/of-this-test")
    checkout = Path(demo.__file__).resolve().parents[2]
    for place in (checkout, tmp_path):
        assert str(place / "models/of-this-test") in str(error_info.value)
    assert "--model" in str(error_info.value)

    folder = tmp_path / "models" / "of-this-test"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}", encoding="utf-8")
    assert demo.bundled("models/of-this-test") == folder


def test_the_bundled_model_is_the_default(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "BUNDLED_MODELS", {"mtp": (str(model), None)})
    monkeypatch.setattr(demo, "load_prompts", lambda: [Prompt("short", "def f")])
    assert main(["demo", "--tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith(f"{model}: 1 prompt, up to 4 tokens each\n")


def test_the_trained_model_saves_target_passes(
    trained_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--model", str(trained_model), "--tokens", "24"]) == 0
    row = next(
        line for line in capsys.readouterr().out.splitlines() if line.startswith("mtp, k = 3")
    )
    num_passes, num_tokens = (int(cell) for cell in row.split()[-4:-2])
    assert num_passes < 0.8 * num_tokens
