"""Activations whose value for an element does not depend on where the element lies.

PyTorch's own sigmoid, silu and softplus run a vector kernel on most of a tensor and a scalar one on
what is left at its end (and at the ends of each thread's share); the two differ in the last bit.
exp, log1p, division and multiplication agree with themselves everywhere, so these are made of them.
"""

import torch
from torch import Tensor


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)); rounded once to x's dtype, as are the others."""
    return (1.0 / (1.0 + torch.exp(-_wide(x)))).to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    wide = _wide(x)
    return (wide / (1.0 + torch.exp(-wide))).to(x.dtype)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), which is x to rounding from 20 on."""
    wide = _wide(x)
    bent = torch.log1p(torch.exp(wide.clamp(max=20.0)))
    return torch.where(wide > 20.0, wide, bent).to(x.dtype)
