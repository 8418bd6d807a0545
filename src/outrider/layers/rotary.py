"""Rotary position embedding tables, made for the rows at hand."""

import torch
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """cos and sin of position * theta^(-2i / P), the P / 2 angles repeated twice."""

    inverse_frequencies: Tensor

    def __init__(self, rotary_dim: int, theta: float) -> None:
        super().__init__()
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
        # A buffer moves with the module; it is derived, so checkpoints do not hold it.
        self.register_buffer("inverse_frequencies", 1.0 / theta**exponents, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[R] int64 -> cos, sin, each [R, P] float32."""
        angles = positions.float()[:, None] * self.inverse_frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()
