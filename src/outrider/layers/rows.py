"""What a pass tells its layers about the rows it runs, and the storage the rows live in.

A pass runs R rows, flat. Rows come in rectangular groups: the spans of a round form one group of
B sequences by T rows, each prompt chunk is a group of its own with B = 1.
"""

from dataclasses import dataclass

from torch import Tensor

from outrider.ops.gated_delta_rule import DeltaState, PendingRecords


@dataclass(frozen=True)
class RowGroup:
    """B sequences by T rows, at flat rows begin .. begin + B * T - 1.

    Attributes:
        slots: [B] int64.
        starts: [B] int64, position of each sequence's first row.
        num_rows: [B] int64, at most T; rows past it are padding.
        block_tables: [B, M] int64.
        piece_ends: row counts at which a prompt chunk is cut for the chunked delta rule; None for
            the rows of a round.
        starts_sequence: the chunk begins at position 0, so that no earlier state exists.
    """

    begin: int
    rows_per_sequence: int
    slots: Tensor
    starts: Tensor
    num_rows: Tensor
    block_tables: Tensor
    piece_ends: tuple[int, ...] | None = None
    starts_sequence: bool = False

    @property
    def num_sequences(self) -> int:
        return self.slots.shape[0]

    @property
    def flat(self) -> slice:
        return slice(self.begin, self.begin + self.num_sequences * self.rows_per_sequence)


@dataclass(frozen=True)
class RowBatch:
    """All rows of a pass.

    Attributes:
        positions: [R] int64.
        kv_index: [R] int64, where each row's key and value go in a flattened pool; padding rows
            point into the null block.
        pending: records of earlier rounds, by slot; layers read it and never write it.
    """

    groups: tuple[RowGroup, ...]
    positions: Tensor
    kv_index: Tensor
    pending: PendingRecords


@dataclass(frozen=True)
class AttentionCache:
    """Paged keys and values of one layer: [2, num_blocks, heads, block_size, head_dim]."""

    kv_pool: Tensor


@dataclass(frozen=True)
class DeltaCache:
    """Recurrent state of one gated delta net: raw convolution inputs [slots, ring, C], and S."""

    conv_ring: Tensor
    delta: DeltaState


LayerCache = AttentionCache | DeltaCache


@dataclass(frozen=True)
class AttentionCacheSpec:
    """Shape of one attention layer's cache, per token."""

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class DeltaCacheSpec:
    """Shape of one gated delta net's state, per slot."""

    conv_channels: int
    conv_kernel: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int


LayerCacheSpec = AttentionCacheSpec | DeltaCacheSpec
