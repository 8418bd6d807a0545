"""No flag is accepted and ignored: each is read by the code that it is for, or refused.

Every command runs on a small model while reads of the config dataclasses are noted. What a command
offers has to be among what was read. Handing a config on, copying it and checking it do not count.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import outrider.cli
from outrider import demo, engine_process
from outrider.cli import build_parser, main
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.errors import CheckpointError, ConfigError, RequestError
from outrider.llm import LLM
from outrider.params import SamplingParams
from outrider.server.options import ServerOptions
from tests.checkpoints import TinyShape
from tests.tiny_tokenizer import SHAPE, write_tokenizer
from tests.trained import trained_folder

CONFIGS = (EngineConfig, SpeculativeConfig, SamplingParams)

NO_READERS = {
    "__post_init__",
    "_check_memory",
    "_check_draft_vocab",
    "_check_synthetic",
    "_check_distribution",
    "_check_rules",
    "_normalise_bias",
    "_normalise_grammar",
    "_normalise_stops",
    "refuse_idle",
    "_refuse_sampled_drafts",
    "_open",  # check's, which hands every field on
    "check_drafts",
}
"""Functions that check or copy fields. All of dataclasses' own copy, too."""

READ_ON_A_GPU = {"EngineConfig.enforce_eager"}
"""A CPU runs everything that way anyhow."""


class Reads:
    """Which fields and arguments were read, as the destinations of their flags."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    @contextmanager
    def noted(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        with monkeypatch.context() as patch:
            for config in CONFIGS:
                patch.setattr(config, "__getattribute__", self._reader(config), raising=False)
            patch.setattr(outrider.cli, "build_parser", lambda: _WithNotes(build_parser(), self))
            yield

    def _reader(self, config: type) -> Callable[[object, str], Any]:
        fields = {field.name for field in dataclasses.fields(config)}

        def read(instance: object, name: str) -> Any:
            if name in fields:
                code = sys._getframe(1).f_code
                copies = code.co_filename == dataclasses.__file__ or code.co_name in NO_READERS
                if not copies and not code.co_filename.startswith("<"):  # generated __eq__ etc.
                    self.names.add(f"{config.__name__}.{name}")
            return object.__getattribute__(instance, name)

        return read


class _WithNotes:
    """A parser whose namespace notes which arguments are read."""

    def __init__(self, parser: argparse.ArgumentParser, reads: Reads) -> None:
        self._parser = parser
        self._reads = reads

    def parse_args(self, argv: Sequence[str] | None) -> argparse.Namespace:
        names = self._reads.names

        class Noted(argparse.Namespace):
            def __getattribute__(self, name: str) -> Any:
                if not name.startswith("_"):
                    names.add(name)
                return super().__getattribute__(name)

        return Noted(**vars(self._parser.parse_args(argv)))


def commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Every command by its words, those below a command included."""
    found: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                deeper = commands(below)
                found |= {f"{name} {rest}": p for rest, p in deeper.items()} or {name: below}
    return found


def offered(parser: argparse.ArgumentParser) -> set[str]:
    """Destinations of all that a command takes."""
    return {action.dest for action in parser._actions if action.dest != "help"}


@pytest.fixture
def model(random_checkpoint: Callable[[TinyShape], Path]) -> str:
    """A hybrid model with an MTP head and a chat template, so that every option means something."""
    folder = random_checkpoint(SHAPE)
    write_tokenizer(folder)
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    return str(folder)


SMALL = ("--max-model-len", "128", "--max-num-seqs", "4", "--device", "cpu")
MTP = ("--speculative-algorithm", "mtp", "--speculative-draft-vocab", "ids.json")
WORK = ("--input-len", "8", "--output-len", "8", "--num-iters", "1", "--json", "result.jsonl")
CACHED = ("--enable-prefix-caching",)

RECORDED = ("MODEL", "--prompt", "def f", "--max-tokens", "4", "--trace-file", "run.jsonl", *SMALL)

RUNS: dict[str, list[tuple[str, ...]]] = {
    "generate": [(*RECORDED, *MTP)],
    "trace": [("run.jsonl", "--html", "out.html")],
    "chat": [("MODEL", "--max-tokens", "4", "--temperature", "0", *SMALL, *MTP)],
    "serve": [("MODEL", *SMALL, *MTP)],
    "check": [("MODEL", "--num-tokens", "2", "--max-num-seqs", "4", *MTP)],
    "demo": [("--model", "MODEL", "--tokens", "2")],
    "draft-vocab": [("MODEL", "text.txt", "--size", "16", "--out", "other.json")],
    "bench latency": [("MODEL", *WORK, *SMALL, *MTP, *CACHED)],
    "bench throughput": [("MODEL", *WORK, *SMALL, *MTP, *CACHED, "--num-requests", "2")],
}

NOT_REACHED_HERE: dict[str, set[str]] = {
    # Read only where a request is made of them: tests/server/test_openai.py sends every one.
    "chat": {"model", "api_key"},  # refused without --url, which tests/server/test_chat.py gives
    "check": {"EngineConfig.seed"},  # of dummy weights; its own requests bring seeds
}


