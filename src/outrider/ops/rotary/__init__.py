"""Rotary position embedding on the first dimensions of a head."""

from torch import Tensor

from outrider.ops.dispatch import uses_kernels
from outrider.ops.rotary.reference import rotary_angles_reference


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
