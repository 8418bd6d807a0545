"""Counter-based random numbers: Philox4x32-10, so that a number depends on its key alone.

J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from torch import Tensor

from outrider.ops.dispatch import overlaps_launches, uses_kernels
from outrider.ops.philox.reference import Purpose, uniforms_reference


def uniforms(seeds: Tensor, keys: Tensor, count: int, purpose: Purpose) -> Tensor:
    """One uniform in (0, 1) for each row and index 0 .. count - 1: [R, count] float32."""
    if uses_kernels(seeds):
        from outrider.ops.philox.triton import uniforms_kernel

        return uniforms_kernel(seeds, keys, count, purpose, pdl=overlaps_launches(seeds))
    return uniforms_reference(seeds, keys, count, purpose)


__all__ = ["Purpose", "uniforms"]
