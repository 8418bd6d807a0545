"""A recorded run as a file of JSON lines: written by `generate --trace-file`, read by `trace`.

The first line is the run; then comes each output, followed by its rounds. Texts of tokens are in
the file, so that it can be shown without the model. Knows nothing of how it is shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from outrider.batch import FinishReason
from outrider.output import Completion, RequestOutput
from outrider.server.token_text import OriginTrace
from outrider.tokenizer import Tokenizer
from outrider.trace import RoundTrace
from outrider.trace_fields import Fields, TraceFileError

VERSION = 1
_PARTS = ("verify", "commit", "draft")


@dataclass(frozen=True)
class RecordedToken:
    """A token of the text; the texts of an output's tokens together are its text."""

    id: int
    text: str


@dataclass(frozen=True)
class RecordedRound:
    """A pass that emitted tokens.

    Attributes:
        drafts: ids that were verified.
        accepted: how many of them the rule kept.
        tokens: what the text gained; fewer than accepted + 1 where the text ended inside.
        rejected: texts of the refused drafts; empty where the token in their place was cut off.
        prompt_pass: the pass that ended the prompt.
        started, seconds: by a clock that begins with the run's first pass.
        parts: seconds of verify, commit and draft; None where they cannot be told apart.
        sequences: sequences that got tokens from the same pass.
    """

    drafts: tuple[int, ...]
    accepted: int
    tokens: tuple[RecordedToken, ...]
    rejected: tuple[str, ...]
    prompt_pass: bool
    started: float
    seconds: float
    parts: tuple[float, float, float] | None
    sequences: int

    @property
    def trace(self) -> RoundTrace:
        """The same in ids, without what was measured."""
        return RoundTrace(self.drafts, self.accepted, len(self.tokens))

    @property
    def was_cut(self) -> bool:
        """The text ended before all that the rule kept was in it."""
        return len(self.tokens) < self.accepted + 1


@dataclass(frozen=True)
class RecordedOutput:
    """One text: which prompt it continues, which of the prompt's outputs it is, how it ended."""

    prompt_index: int
    output_index: int
    prompt: str
    finish_reason: str
    rounds: tuple[RecordedRound, ...] = ()


@dataclass(frozen=True)
class RecordedRun:
    """A run.

    Attributes:
        method: how it drafted; None did not.
        num_draft_tokens: most drafts of a round.
        device: "cpu" or "cuda".
    """

    model: str
    method: str | None
    num_draft_tokens: int
    device: str
    outputs: tuple[RecordedOutput, ...] = ()


def record(
    run: RecordedRun, prompts: Sequence[str], outputs: Sequence[RequestOutput], tokenizer: Tokenizer
) -> RecordedRun:
    """The run with all outputs that were not refused; all have ended."""
    all_rounds = [trace for output in outputs for one in output.completions for trace in one.rounds]
    begin = min((trace.times.started for trace in all_rounds if trace.times), default=0.0)
    recorded = [
        _output(index, prompt, completion, tokenizer, begin)
        for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
        for completion in (output.completions if output.error is None else ())
    ]
    return replace(run, outputs=tuple(recorded))


def _output(
    index: int, prompt: str, completion: Completion, tokenizer: Tokenizer, begin: float
) -> RecordedOutput:
    reason = completion.finish_reason
    assert reason is not None, "texts of tokens are known where the text has ended"
    rounds = tuple(_rounds(completion, tokenizer, begin))
    return RecordedOutput(index, completion.index, prompt, reason.value, rounds)


def _rounds(completion: Completion, tokenizer: Tokenizer, begin: float) -> Iterator[RecordedRound]:
    entries = iter(OriginTrace(tokenizer).push(completion))
    for trace in completion.rounds:
        # Tokens behind a stop string's begin have no text any more, but stand in the output's ids.
        mine = [next(entries) for _ in range(trace.num_emitted)]
        yield _round(trace, mine, begin)


def _round(trace: RoundTrace, entries: list[dict[str, Any]], begin: float) -> RecordedRound:
    assert trace.times is not None, "passes of an engine in this process are timed"
    rejected = next((entry["rejected"] for entry in entries if entry["rejected"]), ())
    return RecordedRound(
        drafts=trace.draft_token_ids,
        accepted=trace.num_accepted,
        tokens=tuple(RecordedToken(entry["token_id"], entry["text"]) for entry in entries),
        rejected=tuple(rejected),
        prompt_pass=not trace.times.is_round,
        started=trace.times.started - begin,
        seconds=trace.times.seconds,
        parts=trace.times.parts,
        sequences=trace.times.num_sequences,
    )


