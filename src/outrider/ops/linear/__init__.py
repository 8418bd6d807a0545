"""y = x W^T, with a row's bits independent of how many rows there are."""

import torch
from torch import Tensor

from outrider.ops.dispatch import capability, is_hopper, uses_kernels
from outrider.ops.linear.reference import linear_reference
from outrider.ops.linear.segments import is_invariant, uses_library
from outrider.ops.silu_mul import silu_mul

__all__ = ["SUPPORTED_DTYPES", "gated_linear", "is_invariant", "linear"]

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Project rows.

    On a GPU the next kernel may start before this one ends, and the weight is read before the
    kernel in front has ended: weights must not be written by a kernel just before.

    Args:
        x: [R, K], any of SUPPORTED_DTYPES, any strides (contiguous within a row is read in place).
        weight: [N, K], dtype of x, contiguous within a row.

    Returns:
        [R, N], dtype of x. Row r depends on x[r] and weight alone, bit for bit, where
        `is_invariant` says so.
    """
    assert x.dim() == 2 and x.shape[1] == weight.shape[1], (x.shape, weight.shape)
    assert x.dtype == weight.dtype and x.dtype in SUPPORTED_DTYPES, (x.dtype, weight.dtype)
    assert weight.stride(1) == 1, weight.stride()
    if not uses_kernels(x):
        return linear_reference(x, weight)
    if x.shape[0] == 0:
        return x.new_empty(0, weight.shape[0])
    if uses_library(x.dtype, capability(x.device)):
        from outrider.ops.linear.library import linear_library

        return linear_library(x, weight)
    if is_hopper(x):
        from outrider.ops.linear.hopper import fits, linear_hopper

        if fits(weight):
            return linear_hopper(x, weight)
    from outrider.ops.linear.triton import linear_triton

    return linear_triton(x, weight)


def gated_linear(x: Tensor, weight: Tensor) -> Tensor:
    """silu(gate) * up of a projection to both, whose rows alternate: gate 0, up 0, gate 1, ...

    Args:
        x: [R, K], as in `linear`.
        weight: [2M, K], as in `linear`.

    Returns:
        [R, M], dtype of x: gate and up are rounded to it, and silu(gate) is, before the product.
        The bits of silu_mul(linear(x, weight)); on SM90 one kernel, which does not write the two.
    """
    if uses_kernels(x) and is_hopper(x) and x.shape[0] > 0:
        from outrider.ops.linear.hopper import fits, linear_hopper

        if fits(weight):
            assert x.dtype == weight.dtype and x.shape[1] == weight.shape[1], (x.shape, x.dtype)
            assert weight.shape[0] % 2 == 0, weight.shape
            return linear_hopper(x, weight, gated=True)
    return silu_mul(linear(x, weight))
