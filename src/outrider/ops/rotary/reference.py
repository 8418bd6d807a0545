"""Reference rotary embedding, half-split layout."""

import torch
from torch import Tensor


def rotary_angles_reference(
    positions: Tensor,
    inverse_frequencies: Tensor,
    scale: float,
    sections: tuple[int, int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """positions [R] or [3, R], inverse_frequencies [P / 2] -> cos, sin [R, P] float32."""
    if positions.dim() == 1:
        turning = positions.float()[:, None]  # [R, 1]
    else:
        assert sections is not None, "sections say which frequency takes which position"
        axes = _axes(sections, inverse_frequencies.shape[0]).to(positions.device)
        turning = positions.float()[axes].t()  # [R, P / 2]
    angles = turning * inverse_frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * scale, angles.sin() * scale


def _axes(sections: tuple[int, int, int], count: int) -> Tensor:
    """[count]: which of time (0), height (1) and width (2) each frequency turns with."""
    axes = torch.zeros(count, dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [R, heads, D], cos and sin [R, P] -> [R, heads, D]."""
    rotary_dim = cos.shape[-1]
    rotated, passed = x[..., :rotary_dim], x[..., rotary_dim:]
    first, second = rotated.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    rotated = rotated * cos[:, None].to(x.dtype) + turned * sin[:, None].to(x.dtype)
    return torch.cat((rotated, passed), dim=-1)
