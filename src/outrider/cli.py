"""The `outrider` command: reads the command line, runs, and turns errors into one line each.

Exit codes: 0, 1 where a part of the work failed, 2 for what the user got wrong, 130 for Ctrl-C,
141 for a reader that went away.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from outrider import bench, chat, check, demo, draft_vocab, render, trace_command
from outrider.cli_flags import (
    add_engine_flags,
    add_flags,
    add_sampling_flags,
    check_drafts,
    engine_options,
    given,
    sampling_options,
)
from outrider.config import EngineConfig
from outrider.errors import ConfigError, OutriderError, RequestError
from outrider.llm import LLM
from outrider.output import Completion, RequestOutput, total_speculation
from outrider.params import SamplingParams
from outrider.server.options import ServerOptions

_OK, _PARTIAL, _USER_ERROR, _INTERRUPTED, _PIPE_CLOSED = 0, 1, 2, 130, 141
_HEADING_CHARACTERS = 60


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may not know every character
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()  # a closed pipe shows itself here, not when the interpreter ends
    except OutriderError as error:
        print_error(error)
        return _USER_ERROR
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # What is still buffered would raise again when the interpreter flushes it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED


def _run(argv: Sequence[str] | None) -> int:
    args = build_parser().parse_args(argv)
    level = logging.INFO if args.verbose else logging.WARNING
    logging.basicConfig(level=level, format="outrider: %(message)s", stream=sys.stderr)
    return args.run(args)


def print_error(error: OutriderError, about: str = "") -> None:
    """One line on stderr, whatever the message holds."""
    print(render.error_line(error, about), file=sys.stderr)


class _Parser(argparse.ArgumentParser):
    """Reports what it cannot read as every other error is reported."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, hint=f"see {self.prog} --help")


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command; `run` in its result is the function to call."""
    parser = _Parser(prog="outrider", description="LLM inference built on speculative decoding.")
    parser.add_argument("--version", action="version", version=f"outrider {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="continue one prompt or several")
    _add_generate_arguments(generate)

    serve = commands.add_parser("serve", help="serve a model to clients of OpenAI's API")
    add_engine_flags(serve)
    add_flags(serve.add_argument_group("server"), ServerOptions)
    serve.add_argument("--verbose", action="store_true", help="log what the engine does")
    serve.set_defaults(run=_serve)

    talk = commands.add_parser("chat", help="talk to a model, here or behind a server")
    chat.add_arguments(talk)

    examine = commands.add_parser("check", help="is the text the same with speculation?")
    examine.add_argument(
        "--num-tokens", type=int, default=64, metavar="N", help="tokens of each text (64)"
    )
    add_engine_flags(examine)
    examine.add_argument("--verbose", action="store_true", help="log what the engine does")
    examine.set_defaults(run=_check)

    choose = commands.add_parser("draft-vocab", help="find the ids for a trimmed draft head")
    draft_vocab.add_arguments(choose)
    choose.add_argument("--verbose", action="store_true", help="log what the command does")
    choose.set_defaults(run=draft_vocab.run)

    trace = commands.add_parser("trace", help="look at a run recorded by generate --trace-file")
    trace_command.add_arguments(trace)

    measure = commands.add_parser("bench", help="measure speed, with random weights where wanted")
    bench.add_commands(measure)

    show = commands.add_parser("demo", help="compare a small model with and without speculation")
    demo.add_arguments(show)

    for command, run in ((generate, _generate), (talk, chat.run), (show, demo.run)):
        command.add_argument(
            "--color",
            choices=("auto", "always", "never"),
            default="auto",
            help="show who chose each token (default: on a terminal)",
        )
        command.add_argument("--verbose", action="store_true", help="log what the engine does")
        command.set_defaults(run=run)
    return parser


def _add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    prompts = parser.add_argument_group("prompts", "one or more, in the order given")
    prompts.add_argument("--prompt", dest="prompts", action="append", metavar="TEXT")
    prompts.add_argument(
        "--prompt-file",
        dest="prompts",
        action="append",
        type=Path,
        metavar="FILE",
        help="all of a file is one prompt, its last newline included; - is standard input",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object per output")
    trace_command.add_trace_file(parser)
    add_engine_flags(parser)
    add_sampling_flags(parser)


def _version() -> str:
    try:
        return metadata.version("outrider")
    except metadata.PackageNotFoundError:
        return "from a source tree that is not installed"


def _generate(args: argparse.Namespace) -> int:
    prompts = [_read_prompt(source) for source in args.prompts or ()]
    if not prompts:
        raise RequestError("no prompt", hint="give --prompt TEXT or --prompt-file FILE")
    chosen = sampling_options(args)
    if not args.json and not {"logprobs", "prompt_logprobs"}.isdisjoint(chosen):
        raise RequestError("log probabilities are shown as JSON only", hint="add --json")
    if args.json and args.color == "always":
        raise ConfigError(
            "JSON has no colours", got="--color always", hint="leave it or --json out"
        )
    trace_command.check(args)
    options = engine_options(args)
    check_drafts(options, chosen)
    llm = LLM(**options)
    params = dataclasses.replace(llm.default_params(), **chosen)

    started = time.perf_counter()
    streams = len(prompts) == params.n == 1 and sys.stdout.isatty() and not args.json
    color = render.use_color(args.color, sys.stdout, os.environ)
    if streams:
        outputs = [_stream(llm, prompts[0], params, color)]
    else:
        outputs = _run_batch(llm, prompts, params)
    seconds = time.perf_counter() - started
    trace_command.record(args, llm, prompts, outputs)

    if len(outputs) == 1 and outputs[0].error is not None:
        raise outputs[0].error
    if not streams:
        for index, output in enumerate(outputs):
            _print_output(llm, index, prompts, output, as_json=args.json, color=color)
    failed = [(i, out.error) for i, out in enumerate(outputs) if out.error is not None]
    for index, error in failed:
        print_error(error, about=f"prompt {index + 1}: ")
    if not args.json:
        num_drafts = llm.engine.config.num_speculative_tokens
        if color and num_drafts:
            print(f"\n{render.legend(num_drafts)}", flush=True)
        # On stderr, so that what is piped on is the text and nothing else.
        lines = render.statistics_lines(total_speculation(outputs), seconds)
        print("", *lines, sep="\n", file=sys.stderr)
    return _PARTIAL if failed else _OK


def _serve(args: argparse.Namespace) -> int:
    # What makes no sense is refused first, whether the server's packages are there or not.
    config = EngineConfig(**engine_options(args))
    options = ServerOptions(**given(args, ServerOptions))
    try:
        from outrider.server.main import serve
    except ImportError as error:
        raise ConfigError(
            f"serve needs a package that is not installed ({error.name})",
            hint="pip install 'outrider[server]'",
        ) from error
    return serve(config, options)


def _check(args: argparse.Namespace) -> int:
    config = EngineConfig(**engine_options(args))
    if config.speculative_config is None:
        raise ConfigError(
            "check compares a text with speculation and without, and no speculation is asked for",
            hint="say how to draft, for instance --speculative-algorithm mtp",
        )
    report = check.check(config, num_tokens=args.num_tokens)
    check.print_report(report, sys.stdout)
    return int(report.result)


def _read_prompt(source: str | Path) -> str:
    if isinstance(source, str):
        return source
    try:
        raw = sys.stdin.buffer.read() if str(source) == "-" else source.read_bytes()
        return raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"prompt file cannot be read ({error})", got=str(source)) from error


def _run_batch(llm: LLM, prompts: list[str], params: SamplingParams) -> list[RequestOutput]:
    shows = len(prompts) > 1 and sys.stderr.isatty()
    bar = render.ProgressBar(sys.stderr) if shows else None
    try:
        outputs = llm.generate(prompts, params, progress=bar)
    finally:
        if bar is not None:
            bar.close()
    return outputs if isinstance(outputs, list) else [outputs]


def _stream(llm: LLM, prompt: str, params: SamplingParams, color: bool) -> RequestOutput:
    painter = render.TextPainter(llm.tokenizer, color, sys.stdout.isatty())
    output = None
    for output in llm.stream(prompt, params):
        sys.stdout.write(painter.push(output.completions[0]))
        sys.stdout.flush()
    assert output is not None  # a request that was accepted emits at least one token
    print()
    return output


def _print_output(
    llm: LLM, index: int, prompts: list[str], output: RequestOutput, *, as_json: bool, color: bool
) -> None:
    for completion in output.completions:
        if as_json:
            print(json.dumps(_as_object(index, output, completion)))
        elif output.error is None:
            if len(prompts) > 1 or len(output.completions) > 1:
                which = f", output {completion.index + 1}" if len(output.completions) > 1 else ""
                heading = f"--- prompt {index + 1}{which}: {_shortened(prompts[index])} ---"
                print(render.paint(heading, render.BOLD if color else ""))
            painter = render.TextPainter(llm.tokenizer, color, sys.stdout.isatty())
            print(painter.push(completion))


def _shortened(prompt: str) -> str:
    shown = repr(prompt[:_HEADING_CHARACTERS])
    return shown if len(prompt) <= _HEADING_CHARACTERS else f"{shown}..."


def _as_object(index: int, output: RequestOutput, completion: Completion) -> dict[str, Any]:
    """What --json prints of one output."""
    reason, stats = completion.finish_reason, completion.speculation
    item: dict[str, Any] = {
        "index": index,
        "completion": completion.index,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": None if reason is None else reason.value,
        "speculation": dataclasses.asdict(stats) | {"acceptance_length": stats.acceptance_length},
        "error": None if output.error is None else str(output.error),
    }
    for name, logprobs in (
        ("logprobs", completion.logprobs),
        ("prompt_logprobs", output.prompt_logprobs),
    ):
        if logprobs is not None:
            item[name] = [dataclasses.asdict(entry) for entry in logprobs]
    return item
