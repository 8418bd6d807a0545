"""Rotary position embedding, made for the rows at hand."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outrider.ops.rotary import rotary_angles


@dataclass(frozen=True)
class YarnScaling:
    """Rotary scaling for contexts past the trained length (B. Peng et al., "YaRN", 2023).

    Attributes:
        factor: how many times longer the context becomes.
        original_max_position_embeddings: trained length.
        beta_fast, beta_slow: turns over the trained length above which a dimension keeps its
            frequency, and below which its frequency is divided by `factor`.
        attention_factor: multiplies cos and sin; 0.1 ln(factor) + 1 where a checkpoint is silent.
        truncate: whether the two dimensions so found are rounded outwards to whole ones.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool


class RotaryEmbedding(nn.Module):
    """cos and sin of position * frequency, the P / 2 angles repeated twice.

    Frequency i is theta^(-2i / P). With YaRN, frequencies that turn seldom over the trained length
    are divided by its factor, those that turn often are kept, and a ramp joins the two.

    Args:
        mrope_section: how many frequencies turn with time, height and width, for models whose
            tokens have three positions. Text has one: all three are equal.
    """

    inverse_frequencies: Tensor

    def __init__(
        self,
        rotary_dim: int,
        theta: float,
        yarn: YarnScaling | None = None,
        mrope_section: tuple[int, int, int] | None = None,
    ) -> None:
        super().__init__()
        self.mrope_section = mrope_section
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
        frequencies = 1.0 / theta**exponents
        if yarn is not None:
            stretched = _ramp(yarn, rotary_dim, theta)
            frequencies = frequencies / yarn.factor * stretched + frequencies * (1.0 - stretched)
        self.scale = 1.0 if yarn is None else yarn.attention_factor
        # A buffer moves with the module; it is derived, so checkpoints do not hold it.
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[R] int64, or [3, R] where there is an mrope_section -> cos, sin, each [R, P] float32."""
        return rotary_angles(positions, self.inverse_frequencies, self.scale, self.mrope_section)


def _ramp(yarn: YarnScaling, rotary_dim: int, theta: float) -> Tensor:
    """[P / 2]: 0 where a frequency is kept, 1 where it is divided, linear between."""

    def dim_with_turns(turns: float) -> float:
        """Dimension that turns that many times over the trained length."""
        length = yarn.original_max_position_embeddings / (turns * 2 * math.pi)
        return rotary_dim * math.log(length) / (2 * math.log(theta))

    low, high = dim_with_turns(yarn.beta_fast), dim_with_turns(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    index = torch.arange(rotary_dim // 2, dtype=torch.float32, device="cpu")
    return ((index - low) / (high - low)).clamp(0, 1)
