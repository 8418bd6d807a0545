"""From logits to a distribution or to a token: argmax, filters, exponential races.

A race draws from weights w: with T_i a standard exponential time for each id i, argmin T_i / w_i is
a sample. The times are Philox numbers keyed by (seed, key, purpose, index, token id), so that a
token depends neither on the batch nor on what else is drawn; see ops.philox.

No function waits for the device, and none gives a row other bits for its neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.ops.dispatch import overlaps_launches, uses_kernels
from outrider.ops.philox import Purpose
from outrider.ops.sampling.reference import (
    argmax_reference,
    block_terms_sparse_reference,
    draw_listed_reference,
    processed_probs_reference,
    race_reference,
    sample_reference,
    top_m_reference,
)

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of logits. The references take float64 too, on a CPU."""

MAX_TOP_M = 1024


def argmax(logits: Tensor, token_ids: Tensor | None = None) -> Tensor:
    """Id of the largest logit of each row, the lowest of a tie; NaN counts as -inf.

    Args:
        logits: [R, V]; rows may lie any distance apart.
        token_ids: [V] int64, names of the columns; None for the column's number.

    Returns:
        [R] int64.
    """
    if uses_kernels(logits):
        from outrider.ops.sampling.triton import argmax_kernel

        assert logits.dtype in SUPPORTED_DTYPES, logits.dtype
        return argmax_kernel(logits, token_ids, pdl=overlaps_launches(logits))
    return argmax_reference(logits, token_ids)


