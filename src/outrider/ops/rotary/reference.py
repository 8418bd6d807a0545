"""Reference rotary embedding, half-split layout."""

import torch
from torch import Tensor


def rotary_angles_reference(
    positions: Tensor, inverse_frequencies: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """positions [R], inverse_frequencies [P / 2] -> cos, sin [R, P] float32."""
    angles = positions.float()[:, None] * inverse_frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * scale, angles.sin() * scale


def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [R, heads, D], cos and sin [R, P] -> [R, heads, D]."""
    rotary_dim = cos.shape[-1]
    rotated, passed = x[..., :rotary_dim], x[..., rotary_dim:]
    first, second = rotated.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    rotated = rotated * cos[:, None].to(x.dtype) + turned * sin[:, None].to(x.dtype)
    return torch.cat((rotated, passed), dim=-1)
