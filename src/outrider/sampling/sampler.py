"""The one function from logits to the target's distribution, and the one draw from it."""

from __future__ import annotations

from torch import Tensor

from outrider.ops.sampling import processed_probs, sample
from outrider.sampling.arrays import SamplingArrays


def target_probs(logits: Tensor, sampling: SamplingArrays) -> Tensor:
    """Processed distribution of each row: temperature, then top-k, then top-p, then min-p.

    Args:
        logits: [R, V]; rows of a greedy entry are treated as temperature 1.
        sampling: entries of shape [R].

    Returns:
        [R, V] float32 (float64 for float64 logits), rows sum to 1. Ties at the top-k and top-p
        thresholds are kept or cut by id, the lower id first.
    """
    return processed_probs(
        logits, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
    )


def sample_rows(logits: Tensor, sampling: SamplingArrays, positions: Tensor) -> Tensor:
    """Draw the target's own token for each row.

    Args:
        logits: [R, V].
        sampling: entries of shape [R]; temperature 0 takes the largest logit, the lowest id first.
        positions: [R] int64, absolute position of the token being drawn; it keys the noise with
            the seed, so that a row draws the same token whichever round reaches it.

    Returns:
        [R] int64.
    """
    return sample(
        logits,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.seeds,
        positions,
    )
