"""Allocates what layers keep between passes, and says how much that is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from outrider.layers.rows import (
    AttentionCache,
    AttentionCacheSpec,
    DeltaCache,
    DeltaCacheSpec,
    LayerCache,
    LayerCacheSpec,
)
from outrider.ops.gated_delta_rule import DeltaState, PendingRecords, delta_replay
from outrider.ops.state_copy import copy_slots


@dataclass(frozen=True)
class StorageSize:
    """Capacities shared by all layers; blocks and slots include the null ones.

    Attributes:
        max_rows: most rows of a round, K + 1.
    """

    num_blocks: int
    block_size: int
    num_slots: int
    max_rows: int


def kv_bytes_per_token(specs: Iterable[LayerCacheSpec], dtype: torch.dtype) -> int:
    """Bytes of keys and values that one position takes over all layers."""
    return sum(
        2 * spec.num_kv_heads * spec.head_dim * dtype.itemsize
        for spec in specs
        if isinstance(spec, AttentionCacheSpec)
    )


def state_bytes_per_slot(
    specs: Iterable[LayerCacheSpec],
    max_rows: int,
    state_dtype: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.float32,
) -> int:
    """Bytes of recurrent state, records and raw inputs that one sequence takes over all layers."""
    total = 0
    for spec in specs:
        if isinstance(spec, DeltaCacheSpec):
            update = spec.num_value_heads * (spec.value_dim + 1)
            key = spec.num_key_heads * spec.key_dim
            state = spec.num_value_heads * spec.value_dim * spec.key_dim
            total += state * state_dtype.itemsize + 4 * 2 * max_rows * (update + key)
            total += (spec.conv_kernel - 1 + max_rows) * spec.conv_channels * dtype.itemsize
    return total


def allocate_caches(
    specs: Iterable[LayerCacheSpec],
    size: StorageSize,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    device: torch.device,
) -> tuple[LayerCache, ...]:
    """Uninitialised storage, one entry per spec.

    KV and raw inputs in dtype, recurrent states in state_dtype, their records in float32.
    """

    def allocate(spec: LayerCacheSpec) -> LayerCache:
        if isinstance(spec, AttentionCacheSpec):
            shape = (2, size.num_blocks, spec.num_kv_heads, size.block_size, spec.head_dim)
            return AttentionCache(torch.empty(shape, dtype=dtype, device=device))
        return _allocate_delta(spec, size, dtype, state_dtype, device)

    return tuple(allocate(spec) for spec in specs)


def _allocate_delta(
    spec: DeltaCacheSpec,
    size: StorageSize,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    device: torch.device,
) -> DeltaCache:
    slots, rows = size.num_slots, size.max_rows
    ring_size = spec.conv_kernel - 1 + rows
    records = (2, slots, rows)

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    return DeltaCache(
        conv_ring=torch.empty((slots, ring_size, spec.conv_channels), dtype=dtype, device=device),
        delta=DeltaState(
            state=torch.empty(
                (slots, spec.num_value_heads, spec.value_dim, spec.key_dim),
                dtype=state_dtype,
                device=device,
            ),
            record_keys=floats(*records, spec.num_key_heads, spec.key_dim),
            record_updates=floats(*records, spec.num_value_heads, spec.value_dim),
            record_decays=floats(*records, spec.num_value_heads),
        ),
    )


def copy_states(caches: Iterable[LayerCache], sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy what recurrent layers hold of the slots `sources` [N] to `targets` [N].

    Records are left out: nothing may be pending for the sources. Targets are distinct, and none is
    a source.
    """
    for cache in caches:
        if isinstance(cache, DeltaCache):
            copy_slots(cache.conv_ring, cache.delta, sources, targets, with_records=False)


def keep_states(
    caches: Iterable[LayerCache],
    pending: PendingRecords,
    slots: torch.Tensor,
    targets: torch.Tensor,
    positions: torch.Tensor,
    num_committed: torch.Tensor,
) -> torch.Tensor:
    """Copy the recurrent states of `slots` behind `positions` tokens to `targets`; all [N] int64.

    A slot's state stands before its pending records; those that lead up to the position are
    replayed in the copy.

    Args:
        num_committed: [slots].

    Returns:
        [N] int64, 1 where the position lies among the pending rows; what the target holds is
        unspecified elsewhere.
    """
    accepted = torch.minimum(pending.num_accepted_rows[slots], pending.last_num_rows[slots])
    rows = positions - (num_committed[slots] - 1 - accepted)
    kept = (rows >= 0) & (rows <= accepted)
    pending.parity[targets] = pending.parity[slots]
    pending.last_num_rows[targets] = pending.last_num_rows[slots]
    pending.num_accepted_rows[targets] = torch.where(kept, rows, 0)
    for cache in caches:
        if isinstance(cache, DeltaCache):
            copy_slots(cache.conv_ring, cache.delta, slots, targets, with_records=True)
            delta_replay(cache.delta, pending, targets)
    pending.num_accepted_rows[targets] = 0
    return kept.long()
