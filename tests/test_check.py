"""`outrider check`: right, wrong, or could not run, as a value and as an exit code."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider import check as check_module
from outrider.batch import FinishReason
from outrider.check import CheckReport, CheckResult, check, print_report
from outrider.cli import main
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.errors import CapacityError, CheckpointError, ConfigError, OutriderError, RequestError
from outrider.ops.bookkeeping import reference as bookkeeping
from outrider.ops.sampling import reference as sampling
from outrider.output import Completion, RequestOutput
from outrider.trace import SpeculationStats
from tests.checkpoints import TinyShape, write_qwen3_5
from tests.tiny_tokenizer import write_tokenizer

NUM_PROMPTS = 5
NUM_TOKENS = 10
SMALL: dict[str, Any] = {"max_model_len": 256, "kv_cache_memory_gib": 0.02, "max_num_seqs": 10}
FLAGS = ("--max-model-len", "256", "--kv-cache-memory-gib", "0.02", "--num-tokens", str(NUM_TOKENS))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("check")
    write_qwen3_5(path, TinyShape(num_layers=2, interval=2, vocab_size=272))
    write_tokenizer(path)
    return path


def config(model: Path, method: str | None = "mtp", **options: Any) -> EngineConfig:
    spec = None if method is None else SpeculativeConfig(method, num_speculative_tokens=3)
    return EngineConfig(str(model), speculative_config=spec, **SMALL | options)


def accept_everything(sampled: Tensor, draft_token_ids: Tensor, num_drafts: Tensor) -> Tensor:
    return num_drafts


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner that keeps every draft."""
    monkeypatch.setattr(bookkeeping, "accept_matching", accept_everything)


def printed(report: CheckReport) -> str:
    stream = io.StringIO()
    print_report(report, stream)
    return stream.getvalue()


@pytest.mark.parametrize("method", ["mtp", "ngram"])
def test_a_checkpoint_that_writes_the_same_text_is_right(model: Path, method: str) -> None:
    report = check(config(model, method), num_tokens=24)
    assert report.result is CheckResult.RIGHT
    assert report.error is None and report.mismatches == ()
    # Each prompt greedily and warm; without speculation every token takes a pass.
    assert report.num_texts == 2 * NUM_PROMPTS
    assert report.num_tokens == report.plain_passes == report.speculation.num_tokens == 240
    stats = report.speculation
    assert stats.num_passes + stats.num_accepted >= stats.num_tokens
    assert (stats.num_drafted > 0) and (stats.num_passes < 240) == (stats.num_accepted > 0)
    assert all(seconds > 0 for seconds in report.seconds)
    assert report.model.startswith("qwen3_5, ")
    assert "2 layers (1 linear attention), MTP head, vocabulary 272, float32" in report.model
    assert report.model.endswith("up to 256 tokens")


def test_a_model_alone_is_compared_with_itself(model: Path) -> None:
    report = check(config(model, None), num_tokens=4)
    assert report.result is CheckResult.RIGHT
    assert report.speculation.num_rounds == 0 and report.speculation.num_tokens == 40


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("method", ["mtp", "ngram"])
def test_a_runner_that_accepts_every_draft_is_wrong(model: Path, method: str) -> None:
    report = check(config(model, method), num_tokens=24)
    assert report.result is CheckResult.WRONG_OUTPUT
    assert 0 < len(report.mismatches) <= report.num_texts
    assert report.speculation.num_accepted == report.speculation.num_drafted
    assert all(re.match(r"text \d: token \d+ of 24 differs: ", m) for m in report.mismatches)


