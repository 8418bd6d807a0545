"""What the front process and the engine process say to each other, as msgpack.

Plain values only. Needs the package msgspec, so nothing of the core imports this file.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from outrider import errors
from outrider.batch import FinishReason, TokenLogprobs
from outrider.config import EngineConfig
from outrider.errors import OutriderError, RequestError
from outrider.params import SamplingParams
from outrider.trace import PassTimes, RoundTrace


@dataclasses.dataclass(frozen=True)
class Startup:
    """What the engine process is told before anything else, pickled on its standard input.

    Attributes:
        to_engine, from_engine: addresses that the process binds.
        log_level: level of the root logger.
    """

    config: EngineConfig
    to_engine: str
    from_engine: str
    log_level: int


class Add(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A request.

    Attributes:
        params: the fields of SamplingParams that are not at their default.
    """

    request_id: str
    token_ids: tuple[int, ...]
    params: dict[str, Any]


class Abort(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The request is of no use any more; nothing is said of it afterwards."""

    request_id: str


class Stop(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """End the process now."""


ToEngine = Add | Abort | Stop


class Fault(msgspec.Struct, array_like=True, frozen=True):
    """An OutriderError on its way between processes; what was got travels as it is shown."""

    kind: str
    what: str
    got: str | None
    allowed: str | None
    hint: str | None


class Ready(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The model is loaded.

    Attributes:
        sampling_defaults: the checkpoint's own recommendation, fields of SamplingParams.
        max_num_seqs: sequences that run at once.
    """

    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    sampling_defaults: dict[str, Any]


class Failed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The model cannot be loaded; the process ends."""

    fault: Fault


class Accepted(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The request is queued."""

    request_id: str


class Refused(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The request cannot be served, or not to its end; nothing more is said of it."""

    request_id: str
    fault: Fault


class CompletionDelta(msgspec.Struct, array_like=True, frozen=True):
    """What one output of a request gained in a step."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    rounds: tuple[RoundTrace, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None


class RequestDelta(msgspec.Struct, array_like=True, frozen=True):
    """What a request gained in a step.

    Attributes:
        prompt_logprobs: once, with the first output's first tokens, where they were asked for.
        num_cached_tokens: prompt tokens that the prefix cache held.
    """

    request_id: str
    completions: tuple[CompletionDelta, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    num_cached_tokens: int = 0


class Progress(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The requests that gained something in a step."""

    requests: tuple[RequestDelta, ...]


class Stats(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """How the engine stands; sent a few times a second while something changes.

    Attributes:
        num_running: sequences that hold a slot.
        num_waiting: sequences that hold nothing yet.
        kv_usage: share of the blocks that sequences hold, 0 to 1; cached blocks that nobody uses
            are free.
        num_preemptions: sequences that gave up their place, since the start.
        step_seconds: how long each step since the last message took.
        pass_times: of the passes whose results have come since then.
    """

    num_running: int
    num_waiting: int
    kv_usage: float
    num_preemptions: int
    step_seconds: tuple[float, ...] = ()
    pass_times: tuple[PassTimes, ...] = ()


FromEngine = Ready | Failed | Accepted | Refused | Progress | Stats


def _plain(value: object) -> object:
    """What a subclass of a number or of text stands for, such as a float of NumPy's."""
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return "".join(value)
    raise TypeError(f"{type(value).__name__} cannot be sent to another process")


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine, strict=False).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def params_to_fields(params: SamplingParams) -> dict[str, Any]:
    """The fields that are not at their default; SamplingParams(**fields) gives the same again."""
    fields = {
        field.name: value
        for field in dataclasses.fields(params)
        if (value := getattr(params, field.name)) != field.default
    }
    if params.grammar is not None:
        fields["structured_output"] = dataclasses.asdict(params.grammar)
    return fields


def refuse_unreadable(content: bytes, error: msgspec.MsgspecError) -> Refused | None:
    """The answer to a message that is no ToEngine; None where its request cannot be told."""
    try:
        match msgspec.msgpack.decode(content):
            case ["Add", str(request_id), *_]:
                fault = to_fault(RequestError(f"the request cannot be read ({error})"))
                return Refused(request_id, fault)
            case _:
                return None
    except msgspec.MsgspecError:
        return None


class _Shown:
    """Stands for a value of the other process in an error's message."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def to_fault(error: OutriderError) -> Fault:
    """The error's parts."""
    got = repr(error.got) if error.has_got else None
    return Fault(type(error).__name__, error.what, got, error.allowed, error.hint)


def to_error(fault: Fault) -> OutriderError:
    """The error again, of the same type and with the same message."""
    kind = getattr(errors, fault.kind)
    if fault.got is None:
        return kind(fault.what, allowed=fault.allowed, hint=fault.hint)
    return kind(fault.what, got=_Shown(fault.got), allowed=fault.allowed, hint=fault.hint)
