"""RMS norm layers."""

import torch
from torch import Tensor, nn

from outrider.ops.rms_norm import gated_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """RMS norm over the last dimension; zero_centred weights multiply as (1 + w)."""

    def __init__(self, size: int, eps: float, *, zero_centred: bool) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centred = zero_centred
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.weight.dummy_init = "zeros" if zero_centred else "ones"  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return rms_norm(x, self.weight, self.eps, zero_centred=self.zero_centred)


class GatedRMSNorm(nn.Module):
    """RMSNorm(x) * weight * silu(gate), plain weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.weight.dummy_init = "ones"  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate [..., size] -> [..., size]."""
        return gated_rms_norm(x, gate, self.weight, self.eps)
