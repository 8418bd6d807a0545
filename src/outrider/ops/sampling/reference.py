"""Reference sampling, by sorting: the definition of what the kernels find without a sort.

NaN counts as -inf where a largest logit is looked for. A row whose logits hold NaN or +inf, or
nothing but -inf, has no distribution: its probabilities are NaN, and a draw from it is id 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.ops.philox.reference import Purpose, race_times_of_reference, race_times_reference

NEVER = float("-inf")


def argmax_reference(logits: Tensor, token_ids: Tensor | None) -> Tensor:
    """[R, V] -> [R]."""
    best = torch.where(logits.isnan(), NEVER, logits).argmax(-1)
    return best if token_ids is None else token_ids[best]


def processed_probs_reference(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """logits [R, V], parameters [R] -> [R, V]."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    temperature = torch.where(temperature > 0, temperature, 1.0)
    probs = torch.softmax(wide / temperature[:, None].to(wide.dtype), dim=-1)
    vocab_size = logits.shape[-1]
    # Looking costs a CPU nothing and saves the sort; on another device it would be a wait.
    if logits.is_cuda or bool(((top_k < vocab_size) | (top_p < 1)).any()):
        ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(vocab_size, device=logits.device)
        kept = torch.where(rank < top_k[:, None], ordered, 0.0)
        # Top-p looks at the distribution that top-k left.
        before = (kept.cumsum(-1) - kept) / kept.sum(-1, keepdim=True)
        # A top-p that float32 rounds to 0 must not empty the row, nor one of 1 cut its tail.
        always = (rank == 0) | (top_p[:, None] >= 1)
        open_nucleus = (before < top_p[:, None]) | always
        kept = torch.where(open_nucleus, kept, 0.0)
        probs = torch.zeros_like(probs).scatter(-1, ids, kept)
    threshold = min_p[:, None].to(probs.dtype) * probs.amax(-1, keepdim=True)
    probs = torch.where(probs >= threshold, probs, 0.0)
    return probs / probs.sum(-1, keepdim=True)


def sample_reference(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    token_ids: Tensor | None,
) -> Tensor:
    """logits [R, V], parameters, seeds and positions [R], token_ids [V] or None -> [R]."""
    probs = processed_probs_reference(logits, temperature, top_k, top_p, min_p)
    if token_ids is None:
        times = race_times_reference(seeds, positions, logits.shape[-1], Purpose.TARGET, 0)
    else:
        ids = token_ids.expand(logits.shape[0], -1)
        times = race_times_of_reference(seeds, positions, ids, Purpose.TARGET, 0)
    sampled = (times / probs).argmin(-1)
    best = torch.where(temperature > 0, sampled, argmax_reference(logits, None))
    return best if token_ids is None else token_ids[best]


def race_reference(
    weights: Tensor, seeds: Tensor, keys: Tensor, purpose: Purpose, index: Tensor | int
) -> Tensor:
    """weights [R, V], the others [R] -> [R]."""
    times = race_times_reference(seeds, keys, weights.shape[-1], purpose, index)
    return torch.where(weights > 0, times / weights, float("inf")).argmin(-1)


def top_m_reference(logits: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """[R, V] -> scores and ids [R, m]; torch.topk promises no order of equal scores."""
    wide = torch.where(logits.isnan(), NEVER, logits)
    last = wide.topk(m, dim=-1).values[:, -1:]
    above, ties = wide > last, wide == last
    missing = m - above.sum(-1, keepdim=True)
    kept = above | (ties & (ties.cumsum(-1) <= missing))
    ids = kept.nonzero()[:, 1].view(-1, m)
    scores, order = wide.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return scores, ids.gather(-1, order)


def draw_listed_reference(
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
    """scores and token_ids [R, m], the others [R] -> tokens [R] and probabilities [R, m]."""
    probs = processed_probs_reference(scores, temperature, top_k, top_p, min_p)
    times = race_times_of_reference(seeds, keys, token_ids, purpose, index)
    return token_ids.gather(-1, (times / probs).argmin(-1, keepdim=True))[:, 0], probs


def block_terms_sparse_reference(
    probs: Tensor, draft_token_ids: Tensor, num_drafts: Tensor, token_ids: Tensor, q: Tensor
) -> tuple[Tensor, Tensor]:
    """probs [B, K + 1, V], token_ids and q [B, K, m] -> reach and accept [B, K + 1]."""
    batch, most = draft_token_ids.shape
    index = torch.arange(most + 1, device=probs.device)
    p_drafted = probs[:, :-1].gather(-1, draft_token_ids[..., None])[..., 0]  # [B, K]
    q_drafted = torch.where(token_ids == draft_token_ids[..., None], q, 0.0).sum(-1)
    reach = [probs.new_ones(batch)]
    for i in range(most):
        ratio = p_drafted[:, i] / q_drafted[:, i]
        reach.append((reach[-1] * ratio.nan_to_num(0.0)).clamp(max=1.0))
    reaches = torch.stack(reach, dim=1)  # [B, K + 1]

    p_listed = probs[:, :-1].gather(-1, token_ids)  # [B, K, m]: row i is after i drafts
    overlap = torch.minimum(reaches[:, :-1, None] * p_listed, q).sum(-1)
    excess = (reaches[:, :-1] - overlap).clamp(min=0.0)  # S_i
    total = excess + 1.0 - reaches[:, :-1]
    inner = torch.where(total > 0, excess / total, 1.0)
    accept = torch.nn.functional.pad(inner, (0, 1))
    accept = torch.where(index == num_drafts[:, None], reaches, accept)
    accept = torch.where(index > num_drafts[:, None], 0.0, accept)
    accept[:, 0] = 1.0
    return reaches, accept
