"""The one function from logits to the target's distribution, and the one draw from it."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.ops.philox import race_times
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
    wide = logits if logits.dtype == torch.float64 else logits.float()
    temperature = torch.where(sampling.temperature > 0, sampling.temperature, 1.0)
    probs = torch.softmax(wide / temperature[:, None].to(wide.dtype), dim=-1)
    vocab_size = logits.shape[-1]
    if bool(((sampling.top_k < vocab_size) | (sampling.top_p < 1)).any()):
        ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(vocab_size, device=logits.device)
        kept = torch.where(rank < sampling.top_k[:, None], ordered, 0.0)
        # Top-p looks at the distribution that top-k left.
        before = (kept.cumsum(-1) - kept) / kept.sum(-1, keepdim=True)
        # A top-p that float32 rounds to 0 must not empty the row, nor one of 1 cut its tail.
        always = (rank == 0) | (sampling.top_p[:, None] >= 1)
        open_nucleus = (before < sampling.top_p[:, None]) | always
        kept = torch.where(open_nucleus, kept, 0.0)
        probs = torch.zeros_like(probs).scatter(-1, ids, kept)
    threshold = sampling.min_p[:, None].to(probs.dtype) * probs.amax(-1, keepdim=True)
    probs = torch.where(probs >= threshold, probs, 0.0)
    return probs / probs.sum(-1, keepdim=True)


def sample_rows(
    logits: Tensor, sampling: SamplingArrays, positions: Tensor, *, all_greedy: bool = False
) -> Tensor:
    """Draw the target's own token for each row.

    Args:
        logits: [R, V].
        sampling: entries of shape [R]; temperature 0 takes the largest logit, the lowest id first.
        positions: [R] int64, absolute position of the token being drawn; it keys the noise with
            the seed, so that a row draws the same token whichever round reaches it.
        all_greedy: every entry is greedy, as the host knows: nothing random is made.

    Returns:
        [R] int64.
    """
    greedy = logits.argmax(-1)
    if all_greedy:
        return greedy
    probs = target_probs(logits, sampling)
    times = race_times(sampling.seeds, positions, logits.shape[-1])
    sampled = (times / probs).argmin(-1)
    return torch.where(sampling.temperature > 0, sampled, greedy)
