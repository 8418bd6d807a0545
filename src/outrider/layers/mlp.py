"""Gated MLP."""

from torch import Tensor, nn

from outrider.layers.linear import Linear
from outrider.ops.silu_mul import silu_mul


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, intermediate_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[R, H] -> [R, H]."""
        return self.down_proj(silu_mul(self.gate_up_proj(x)))