def write(run: RecordedRun, path: Path) -> None:
    """Write a run, in place of what the file held.

    Raises:
        TraceFileError: the file cannot be written.
    """
    try:
        with path.open("w", encoding="utf-8") as file:
            for line in _lines(run):
                file.write(json.dumps(line, ensure_ascii=True) + "\n")
    except OSError as error:
        raise TraceFileError(f"cannot write the trace ({error.strerror})", got=str(path)) from error


def _lines(run: RecordedRun) -> Iterator[dict[str, Any]]:
    yield {
        "type": "run",
        "version": VERSION,
        "model": run.model,
        "method": run.method,
        "num_draft_tokens": run.num_draft_tokens,
        "device": run.device,
    }
    for output in run.outputs:
        yield {
            "type": "output",
            "prompt_index": output.prompt_index,
            "output_index": output.output_index,
            "prompt": output.prompt,
            "finish_reason": output.finish_reason,
        }
        for one in output.rounds:
            parts = None if one.parts is None else dict(zip(_PARTS, one.parts, strict=True))
            yield {"type": "round"} | asdict(one) | {"parts": parts}


def read(path: Path) -> RecordedRun:
    """Read a run.

    Raises:
        TraceFileError: the file cannot be read, or a line of it is not what `write` writes; the
            error names the file, the line and the field.
    """
    try:
        lines = path.read_bytes().decode("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceFileError(f"trace file cannot be read ({error})", got=str(path)) from error
    run: RecordedRun | None = None
    outputs: list[RecordedOutput] = []
    rounds: list[list[RecordedRound]] = []  # of each output
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        fields = Fields(_object(line, f"{path}, line {number}"), f"{path}, line {number}")
        kind = fields.choice("type", ("run", "output", "round"))
        if run is None:
            if kind != "run":
                raise fields.wrong("type", kind, "run, in the first line")
            run = _read_run(fields)
        elif kind == "run":
            raise fields.wrong("type", kind, "output or round: the run is told already")
        elif kind == "output":
            outputs.append(_read_output(fields))
            rounds.append([])
        elif not outputs:
            raise fields.wrong("type", kind, "output, which its rounds follow")
        elif rounds[-1] and rounds[-1][-1].was_cut:
            raise fields.wrong("type", kind, "output or the end: the round before was the last")
        else:
            rounds[-1].append(_read_round(fields))
        fields.end()
    if run is None:
        raise TraceFileError("trace file is empty", got=str(path), hint="record a run first")
    whole = [replace(one, rounds=tuple(own)) for one, own in zip(outputs, rounds, strict=True)]
    return replace(run, outputs=tuple(whole))


def _object(line: str, where: str) -> Mapping[str, Any]:
    try:
        value: object = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceFileError(f"{where}: not JSON ({error})", got=line) from error
    if not isinstance(value, dict):
        raise TraceFileError(f"{where}: not a JSON object", got=line)
    return value  # pyright: ignore[reportUnknownVariableType]  # keys of JSON are strings


def _read_run(fields: Fields) -> RecordedRun:
    version = fields.integer("version")
    if version != VERSION:
        raise fields.wrong("version", version, f"{VERSION}, what this Outrider reads")
    return RecordedRun(
        model=fields.text("model"),
        method=fields.optional_text("method"),
        num_draft_tokens=fields.integer("num_draft_tokens"),
        device=fields.choice("device", ("cpu", "cuda")),
    )


def _read_output(fields: Fields) -> RecordedOutput:
    return RecordedOutput(
        prompt_index=fields.integer("prompt_index"),
        output_index=fields.integer("output_index"),
        prompt=fields.text("prompt"),
        finish_reason=fields.choice("finish_reason", [reason.value for reason in FinishReason]),
    )


def _read_round(fields: Fields) -> RecordedRound:
    drafts = tuple(fields.integers("drafts"))
    accepted = fields.integer("accepted", len(drafts), "the number of drafts")
    tokens = tuple(
        RecordedToken(inner.integer("id"), inner.text("text")) for inner in fields.objects("tokens")
    )
    if not 1 <= len(tokens) <= accepted + 1:
        raise fields.wrong("tokens", len(tokens), f"1 to {accepted + 1} tokens, accepted + 1")
    rejected = tuple(fields.texts("rejected"))
    if rejected and len(rejected) != len(drafts) - accepted:
        raise fields.wrong(
            "rejected", len(rejected), f"0 or {len(drafts) - accepted} texts, drafts - accepted"
        )
    inner = fields.optional_object("parts")
    parts = None
    if inner is not None:
        parts = (inner.seconds("verify"), inner.seconds("commit"), inner.seconds("draft"))
        inner.end()
    return RecordedRound(
        drafts=drafts,
        accepted=accepted,
        tokens=tokens,
        rejected=rejected,
        prompt_pass=fields.flag("prompt_pass"),
        started=fields.seconds("started"),
        seconds=fields.seconds("seconds"),
        parts=parts,
        sequences=fields.integer("sequences"),
    )
