"""RMS norm layers."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outrider.ops.rms_norm import add_rms_norm, gated_rms_norm, rms_norm


@dataclass(frozen=True)
class NormConfig:
    """What a model's RMS norms have in common; zero_centred weights multiply as (1 + w)."""

    eps: float
    zero_centred: bool


class RMSNorm(nn.Module):
    """RMS norm over the last dimension."""

    def __init__(self, size: int, config: NormConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.weight.dummy_init = "zeros" if config.zero_centred else "ones"  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return rms_norm(x, self.weight, self.config.eps, zero_centred=self.config.zero_centred)

    def add(self, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of residual + x, residual + x), each [R, size]; x None adds nothing."""
        if x is None:
            return self.forward(residual), residual
        config = self.config
        return add_rms_norm(x, residual, self.weight, config.eps, zero_centred=config.zero_centred)


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
