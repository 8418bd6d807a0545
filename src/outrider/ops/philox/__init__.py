"""Counter-based random numbers: Philox4x32-10, so that a number depends on its key alone.

J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from torch import Tensor

from outrider.ops.dispatch import overlaps_launches, uses_kernels
from outrider.ops.philox.reference import (
    Purpose,
    philox_reference,
    race_times_of_reference,
    race_times_reference,
    uniforms_reference,
)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: Tensor) -> Tensor:
    """Four 32-bit words for each counter.

    Args:
        counter: four int64 tensors of values in [0, 2^32), of shapes that broadcast to [...].
        seed: int64 of a shape that broadcasts to [...], all 64 bits used as the key.

    Returns:
        [..., 4] int64, values in [0, 2^32).

    The definition, on every device. Kernels make their words where they use them.
    """
    return philox_reference(counter, seed)


def race_times(
    seeds: Tensor,
    keys: Tensor,
    num_tokens: int,
    purpose: Purpose = Purpose.TARGET,
    index: Tensor | int = 0,
) -> Tensor:
    """Standard exponential times, one for each row and token id: the noise of a sampled row.

    argmin over ids of time / p is a sample from p. The time of an id depends on (seed, key,
    purpose, index, id) only: neither the batch nor the vocabulary's end matters.

    Args:
        seeds: [R] int64.
        keys: [R] int64; for Purpose.TARGET the absolute position of the token being drawn, else
            the number of committed tokens at the start of the round.
        index: place in the block, one for all rows or [R] int64.

    Returns:
        [R, num_tokens] float32, positive and finite.
    """
    if uses_kernels(seeds):
        from outrider.ops.philox.triton import race_times_kernel

        pdl = overlaps_launches(seeds)
        return race_times_kernel(seeds, keys, num_tokens, purpose, index, pdl=pdl)
    return race_times_reference(seeds, keys, num_tokens, purpose, index)


def race_times_of(
    seeds: Tensor, keys: Tensor, token_ids: Tensor, purpose: Purpose, index: int = 0
) -> Tensor:
    """The entries `token_ids` [R, m] of what race_times gives, without making the others."""
    if uses_kernels(seeds):
        from outrider.ops.philox.triton import race_times_kernel

        count, pdl = token_ids.shape[1], overlaps_launches(seeds)
        return race_times_kernel(seeds, keys, count, purpose, index, token_ids=token_ids, pdl=pdl)
    return race_times_of_reference(seeds, keys, token_ids, purpose, index)


def uniforms(seeds: Tensor, keys: Tensor, count: int, purpose: Purpose) -> Tensor:
    """One uniform in (0, 1) for each row and index 0 .. count - 1: [R, count] float32."""
    if uses_kernels(seeds):
        from outrider.ops.philox.triton import uniforms_kernel

        return uniforms_kernel(seeds, keys, count, purpose, pdl=overlaps_launches(seeds))
    return uniforms_reference(seeds, keys, count, purpose)


__all__ = ["Purpose", "philox", "race_times", "race_times_of", "uniforms"]
