"""Prompt chunks on a GPU: one kernel in front, then the chunked delta rule of fla-core.

fla-core (flash-linear-attention) cuts the rows it is given into 64s from the first one on. Its
kernels are tuned at their first use, by timing, and the number of warps decides the order of some
sums; with one configuration each, a prompt's bits are the same in every process, and the first
prompt does not wait for the timing.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import cache
from inspect import unwrap
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.ops.dispatch import capability
from outrider.ops.gated_delta_rule.reference import delta_prefill_reference

if TYPE_CHECKING:
    from outrider.ops.gated_delta_net import DeltaNetRows, DeltaNetWeights
    from outrider.ops.gated_delta_rule import DeltaState

PIECE = 64
"""Rows that fla-core takes at a time."""

# Of each kernel's own list of configurations, the one to keep: options not named are not compared.
_CONFIGURATIONS: dict[tuple[str, str], dict[str, int]] = {
    ("fla.ops.utils.cumsum", "chunk_local_cumsum_scalar_kernel"): {"num_warps": 1},
    (
        "fla.ops.gated_delta_rule.chunk_fwd",
        "chunk_gated_delta_rule_fwd_kkt_solve_kernel",
    ): {"BK": 64, "num_warps": 2},
    ("fla.ops.gated_delta_rule.wy_fast", "recompute_w_u_fwd_kernel"): {
        "num_warps": 4,
        "num_stages": 3,
    },
    (
        "fla.ops.common.chunk_delta_h",
        "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
    ): {"BV": 32, "num_warps": 4, "num_stages": 2},
    ("fla.ops.common.chunk_o", "chunk_fwd_kernel_o"): {"BK": 64, "BV": 64, "num_warps": 4},
}


def delta_net_prefill_kernels(
    rows: DeltaNetRows,
    weights: DeltaNetWeights,
    conv_ring: Tensor,
    delta: DeltaState,
    slot: Tensor,
    start: Tensor,
    piece_ends: tuple[int, ...],
    starts_sequence: bool,
) -> Tensor:
    """-> [R, HV, V]; see the public function for the contract. Synchronises nothing."""
    from outrider.ops.gated_delta_net.triton import prefill_inputs

    chunked = uses_fla(rows.qkv, delta)
    dtype = rows.qkv.dtype if chunked else torch.float32
    inputs = prefill_inputs(rows, weights, conv_ring, delta, slot, start, dtype)
    state = delta.state[slot][0]
    if starts_sequence:
        state = torch.zeros_like(state)
    if chunked:
        output, state = _chunked(*inputs, state, piece_ends)
    else:
        output, state = delta_prefill_reference(*inputs, state, piece_ends)
    delta.state[slot] = state.to(delta.state.dtype)[None]
    return output


def uses_fla(rows: Tensor, delta: DeltaState) -> bool:
    """Whether fla-core takes such rows: it wants matrix units for 16 bits, and heads up to 256."""
    return (
        rows.dtype != torch.float32
        and capability(rows.device) >= (8, 0)
        and all(size <= 256 and size % 16 == 0 for size in delta.state.shape[2:])
        and has_fla()
    )


@cache
def has_fla() -> bool:
    """Whether fla-core is installed."""
    return importlib.util.find_spec("fla") is not None


def calls(piece_ends: tuple[int, ...], piece_by_piece: bool) -> Iterator[tuple[int, int]]:
    """Row ranges of calls: pieces go together while their boundaries fall between fla's own.

    So whatever grid the pieces lie on, and however a prompt was cut into chunks on that grid, a
    row is reached by the same sequence of operations.
    """
    begin = previous = 0
    for end in piece_ends:
        if (end - previous) % PIECE or piece_by_piece or end == piece_ends[-1]:
            yield begin, end
            begin = end
        previous = end


def _chunked(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    piece_ends: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """delta_prefill by fla-core; a state of 16 bits is rounded where pieces end."""
    rule = chunked_rule()
    outputs: list[Tensor] = []
    for begin, end in calls(piece_ends, state.dtype != torch.float32):
        output, final = rule(
            *(x[None, begin:end] for x in (queries, keys, values, g, beta)),
            scale=1.0,
            initial_state=state.float()[None],
            output_final_state=True,
            state_v_first=True,
        )
        outputs.append(output[0])
        state = final[0].to(state.dtype)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs), state


@cache
def chunked_rule() -> Callable[..., tuple[Tensor, Tensor]]:
    """fla-core's chunk_gated_delta_rule, its kernels limited to one configuration each.

    Unwrapped, because the wrapper may hand over to another package that cuts long inputs by load.
    """
    for (module, name), wanted in _CONFIGURATIONS.items():
        _keep_one(getattr(importlib.import_module(module), name), wanted)
    return unwrap(importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule)


def _keep_one(kernel: Any, wanted: dict[str, int]) -> None:
    """Leave an autotuned kernel (below its heuristics) the first configuration that fits."""
    tuner = kernel
    while not hasattr(tuner, "configs"):
        tuner = tuner.fn

    def fits(config: Any) -> bool:
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages, **config.kwargs}
        return all(options[key] == value for key, value in wanted.items())

    tuner.configs = [next(config for config in tuner.configs if fits(config))]
