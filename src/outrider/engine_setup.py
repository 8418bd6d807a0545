"""What an engine settles before it runs: threads, refused shapes, memory, kernels, its parts."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from outrider.admission import AdmissionRules
from outrider.cache.manager import CacheManager
from outrider.config import EngineConfig
from outrider.errors import CapacityError, ConfigError
from outrider.layers.linear import Linear
from outrider.models.base import CausalLM
from outrider.models.build import DTYPES, Checkpoint
from outrider.ops.dispatch import capability, kernels_are_on, uses_kernels
from outrider.ops.linear.ahead import Projection, compile_ahead
from outrider.ops.linear.segments import is_invariant
from outrider.runner.graphs import bucket
from outrider.runner.memory import (
    MemoryNeeds,
    MemoryPlan,
    measure_budget,
    plan_memory,
    workspace_bytes,
)
from outrider.runner.rounds import Runner, RunnerOptions
from outrider.runner.storage import StorageSize, kv_bytes_per_token, state_bytes_per_slot
from outrider.spec.base import Drafter
from outrider.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_SMALL_MODEL = 100_000_000
"""Parameters under which threads that wait for each other cost more than they do."""


def set_threads(wanted: int | None, num_parameters: int) -> None:
    if wanted is None and num_parameters < _SMALL_MODEL:
        wanted = 1
    if wanted is not None:
        torch.set_num_threads(wanted)


def refuse_variant_shapes(device: torch.device, target: CausalLM, drafter: Drafter | None) -> None:
    """Raise where a matrix has no kernel that gives a row the same bits in any company."""
    if device.type == "cpu":
        return  # the reference operations are row-invariant for every shape
    weights = [*target.parameters(), *((drafter and drafter.step_weights(1)) or ())]
    variant = {
        f"{weight.dtype} {weight.shape[0]} x {weight.shape[1]}"
        for weight in weights
        if weight.dim() == 2 and not is_invariant(weight.dtype, capability(device))
    }
    if variant:
        raise ConfigError(
            "deterministic: no row-invariant kernel on this GPU for matrices",
            got=sorted(variant)[:4],
            hint="leave deterministic out, or compute in float32",
        )


def plan_engine_memory(
    config: EngineConfig, checkpoint: Checkpoint, target: CausalLM, drafter: Drafter | None
) -> MemoryPlan:
    """Divide the memory that is left beside the weights.

    Raises:
        ConfigError: an option has no effect on this device or with this model.
        CapacityError: something does not fit.
    """
    specs = target.cache_specs + (() if drafter is None else drafter.cache_specs)
    on_gpu = checkpoint.device.type == "cuda"
    max_rows, model = config.num_speculative_tokens + 1, checkpoint.config
    slot_bytes = state_bytes_per_slot(specs, max_rows, DTYPES[config.state_dtype], checkpoint.dtype)
    if not on_gpu:
        config.refuse_idle(("gpu_memory_utilization",), "the model runs on the CPU")
    if not slot_bytes:
        names = ("state_dtype", "num_state_checkpoints", "checkpoint_interval")
        config.refuse_idle(names, "the model has no recurrent state")
    needs = MemoryNeeds(
        weight_bytes=(
            torch.cuda.memory_allocated(checkpoint.device)
            if on_gpu
            else sum(parameter.nbytes for parameter in target.parameters())
        ),
        workspace_bytes=(
            workspace_bytes(config, model, checkpoint.dtype.itemsize) if on_gpu else 0
        ),
        slot_bytes=slot_bytes,
        block_bytes=kv_bytes_per_token(specs, checkpoint.dtype) * config.block_size,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        model_limit=model.max_position_embeddings,
        num_kv_blocks=config.num_kv_blocks,
        num_checkpoints=config.num_state_checkpoints if slot_bytes and config.prefix_unit else 0,
    )
    return plan_memory(measure_budget(config, checkpoint.device), needs)


def compile_linears(config: EngineConfig, target: CausalLM, drafter: Drafter | None) -> None:
    """Have the kernels of the linear layers ready for the sizes of rounds and of prompt chunks.

    Without this each would be compiled when it is first met, in the middle of serving.
    """
    if not uses_kernels(target.head_weight):
        return
    begin = time.perf_counter()
    rounds = round_sizes(config)
    projections = [*_projections(target, target.head_weight, max(rounds))]
    if drafter is not None and drafter.output_weight is not None:
        projections += _projections(drafter.network, drafter.output_weight, max(rounds))
    count = compile_ahead(projections, rounds | chunk_sizes(config))
    logger.info("%d kernels of linear layers ready in %.1f s", count, time.perf_counter() - begin)


def round_sizes(config: EngineConfig) -> set[int]:
    """Numbers of rows that rounds have on a GPU, of one draft step and of a whole pass."""
    sequences = {bucket(count) for count in range(1, config.max_num_seqs + 1)}
    return sequences | {count * (config.num_speculative_tokens + 1) for count in sequences}


def chunk_sizes(config: EngineConfig) -> set[int]:
    """Of prompt chunks, close enough to meet nearly every choice of a tile."""
    most = config.max_prefill_tokens
    return {*range(16, min(most, 1024) + 1, 16), *range(1024, most + 1, 64), most}


def _projections(model: nn.Module | None, head: Tensor, most_rows: int) -> Iterator[Projection]:
    """Linear layers, and the output head, which sees the rows of rounds only."""
    for module in model.modules() if model is not None else ():
        if isinstance(module, Linear) and module.weight is not head:
            yield Projection(module.weight, module.interleaved)
    yield Projection(head, most_rows=most_rows)


def build_runner(
    config: EngineConfig,
    checkpoint: Checkpoint,
    target: CausalLM,
    drafter: Drafter | None,
    plan: MemoryPlan,
) -> Runner:
    """The runner, with its caches allocated."""
    spec = config.speculative_config
    if spec is not None and spec.synthetic_rates is not None:
        logger.warning("acceptance is synthetic, for benchmarks: texts are not the model's own")
    size = StorageSize(
        num_blocks=plan.num_blocks + 1,
        block_size=config.block_size,
        num_slots=config.max_num_seqs + plan.needs.num_checkpoints + 1,
        max_rows=config.num_speculative_tokens + 1,
    )
    on_gpu = checkpoint.device.type == "cuda"
    options = RunnerOptions(
        size=size,
        max_model_len=plan.max_model_len,
        prefill_grid=config.prefill_grid,
        dtype=checkpoint.dtype,
        device=checkpoint.device,
        draft_top_m=1 if spec is None else spec.draft_top_m,
        synthetic_rates=None if spec is None else spec.synthetic_rates,
        state_dtype=DTYPES[config.state_dtype],
        use_graphs=on_gpu and kernels_are_on() and not config.enforce_eager,
    )
    try:
        return Runner(target, drafter, options)
    except RuntimeError as error:  # how torch says that memory cannot be had
        raise CapacityError(
            f"caches do not fit into memory ({error})",
            got=f"{size.num_blocks} blocks of KV and {size.num_slots} state slots",
            hint="lower num_kv_blocks, kv_cache_memory_gib, max_num_seqs or num_state_checkpoints",
        ) from error


def build_cache(config: EngineConfig, plan: MemoryPlan) -> CacheManager:
    """Who owns which of the runner's blocks and slots."""
    recurrent = plan.needs.slot_bytes > 0
    return CacheManager(
        plan.num_blocks,
        config.block_size,
        config.max_num_seqs,
        prefix_unit=config.prefix_unit,
        num_checkpoints=plan.needs.num_checkpoints if recurrent else None,
    )


def admission_rules(
    config: EngineConfig,
    checkpoint: Checkpoint,
    drafter: Drafter | None,
    tokenizer: Tokenizer | None,
    plan: MemoryPlan,
) -> AdmissionRules:
    """What a request must keep to."""
    spec = config.speculative_config
    return AdmissionRules(
        vocab_size=checkpoint.config.vocab_size,
        max_model_len=plan.max_model_len,
        eos_token_ids=checkpoint.config.eos_token_ids,
        engine_seed=config.seed,
        draft_sampling=None if spec is None else spec.draft_sampling,
        drafter_samples=None if drafter is None else drafter.samples,
        tokenizer=tokenizer,
        synthetic_acceptance=spec is not None and spec.synthetic_rates is not None,
    )
