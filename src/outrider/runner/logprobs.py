"""Log probabilities of chosen tokens and of the most likely alternatives."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.batch import TokenLogprobs
from outrider.sampling.arrays import SamplingArrays
from outrider.sampling.sampler import target_probs


def raw_logprobs(logits: Tensor) -> Tensor:
    """The model's own distribution: [R, V] -> [R, V] float32."""
    return torch.log_softmax(logits.float(), dim=-1)


def processed_logprobs(ruled_logits: Tensor, sampling: SamplingArrays) -> Tensor:
    """The distribution that tokens are drawn from (a greedy entry counts as temperature 1)."""
    return target_probs(ruled_logits, sampling).log()


def describe(logprobs: Tensor, token_ids: Tensor, num_top: int) -> tuple[TokenLogprobs, ...]:
    """What is reported of each row.

    Args:
        logprobs: [R, V].
        token_ids: [R] int64, the token that was chosen.
        num_top: how many alternatives to list; those of probability 0 are left out.
    """
    chosen = logprobs.gather(-1, token_ids[:, None])
    ranks = (logprobs > chosen).sum(-1) + 1
    values, ids = logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1)
    tops = zip(ids.tolist(), values.tolist(), strict=True)
    return tuple(
        TokenLogprobs(
            token,
            logprob,
            rank,
            tuple((i, v) for i, v in zip(top_ids, top_values, strict=True) if v > float("-inf")),
        )
        for token, logprob, rank, (top_ids, top_values) in zip(
            token_ids.tolist(), chosen[:, 0].tolist(), ranks.tolist(), tops, strict=True
        )
    )
