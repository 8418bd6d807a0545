"""silu(gate) * up on a projection to both."""

import torch
from torch import Tensor

from outrider.ops.dispatch import overlaps_launches, uses_kernels
from outrider.ops.silu_mul.reference import silu_mul_reference

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[R, 2M], whose columns alternate gate and up -> silu(gate) * up, [R, M], of the same dtype.

    Neighbours, because a tile of a projection then holds both, whatever its width.
    """
    assert gate_up.dtype in SUPPORTED_DTYPES, gate_up.dtype
    assert gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0, gate_up.shape
    if uses_kernels(gate_up):
        from outrider.ops.silu_mul.triton import silu_mul_kernel

        return silu_mul_kernel(gate_up, pdl=overlaps_launches(gate_up))
    return silu_mul_reference(gate_up)
