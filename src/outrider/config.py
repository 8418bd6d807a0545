"""What a user chooses: the engine, speculation, and how one request is sampled.

Every value is validated once, when the object is built; nothing later checks it again. Knows
nothing of models: what depends on a checkpoint is resolved by the engine.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from outrider.errors import ConfigError, OutriderError, RequestError
from outrider.spec.names import SIDECAR_METHODS, canonical_method

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
DeviceName = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["auto", "safetensors", "dummy"]

MAX_SPECULATIVE_TOKENS = 8
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: the softmax would be one-hot up to rounding."""


@dataclass(frozen=True)
class SpeculativeConfig:
    """How to draft.

    Args:
        method: name of the draft method; aliases are accepted and replaced by the method's name.
        model: path or hub id of the draft's own checkpoint, for methods that have one.
        num_speculative_tokens: K, the most tokens drafted in a round, 1 to 8.

    Raises:
        ConfigError: a value is not allowed.
    """

    method: str
    model: str | None = None
    num_speculative_tokens: int = 3

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", canonical_method(self.method))
        if self.model is not None:
            _check_text(ConfigError, "speculative model", self.model)
            if self.method not in SIDECAR_METHODS:
                raise ConfigError(
                    f"speculative method {self.method} has no checkpoint of its own",
                    got=self.model,
                    allowed="model=None",
                    hint="leave out the draft model: the draft's weights are in the target's",
                )
        elif self.method in SIDECAR_METHODS:
            raise ConfigError(
                f"speculative method {self.method} needs a draft checkpoint",
                got=None,
                hint="name it with model=",
            )
        _check_int(
            ConfigError,
            "num_speculative_tokens",
            self.num_speculative_tokens,
            1,
            MAX_SPECULATIVE_TOKENS,
            hint="leave speculative_config out to decode without drafts",
        )