def processed_probs(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Distribution of each row: softmax(logits / temperature), then top-k, top-p and min-p.

    Ties at the top-k and top-p thresholds are kept or cut by id, the lower id first. Top-p looks at
    the distribution that top-k left; min-p at the likeliest token. The first token always stays.

    Args:
        logits: [R, V]; rows may lie any distance apart.
        temperature: [R] float32; 0 is treated as 1.
        top_k: [R] int64; V or more is off.
        top_p, min_p: [R] float32; 1 and 0 are off.

    Returns:
        [R, V] float32 (float64 for float64 logits), rows sum to 1; NaN where a row has no finite
        largest logit.
    """
    _check_rows(logits.shape[0], temperature, top_k, top_p, min_p)
    if uses_kernels(logits):
        from outrider.ops.sampling.triton import processed_probs_kernel

        assert logits.dtype in SUPPORTED_DTYPES, logits.dtype
        parameters = (temperature, top_k, top_p, min_p)
        return processed_probs_kernel(logits, parameters, pdl=overlaps_launches(logits))
    return processed_probs_reference(logits, temperature, top_k, top_p, min_p)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    token_ids: Tensor | None = None,
) -> Tensor:
    """The target's own token of each row: a race over processed_probs, Purpose.TARGET.

    Args:
        logits: [R, V]; rows may lie any distance apart.
        temperature: [R] float32; 0 takes the argmax.
        top_k, top_p, min_p: [R], as in processed_probs.
        seeds: [R] int64.
        positions: [R] int64, absolute position of the token that is drawn.
        token_ids: [V] int64, names of the columns, which key the noise: a draft over a part of the
            vocabulary meets the target's own. None for the column's number.

    Returns:
        [R] int64, names where there are any.
    """
    _check_rows(logits.shape[0], temperature, top_k, top_p, min_p, seeds, positions)
    if uses_kernels(logits):
        from outrider.ops.sampling.triton import sample_kernel

        assert logits.dtype in SUPPORTED_DTYPES, logits.dtype
        return sample_kernel(
            logits,
            (temperature, top_k, top_p, min_p),
            seeds,
            positions,
            token_ids,
            int(Purpose.TARGET),
            pdl=overlaps_launches(logits),
        )
    return sample_reference(logits, temperature, top_k, top_p, min_p, seeds, positions, token_ids)


def race(
    weights: Tensor, seeds: Tensor, keys: Tensor, purpose: Purpose, index: Tensor | int
) -> Tensor:
    """A draw from weights that need not sum to 1; those that are not positive are never drawn.

    Args:
        weights: [R, V] float32; rows may lie any distance apart. A row without a positive weight
            gives 0.
        seeds, keys: [R] int64.
        index: place in the block, one for all rows or [R] int64.

    Returns:
        [R] int64.
    """
    _check_rows(weights.shape[0], seeds, keys)
    if uses_kernels(weights):
        from outrider.ops.sampling.triton import race_kernel

        assert weights.dtype == torch.float32, weights.dtype
        pdl = overlaps_launches(weights)
        return race_kernel(weights, seeds, keys, int(purpose), index, pdl=pdl)
    return race_reference(weights, seeds, keys, purpose, index)


def top_m(logits: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """The m largest logits of each row in descending order, lower ids first; NaN counts as -inf.

    Args:
        logits: [R, V]; rows may lie any distance apart.
        m: 1 .. min(V, MAX_TOP_M).

    Returns:
        scores [R, m] in logits' dtype, ids [R, m] int64.
    """
    assert 0 < m <= min(logits.shape[1], MAX_TOP_M), (m, logits.shape)
    if uses_kernels(logits):
        from outrider.ops.sampling.triton import top_m_kernel

        assert logits.dtype in SUPPORTED_DTYPES, logits.dtype
        return top_m_kernel(logits, m, pdl=overlaps_launches(logits))
    return top_m_reference(logits, m)


def draw_listed(
    scores: Tensor,
    token_ids: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    keys: Tensor,
    purpose: Purpose,
    index: int,
) -> tuple[Tensor, Tensor]:
    """Draw from a short ordered list, as top_m gives it, and say from which distribution.

    Args:
        scores: [R, m], descending, contiguous; m is at most MAX_TOP_M.
        token_ids: [R, m] int64, contiguous: they key the noise.
        temperature, top_k, top_p, min_p: [R], as in processed_probs of scores.
        seeds, keys: [R] int64.
        index: place in the block.

    Returns:
        tokens [R] int64, and the probabilities [R, m] float32 that they were drawn from.
    """
    assert scores.shape == token_ids.shape and scores.shape[1] <= MAX_TOP_M, scores.shape
    _check_rows(scores.shape[0], temperature, top_k, top_p, min_p, seeds, keys)
    if uses_kernels(scores):
        from outrider.ops.sampling.triton import draw_listed_kernel

        assert scores.dtype in SUPPORTED_DTYPES, scores.dtype
        return draw_listed_kernel(
            scores,
            token_ids,
            (temperature, top_k, top_p, min_p),
            seeds,
            keys,
            int(purpose),
            index,
            pdl=overlaps_launches(scores),
        )
    return draw_listed_reference(
        scores, token_ids, temperature, top_k, top_p, min_p, seeds, keys, purpose, index
    )


def block_terms_sparse(
    probs: Tensor, draft_token_ids: Tensor, num_drafts: Tensor, token_ids: Tensor, q: Tensor
) -> tuple[Tensor, Tensor]:
    """P_i and h_i of block verification, for drafts drawn from q over a few listed ids.

        P_0 = 1,  P_{i+1} = min(1, P_i p(x_{i+1}) / q(x_{i+1}))
        S_i = P_i - sum over the listed ids of min(P_i p, q)
        h_i = S_i / (S_i + 1 - P_i), 0 / 0 = 1;  h_i = P_i at the block's end

    Args:
        probs: [B, K + 1, V] float32 (on a CPU float64 too), contiguous: the target's distribution
            at each row.
        draft_token_ids: [B, K] int64.
        num_drafts: [B] int64, where each block ends.
        token_ids: [B, K, m] int64, distinct in a row where q is positive; blocks may lie any
            distance apart.
        q: [B, K, m] float32, likewise.

    Returns:
        reach [B, K + 1], P_0 .. P_K; accept [B, K + 1], h_0 = 1 and 0 past num_drafts.
    """
    assert token_ids.shape == q.shape and q.shape[:2] == draft_token_ids.shape, q.shape
    assert probs.shape[1] == draft_token_ids.shape[1] + 1, probs.shape
    if uses_kernels(probs):
        from outrider.ops.sampling.triton import block_terms_sparse_kernel

        assert probs.is_contiguous() and probs.dtype == q.dtype == torch.float32, probs.dtype
        assert token_ids[:1].is_contiguous() and q[:1].is_contiguous(), q.stride()
        _check_rows(probs.shape[0], num_drafts)
        return block_terms_sparse_kernel(
            probs, draft_token_ids, num_drafts, token_ids, q, pdl=overlaps_launches(probs)
        )
    return block_terms_sparse_reference(probs, draft_token_ids, num_drafts, token_ids, q)


def _check_rows(num_rows: int, *parameters: Tensor) -> None:
    for parameter in parameters:
        assert parameter.shape == (num_rows,) and parameter.stride(0) == 1, parameter.shape


__all__ = [
    "MAX_TOP_M",
    "SUPPORTED_DTYPES",
    "argmax",
    "block_terms_sparse",
    "draw_listed",
    "processed_probs",
    "race",
    "sample",
    "top_m",
]