def test_noise_that_depends_on_speculation_is_found_in_the_warm_texts_only(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = sampling.race_times_reference

    def worse(seeds: Tensor, positions: Tensor, *others: Any, **options: Any) -> Tensor:
        # Noise by the row in the pass instead of by the position in the text.
        return original(
            seeds, torch.arange(len(positions), device=positions.device), *others, **options
        )

    monkeypatch.setattr(sampling, "race_times_reference", worse)
    report = check(config(model), num_tokens=16)
    assert report.result is CheckResult.WRONG_OUTPUT
    assert {int(m.split()[1].rstrip(":")) for m in report.mismatches} <= set(range(5, 10))


def test_the_texts_are_the_same_every_time_and_for_every_method(model: Path) -> None:
    seen: list[list[tuple[int, ...]]] = []
    original = check_module._generate

    def watched(*args: Any) -> tuple[list[RequestOutput], float]:
        outputs, seconds = original(*args)
        seen.append([output.token_ids for output in outputs])
        return outputs, seconds

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check_module, "_generate", watched)
        check(config(model, "mtp"), num_tokens=6)
        check(config(model, "ngram"), num_tokens=6)
    assert len(seen) == 4 and all(texts == seen[0] for texts in seen)
    assert len(set(seen[0])) > NUM_PROMPTS  # warm texts are texts of their own


def output(*token_ids: int) -> RequestOutput:
    return RequestOutput("r", (1,), (Completion(0, "", "", token_ids, FinishReason.LENGTH),))


def test_a_difference_says_where_it_begins_and_what_stood_there() -> None:
    difference = check_module._difference
    assert difference(3, output(1, 2, 3), output(1, 2, 3)) is None
    said = difference(3, output(1, 2, 3, 4, 5, 6, 7), output(1, 2, 9, 4, 5, 6, 7))
    assert said == "text 3: token 2 of 7 differs: plain (3, 4, 5, 6), speculative (9, 4, 5, 6)"
    said = difference(0, output(1, 2, 3), output(1, 2))
    assert said == "text 0: token 2 of 3 differs: plain (3,), speculative ()"


def without_tokenizer(model: Path, path: Path) -> EngineConfig:
    shutil.copytree(model, path / "m")
    (path / "m" / "tokenizer.json").unlink()
    return config(path / "m")


def without_head(model: Path, path: Path) -> EngineConfig:
    shutil.copytree(model, path / "m")
    text = json.loads((path / "m" / "config.json").read_text())
    (path / "m" / "config.json").write_text(json.dumps(text | {"mtp_num_hidden_layers": 0}))
    return config(path / "m")


def with_broken_weights(model: Path, path: Path) -> EngineConfig:
    shutil.copytree(model, path / "m")
    weights = path / "m" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    return config(path / "m")


CANNOT: dict[str, tuple[Callable[[Path, Path], EngineConfig], type[OutriderError]]] = {
    "a missing folder": (lambda _, path: config(path / "nothing"), CheckpointError),
    "an empty folder": (lambda _, path: config(path), CheckpointError),
    "no tokenizer": (without_tokenizer, CheckpointError),
    "broken weights": (with_broken_weights, CheckpointError),
    "a target that cannot host the method": (without_head, ConfigError),
    "too little memory": (lambda model, _: config(model, kv_cache_memory_gib=1e-6), CapacityError),
    "too little room for the prompts": (
        lambda model, _: config(model, max_model_len=64),
        RequestError,
    ),
}


@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_run_is_reported_with_its_error(model: Path, tmp_path: Path, name: str) -> None:
    make, kind = CANNOT[name]
    report = check(make(model, tmp_path), num_tokens=4)
    assert report.result is CheckResult.COULD_NOT_RUN
    assert isinstance(report.error, kind)
    assert printed(report) == f"could not run: {report.error}\n"


def test_a_number_of_tokens_that_makes_no_sense_could_not_run(model: Path) -> None:
    assert check(config(model), num_tokens=0).result is CheckResult.COULD_NOT_RUN


MTP = ("--speculative-algorithm", "mtp", "--speculative-num-draft-tokens", "3")


def lines_of(out: str) -> dict[str, str]:
    """Printed lines by their labels."""
    return {line[:13].strip(): line[13:] for line in out.splitlines()}


