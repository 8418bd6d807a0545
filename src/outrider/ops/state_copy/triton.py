"""One launch that copies all tensors of a layer for all pairs of slots, as integers of their size.

Integers, so that every bit arrives whatever it stands for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from outrider.ops.gated_delta_rule import DeltaState

BLOCK = 4096
"""Elements that a program moves."""

_INTEGERS = {2: torch.int16, 4: torch.int32}


@triton.jit
def copy_block(p_x, i_block, first, source, target, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """x[first + target] = x[first + source] for one block of the [SIZE] elements of an entry."""
    o_i = i_block * BLOCK + tl.arange(0, BLOCK)
    inside = o_i < SIZE
    b_x = tl.load(p_x + (first + source) * SIZE + o_i, mask=inside)
    tl.store(p_x + (first + target) * SIZE + o_i, b_x, mask=inside)


@triton.jit
def copy_half_block(p_x, i_block, num_slots, source, target, SIZE: tl.constexpr,
                    BLOCK: tl.constexpr):  # fmt: skip
    """The same for records, [2, slots, SIZE]: blocks of the first half, then of the second."""
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    first = (i_block // BLOCKS).to(tl.int64) * num_slots
    copy_block(p_x, i_block % BLOCKS, first, source, target, SIZE, BLOCK)


@triton.jit(
    do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["p_sources", "p_targets"]
)
def _copy_slots(
    p_state,  # [slots, STATE]
    p_ring,  # [slots, RING]
    p_keys,  # records [2, slots, KEYS]
    p_updates,  # records [2, slots, UPDATES]
    p_decays,  # records [2, slots, DECAYS]
    p_sources,  # [N] int64
    p_targets,  # [N] int64
    num_slots,
    STATE: tl.constexpr,
    RING: tl.constexpr,
    KEYS: tl.constexpr,
    UPDATES: tl.constexpr,
    DECAYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of one tensor for one pair. The grid ends before the records if they stay."""
    i_block, i_pair = tl.program_id(0), tl.program_id(1)
    source, target = tl.load(p_sources + i_pair), tl.load(p_targets + i_pair)
    RING_BEGIN: tl.constexpr = (STATE + BLOCK - 1) // BLOCK
    KEYS_BEGIN: tl.constexpr = RING_BEGIN + (RING + BLOCK - 1) // BLOCK
    UPDATES_BEGIN: tl.constexpr = KEYS_BEGIN + 2 * ((KEYS + BLOCK - 1) // BLOCK)
    DECAYS_BEGIN: tl.constexpr = UPDATES_BEGIN + 2 * ((UPDATES + BLOCK - 1) // BLOCK)
    if i_block < RING_BEGIN:
        copy_block(p_state, i_block, 0, source, target, STATE, BLOCK)
    elif i_block < KEYS_BEGIN:
        copy_block(p_ring, i_block - RING_BEGIN, 0, source, target, RING, BLOCK)
    elif i_block < UPDATES_BEGIN:
        copy_half_block(p_keys, i_block - KEYS_BEGIN, num_slots, source, target, KEYS, BLOCK)
    elif i_block < DECAYS_BEGIN:
        i_update = i_block - UPDATES_BEGIN
        copy_half_block(p_updates, i_update, num_slots, source, target, UPDATES, BLOCK)
    else:
        i_decay = i_block - DECAYS_BEGIN
        copy_half_block(p_decays, i_decay, num_slots, source, target, DECAYS, BLOCK)


def copy_slots_kernel(
    conv_ring: Tensor,
    delta: DeltaState,
    sources: Tensor,
    targets: Tensor,
    with_records: bool,
    *,
    warmup: bool = False,
) -> Any:
    """sources, targets [N]; see the public function. A launch that overlaps nothing."""
    by_slot = (delta.state, conv_ring)
    records = (delta.record_keys, delta.record_updates, delta.record_decays)
    assert all(x.is_contiguous() for x in (*by_slot, *records)), "slots lie one after the other"
    if sources.shape[0] == 0:
        return None
    sizes = [x[0].numel() for x in by_slot] + [x[0, 0].numel() for x in records]
    num_blocks = sum(triton.cdiv(size, BLOCK) for size in sizes[:2])
    if with_records:
        num_blocks += sum(2 * triton.cdiv(size, BLOCK) for size in sizes[2:])
    arguments = (
        *(x.view(_INTEGERS[x.element_size()]) for x in (*by_slot, *records)),
        sources.contiguous(),
        targets.contiguous(),
        conv_ring.shape[0],
        *sizes,
        BLOCK,
    )
    grid = (num_blocks, sources.shape[0])
    if warmup:
        return _copy_slots.warmup(*arguments, grid=grid, num_warps=4)
    return _copy_slots[grid](*arguments, num_warps=4)
