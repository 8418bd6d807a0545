"""Activations whose value for an element does not depend on where the element lies.

PyTorch's own sigmoid, silu and softplus run a vector kernel on most of a tensor and a scalar one on
what is left at its end (and at the ends of each thread's share); the two differ in the last bit.
exp, log1p, division and multiplication agree with themselves everywhere, so these are made of them.
"""

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), any shape and floating dtype."""
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return x / (1.0 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), which is x to rounding from 20 on."""
    return torch.where(x > 20.0, x, torch.log1p(torch.exp(x.clamp(max=20.0))))
