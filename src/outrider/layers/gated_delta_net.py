"""Gated delta net: convolution, delta rule, gated norm. Qwen3.5's linear attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outrider.layers.linear import Linear
from outrider.layers.norm import GatedRMSNorm
from outrider.layers.rows import DeltaCache, DeltaCacheSpec, RowBatch, RowGroup
from outrider.ops.gated_delta_net import (
    DeltaNetRows,
    DeltaNetWeights,
    delta_net_prefill,
    delta_net_round,
)
from outrider.ops.gated_delta_rule import PendingRecords


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
        outputs = [
            self._run_group(
                group,
                DeltaNetRows(qkv[group.flat], a[group.flat], b[group.flat]),
                cache,
                rows.pending,
            )
            for group in rows.groups
        ]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)  # [R, HV, V]
        gated = self.norm(output, z.unflatten(-1, output.shape[1:]))
        return self.out_proj(gated.flatten(1))

    def _run_group(
        self, group: RowGroup, own: DeltaNetRows, cache: DeltaCache, pending: PendingRecords
    ) -> Tensor:
        """[B * T, HV, V] of one group's rows."""
        weights = DeltaNetWeights(self.conv1d.weight[:, 0], self.A_log, self.dt_bias)
        if group.piece_ends is None:
            return delta_net_round(
                own,
                weights,
                cache.conv_ring,
                cache.delta,
                pending,
                group.slots,
                group.starts,
                group.num_rows,
            )
        return delta_net_prefill(
            own,
            weights,
            cache.conv_ring,
            cache.delta,
            group.slots,
            group.starts,
            group.piece_ends,
            starts_sequence=group.starts_sequence,
        )
