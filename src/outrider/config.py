"""What a user chooses for an engine: the model, its memory, and how it speculates.

Every value is validated once, when the object is built; nothing later checks it again. Knows
nothing of models: what depends on a checkpoint is resolved by the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import lcm
from typing import Literal

from outrider.checks import as_tuple, check_choice, check_int, check_real, check_text, check_type
from outrider.errors import ConfigError
from outrider.spec.names import SIDECAR_METHODS, DraftSampling, canonical_method

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
DeviceName = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
StateDtypeName = Literal["float32", "float16", "bfloat16"]

MAX_SPECULATIVE_TOKENS = 8
MAX_LOOK_AHEAD = 2
MAX_COUNT = 2**31 - 1
"""Most of anything that is counted: products of two counts and a size in bytes fit an int64."""
MAX_SEQUENCES = 2**20
MAX_THREADS = 1024
MAX_KV_CACHE_GIB = 2**20
HOST_KV_CACHE_GIB = 1.0
"""Memory for KV on a CPU where nothing is said."""

_TRIMMED_HEAD_METHODS = ("mtp",)
"""Methods that draft with the target's own head, of which a part can be taken."""


@dataclass(frozen=True)
class SpeculativeConfig:
    """How to draft.

    Args:
        method: name of the draft method; aliases are accepted and replaced by the method's name.
        model: path or hub id of the draft's own checkpoint, for methods that have one.
        num_speculative_tokens: K, the most tokens drafted in a round, 1 to 8.
        draft_sampling: how drafts are drawn, "argmax", "coupled" or "sampled", for requests that do
            not say; None is argmax for greedy and cool requests, and sampled for warmer ones.
        draft_top_m: most ids that the distribution of a sampled draft keeps, 1 to 1024.
        draft_vocab: for method mtp, the token ids that a draft may propose: a file that `outrider
            draft-vocab` wrote (or a JSON list, or one id a line), or a number N for the first N ids
            of the checkpoint's own draft_vocab.json. The draft then reads N rows of the target's
            head and not all of them; the text stays the target's, and fewer drafts may be
            accepted. None drafts from the whole vocabulary.
        synthetic_acceptance_length: for benchmarks only: accept drafts at random so that a round
            emits this many tokens on average, 1 to K + 1. The text is then not the target's.
        synthetic_acceptance_rates: the same, by the probability that drafts 1 .. i are all
            accepted, for i = 1 .. K.

    Raises:
        ConfigError: a value is not allowed.
    """

    method: str
    model: str | None = None
    num_speculative_tokens: int = 3
    draft_sampling: str | None = None
    draft_top_m: int = 32
    draft_vocab: str | int | None = None
    synthetic_acceptance_length: float | None = None
    synthetic_acceptance_rates: Sequence[float] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", canonical_method(self.method))
        if self.model is not None:
            check_text(ConfigError, "speculative model", self.model)
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
                hint="name it with model=, or --speculative-draft-model on the command line",
            )
        check_int(
            ConfigError,
            "num_speculative_tokens",
            self.num_speculative_tokens,
            1,
            MAX_SPECULATIVE_TOKENS,
            hint="leave speculative_config out to decode without drafts",
        )
        if self.draft_sampling is not None:
            check_choice(ConfigError, "draft_sampling", self.draft_sampling, list(DraftSampling))
        check_int(ConfigError, "draft_top_m", self.draft_top_m, 1, 1024)
        self._check_draft_vocab()
        self._check_synthetic()

    def _check_draft_vocab(self) -> None:
        if self.draft_vocab is None:
            return
        match self.draft_vocab:
            case bool():
                allowed = False
            case int(number):
                allowed = number >= 1
            case name:
                allowed = isinstance(name, str) and name != ""  # pyright: ignore[reportUnnecessaryIsInstance]
        if not allowed:
            raise ConfigError(
                "draft_vocab",
                got=self.draft_vocab,
                allowed="a file of token ids, or a number of ids, 1 or more",
            )
        if self.method not in _TRIMMED_HEAD_METHODS:
            raise ConfigError(
                f"draft_vocab: method {self.method} does not draft with the target's head",
                got=self.draft_vocab,
                allowed="None",
                hint=f"leave draft_vocab out, or draft with {', '.join(_TRIMMED_HEAD_METHODS)}",
            )

    def _check_synthetic(self) -> None:
        length, rates, most = (
            self.synthetic_acceptance_length,
            self.synthetic_acceptance_rates,
            self.num_speculative_tokens,
        )
        if length is not None:
            check_real(ConfigError, "synthetic_acceptance_length", length)
            if not 1 <= length <= most + 1:
                raise ConfigError(
                    "synthetic_acceptance_length", got=length, allowed=f"[1, {most + 1}]"
                )
        if rates is None:
            return
        if length is not None:
            raise ConfigError(
                "synthetic acceptance is given twice",
                got=(length, rates),
                allowed="synthetic_acceptance_length or synthetic_acceptance_rates",
            )
        numbers = as_tuple(ConfigError, "synthetic_acceptance_rates", rates)
        for rate in numbers:
            check_real(ConfigError, "synthetic acceptance rate", rate)
        falling = all(a >= b for a, b in zip((1.0, *rates), (*rates, 0.0), strict=True))
        if len(numbers) != most or not falling:
            raise ConfigError(
                "synthetic_acceptance_rates",
                got=rates,
                allowed=f"{most} probabilities, none larger than the one before it",
            )
        object.__setattr__(self, "synthetic_acceptance_rates", numbers)

    @property
    def synthetic_rates(self) -> tuple[float, ...] | None:
        """Probability that drafts 1 .. i are all accepted; None where acceptance is real."""
        if self.synthetic_acceptance_rates is not None:
            return tuple(self.synthetic_acceptance_rates)
        if self.synthetic_acceptance_length is None:
            return None
        return geometric_rates(self.synthetic_acceptance_length, self.num_speculative_tokens)


