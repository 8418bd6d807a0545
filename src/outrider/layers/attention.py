"""Grouped-query attention over the paged cache, with optional q/k norms and output gate."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outrider.layers.linear import Linear
from outrider.layers.norm import NormConfig, RMSNorm
from outrider.layers.rows import AttentionCache, AttentionCacheSpec, RowBatch
from outrider.ops.attention import paged_attention
from outrider.ops.elementwise import sigmoid
from outrider.ops.kv_cache import write_kv
from outrider.ops.rotary import apply_rotary


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
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.output_gate = output_gate
        query_size = num_heads * head_dim * (2 if output_gate else 1)
        kv_size = num_kv_heads * head_dim
        self.qkv_proj = Linear(input_size or hidden_size, query_size, kv_size, kv_size)
        self.o_proj = Linear(num_heads * head_dim, hidden_size)
        self.has_qk_norm = qk_norm is not None
        if qk_norm is not None:
            self.q_norm = RMSNorm(head_dim, qk_norm)
            self.k_norm = RMSNorm(head_dim, qk_norm)

    @property
    def cache_spec(self) -> AttentionCacheSpec:
        return AttentionCacheSpec(self.num_kv_heads, self.head_dim)

    def forward(
        self, x: Tensor, rows: RowBatch, rotary: tuple[Tensor, Tensor], cache: AttentionCache
    ) -> Tensor:
        """x [R, input_size] -> [R, H]; writes the rows' keys and values into the cache."""
        num_rows = x.shape[0]
        queries, keys, values = self.qkv_proj.forward_parts(x)
        queries = queries.view(num_rows, self.num_heads, -1)
        queries, gate = queries[..., : self.head_dim], queries[..., self.head_dim :]
        keys = keys.view(num_rows, self.num_kv_heads, self.head_dim)
        values = values.view(num_rows, self.num_kv_heads, self.head_dim)
        if self.has_qk_norm:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries, keys = apply_rotary(queries, *rotary), apply_rotary(keys, *rotary)
        write_kv(keys, values, cache.kv_pool, rows.kv_index)

        output = torch.empty_like(queries)
        for group in rows.groups:
            shape = (group.num_sequences, group.rows_per_sequence, *queries.shape[1:])
            attended = paged_attention(
                queries[group.flat].view(shape),
                cache.kv_pool,
                group.block_tables,
                group.starts,
                group.num_rows,
            )
            output[group.flat] = attended.flatten(0, 1)
        if self.output_gate:
            output = output * sigmoid(gate)
        return self.o_proj(output.reshape(num_rows, -1))
