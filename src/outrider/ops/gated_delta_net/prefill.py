"""Prompt chunks on a GPU: one kernel in front, then the chunked delta rule of fla-core.

Where fla-core cannot serve (float32 rows, old cards, odd head sizes, not installed), the rule is
the reference's chunked form on the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.ops.dispatch import capability
from outrider.ops.gated_delta_net.chunked import CHUNK, chunked_rule, has_fla
from outrider.ops.gated_delta_rule.reference import delta_prefill_reference

if TYPE_CHECKING:
    from outrider.ops.gated_delta_net import DeltaNetRows, DeltaNetWeights
    from outrider.ops.gated_delta_rule import DeltaState


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
    if starts_sequence:
        state = delta.state.new_zeros(delta.state.shape[1:])
    else:
        state = delta.state.index_select(0, slot)[0]
    run = _chunked if chunked else delta_prefill_reference
    output, state = run(*inputs, state, piece_ends)
    delta.state.index_copy_(0, slot, state.to(delta.state.dtype)[None])
    return output


def uses_fla(rows: Tensor, delta: DeltaState) -> bool:
    """Whether fla-core takes such rows: it wants matrix units for 16 bits, and heads up to 256."""
    return (
        rows.dtype != torch.float32
        and capability(rows.device) >= (8, 0)
        and all(size <= 256 and size % 16 == 0 for size in delta.state.shape[2:])
        and has_fla()
    )


def calls(piece_ends: tuple[int, ...], piece_by_piece: bool) -> Iterator[tuple[int, int]]:
    """Row ranges of calls: pieces go together while their boundaries fall between fla's own.

    So whatever grid the pieces lie on, and however a prompt was cut into chunks on that grid, a
    row is reached by the same sequence of operations.
    """
    begin = previous = 0
    for end in piece_ends:
        if (end - previous) % CHUNK or piece_by_piece or end == piece_ends[-1]:
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
    outputs: list[Tensor] = []
    for begin, end in calls(piece_ends, state.dtype != torch.float32):
        q, k, v, decay, gate = (x[begin:end] for x in (queries, keys, values, g, beta))
        output, final = chunked_rule(q, k, v, decay, gate, state.float())
        outputs.append(output)
        state = final.to(state.dtype)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs), state
