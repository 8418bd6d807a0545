"""What an engine settles before it runs: threads, refused shapes, how memory is divided."""

from __future__ import annotations

import torch

from outrider.config import EngineConfig
from outrider.errors import ConfigError
from outrider.models.base import CausalLM
from outrider.models.build import DTYPES, Checkpoint
from outrider.ops.dispatch import capability
from outrider.ops.linear.segments import is_invariant
from outrider.runner.memory import (
    MemoryNeeds,
    MemoryPlan,
    measure_budget,
    plan_memory,
    workspace_bytes,
)
from outrider.runner.storage import kv_bytes_per_token, state_bytes_per_slot
from outrider.spec.base import Drafter

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