def test_the_runs_of_this_file_are_those_of_every_command() -> None:
    assert set(RUNS) == set(commands(build_parser()))


@pytest.mark.parametrize("command", RUNS)
def test_every_flag_of_a_command_is_read_when_it_runs(
    command: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ids.json").write_text(str([*range(16)]))
    Path("text.txt").write_text("def f return self")
    monkeypatch.setattr("sys.stdin", io.StringIO("def f\n"))
    monkeypatch.setattr(demo, "load_prompts", lambda: [demo.Prompt("short", "def f")])
    reads = Reads()
    if command == "trace":
        assert main(["generate", *(model if word == "MODEL" else word for word in RECORDED)]) == 0
    with reads.noted(monkeypatch):
        if command == "serve":  # its engine, as the engine process loads and runs it
            monkeypatch.setattr("outrider.server.main.serve", _serve_in_this_process)
        for words in RUNS[command]:
            line = [*command.split(), *(model if word == "MODEL" else word for word in words)]
            assert main(line) == 0
    wanted = offered(commands(build_parser())[command])
    wanted -= READ_ON_A_GPU | NOT_REACHED_HERE.get(command, set())
    if command == "serve":
        wanted = {name for name in wanted if not name.startswith("ServerOptions.")}
    # A field that is read as a whole counts by its parts.
    missing = {name for name in wanted - reads.names if name != "EngineConfig.speculative_config"}
    assert not missing, f"{command} accepts and ignores {sorted(missing)}"


def _serve_in_this_process(config: EngineConfig, options: ServerOptions) -> int:
    engine = engine_process._load(config)
    engine.add_request("1", [5, 6, 7], SamplingParams(max_tokens=4, temperature=1.0))
    while engine.has_work:
        engine.step()
    return 0


def test_every_option_of_the_server_is_read_by_it() -> None:
    folder = Path(outrider.cli.__file__).parent / "server"
    read: set[str] = set()
    for file in folder.glob("*.py"):
        if file.name != "options.py":
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Attribute) and "options" in ast.unparse(node.value):
                    read.add(node.attr)
    assert {field.name for field in dataclasses.fields(ServerOptions)} <= read


# What would have no effect is refused.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench", "latency", "M", "--tokenizer", "t"], "unrecognized arguments: --tokenizer t"),
        (["bench", "throughput", "M", "--tokenizer", "t"], "unrecognized arguments: --tokenizer"),
        (
            ["generate", "M", "--num-kv-blocks", "4", "--kv-cache-memory-gib", "1"],
            "memory for KV is given twice: got 'num_kv_blocks=4, kv_cache_memory_gib=1.0'",
        ),
        (
            ["serve", "M", "--no-enable-prefix-caching", "--checkpoint-interval", "64"],
            "checkpoint_interval has no effect (states are kept for the prefix cache, which is",
        ),
        (
            ["bench", "latency", "M", "--num-state-checkpoints", "2"],
            "num_state_checkpoints has no effect (states are kept for the prefix cache, which is",
        ),
        (["check", "M", "--gpu-memory-utilization", "2"], "gpu_memory_utilization: got 2.0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_flag_without_effect_is_one_line_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*words, "--prompt", "x"] if words[0] == "generate" else words
    assert main(words) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_memory_utilization": 0.5}, "gpu_memory_utilization has no effect .*on the CPU"),
        ({"state_dtype": "float16"}, "state_dtype has no effect .*no recurrent state"),
        ({"checkpoint_interval": 64}, "checkpoint_interval has no effect .*no recurrent state"),
        ({"revision": "main"}, "revision of a local folder .*got 'main'"),
        (
            {"speculative_config": SpeculativeConfig("ngram", draft_top_m=4)},
            "draft_top_m: method ngram has no distribution to cut: got 4",
        ),
    ],
    ids=str,
)
def test_an_option_that_a_model_or_device_has_no_use_for_is_refused(
    options: dict[str, Any], message: str
) -> None:
    small = {"device": "cpu", "kv_cache_memory_gib": 0.01, "max_model_len": 64}
    with pytest.raises((ConfigError, CheckpointError), match=message):
        LLM(str(trained_folder("tiny-qwen3")), **small, **options)


@pytest.mark.parametrize("name", ["draft_sampling", "draft_top_m"])
def test_a_check_refuses_drafts_that_it_would_draw_otherwise(
    name: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    value = "sampled" if name == "draft_sampling" else "4"
    flag = f"--speculative-{name.replace('_', '-')}"
    assert main(["check", model, "--speculative-algorithm", "mtp", flag, value]) == 2
    assert f"could not run: {name}: a check draws drafts" in capsys.readouterr().out


def test_a_mode_of_log_probabilities_that_nobody_asked_for_is_refused(model: str) -> None:
    llm = LLM(model, max_model_len=64, max_num_seqs=1, device="cpu")
    with pytest.raises(RequestError, match="logprobs_mode has no effect"):
        llm.generate("def f", SamplingParams(logprobs_mode="processed"))
