"""`outrider bench`: how fast tokens come, and how near that is to what memory allows.

Prompts are random token ids and outputs have a fixed length, so that only the work counts; a
preset with random weights does the same work as the model it is shaped like.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

from outrider.bench_report import (
    ResultFile,
    Table,
    device_name,
    now,
    versions,
)
from outrider.bench_runs import Bench, Latency, measure_latency
from outrider.checks import check_int
from outrider.cli_flags import (
    SAMPLING_FLAGS,
    add_engine_flags,
    add_flags,
    check_drafts,
    destination,
    engine_options,
    sampling_options,
)
from outrider.config import MAX_COUNT, EngineConfig, SpeculativeConfig
from outrider.errors import ConfigError
from outrider.models.presets import is_preset
from outrider.params import SamplingParams
from outrider.words import counted

SAMPLING_FIELDS = (
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logprobs",
    "speculation",
    "max_draft_tokens",
    "draft_sampling",
)
"""What can be asked of the requests, besides temperature: all that does not change their length."""

_MOST_PREFILL_TOKENS = 8192
_SHORTEST_OUTPUT = 8


def add_commands(parser: argparse.ArgumentParser) -> None:
    """`latency` and `throughput` below `bench`."""
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    latency = commands.add_parser("latency", help="decoding at fixed batch sizes")
    latency.add_argument(
        "--batch-size", dest="batch_sizes", type=int, nargs="+", default=[1], metavar="N",
        help="sequences that run together, one or several sizes (1)",
    )  # fmt: skip
    throughput = commands.add_parser("throughput", help="many requests that arrive at once")
    throughput.add_argument(
        "--num-requests", type=int, default=64, metavar="N", help="requests (64)"
    )
    for command, run, num_iters in ((latency, run_latency, 3), (throughput, run_throughput, 1)):
        _add_work(command, num_iters)
        # Prompts are random ids and no text is made of the outputs.
        add_engine_flags(command, without=("tokenizer",))
        command.add_argument(
            "--synthetic-acceptance-length",
            dest=destination(SpeculativeConfig, "synthetic_acceptance_length"),
            type=float, default=argparse.SUPPRESS, metavar="X",
            help="short for --speculative-synthetic-acceptance-length",
        )  # fmt: skip
        group = command.add_argument_group("sampling")
        group.add_argument(
            "--temperature", dest=destination(SamplingParams, "temperature"),
            type=float, default=argparse.SUPPRESS, metavar="X", help="0 is greedy (default: 0)",
        )  # fmt: skip
        add_flags(group, SamplingParams, SAMPLING_FLAGS, SAMPLING_FIELDS)
        command.add_argument("--verbose", action="store_true", help="log what the engine does")
        command.set_defaults(run=run)


def _add_work(command: argparse.ArgumentParser, num_iters: int) -> None:
    for flag, default, help_text in (
        ("--input-len", 1024, "tokens of each prompt"),
        ("--output-len", 256, "tokens of each output"),
        ("--num-iters", num_iters, "timed runs, of which the best is shown"),
    ):
        command.add_argument(
            flag, type=int, default=default, metavar="N", help=f"{help_text} ({default})"
        )
    command.add_argument(
        "--json", type=Path, metavar="FILE", help="append results and raw times, one object a line"
    )


def run_latency(args: argparse.Namespace) -> int:
    """`outrider bench latency`."""
    _check_work(args)
    for size in args.batch_sizes:
        check_int(ConfigError, "batch size", size, 1, MAX_COUNT)
    largest = max(args.batch_sizes)
    config = engine_config(args, largest, max_num_seqs=largest)
    if config.max_num_seqs < largest:
        raise ConfigError(
            "max_num_seqs is smaller than a batch size",
            got=config.max_num_seqs,
            allowed=f"at least {largest}",
        )
    bench, file = _start(args, config)
    short_len = args.output_len // 4
    # Once more than is timed: the first run captures graphs and makes the allocator grow.
    runs = [bench.run(1, args.input_len, short_len) for _ in range(args.num_iters + 1)][1:]
    first_tokens = [run.first_tokens[0] for run in runs]
    first_token = statistics.median(first_tokens)
    file.context |= {"first_token_seconds": first_token, "first_token_seconds_all": first_tokens}
    print(f"first token  {first_token * 1e3:.1f} ms (batch 1, {args.input_len} prompt tokens)\n")
    table = Table(*_LATENCY_COLUMNS)
    for size in args.batch_sizes:
        measured = measure_latency(bench, size, args.input_len, args.output_len, args.num_iters)
        table.row(*_latency_cells(measured))
        file.write(measured.result)
    return 0


_LATENCY_COLUMNS = (
    "batch", "tok/s", "full tok/s", "round ms", "acceptance", "rounds", "floor ms", "of floor",
)  # fmt: skip


def _latency_cells(measured: Latency) -> tuple[str, ...]:
    """A row of the table; rounds are those of one sequence in one long run."""
    rounds = measured.stats.num_passes / (len(measured.long) * measured.batch_size)
    return (
        str(measured.batch_size),
        f"{measured.decode_rate:.1f}",
        _shown(measured.full_batch_rate, 1),
        _shown(measured.round_seconds, 3, 1e3),
        _shown(measured.stats.acceptance_length, 2),
        f"{rounds:.1f}",
        _shown(measured.floor_seconds, 3, 1e3),
        _shown(measured.share_of_floor, 1, 1e2, "%"),
    )


def _shown(value: float | None, digits: int, factor: float = 1.0, unit: str = "") -> str:
    return "-" if value is None else f"{value * factor:.{digits}f}{unit}"


def run_throughput(args: argparse.Namespace) -> int:
    """`outrider bench throughput`."""
    _check_work(args)
    check_int(ConfigError, "num_requests", args.num_requests, 1, MAX_COUNT)
    config = engine_config(args, args.num_requests)
    bench, file = _start(args, config)
    bench.run(min(config.max_num_seqs, args.num_requests), args.input_len, args.output_len)
    print()
    table = Table("requests", "at once", "seconds", "output tok/s", "total tok/s", "acceptance")
    runs = [
        bench.run(args.num_requests, args.input_len, args.output_len) for _ in range(args.num_iters)
    ]
    best = min(runs, key=lambda run: run.seconds)
    output_rate = best.stats.num_tokens / best.seconds
    total_rate = output_rate + args.num_requests * args.input_len / best.seconds
    length = best.stats.acceptance_length
    table.row(
        str(args.num_requests),
        str(config.max_num_seqs),
        f"{best.seconds:.2f}",
        f"{output_rate:.1f}",
        f"{total_rate:.1f}",
        _shown(length, 2),
    )
    file.write(
        {
            "kind": "throughput",
            "num_requests": args.num_requests,
            "output_tokens_per_second": output_rate,
            "total_tokens_per_second": total_rate,
            "acceptance_length": length,
            "runs": [run.raw for run in runs],
        }
    )
    return 0


def _check_work(args: argparse.Namespace) -> None:
    check_int(ConfigError, "input_len", args.input_len, 1, MAX_COUNT)
    check_int(ConfigError, "output_len", args.output_len, _SHORTEST_OUTPUT, MAX_COUNT)
    check_int(ConfigError, "num_iters", args.num_iters, 1, MAX_COUNT)


def engine_config(
    args: argparse.Namespace, num_requests: int, max_num_seqs: int | None = None
) -> EngineConfig:
    """The engine that the flags describe, with what they leave open made to fit the work.

    Weights of a preset are random; a sequence is as long as the work's; there are blocks for all
    sequences that run; and a step takes enough prompt tokens for them to begin together.

    Args:
        num_requests: most that are queued at once.
        max_num_seqs: the default.

    Raises:
        ConfigError: the flags make no sense together.
    """
    length = args.input_len + args.output_len
    # Random prompts share nothing, and keeping their states would cut them into more chunks.
    options: dict[str, Any] = {"max_model_len": length, "enable_prefix_caching": False}
    options |= engine_options(args)
    if max_num_seqs is not None:
        options.setdefault("max_num_seqs", max_num_seqs)
    if is_preset(options["model"]):
        options.setdefault("load_format", "dummy")
    config = EngineConfig(**options)
    if config.max_model_len is not None and config.max_model_len < length:
        raise ConfigError(
            "max_model_len is smaller than the prompt and its output",
            got=config.max_model_len,
            allowed=f"at least {length}",
        )
    fitted: dict[str, int] = {}
    if not {"num_kv_blocks", "kv_cache_memory_gib"} & set(options):
        blocks = -(-(config.max_model_len or length) // config.block_size)
        fitted["num_kv_blocks"] = blocks * config.max_num_seqs
    if "max_prefill_tokens" not in options:
        prompts = min(num_requests, config.max_num_seqs) * args.input_len
        wanted = max(prompts, config.max_prefill_tokens)
        fitted["max_prefill_tokens"] = min(wanted, _MOST_PREFILL_TOKENS)
    return dataclasses.replace(config, **fitted)


def _start(args: argparse.Namespace, config: EngineConfig) -> tuple[Bench, ResultFile]:
    """Load the engine, run one request through it, and say what stands."""
    options = sampling_options(args)
    check_drafts(engine_options(args), options)
    file = ResultFile(args.json, {"command": shlex.join(["outrider", *sys.argv[1:]])})
    bench = Bench(config, options)
    first = bench.run(1, args.input_len, _SHORTEST_OUTPUT).first_tokens[0]
    ready = bench.ready_seconds
    start_up = {
        "load_seconds": bench.load_seconds,
        "ready_seconds": ready,
        "first_token_seconds": None if ready is None else ready + first,
    }
    file.context |= {
        "date": now(),
        "versions": versions(bench.device),
        "engine": dataclasses.asdict(config),
        "sampling": options,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "start_up": start_up,
    }
    for line in _heading(bench, first):
        print(line)
    return bench, file


def _heading(bench: Bench, first: float) -> list[str]:
    config, engine = bench.engine.config, bench.engine
    used = versions(bench.device)
    size = sum(parameter.numel() for parameter in engine.runner.target.parameters())
    dtype = str(engine.runner.options.dtype).removeprefix("torch.")
    random_weights = ", random weights" if config.load_format == "dummy" else ""
    drafts = "none"
    if config.speculative_config is not None:
        spec = config.speculative_config
        drafts = f"{spec.method}, {spec.num_speculative_tokens} a round"
        if spec.synthetic_rates is not None:
            drafts += f", accepted at random, {1 + sum(spec.synthetic_rates):.2f} tokens a round"
    since = ""
    if bench.ready_seconds is not None:
        ready = bench.ready_seconds
        since = f"; since the process began {ready:.1f} s, and {ready + first:.1f} s to a token"
    return [
        f"model        {config.model}, {size / 1e6:.1f} M parameters, {dtype}{random_weights}",
        f"drafts       {drafts}",
        f"runs on      {device_name(bench.device)}, torch {used['torch']}, triton {used['triton']}",
        f"engine       {counted(config.max_num_seqs, 'sequence')} of "
        f"{counted(engine.max_model_len, 'token')}, "
        f"{counted(config.max_prefill_tokens, 'prompt token')} a step",
        f"start-up     {bench.load_seconds:.1f} s to load{since}",
    ]
