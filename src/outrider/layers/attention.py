"""Grouped-query attention over the paged cache, with optional q/k norms and output gate."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outrider.layers.linear import Linear
from outrider.layers.norm import NormConfig, RMSNorm
from outrider.layers.rows import AttentionCache, AttentionCacheSpec, RowBatch, RowGroup
from outrider.ops.attention import paged_attention, prefill_attention
from outrider.ops.attention_inputs import HeadLayout, HeadNorms, attention_inputs


class Attention(nn.Module):
    """q, k, v projections; per-head norm of q and k; rotary; paged attention; output projection.

    Args:
        input_size: width of the projections' input, where it is not hidden_size.
        qk_norm: the per-head norms; None for an architecture without them.
        output_gate: the query projection holds, per head, [q | gate], and the attention output is
            multiplied by sigmoid(gate) before the output projection.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        input_size: int | None = None,
        qk_norm: NormConfig | None = None,
        output_gate: bool = False,
    ) -> None:
        super().__init__()
        self.layout = HeadLayout(num_heads, num_kv_heads, head_dim, output_gate)
        kv_size = num_kv_heads * head_dim
        query_size = self.layout.width - 2 * kv_size
        self.qkv_proj = Linear(input_size or hidden_size, query_size, kv_size, kv_size)
        self.o_proj = Linear(num_heads * head_dim, hidden_size)
        self.has_qk_norm = qk_norm is not None
        if qk_norm is not None:
            self.q_norm = RMSNorm(head_dim, qk_norm)
            self.k_norm = RMSNorm(head_dim, qk_norm)

    @property
    def cache_spec(self) -> AttentionCacheSpec:
        return AttentionCacheSpec(self.layout.num_kv_heads, self.layout.head_dim)

    def _norms(self) -> HeadNorms | None:
        if not self.has_qk_norm:
            return None
        config = self.q_norm.config
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, config.eps, config.zero_centred)

    def forward(
        self, x: Tensor, rows: RowBatch, rotary: tuple[Tensor, Tensor], cache: AttentionCache
    ) -> Tensor:
        """x [R, input_size] -> [R, H]; writes the rows' keys and values into the cache."""
        queries, gate = attention_inputs(
            self.qkv_proj(x), self.layout, self._norms(), rotary, cache.kv_pool, rows.kv_index
        )
        outputs = [_attend(group, queries, gate, cache.kv_pool) for group in rows.groups]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return self.o_proj(output.flatten(1))


def _attend(group: RowGroup, queries: Tensor, gate: Tensor | None, kv_pool: Tensor) -> Tensor:
    """Output [B * T, Hq, D] of one group's rows."""
    attend = paged_attention if group.piece_ends is None else prefill_attention
    shape = (group.num_sequences, group.rows_per_sequence, *queries.shape[1:])
    own_gate = None if gate is None else gate[group.flat].unflatten(0, shape[:2])
    output = attend(
        queries[group.flat].view(shape),
        kv_pool,
        group.block_tables,
        group.starts,
        group.num_rows,
        own_gate,
    )
    return output.flatten(0, 1)
