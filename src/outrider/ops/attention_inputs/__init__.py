"""From a layer's q, k, v projection to what attention reads: norms, rotary embedding, KV write."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.ops.attention_inputs.reference import attention_inputs_reference
from outrider.ops.dispatch import overlaps_launches, uses_kernels

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class HeadLayout:
    """How a row of the projection is laid out: queries, then keys, then values, head by head.

    Attributes:
        gated: each query head is followed by a gate of its size, [q (D) | gate (D)].
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    gated: bool

    @property
    def width(self) -> int:
        """Columns of the projection."""
        query_columns = self.num_heads * self.head_dim * (2 if self.gated else 1)
        return query_columns + 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class HeadNorms:
    """Per-head RMS norms of queries and keys; weights [D]."""

    query_weight: Tensor
    key_weight: Tensor
    eps: float
    zero_centred: bool


def attention_inputs(
    projected: Tensor,
    layout: HeadLayout,
    norms: HeadNorms | None,
    angles: tuple[Tensor, Tensor],
    kv_pool: Tensor,
    kv_index: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Norm and rotate queries and keys, and write keys and values into the pool.

    Args:
        projected: [R, layout.width]; rows may lie any distance apart.
        norms: None for an architecture without them.
        angles: cos and sin of each row's position, [R, P] float32 each, see ops.rotary.
        kv_pool: [2, num_blocks, Hkv, block_size, D], written in place.
        kv_index: [R] int64, block * block_size + offset; padding rows point into the null block,
            whose content is never read.

    Returns:
        queries [R, Hq, D], contiguous, and the gate [R, Hq, D], a view into `projected`, or None.
    """
    assert projected.dtype in SUPPORTED_DTYPES and projected.dtype == kv_pool.dtype
    assert projected.dim() == 2 and projected.shape[1] == layout.width, projected.shape
    assert kv_pool.shape[2] == layout.num_kv_heads and kv_pool.shape[4] == layout.head_dim
    if uses_kernels(projected):
        from outrider.ops.attention_inputs.triton import attention_inputs_kernel

        pdl = overlaps_launches(projected)
        return attention_inputs_kernel(projected, layout, norms, angles, kv_pool, kv_index, pdl=pdl)
    return attention_inputs_reference(projected, layout, norms, angles, kv_pool, kv_index)
