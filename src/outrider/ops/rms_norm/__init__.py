"""RMS norms: plain or zero-centred weight, and the gated form of the delta net."""

import torch
from torch import Tensor

from outrider.ops.dispatch import overlaps_launches, uses_kernels
from outrider.ops.rms_norm.reference import (
    add_rms_norm_reference,
    gated_rms_norm_reference,
    rms_norm_reference,
)

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, zero_centred: bool) -> Tensor:
    """w' * x / sqrt(mean(x^2) + eps), statistics in float32; w' is weight, or 1 + weight.

    Args:
        x: [..., D]; the last dimension is normalised.
        weight: [D].

    Returns:
        [..., D] in x's dtype. A plain weight multiplies after the cast back to x's dtype, a
        zero-centred one before it, as the public model definitions do.
    """
    assert x.shape[-1] == weight.shape[0] and x.dtype in SUPPORTED_DTYPES, (x.shape, x.dtype)
    if uses_kernels(x):
        from outrider.ops.rms_norm.triton import rms_norm_kernel

        return rms_norm_kernel(x, weight, eps, zero_centred, pdl=overlaps_launches(x))
    return rms_norm_reference(x, weight, eps, zero_centred)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, zero_centred: bool
) -> tuple[Tensor, Tensor]:
    """(rms_norm(residual + x), residual + x): the sum is rounded to the dtype before the norm.

    Args:
        x, residual: [R, D], what a layer adds and the stream it adds to; rows may lie any distance
            apart.
        weight: [D].

    Returns:
        Both [R, D] in x's dtype, contiguous.
    """
    assert x.shape == residual.shape and x.dtype == residual.dtype, (x.shape, residual.shape)
    assert x.shape[-1] == weight.shape[0] and x.dtype in SUPPORTED_DTYPES, (x.shape, x.dtype)
    if uses_kernels(x):
        from outrider.ops.rms_norm.triton import add_rms_norm_kernel

        return add_rms_norm_kernel(x, residual, weight, eps, zero_centred, pdl=overlaps_launches(x))
    return add_rms_norm_reference(x, residual, weight, eps, zero_centred)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm(x) * weight * silu(gate): the output norm of a gated delta net.

    Args:
        x: [R, heads, D], float32 or gate's dtype.
        gate: [R, heads, D]; rows may lie any distance apart, a view into a wider matrix.
        weight: [D], plain.

    Returns:
        [R, heads, D] in gate's dtype, contiguous.
    """
    assert gate.dtype in SUPPORTED_DTYPES, gate.dtype
    assert x.shape == gate.shape and x.shape[-1] == weight.shape[0], (x.shape, gate.shape)
    if uses_kernels(x):
        from outrider.ops.rms_norm.triton import gated_rms_norm_kernel

        return gated_rms_norm_kernel(x, gate, weight, eps, pdl=overlaps_launches(x))
    return gated_rms_norm_reference(x, gate, weight, eps)
