"""Log probabilities of chosen tokens and of the most likely alternatives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.batch import Span, TokenLogprobs
from outrider.runner.decide import Decision
from outrider.sampling.arrays import SamplingArrays
from outrider.sampling.sampler import target_probs

ROWS_AT_ONCE = 64
"""Rows of a prompt that are scored together: float32 copies of their logits live at once."""


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


def prompt_logprobs(
    span: Span, logits: Tensor, next_token_ids: Tensor, sampling: SamplingArrays
) -> tuple[TokenLogprobs, ...]:
    """About the token after each of a chunk's rows: logits [R, V], next_token_ids [R]."""
    num_top = span.effects.num_prompt_logprobs
    assert num_top is not None, span
    reports: list[TokenLogprobs] = []
    for begin in range(0, logits.shape[0], ROWS_AT_ONCE):
        rows = logits[begin : begin + ROWS_AT_ONCE]
        scores = raw_logprobs(rows)
        if span.effects.processed_logprobs:
            slots = torch.full((rows.shape[0],), span.slot, device=logits.device)
            scores = processed_logprobs(rows, sampling.gather(slots))
        reports += describe(scores, next_token_ids[begin : begin + ROWS_AT_ONCE], num_top)
    return tuple(reports)


def emitted_logprobs(
    spans: Sequence[Span], decision: Decision, sampling: SamplingArrays
) -> dict[int, tuple[TokenLogprobs, ...]]:
    """By sequence id, for the spans that ask; waits for the device where one does."""
    return {
        span.sequence_id: _emitted(span, decision, index, sampling)
        for index, span in enumerate(spans)
        if span.effects.num_logprobs is not None
    }


def _emitted(
    span: Span, decision: Decision, index: int, sampling: SamplingArrays
) -> tuple[TokenLogprobs, ...]:
    assert span.effects.num_logprobs is not None, span
    num_emitted = int(decision.outcome.num_emitted[index])
    if span.effects.processed_logprobs:
        slots = torch.full((num_emitted,), span.slot, device=decision.logits.device)
        ruled = decision.ruled_logits[index, :num_emitted]
        scores = processed_logprobs(ruled, sampling.gather(slots))
    else:
        scores = raw_logprobs(decision.logits[index, :num_emitted])
    tokens = decision.outcome.token_ids[index, :num_emitted]
    return describe(scores, tokens, span.effects.num_logprobs)
