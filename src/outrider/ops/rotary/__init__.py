"""Rotary position embedding on the first dimensions of a head."""

from torch import Tensor

from outrider.ops.dispatch import uses_kernels
from outrider.ops.rotary.reference import rotary_angles_reference

NUM_AXES = 3
"""Positions of a token in a text with images: time, height, width."""


def rotary_angles(
    positions: Tensor,
    inverse_frequencies: Tensor,
    scale: float,
    sections: tuple[int, int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """scale * cos and scale * sin of position * frequency, the P / 2 angles repeated twice.

    With three positions for a row, frequency i takes the height where i % 3 == 1 and
    i < 3 * sections[1], the width where i % 3 == 2 and i < 3 * sections[2], and else the time.
    Where the three are equal, as they are for text, the bits are those of one position.

    Args:
        positions: [R] int64, or [NUM_AXES, R].
        inverse_frequencies: [P / 2] float32.
        sections: how many frequencies turn with time, height and width; needed for three positions
            and without effect on one.

    Returns:
        cos, sin, each [R, P] float32, contiguous.
    """
    if positions.dim() == 2:
        assert positions.shape[0] == NUM_AXES and sections is not None, (positions.shape, sections)
    if uses_kernels(positions):
        from outrider.ops.rotary.triton import rotary_angles_kernel

        # It starts when everything before it has ended, once in every pass and draft step: the
        # attention behind it may then read the keys of earlier steps without waiting.
        return rotary_angles_kernel(positions, inverse_frequencies, scale, sections, pdl=False)
    return rotary_angles_reference(positions, inverse_frequencies, scale, sections)