@dataclass(frozen=True)
class EngineConfig:
    """What the engine serves and with how much memory.

    Args:
        model: local folder or hub id of the checkpoint.
        tokenizer: folder or hub id of the tokenizer where it is not the model's own.
        revision: branch, tag or commit on the hub.
        dtype: type of weights and activations; "auto" follows the checkpoint.
        device: "auto" is CUDA where there is one.
        load_format: "dummy" fills weights with random values of the right shapes.
        seed: seed of dummy weights and of requests that bring none.
        max_model_len: most tokens of a sequence, prompt and output; None is the checkpoint's own.
        max_num_seqs: most sequences that run at once, which is the number of state slots.
        block_size: tokens in a block of KV, a multiple of 16 from 16 to 256.
        num_kv_blocks: blocks of KV; None derives it from kv_cache_memory_gib.
        kv_cache_memory_gib: memory for KV in GiB, where num_kv_blocks is None.
        prefill_grid: prompt chunks end at multiples of this many tokens, the prompt's end excepted.
        max_prefill_tokens: most prompt tokens computed in one step, at least prefill_grid.
        speculative_config: how to draft; None decodes plainly.
        debug_checks: check the engine's own invariants after every step, slowly.

    Raises:
        ConfigError: a value is not allowed.
    """

    model: str
    tokenizer: str | None = None
    revision: str | None = None
    dtype: DtypeName = "auto"
    device: DeviceName = "auto"
    load_format: LoadFormat = "auto"
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int = 16
    block_size: int = 64
    num_kv_blocks: int | None = None
    kv_cache_memory_gib: float = 1.0
    prefill_grid: int = 64
    max_prefill_tokens: int = 512
    speculative_config: SpeculativeConfig | None = None
    debug_checks: bool = False

    def __post_init__(self) -> None:
        error = ConfigError
        _check_text(error, "model", self.model)
        for name in ("tokenizer", "revision"):
            if getattr(self, name) is not None:
                _check_text(error, name, getattr(self, name))
        _check_choice("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        _check_choice("device", self.device, ("auto", "cpu", "cuda"))
        _check_choice("load_format", self.load_format, ("auto", "safetensors", "dummy"))
        _check_int(error, "seed", self.seed, 0, 2**63 - 1)
        for name in ("max_model_len", "num_kv_blocks"):
            if getattr(self, name) is not None:
                _check_int(error, name, getattr(self, name), 1)
        for name in ("max_num_seqs", "prefill_grid", "max_prefill_tokens"):
            _check_int(error, name, getattr(self, name), 1)
        _check_int(error, "block_size", self.block_size, 16, 256)
        if self.block_size % 16:
            raise ConfigError(
                "block_size", got=self.block_size, allowed="a multiple of 16 from 16 to 256"
            )
        _check_real(error, "kv_cache_memory_gib", self.kv_cache_memory_gib)
        if self.kv_cache_memory_gib <= 0:
            raise ConfigError(
                "kv_cache_memory_gib", got=self.kv_cache_memory_gib, allowed="more than 0"
            )
        if self.max_prefill_tokens < self.prefill_grid:
            raise ConfigError(
                "max_prefill_tokens is smaller than a prefill chunk",
                got=self.max_prefill_tokens,
                allowed=f"at least prefill_grid ({self.prefill_grid})",
                hint="raise max_prefill_tokens or lower prefill_grid",
            )
        _check_type(error, "speculative_config", self.speculative_config, SpeculativeConfig, True)
        _check_type(error, "debug_checks", self.debug_checks, bool)

    @property
    def num_speculative_tokens(self) -> int:
        """K: the most tokens drafted in a round; 0 without speculation."""
        spec = self.speculative_config
        return 0 if spec is None else spec.num_speculative_tokens

    @property
    def tokenizer_source(self) -> str:
        """Folder or hub id that the tokenizer comes from."""
        return self.model if self.tokenizer is None else self.tokenizer

    @property
    def kv_cache_bytes(self) -> int:
        """kv_cache_memory_gib in bytes."""
        return int(self.kv_cache_memory_gib * 2**30)


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    Args:
        max_tokens: most output tokens.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; None keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
        min_p: drop tokens less likely than this share of the most likely one, in [0, 1].
        seed: the request's own seed; None takes one from the engine's.
        stop: strings that end the output, kept as a tuple.
        stop_token_ids: token ids that end the output, besides the end-of-sequence ids.
        ignore_eos: go on past end-of-sequence ids.
        max_draft_tokens: cap on the drafts of a round for this request; None is the engine's K.
        speculation: False switches drafting off for this request.

    The remaining fields belong to the interface but are not built yet: anything but their neutral
    value is refused.

    Raises:
        RequestError: a value is not allowed or not built yet.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_draft_tokens: int | None = None
    speculation: bool = True
    n: int = 1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_output: object | None = None

    def __post_init__(self) -> None:
        error = RequestError
        _refuse_unsupported(self)
        _check_int(error, "max_tokens", self.max_tokens, 1)
        _check_real(error, "temperature", self.temperature)
        if self.temperature < 0:
            raise RequestError(
                "temperature", got=self.temperature, allowed="0 or more", hint="0 is greedy"
            )
        if self.top_k is not None:
            _check_int(error, "top_k", self.top_k, 1, hint="None keeps all tokens")
        _check_real(error, "top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise RequestError("top_p", got=self.top_p, allowed="(0, 1]", hint="1 keeps all tokens")
        _check_real(error, "min_p", self.min_p)
        if not 0 <= self.min_p <= 1:
            raise RequestError("min_p", got=self.min_p, allowed="[0, 1]", hint="0 keeps all tokens")
        if self.seed is not None:
            _check_int(error, "seed", self.seed, 0, 2**63 - 1)
        if self.max_draft_tokens is not None:
            _check_int(
                error, "max_draft_tokens", self.max_draft_tokens, 0, hint="None is the engine's K"
            )
        _check_type(error, "ignore_eos", self.ignore_eos, bool)
        _check_type(error, "speculation", self.speculation, bool)
        self._normalise_stops()

    def _normalise_stops(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop)
        for text in stop:
            _check_text(RequestError, "stop string", text)
        stop_token_ids = _as_tuple("stop_token_ids", self.stop_token_ids)
        for token_id in stop_token_ids:
            _check_int(RequestError, "stop token id", token_id, 0)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", stop_token_ids)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as it is after normalisation."""
        return cast(tuple[str, ...], self.stop)


UNSUPPORTED: Mapping[str, object] = {
    "n": 1,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": None,
    "bad_words": (),
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "structured_output": None,
}
"""Fields of SamplingParams that are not built yet, and the one value of each that asks nothing."""


def _refuse_unsupported(params: SamplingParams) -> None:
    for name, neutral in UNSUPPORTED.items():
        value: object = getattr(params, name)
        if isinstance(value, list):
            value = tuple(cast(list[object], value))
        if isinstance(value, bool) or value != neutral:
            raise RequestError(
                f"{name} is not built yet",
                got=getattr(params, name),
                allowed=repr(neutral),
                hint="leave it out",
            )
        object.__setattr__(params, name, neutral)


def _check_type(
    error: type[OutriderError], name: str, value: object, kind: type, optional: bool = False
) -> None:
    if not (isinstance(value, kind) or (optional and value is None)):
        raise error(name, got=value, allowed=kind.__name__ + (" or None" if optional else ""))


def _check_text(error: type[OutriderError], name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise error(name, got=value, allowed="a string that is not empty")


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(name, got=value, allowed=allowed)


def _check_int(
    error: type[OutriderError],
    name: str,
    value: object,
    low: int,
    high: int | None = None,
    hint: str | None = None,
) -> None:
    allowed = f"an integer, {low} or more" if high is None else f"an integer from {low} to {high}"
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or value < low
        or (high is not None and value > high)
    ):
        raise error(name, got=value, allowed=allowed, hint=hint)


def _check_real(error: type[OutriderError], name: str, value: object) -> None:
    limit = sys.float_info.max
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not -limit <= value <= limit
    ):
        raise error(name, got=value, allowed="a finite number")


def _as_tuple(name: str, value: object) -> tuple[object, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise RequestError(name, got=value, allowed="a list or a tuple")
    return tuple(cast(Sequence[object], value))
