"""Which drafts survive, and what a round commits.

Rule `match`, for drafts that are a point mass given the noise (an argmax, a lookup, a coupled
draw): the target draws its own token y_i ~ p(. | x_<i) at every row, drafts are accepted while
y_i == x_i, and the first y_i that differs (or the one after the last draft) is emitted too. Every
emitted token is the target's own draw, so the law of the text is the target's, whatever was
proposed. At temperature 0 the draw is the argmax. It is part of ops.bookkeeping.commit_round.

Rule `block`, for drafts x_i ~ q(. | x_<i):

    P_0 = 1,  P_i = min(1, P_{i-1} p(x_i | x_<i) / q(x_i | x_<i))
    S_i = sum_x max(P_i p(x | x_<=i) - q(x | x_<=i), 0)
    h_i = S_i / (S_i + 1 - P_i) for i < k (0/0 = 1),  h_k = P_k

accepts tau = the largest i with u_i <= h_i, a later acceptance overriding an earlier refusal, and
emits y ~ p after a whole block, else y ~ max(P_tau p - q, 0) normalised. It accepts at least as
many drafts as token-wise rejection (Z. Sun et al., "Block verification accelerates speculative
decoding", 2024).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.ops.sampling import block_terms_sparse


@dataclass(frozen=True)
class SparseLaw:
    """The distribution q that each draft was drawn from: zero outside the listed ids.

    Attributes:
        token_ids: [B, K, m] int64, distinct within a row where probs are positive.
        probs: [B, K, m], rows sum to 1; entries that are not used are 0.
    """

    token_ids: Tensor
    probs: Tensor


@dataclass(frozen=True)
class BlockTerms:
    """P and h of the rule, entry i for a block cut after i drafts.

    Attributes:
        reach: [B, K + 1], P_0 .. P_K.
        accept: [B, K + 1], h_0 .. h_K; h_0 is 1 and entries past num_drafts are 0.
    """

    reach: Tensor
    accept: Tensor


def block_terms(
    probs: Tensor, draft_token_ids: Tensor, num_drafts: Tensor, q: SparseLaw
) -> BlockTerms:
    """P_i and h_i of every block.

    Args:
        probs: [B, T, V] the target's distribution at each row, float32 (on a CPU float64 too),
            contiguous.
        draft_token_ids: [B, T - 1].
        num_drafts: [B].
    """
    return BlockTerms(*block_terms_sparse(probs, draft_token_ids, num_drafts, q.token_ids, q.probs))


def accept_block(terms: BlockTerms, uniforms: Tensor) -> Tensor:
    """tau: the largest i with u_i <= h_i, [B] int64; uniforms [B, K] in (0, 1)."""
    index = torch.arange(1, uniforms.shape[1] + 1, device=uniforms.device)
    return torch.where(uniforms <= terms.accept[:, 1:], index, 0).amax(-1)


def residual_probs(
    probs: Tensor, num_accepted: Tensor, num_drafts: Tensor, q: SparseLaw, terms: BlockTerms
) -> Tensor:
    """Weights [B, V] (not normalised) of the token that a round adds after num_accepted drafts.

    A residual that is zero everywhere, which is p == q up to rounding, falls back to p.
    """
    row = torch.arange(probs.shape[0], device=probs.device)
    target = probs[row, num_accepted]
    cut = num_accepted < num_drafts
    refused = num_accepted.clamp(max=q.probs.shape[1] - 1)  # index of the first draft not kept
    weights = terms.reach[row, num_accepted][:, None] * target
    weights = weights.scatter_add(-1, q.token_ids[row, refused], -q.probs[row, refused])
    weights = weights.clamp(min=0.0)
    usable = cut & (weights.sum(-1) > 0)
    return torch.where(usable[:, None], weights, target)
