"""Gated delta net: convolution, delta rule, gated norm. Qwen3.5's linear attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outrider.layers.linear import Linear
from outrider.layers.norm import GatedRMSNorm
from outrider.layers.rows import DeltaCache, DeltaCacheSpec, RowBatch, RowGroup
from outrider.ops.causal_conv import causal_conv
from outrider.ops.gated_delta_rule import (
    PendingRecords,
    delta_gates,
    delta_prefill,
    delta_round,
    l2_normalise,
)


class CausalConv1d(nn.Module):
    """Holder of a depthwise convolution's weight, [C, 1, W] as checkpoints store it."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel), requires_grad=False)


class GatedDeltaNet(nn.Module):
    """One linear attention layer; see ops.gated_delta_rule for the recurrence."""

    def __init__(self, hidden_size: int, spec: DeltaCacheSpec, norm_eps: float) -> None:
        super().__init__()
        self.cache_spec = spec
        value_size = spec.num_value_heads * spec.value_dim
        num_value_heads = spec.num_value_heads
        self.in_proj = Linear(
            hidden_size, spec.conv_channels, value_size, num_value_heads, num_value_heads
        )
        self.conv1d = CausalConv1d(spec.conv_channels, spec.conv_kernel)
        self.A_log = nn.Parameter(torch.empty(num_value_heads), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty(num_value_heads), requires_grad=False)
        for parameter, init in ((self.A_log, "zeros"), (self.dt_bias, "ones")):
            parameter.keep_dtype = True  # pyright: ignore[reportAttributeAccessIssue]
            parameter.dummy_init = init  # pyright: ignore[reportAttributeAccessIssue]
        self.norm = GatedRMSNorm(spec.value_dim, norm_eps)
        self.out_proj = Linear(value_size, hidden_size)

    def forward(self, x: Tensor, rows: RowBatch, cache: DeltaCache) -> Tensor:
        """x [R, H] -> [R, H]; moves the convolution ring and the recurrent state."""
        qkv, z, b, a = self.in_proj.forward_parts(x)
        g, beta = delta_gates(a.contiguous(), b.contiguous(), self.A_log, self.dt_bias)
        outputs = [
            self._run_group(
                group, qkv[group.flat], g[group.flat], beta[group.flat], cache, rows.pending
            )
            for group in rows.groups
        ]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)  # [R, HV, V]
        gated = self.norm(output, z.reshape(output.shape))
        return self.out_proj(gated.flatten(1))

    def _run_group(
        self,
        group: RowGroup,
        qkv: Tensor,
        g: Tensor,
        beta: Tensor,
        cache: DeltaCache,
        pending: PendingRecords,
    ) -> Tensor:
        """qkv [B * T, C], g and beta [B * T, HV] -> [B * T, HV, V]."""
        spec = self.cache_spec
        shape = (group.num_sequences, group.rows_per_sequence)
        mixed = causal_conv(
            qkv.view(*shape, -1),
            self.conv1d.weight[:, 0],
            cache.conv_ring,
            group.slots,
            group.starts,
            group.num_rows,
        )
        key_size = spec.num_key_heads * spec.key_dim
        q, k, v = mixed.split((key_size, key_size, mixed.shape[-1] - 2 * key_size), dim=-1)
        queries = l2_normalise(q.view(*shape, spec.num_key_heads, -1)) * spec.key_dim**-0.5
        keys = l2_normalise(k.view(*shape, spec.num_key_heads, -1))
        values = v.view(*shape, spec.num_value_heads, -1)
        g, beta = g.view(*shape, -1), beta.view(*shape, -1)
        delta = cache.delta
        if group.piece_ends is None:
            output = delta_round(
                queries, keys, values, g, beta, delta, pending, group.slots, group.num_rows
            )
            return output.flatten(0, 1)
        state = delta.state[group.slots[0]]
        if group.starts_sequence:
            state = torch.zeros_like(state)
        output, state = delta_prefill(
            queries[0], keys[0], values[0], g[0], beta[0], state, group.piece_ends
        )
        delta.state[group.slots[0]] = state
        return output