def geometric_rates(length: float, num_drafts: int) -> tuple[float, ...]:
    """(r, r^2, ..., r^K) with 1 + their sum equal to `length`, found by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        if 1 + sum(rate**i for i in range(1, num_drafts + 1)) < length:
            low = rate
        else:
            high = rate
    return tuple(high**i for i in range(1, num_drafts + 1))


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
        num_threads: threads of torch on the host, for the whole process, at most 1024; None is
            torch's own, and on a CPU one for models under 100 M parameters, whose matrices are too
            small to share.
        max_model_len: most tokens of a sequence, prompt and output; None is the checkpoint's own.
        max_num_seqs: most sequences that run at once, which is the number of state slots; the
            recurrent state of hybrid models comes on top of the KV memory, and is logged.
        gpu_memory_utilization: share of a GPU's memory that may be in use, above 0 and at most 1:
            weights, states, KV, workspace, and what other processes hold. Without a GPU there is
            nothing to share, and another value than the default is refused.
        block_size: tokens in a block of KV, a multiple of 16 from 16 to 256.
        num_kv_blocks: blocks of KV; None derives it from the memory there is.
        kv_cache_memory_gib: most memory for KV in GiB, where num_kv_blocks is None. None is 1 GiB
            on a CPU, and on a GPU what gpu_memory_utilization leaves.
        state_dtype: type in which the recurrent state of hybrid models is stored. With a type of 16
            bits the state is rounded after every token: half the memory and its traffic, and texts
            that are no longer those of float32.
        enable_prefix_caching: keep keys, values and states of computed texts, for requests
            that begin alike. Exact, except that a hybrid model's state behind generated text is
            equal to rounding to the one that a prompt would compute.
        num_state_checkpoints: recurrent states that are kept for that, with hybrid models, each of
            the size of a sequence's state.
        checkpoint_interval: tokens between two kept states of one prompt; the last place where it
            can be shared is kept as well.
        prefill_grid: prompt chunks end at multiples of this many tokens, the prompt's end excepted.
        max_prefill_tokens: most prompt tokens computed in one step, at least prefill_grid.
        speculative_config: how to draft; None decodes plainly.
        enforce_eager: run a GPU's kernels one by one and not as CUDA graphs, to look for faults.
        deterministic: True refuses shapes for which there is no kernel that gives a row the same
            bits whatever runs beside it.
        look_ahead: rounds that are submitted before the results of the one before are awaited, 0
            to 2; None is 1 on a GPU and 0 on a CPU. The text does not depend on it.
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
    num_threads: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 16
    gpu_memory_utilization: float = 0.9
    block_size: int = 64
    num_kv_blocks: int | None = None
    kv_cache_memory_gib: float | None = None
    state_dtype: StateDtypeName = "float32"
    enable_prefix_caching: bool = True
    num_state_checkpoints: int = 16
    checkpoint_interval: int = 1024
    prefill_grid: int = 64
    max_prefill_tokens: int = 512
    speculative_config: SpeculativeConfig | None = None
    enforce_eager: bool = False
    deterministic: bool = False
    look_ahead: int | None = None
    debug_checks: bool = False

    def __post_init__(self) -> None:
        error = ConfigError
        check_text(error, "model", self.model)
        for name in ("tokenizer", "revision"):
            if getattr(self, name) is not None:
                check_text(error, name, getattr(self, name))
        check_choice(ConfigError, "dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        check_choice(ConfigError, "device", self.device, ("auto", "cpu", "cuda"))
        check_choice(ConfigError, "load_format", self.load_format, ("auto", "safetensors", "dummy"))
        check_int(error, "seed", self.seed, 0, 2**63 - 1)
        for name in ("max_model_len", "num_kv_blocks"):
            if getattr(self, name) is not None:
                check_int(error, name, getattr(self, name), 1, MAX_COUNT)
        if self.num_threads is not None:
            check_int(error, "num_threads", self.num_threads, 1, MAX_THREADS)
        check_int(error, "max_num_seqs", self.max_num_seqs, 1, MAX_SEQUENCES)
        for name in ("prefill_grid", "max_prefill_tokens", "checkpoint_interval"):
            check_int(error, name, getattr(self, name), 1, MAX_COUNT)
        check_int(error, "block_size", self.block_size, 16, 256)
        if self.block_size % 16:
            raise ConfigError(
                "block_size", got=self.block_size, allowed="a multiple of 16 from 16 to 256"
            )
        self._check_memory()
        if self.max_prefill_tokens < self.prefill_grid:
            raise ConfigError(
                "max_prefill_tokens is smaller than a prefill chunk",
                got=self.max_prefill_tokens,
                allowed=f"at least prefill_grid ({self.prefill_grid})",
                hint="raise max_prefill_tokens or lower prefill_grid",
            )
        check_type(error, "speculative_config", self.speculative_config, SpeculativeConfig, True)
        if self.look_ahead is not None:
            check_int(error, "look_ahead", self.look_ahead, 0, MAX_LOOK_AHEAD)
        check_type(error, "enforce_eager", self.enforce_eager, bool)
        check_type(error, "deterministic", self.deterministic, bool)
        check_type(error, "debug_checks", self.debug_checks, bool)
        check_type(error, "enable_prefix_caching", self.enable_prefix_caching, bool)
        check_int(error, "num_state_checkpoints", self.num_state_checkpoints, 0, MAX_SEQUENCES)
        if not self.enable_prefix_caching:
            reason = "states are kept for the prefix cache, which is switched off"
            self.refuse_idle(("num_state_checkpoints", "checkpoint_interval"), reason)

    def _check_memory(self) -> None:
        share, gib = self.gpu_memory_utilization, self.kv_cache_memory_gib
        check_real(ConfigError, "gpu_memory_utilization", share)
        if not 0 < share <= 1:
            raise ConfigError("gpu_memory_utilization", got=share, allowed="more than 0, at most 1")
        if gib is not None:
            check_real(ConfigError, "kv_cache_memory_gib", gib)
            if not 0 < gib <= MAX_KV_CACHE_GIB:
                raise ConfigError(
                    "kv_cache_memory_gib",
                    got=gib,
                    allowed=f"more than 0, at most {MAX_KV_CACHE_GIB}",
                )
            if self.num_kv_blocks is not None:
                raise ConfigError(
                    "memory for KV is given twice",
                    got=f"num_kv_blocks={self.num_kv_blocks}, kv_cache_memory_gib={gib}",
                    allowed="num_kv_blocks or kv_cache_memory_gib",
                )
        check_choice(
            ConfigError, "state_dtype", self.state_dtype, ("float32", "float16", "bfloat16")
        )

    def refuse_idle(self, names: Sequence[str], reason: str) -> None:
        """Raise where one of these fields, which have no effect here, is not its default.

        Args:
            reason: why they have none.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in names and value != field.default:
                raise ConfigError(
                    f"{field.name} has no effect ({reason})",
                    got=value,
                    allowed=f"the default, {field.default}",
                    hint="leave it out",
                )

    @property
    def num_speculative_tokens(self) -> int:
        """K: the most tokens drafted in a round; 0 without speculation."""
        spec = self.speculative_config
        return 0 if spec is None else spec.num_speculative_tokens

    @property
    def prefix_unit(self) -> int | None:
        """Requests share text in multiples of this many tokens; None without the prefix cache.

        Blocks are shared whole, and a prompt goes on from a place of the prefill grid, so that it
        is computed with the bits of a prompt that shares nothing.
        """
        return lcm(self.block_size, self.prefill_grid) if self.enable_prefix_caching else None

    @property
    def tokenizer_source(self) -> str:
        """Folder or hub id that the tokenizer comes from."""
        return self.model if self.tokenizer is None else self.tokenizer

    @property
    def kv_cache_bytes(self) -> int:
        """kv_cache_memory_gib in bytes; where it is None, what a CPU takes."""
        gib = HOST_KV_CACHE_GIB if self.kv_cache_memory_gib is None else self.kv_cache_memory_gib
        return int(gib * 2**30)
