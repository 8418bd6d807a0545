"""`outrider trace`, and the recording of runs that it shows."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from outrider import trace_file, trace_html, trace_report
from outrider.checks import check_overwrites_none, check_writable
from outrider.llm import LLM
from outrider.output import RequestOutput
from outrider.trace_fields import TraceFileError


def add_trace_file(parser: argparse.ArgumentParser) -> None:
    """The flag of a command that runs a model."""
    parser.add_argument(
        "--trace-file",
        type=Path,
        metavar="FILE",
        help="record tokens, drafts and times, for outrider trace; prompts and texts are in it",
    )


def check(args: argparse.Namespace) -> None:
    """Refuse a file that cannot be written, or is a prompt, before anything runs."""
    if args.trace_file is not None:
        prompts = [source for source in args.prompts or () if isinstance(source, Path)]
        check_overwrites_none(TraceFileError, "--trace-file", args.trace_file, prompts)
        check_writable(TraceFileError, "the trace", args.trace_file)


def record(
    args: argparse.Namespace, llm: LLM, prompts: Sequence[str], outputs: Sequence[RequestOutput]
) -> None:
    """Write what has run, where it was asked for."""
    if args.trace_file is None:
        return
    config = llm.engine.config
    spec = config.speculative_config
    run = trace_file.RecordedRun(
        model=config.model,
        method=None if spec is None else spec.method,
        num_draft_tokens=config.num_speculative_tokens,
        device=llm.engine.runner.options.device.type,
    )
    trace_file.write(trace_file.record(run, prompts, outputs, llm.tokenizer), args.trace_file)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `outrider trace` can be told."""
    parser.add_argument("file", type=Path, metavar="FILE", help="what --trace-file has written")
    parser.add_argument(
        "--html", type=Path, metavar="OUT", help="write a report that any browser shows"
    )
    parser.set_defaults(run=run, verbose=False)


def run(args: argparse.Namespace) -> int:
    """Print a summary, or write the report; returns the exit code."""
    recorded = trace_file.read(args.file)
    if args.html is None:
        print(*trace_report.summary_lines(recorded), sep="\n")
        return 0
    check_overwrites_none(TraceFileError, "--html", args.html, [args.file])
    try:
        args.html.write_text(trace_html.report(recorded), encoding="utf-8")
    except OSError as error:
        raise TraceFileError(
            f"cannot write the report ({error.strerror})", got=str(args.html)
        ) from error
    return 0
