"""`outrider bench`: what it times, what it makes of the times, and what it refuses."""

import argparse
import importlib.util
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from outrider import bench, bench_runs
from outrider.batch import FinishReason
from outrider.bench_report import RoundWork, process_age, read_bandwidth, round_bytes
from outrider.bench_runs import Bench, Latency, Run, Window, measure_latency
from outrider.cli import build_parser, main
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine import Engine
from outrider.errors import ConfigError, OutriderError, RequestError
from outrider.models.base import CausalLM
from outrider.models.build import ARCHITECTURES
from outrider.models.eagle3 import Eagle3
from outrider.models.loader import prepare_parameters
from outrider.models.presets import preset_config, preset_draft_config
from outrider.models.qwen3_5_mtp import Qwen3_5MTP
from outrider.output import Completion, RequestOutput
from outrider.spec.eagle3 import Eagle3Drafter
from outrider.spec.mtp import MTPDrafter
from outrider.spec.ngram import NgramDrafter
from outrider.trace import RoundTrace, SpeculationStats

ROOT = Path(__file__).parents[1]
SMALL = ("--input-len", "20", "--output-len", "16", "--num-iters", "2", "--device", "cpu")
MTP = ("--speculative-algorithm", "mtp", "--speculative-num-draft-tokens", "3")
META = torch.device("meta")


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a small configuration and nothing else: enough for random weights."""
    folder = tmp_path_factory.mktemp("shape")
    config = {
        "model_type": "qwen3",
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 7,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "max_position_embeddings": 64,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


# What is counted.


def on_meta(module: nn.Module) -> Any:
    """The module in bfloat16 without storage."""
    prepare_parameters(module, torch.bfloat16, META)
    return module


def target_of(preset: str) -> CausalLM:
    config = preset_config(preset)
    with META:
        return on_meta(ARCHITECTURES[config.model_type](config))


def eagle3_of(target: CausalLM) -> Eagle3Drafter:
    with META:
        draft = Eagle3(preset_draft_config("preset:eagle3", target.config), own_embedding=False)
    return Eagle3Drafter(on_meta(draft), target, None)


def mtp_of(target: CausalLM, num_ids: int | None = None) -> MTPDrafter:
    ids = None if num_ids is None else torch.arange(num_ids, device=META)
    with META:
        return MTPDrafter(on_meta(Qwen3_5MTP(target.config)), target, ids)


def gigabytes(target: CausalLM, drafter: Any, work: RoundWork) -> float:
    num_bytes = round_bytes(target, drafter, work, torch.bfloat16, torch.float32)
    assert num_bytes is not None
    return num_bytes / 1e9


def test_weights_of_a_round_are_those_that_were_worked_out_by_hand() -> None:
    empty = RoundWork(num_sequences=0, context_len=0, num_drafts=3)
    qwen3, qwen3_5 = target_of("preset:qwen3-8b"), target_of("preset:qwen3.5-9b")
    assert gigabytes(qwen3, None, empty) == pytest.approx(15.1, abs=0.05)
    assert gigabytes(qwen3_5, None, empty) == pytest.approx(15.9, abs=0.05)
    plain = gigabytes(qwen3, None, empty)
    assert gigabytes(qwen3, eagle3_of(qwen3), empty) - plain == pytest.approx(2.2, abs=0.05)
    plain = gigabytes(qwen3_5, None, empty)
    assert gigabytes(qwen3_5, mtp_of(qwen3_5), empty) - plain == pytest.approx(7.6, abs=0.05)
    trimmed = gigabytes(qwen3_5, mtp_of(qwen3_5, 32_768), empty) - plain
    assert trimmed == pytest.approx(2.3, abs=0.05)
    assert gigabytes(qwen3_5, NgramDrafter(), empty) == plain


def test_keys_values_and_states_count_for_every_sequence() -> None:
    """Qwen3.5-9B: 8 attention layers of 4096 bytes a token, 50 MB of state read and written."""
    target = target_of("preset:qwen3.5-9b")
    none = RoundWork(num_sequences=0, context_len=1000, num_drafts=0)
    two = RoundWork(num_sequences=2, context_len=1000, num_drafts=0)
    of_sequences = gigabytes(target, None, two) - gigabytes(target, None, none)
    state = 24 * 32 * 128 * 128 * 4
    assert state == pytest.approx(50e6, rel=0.01)
    assert of_sequences == pytest.approx(2 * (8 * 4096 * 1000 + 2 * state) / 1e9, abs=1e-6)


def test_a_draft_reads_its_own_keys_and_values_at_each_step() -> None:
    target = target_of("preset:qwen3-8b")
    drafter = eagle3_of(target)
    rounds = [
        gigabytes(target, drafter, RoundWork(num_sequences, 1000, num_drafts))
        for num_sequences, num_drafts in ((0, 3), (1, 3), (0, 0), (1, 0))
    ]
    of_drafts = (rounds[1] - rounds[0]) - (rounds[3] - rounds[2])
    assert of_drafts == pytest.approx(3 * 4096 * 1000 / 1e9, abs=1e-6)


def test_a_tied_embedding_is_read_as_the_head() -> None:
    target = target_of("preset:qwen3-4b")
    empty = RoundWork(0, 0, 0)
    every = sum(parameter.numel() for parameter in target.parameters())
    assert gigabytes(target, None, empty) == pytest.approx(2 * every / 1e9)


def test_a_bandwidth_that_nobody_measured_gives_no_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_bandwidth(torch.device("cpu")) is None
    monkeypatch.setattr("outrider.bench_report.device_name", lambda _: "NVIDIA H200")
    assert read_bandwidth(torch.device("cuda")) == 4.2e12


def test_the_age_of_a_process_grows_with_the_clock() -> None:
    age = process_age()
    if age is not None:
        later = process_age()
        assert later is not None and 0 < age <= later < 24 * 3600


# What is made of the times.


def run_of(seconds: float, num_tokens: int, window: Window | None = None) -> Run:
    stats = SpeculationStats(num_passes=num_tokens, num_tokens=num_tokens)
    return Run(seconds, (0.5,), stats, window)


def test_rates_leave_out_what_both_runs_share() -> None:
    measured = Latency(
        batch_size=2,
        long=(run_of(3.0, 200, Window(2.0, 160, 100)), run_of(2.5, 200, Window(1.6, 160, 100))),
        short=(run_of(1.0, 50), run_of(1.5, 50)),
        floor_bytes=10,
        floor_seconds=0.008,
    )
    assert measured.decode_rates == [150 / 2.0, 150 / 1.5]
    assert measured.decode_rate == 100.0
    assert measured.full_batch_rate == pytest.approx(100.0)
    assert measured.round_seconds == pytest.approx(0.032)  # two sequences, 50 rounds, 1.6 s
    assert measured.share_of_floor == pytest.approx(0.25)


def test_what_could_not_be_measured_is_not_made_up() -> None:
    measured = Latency(1, (run_of(1.0, 20),), (run_of(1.0, 5),), None, None)
    assert measured.decode_rate == 0.0
    assert measured.full_batch_rate is measured.round_seconds is measured.share_of_floor is None


class Script:
    """Stands for an engine: at given times, how many tokens each request has, and which end."""

    def __init__(self, steps: Sequence[tuple[float, dict[str, int]]], last: int) -> None:
        self.steps = steps
        self.last = last

    def outputs(self) -> Iterator[tuple[float, list[RequestOutput]]]:
        for seconds, counts in self.steps:
            yield seconds, [self._output(name, count) for name, count in counts.items()]

    def _output(self, name: str, count: int) -> RequestOutput:
        reason = FinishReason.LENGTH if count == self.last else None
        rounds = (RoundTrace((), 0, 1),) * count
        completion = Completion(token_ids=(1,) * count, finish_reason=reason, rounds=rounds)
        return RequestOutput(name, (), (completion,))


def watched(monkeypatch: pytest.MonkeyPatch, script: Script, num_requests: int) -> Run:
    clock = [100.0]
    monkeypatch.setattr("outrider.bench_runs.time.perf_counter", lambda: clock[0])
    watch = bench_runs._Watch(num_requests)
    for seconds, outputs in script.outputs():
        clock[0] = 100.0 + seconds
        watch.see(outputs)
    return watch.run()


def test_the_window_is_where_every_sequence_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [
        (1.0, {"0": 1}),
        (2.0, {"0": 2}),
        (3.0, {"0": 3, "1": 1}),
        (3.5, {"0": 4, "1": 2}),
        (4.0, {"0": 5, "1": 3}),
        (5.0, {"1": 4}),
        (6.0, {"1": 5}),
    ]
    run = watched(monkeypatch, Script(steps, last=5), 2)
    assert run.seconds == 6.0
    assert run.first_tokens == (1.0, 3.0)
    assert run.stats.num_tokens == 10
    assert run.window == Window(seconds=1.0, num_tokens=4, num_passes=4)


def test_sequences_that_do_not_overlap_have_no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [(1.0, {"0": 1}), (2.0, {"0": 2}), (3.0, {"1": 1}), (4.0, {"1": 2})]
    assert watched(monkeypatch, Script(steps, last=2), 2).window is None
    together = [(1.0, {"0": 1}), (2.0, {"0": 2, "1": 1}), (3.0, {"1": 2})]
    assert watched(monkeypatch, Script(together, last=2), 2).window is None


def test_a_request_that_fails_ends_the_benchmark() -> None:
    watch = bench_runs._Watch(1)
    with pytest.raises(RequestError, match="no"):
        watch.see([RequestOutput.failed("0", RequestError("no"))])


# What is run.


def small_bench(shape: str, **options: Any) -> Bench:
    spec = SpeculativeConfig("eagle3", "preset:eagle3", 3, synthetic_acceptance_length=2.5)
    config = EngineConfig(
        shape,
        load_format="dummy",
        device="cpu",
        dtype="float32",
        max_num_seqs=4,
        num_kv_blocks=8,
        speculative_config=spec,
    )
    return Bench(config, options)


def test_every_run_has_new_prompts_and_the_same_rounds(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[list[int]] = []
    params: list[Any] = []
    add = Engine.add_request

    def spy(engine: Engine, request_id: str, prompt: list[int], one: Any) -> None:
        prompts.append(prompt)
        params.append(one)
        add(engine, request_id, prompt, one)

    monkeypatch.setattr(Engine, "add_request", spy)
    timed = small_bench(shape, top_k=5)
    measured = measure_latency(timed, 2, input_len=10, output_len=20, num_iters=2)
    assert len(prompts) == 2 * 2 * 3 and len({tuple(prompt) for prompt in prompts}) == 12
    assert {len(prompt) for prompt in prompts} == {10}
    assert {token for prompt in prompts for token in prompt} <= set(range(128))
    assert [one.max_tokens for one in params[:4]] == [20, 20, 5, 5]
    assert {(one.temperature, one.top_k, one.ignore_eos) for one in params} == {(0.0, 5, True)}
    first, second = measured.long
    assert first.stats == second.stats
    assert first.stats.num_tokens == 40 and first.stats.num_passes < 40
    assert measured.short[0].stats.num_tokens == 10
    assert measured.floor_seconds is None and measured.floor_bytes is not None


def test_requests_that_do_not_draft_have_a_floor_without_drafts(shape: str) -> None:
    bytes_of = {
        key: small_bench(shape, **options).floor(1, 10)[0]
        for key, options in (
            ("three", {}),
            ("one", {"max_draft_tokens": 1}),
            ("none", {"max_draft_tokens": 0}),
            ("off", {"speculation": False}),
        )
    }
    assert bytes_of["none"] == bytes_of["off"]
    assert bytes_of["three"] > bytes_of["one"] > bytes_of["none"]  # type: ignore[operator]


def test_latency_prints_a_table_and_writes_raw_times(
    trained_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.jsonl"
    words = ["bench", "latency", str(trained_model), "--batch-size", "1", "3", *SMALL, *MTP]
    words += ["--dtype", "float32", "--synthetic-acceptance-length", "3", "--json", str(file)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "mtp, 3 a round, accepted at random, 3.00 tokens a round" in printed
    table = [line.split() for line in printed.splitlines()[-3:]]
    assert table[0][:3] == ["batch", "tok/s", "full"]
    assert [row[0] for row in table[1:]] == ["1", "3"]
    assert all(row[-2:] == ["-", "-"] for row in table[1:])

    one, three = lines(file)
    assert (one["kind"], one["batch_size"], three["batch_size"]) == ("latency", 1, 3)
    assert one["engine"]["max_num_seqs"] == 3 and one["engine"]["max_model_len"] == 36
    assert one["engine"]["num_kv_blocks"] == 3
    assert one["versions"]["torch"] == torch.__version__
    assert {"command", "date", "start_up", "first_token_seconds"} <= set(one)
    assert [run["num_tokens"] for run in three["long_runs"]] == [48, 48]
    assert [run["num_tokens"] for run in three["short_runs"]] == [12, 12]
    assert all(0 < first < run["seconds"] for run in three["long_runs"] for first in
               run["first_tokens"])  # fmt: skip
    assert 1 < one["acceptance_length"] <= 4
    assert float(table[1][1]) == pytest.approx(one["decode_tokens_per_second"], abs=0.06)


def test_throughput_counts_prompts_and_outputs(
    shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.jsonl"
    words = ["bench", "throughput", shape, "--load-format", "dummy", "--num-requests", "5"]
    words += [*SMALL, "--max-num-seqs", "2", "--temperature", "1", "--json", str(file)]
    assert main(words) == 0
    [result] = lines(file)
    assert [run["num_tokens"] for run in result["runs"]] == [80, 80]
    seconds = min(run["seconds"] for run in result["runs"])
    assert result["output_tokens_per_second"] == pytest.approx(80 / seconds)
    assert result["total_tokens_per_second"] == pytest.approx((80 + 100) / seconds)
    assert result["sampling"] == {"temperature": 1.0}
    printed = capsys.readouterr().out
    assert "random weights" in printed and printed.splitlines()[-1].split()[:2] == ["5", "2"]


def parse(*words: str) -> argparse.Namespace:
    return build_parser().parse_args(["bench", "latency", *words])


def test_what_is_left_open_is_made_to_fit_the_work() -> None:
    args = parse("preset:qwen3-8b", "--input-len", "1000", "--output-len", "100")
    config = bench.engine_config(args, 4, max_num_seqs=4)
    assert (config.load_format, config.max_model_len, config.max_num_seqs) == ("dummy", 1100, 4)
    assert config.num_kv_blocks == 4 * 18  # 1100 tokens in blocks of 64
    assert config.max_prefill_tokens == 4000
    assert bench.engine_config(args, 100, max_num_seqs=100).max_prefill_tokens == 8192
    args = parse("m", "--num-kv-blocks", "50", "--max-prefill-tokens", "128")
    config = bench.engine_config(args, 1)
    assert (config.num_kv_blocks, config.max_prefill_tokens) == (50, 128)
    assert config.load_format == "auto"
    args = parse("m", "--kv-cache-memory-gib", "2")
    assert bench.engine_config(args, 1).num_kv_blocks is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--batch-size", "2", "0"), "batch size: got 0"),
        (("--batch-size", "x"), "invalid int value: 'x'"),
        (("--output-len", "7"), "output_len: got 7; allowed: an integer, 8 or more"),
        (("--input-len", "0"), "input_len: got 0"),
        (("--num-iters", "0"), "num_iters: got 0"),
        (("--batch-size", "8", "--max-num-seqs", "4"), "smaller than a batch size: got 4"),
        (("--max-model-len", "100"), "smaller than the prompt and its output: got 100"),
        (("--temperature", "-1"), "temperature: got -1.0"),
        (("--stop", "x"), "unrecognized arguments: --stop"),
        (("--max-tokens", "5"), "unrecognized arguments: --max-tokens"),
        (
            ("--json", "/no/such/folder/out.jsonl"),
            "cannot write results (No such file or directory)",
        ),
        (("--synthetic-acceptance-length", "2"), "speculation has no method"),
        ((*MTP, "--synthetic-acceptance-length", "9"), "synthetic_acceptance_length: got 9.0"),
    ],
)
def test_nonsense_is_refused_before_a_model_is_loaded(
    words: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Bench, "__init__", lambda *_: pytest.fail("a model was loaded"))
    assert main(["bench", "latency", "preset:qwen3-8b", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("preset:qwen3-8b", "--load-format", "auto"), "which has no weights"),
        (("preset:qwen9",), "no such model preset"),
        (("preset:qwen3-8b", "--input-len", "41000"), "max_model_len: got 41256"),
    ],
)
def test_what_a_preset_cannot_do_is_an_error_too(
    words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.engine.load_target", lambda _: target_of("preset:qwen3-8b"))
    args = parse(*words)
    with pytest.raises(OutriderError, match=message):
        Bench(bench.engine_config(args, 1), {})


def test_a_batch_needs_a_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="BENCHMARK"):
        build_parser().parse_args(["bench"])
    with pytest.raises(SystemExit):
        main(["bench", "throughput", "--help"])
    assert "--num-requests" in capsys.readouterr().out


# bench/ops.py.


@pytest.fixture
def ops() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_ops", ROOT / "bench" / "ops.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sweeps_are_gathered_whether_or_not_they_work(ops: ModuleType, tmp_path: Path) -> None:
    write = "import sys\nout = sys.argv[sys.argv.index('--out') + 1]\n"
    scripts = {
        "linear": write + "open(out, 'w').write('{\"words\": %d}' % len(sys.argv))",
        "delta": write + "open(out, 'w').write('{\"a\": 1}\\n{\"a\": 2}\\n')",
        "small": write + "open(out, 'w').write('{\"half')\nsys.exit(3)",
        "sampling": "",
    }
    for name, text in scripts.items():
        (tmp_path / f"{name}_sweep.py").write_text(text)
    output = tmp_path / "ops.json"
    assert ops.main(["--output", str(output), "--", "--quick"], folder=tmp_path) == 1
    report = json.loads(output.read_text())
    assert {"command", "date", "versions"} <= set(report)
    sweeps = report["sweeps"]
    assert list(sweeps) == ["linear", "attention", "delta", "small", "sampling"]
    assert sweeps["linear"]["status"] == "ok" and sweeps["linear"]["results"] == {"words": 4}
    assert sweeps["attention"] == {"status": "missing"}
    assert sweeps["delta"]["results"] == [{"a": 1}, {"a": 2}]
    assert sweeps["small"]["status"] == "exit code 3" and "results" not in sweeps["small"]
    assert sweeps["sampling"]["status"].startswith("no results")
    assert ops.main(["--only", "linear", "--output", str(output)], folder=tmp_path) == 0
