"""Reference RMS norms. A row's statistics are one sum over its own contiguous elements."""

import torch
from torch import Tensor

from outrider.ops.elementwise import silu


def _normalised(x: Tensor, eps: float) -> Tensor:
    x = x.float().contiguous()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, zero_centred: bool) -> Tensor:
    """x [..., D], weight [D] -> [..., D]."""
    normed = _normalised(x, eps)
    if zero_centred:
        return (normed * (1.0 + weight.float())).to(x.dtype)
    return weight * normed.to(x.dtype)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centred: bool
) -> tuple[Tensor, Tensor]:
    """x, residual [R, D], weight [D] -> normed, sum."""
    total = residual + x
    return rms_norm_reference(total, weight, eps, zero_centred), total


def gated_rms_norm_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D], gate [..., D], weight [D] -> [..., D]."""
    normed = weight * _normalised(x, eps).to(gate.dtype)
    return (normed * silu(gate.float())).to(gate.dtype)
