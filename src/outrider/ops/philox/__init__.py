"""Counter-based random numbers: Philox4x32-10, so that a number depends on its key alone.

J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from torch import Tensor

from outrider.ops.philox.reference import philox_reference, race_times_reference


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: Tensor) -> Tensor:
    """Four 32-bit words for each counter.

    Args:
        counter: four int64 tensors of values in [0, 2^32), of shapes that broadcast to [...].
        seed: int64 of a shape that broadcasts to [...], all 64 bits used as the key.

    Returns:
        [..., 4] int64, values in [0, 2^32).
    """
    return philox_reference(counter, seed)


def race_times(seeds: Tensor, positions: Tensor, num_tokens: int) -> Tensor:
    """Standard exponential times, one for each row and token id: the noise of a sampled row.

    argmin over ids of time / p is a sample from p. The time of an id depends on (seed, position,
    id) only: neither the batch nor the vocabulary's end matters.

    Args:
        seeds: [R] int64.
        positions: [R] int64, absolute position of the token being drawn.

    Returns:
        [R, num_tokens] float32, positive and finite.
    """
    return race_times_reference(seeds, positions, num_tokens)
