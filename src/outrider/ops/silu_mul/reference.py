"""Reference silu(gate) * up."""

from torch import Tensor

from outrider.ops.elementwise import silu


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """[R, 2M] -> [R, M]."""
    gate, up = gate_up[:, 0::2].contiguous(), gate_up[:, 1::2]
    return silu(gate) * up
