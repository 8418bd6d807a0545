"""Gated MLP."""

from torch import Tensor, nn

from outrider.layers.linear import Linear


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        sizes = (intermediate_size, intermediate_size)
        self.gate_up_proj = Linear(hidden_size, *sizes, interleaved=True)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[R, H] -> [R, H]."""
        return self.down_proj(self.gate_up_proj.forward_gated(x))
