"""The loop: plan, run, commit, emit. Requests in, outputs out, one step at a time."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from outrider.batch import FinishReason
from outrider.cache.manager import CacheManager
from outrider.config import EngineConfig, SamplingParams
from outrider.errors import CapacityError, ConfigError, RequestError
from outrider.models.build import Checkpoint, load_target
from outrider.models.config import ModelConfig
from outrider.models.files import resolve_checkpoint
from outrider.output import OutputBuilder, RequestOutput
from outrider.request import Request, Sequence
from outrider.runner.rounds import Runner
from outrider.runner.storage import StorageSize, kv_bytes_per_token
from outrider.scheduler import Scheduler, SchedulerConfig
from outrider.spec.registry import build_drafter
from outrider.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass
class _Live:
    """A request inside the engine."""

    sequence: Sequence
    builder: OutputBuilder


class Engine:
    """Runs requests together. Not thread-safe: one thread calls it."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None = None) -> None:
        """Load the model and allocate its caches.

        Raises:
            CheckpointError: the checkpoint cannot be read or does not fit its configuration.
            ConfigError: the options do not fit each other or the checkpoint.
            CapacityError: the memory budget holds less than one sequence.
        """
        self.config = config
        self.tokenizer = tokenizer
        checkpoint = Checkpoint.open(resolve_checkpoint(config.model, config.revision), config)
        self.model_config: ModelConfig = checkpoint.config
        target = load_target(checkpoint)
        spec = config.speculative_config
        drafter = None if spec is None else build_drafter(checkpoint, target, spec)
        checkpoint.close()

        specs = target.cache_specs + (() if drafter is None else drafter.cache_specs)
        bytes_per_token = kv_bytes_per_token(specs, checkpoint.dtype)
        self.max_model_len, num_blocks = _capacity(config, checkpoint.config, bytes_per_token)
        size = StorageSize(
            num_blocks=num_blocks + 1,
            block_size=config.block_size,
            num_slots=config.max_num_seqs + 1,
            max_rows=config.num_speculative_tokens + 1,
        )
        self.cache = CacheManager(num_blocks, config.block_size, config.max_num_seqs)
        self.runner = Runner(
            target, drafter, size, config.prefill_grid, checkpoint.dtype, checkpoint.device
        )
        self.scheduler = Scheduler(
            SchedulerConfig(
                config.max_prefill_tokens, config.prefill_grid, config.num_speculative_tokens
            ),
            self.cache,
        )
        self._live: dict[str, _Live] = {}
        self._by_sequence: dict[int, _Live] = {}
        self._num_requests = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the requests that gained tokens or ended."""
        batch = self.scheduler.plan()
        outputs: list[RequestOutput] = []
        for span, result in zip(batch.spans, self.runner.execute(batch), strict=True):
            live = self._by_sequence[span.sequence_id]
            token_ids, reason = live.builder.add(result)
            self.scheduler.commit(span, result, token_ids, reason)
            if token_ids:
                outputs.append(live.builder.output(reason))
            if reason is not None:
                self._forget(live)
        if self.config.debug_checks:
            self.cache.check_integrity()
        return outputs

    def add_request(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams
    ) -> None:
        """Queue a request.

        Raises:
            RequestError: the prompt or a parameter cannot be served; nothing is queued then.
        """
        if request_id in self._live:
            raise RequestError("request id is in use", got=request_id, hint="choose another id")
        self._check_prompt(prompt_token_ids, params)
        stops = () if params.ignore_eos else self.model_config.eos_token_ids
        index, self._num_requests = self._num_requests, self._num_requests + 1
        request = Request(
            request_id=request_id,
            prompt_token_ids=tuple(prompt_token_ids),
            params=params,
            stop_token_ids=tuple(dict.fromkeys((*stops, *params.stop_token_ids))),
            length_limit=min(len(prompt_token_ids) + params.max_tokens, self.max_model_len),
            seed=_request_seed(self.config.seed, index) if params.seed is None else params.seed,
        )
        live = _Live(Sequence(index, request), OutputBuilder(request, self.tokenizer))
        self._live[request_id] = self._by_sequence[index] = live
        self.scheduler.add(live.sequence)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; None where no such request is running."""
        live = self._live.get(request_id)
        if live is None:
            return None
        self.scheduler.finish(live.sequence, FinishReason.ABORT)
        self._forget(live)
        return live.builder.output(FinishReason.ABORT)

    def _forget(self, live: _Live) -> None:
        del self._live[live.sequence.request.request_id]
        del self._by_sequence[live.sequence.sequence_id]

    def _check_prompt(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        vocab_size, num_tokens = self.model_config.vocab_size, len(prompt_token_ids)
        if num_tokens == 0:
            raise RequestError("prompt is empty", got=0, allowed="at least one token")
        if num_tokens >= self.max_model_len:
            raise RequestError(
                "prompt is too long",
                got=f"{num_tokens} tokens",
                allowed=f"at most {self.max_model_len - 1}, one less than max_model_len",
                hint="shorten the prompt or raise max_model_len",
            )
        for index, token_id in enumerate(prompt_token_ids):
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"prompt token {index}",
                    got=token_id,
                    allowed=f"an integer in [0, {vocab_size})",
                )
        for token_id in params.stop_token_ids:
            if token_id >= vocab_size:
                raise RequestError("stop token id", got=token_id, allowed=f"below {vocab_size}")
        if params.stop_strings and self.tokenizer is None:
            raise RequestError(
                "stop strings need a tokenizer", got=params.stop_strings, hint="use stop_token_ids"
            )


def _request_seed(engine_seed: int, index: int) -> int:
    """A seed for the index-th request: one step of the SplitMix64 sequence, cut to 63 bits."""
    mask = (1 << 64) - 1
    z = (engine_seed + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1


def _capacity(config: EngineConfig, model: ModelConfig, bytes_per_token: int) -> tuple[int, int]:
    """max_model_len, and how many blocks to allocate (the null block not counted)."""
    limit, size = model.max_position_embeddings, config.block_size
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            "max_model_len",
            got=config.max_model_len,
            allowed=f"at most {limit}, the checkpoint's max_position_embeddings",
        )
    bytes_per_block = bytes_per_token * size
    affordable, remedy = config.kv_cache_bytes // bytes_per_block, "kv_cache_memory_gib"
    if config.num_kv_blocks is not None:
        affordable, remedy = config.num_kv_blocks, "num_kv_blocks"
    max_model_len = config.max_model_len or min(limit, affordable * size)
    per_sequence = -(-max_model_len // size)
    if affordable < max(per_sequence, 1):
        raise CapacityError(
            "KV cache holds less than one sequence",
            got=f"{affordable} blocks of {size} tokens, {bytes_per_block} bytes each",
            allowed=f"at least {max(per_sequence, 1)} blocks for max_model_len {max_model_len}",
            hint=f"raise {remedy} or lower max_model_len",
        )
    if config.num_kv_blocks is None:
        affordable = min(affordable, per_sequence * config.max_num_seqs)
    if max_model_len < limit:
        logger.info("max_model_len is %d of the checkpoint's %d", max_model_len, limit)
    logger.info(
        "KV cache: %d blocks of %d tokens, %d bytes each", affordable, size, bytes_per_block
    )
    return max_model_len, affordable
