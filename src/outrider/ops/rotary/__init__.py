"""Rotary position embedding on the first dimensions of a head."""

import torch
from torch import Tensor

from outrider.ops.dispatch import uses_kernels
from outrider.ops.rotary.reference import rotary_angles_reference, rotary_reference

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rotary_angles(
    positions: Tensor, inverse_frequencies: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """scale * cos and scale * sin of position * frequency, the P / 2 angles repeated twice.

    Args:
        positions: [R] int64.
        inverse_frequencies: [P / 2] float32.

    Returns:
        cos, sin, each [R, P] float32, contiguous.
    """
    if uses_kernels(positions):
        from outrider.ops.rotary.triton import rotary_angles_kernel

        # It starts when everything before it has ended, once in every pass and draft step: the
        # attention behind it may then read the keys of earlier steps without waiting.
        return rotary_angles_kernel(positions, inverse_frequencies, scale, pdl=False)
    return rotary_angles_reference(positions, inverse_frequencies, scale)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + P/2) of the first P dimensions of each head; the rest pass through.

    Args:
        x: [R, heads, D].
        cos, sin: [R, P] for the row's position, P even and at most D, the second half repeating
            the first.

    Returns:
        [R, heads, D] in x's dtype.
    """
    assert x.dtype in SUPPORTED_DTYPES, x.dtype
    assert x.shape[0] == cos.shape[0] and cos.shape[1] <= x.shape[2], (x.shape, cos.shape)
    return rotary_reference(x, cos, sin)