def test_the_command_prints_what_was_compared_and_exits_with_0(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(model), *FLAGS, *MTP]) == 0
    lines = lines_of(capsys.readouterr().out)
    assert list(lines) == ["model", "compared", "acceptance", "passes", "time", "texts are"]
    assert lines["model"].startswith("qwen3_5, ")
    assert lines["compared"] == f"10 texts, {10 * NUM_TOKENS} tokens"
    assert re.fullmatch(r"\d\.\d\d tokens a round; by position( \d\.\d\d){3}", lines["acceptance"])
    assert re.fullmatch(rf"{10 * NUM_TOKENS} plain, \d+ speculative", lines["passes"])
    assert re.fullmatch(r"\d+\.\d\d s plain, \d+\.\d\d s speculative", lines["time"])
    assert lines["texts are"] == "identical"


@pytest.mark.usefixtures("broken")
def test_the_command_names_every_text_that_differs_and_exits_with_1(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(model), *FLAGS, *MTP]) == 1
    out = capsys.readouterr().out
    different = [line for line in out.splitlines() if line.startswith("DIFFERENT    text ")]
    assert 0 < len(different) <= 10
    assert lines_of(out)["texts are"] == "NOT identical"


def test_a_check_without_speculation_is_refused(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(model), *FLAGS]) == 2
    error = capsys.readouterr().err
    assert "no speculation is asked for" in error and "--speculative-algorithm" in error


def test_the_command_exits_with_2_where_it_could_not_run(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(tmp_path / "nothing"), *FLAGS, *MTP]) == 2
    printed = capsys.readouterr()
    assert printed.out.startswith("could not run: ") and len(printed.out.splitlines()) == 1
    assert str(tmp_path / "nothing") in printed.out


@pytest.mark.parametrize(
    "words",
    [
        ("--speculative-algorithm", "no-such-method"),
        ("--speculative-algorithm", "mtp", "--speculative-num-draft-tokens", "99"),
        ("--block-size", "17"),
        ("--num-tokens", "many"),
        ("--no-such-flag",),
    ],
)
def test_flags_that_make_no_sense_are_one_line_on_stderr_and_exit_with_2(
    model: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(model), *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("outrider: error: ") and len(printed.err.splitlines()) == 1


def test_rates_by_position_sum_up_to_the_tokens_of_a_round_but_the_targets_own(
    model: Path,
) -> None:
    report = check(config(model, "mtp"), num_tokens=40)
    stats = report.speculation
    per_position = stats.accepted_per_position
    assert sum(per_position) == stats.num_accepted > 0
    assert list(per_position) == sorted(per_position, reverse=True)
    assert stats.acceptance_length == pytest.approx(1 + sum(per_position) / stats.num_rounds)
    shown = lines_of(printed(report))["acceptance"]
    length, *rates = (float(number) for number in re.findall(r"\d\.\d\d", shown))
    assert len(rates) == 3
    # Each was rounded to a hundredth.
    assert length == pytest.approx(1 + sum(rates), abs=0.005 * 4 + 1e-9)


def test_a_report_is_printed_as_it_says() -> None:
    stats = SpeculationStats(
        num_passes=5, num_rounds=4, num_drafted=12, num_accepted=7,
        accepted_per_position=(4, 2, 1), num_tokens=12,
    )  # fmt: skip
    report = CheckReport(
        CheckResult.WRONG_OUTPUT, "a model", 2, 12, ("text 1: ...",), stats, 12, (1.5, 0.754)
    )
    assert printed(report).splitlines() == [
        "model        a model",
        "compared     2 texts, 12 tokens",
        "acceptance   2.75 tokens a round; by position 1.00 0.50 0.25",
        "passes       12 plain, 5 speculative",
        "time         1.50 s plain, 0.75 s speculative",
        "DIFFERENT    text 1: ...",
        "texts are    NOT identical",
    ]


def test_a_report_without_drafts_says_that_nothing_was_verified() -> None:
    report = CheckReport(CheckResult.RIGHT, "a model", 2, 12, (), SpeculationStats(), 12)
    assert lines_of(printed(report))["acceptance"] == "no draft was verified"
