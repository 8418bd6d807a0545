"""The rule `block` for the walk of enumeration.py: production code, and mistaken forms of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from outrider.spec.verify import (
    BlockTerms,
    SparseLaw,
    accept_block,
    block_terms,
    residual_probs,
)
from tests.spec.enumeration import Chain, Context, End, Noise, Row, Table, target_number

Accept = Callable[[BlockTerms, Tensor], Tensor]
Residual = Callable[[Tensor, Tensor, Tensor, SparseLaw, BlockTerms], Tensor]
Terms = Callable[[Tensor, Tensor, Tensor, SparseLaw], BlockTerms]
Number = Callable[[str, int, int], Hashable]


def by_round(purpose: str, begun: int, index: int) -> Hashable:
    """Noise named by the round (its number of committed tokens), the index and the purpose."""
    return purpose, begun, index


def by_position(purpose: str, begun: int, index: int) -> Hashable:
    """The mistake: a position that is drawn again meets the numbers that decided it before."""
    return purpose, begun + index


def sparse(rows: tuple[Row, ...], width: int) -> SparseLaw:
    """Rows of q as the listed ids and probabilities, likeliest first, padded with nothing."""
    ids = torch.zeros((1, len(rows), width), dtype=torch.int64)
    probs = torch.zeros((1, len(rows), width), dtype=torch.float64)
    for place, row in enumerate(rows):
        listed = sorted((i for i, q in enumerate(row) if q > 0), key=lambda i: -row[i])
        for column, token_id in enumerate(listed):
            ids[0, place, column] = token_id
            probs[0, place, column] = row[token_id]
    return SparseLaw(ids, probs)


@dataclass(frozen=True)
class Block:
    """Production code judges; every pattern of the acceptance numbers is walked.

    Args:
        padding: rows past the block's own drafts that hold garbage, as in a mixed batch.
    """

    terms: Terms = block_terms
    accept: Accept = accept_block
    residual: Residual = residual_probs
    number: Number = by_round
    padding: int = 1

    def branches(
        self, p: Table, text: Context, chain: Chain, noise: Noise, end: End
    ) -> Iterator[tuple[float, Context, Noise]]:
        drafts, begun, count = chain.token_ids, len(text), len(chain.token_ids)
        rows = [p(text + drafts[:row]) for row in range(count + 1)]
        vocab_size, width = len(rows[0]), len(rows[0]) + 1
        probs = torch.tensor([rows + [rows[0]] * self.padding], dtype=torch.float64)
        ids = torch.tensor([[*drafts, *([0] * self.padding)]])
        garbage = ((1.0,) + (0.0,) * (vocab_size - 1),) * self.padding
        law = sparse(chain.rows + garbage, width)
        num_drafts = torch.tensor([count])
        terms = self.terms(probs, ids, num_drafts, law)
        chances: list[float] = terms.accept[0, 1 : count + 1].tolist()
        for pattern in product((True, False), repeat=count):
            partial = [(1.0, noise)]
            uniforms = torch.full((1, count + self.padding), 0.5, dtype=torch.float64)
            for index, (accepted, chance) in enumerate(zip(pattern, chances, strict=True)):
                name = self.number("accept", begun, index)
                partial = [
                    (probability * part, after)
                    for probability, known in partial
                    for which, part, after in known.split(name, (chance, 1.0 - chance))
                    if (which == 0) == accepted
                ]
                uniforms[0, index] = chance / 2 if accepted else (1 + chance) / 2
            tau = self.accept(terms, uniforms)
            weights = self.residual(probs, tau, num_drafts, law, terms)[0]
            kept = int(tau)
            row = tuple((weights / weights.sum()).tolist())
            name = self.number("residual", begun, kept)
            if kept == count:
                name = target_number(text, count)
            for probability, known in partial:
                for token_id, chance, after in known.split(name, row):
                    emitted = end.trim(text, (*drafts[:kept], token_id))
                    yield probability * chance, emitted, after


# Mistakes that others have made.


def first_refusal_stops(terms: BlockTerms, uniforms: Tensor) -> Tensor:
    return (uniforms <= terms.accept[:, 1:]).long().cumprod(-1).sum(-1)


def residual_without_reach(
    probs: Tensor, num_accepted: Tensor, num_drafts: Tensor, q: SparseLaw, terms: BlockTerms
) -> Tensor:
    """max(p - q, 0), as token-wise rejection draws."""
    whole = BlockTerms(torch.ones_like(terms.reach), terms.accept)
    return residual_probs(probs, num_accepted, num_drafts, q, whole)


def target_for_residual(
    probs: Tensor, num_accepted: Tensor, num_drafts: Tensor, q: SparseLaw, terms: BlockTerms
) -> Tensor:
    return residual_probs(probs, num_accepted, num_accepted, q, terms)


def inner_form_at_the_end(
    probs: Tensor, draft_token_ids: Tensor, num_drafts: Tensor, q: SparseLaw
) -> BlockTerms:
    """h of the last valid draft as if the block went on behind it."""
    longer = block_terms(probs, draft_token_ids, num_drafts + 1, q)
    index = torch.arange(longer.accept.shape[1])
    return BlockTerms(longer.reach, torch.where(index > num_drafts[:, None], 0.0, longer.accept))


def token_wise_terms(
    probs: Tensor, draft_token_ids: Tensor, num_drafts: Tensor, q: SparseLaw
) -> BlockTerms:
    """Each draft's own min(1, p / q) taken for h."""
    terms = block_terms(probs, draft_token_ids, num_drafts, q)
    own = [terms.reach[:, :1]]
    for i in range(draft_token_ids.shape[1]):
        one = SparseLaw(q.token_ids[:, i : i + 1], q.probs[:, i : i + 1])
        rows = probs[:, i : i + 2]
        single = block_terms(rows, draft_token_ids[:, i : i + 1], torch.ones_like(num_drafts), one)
        own.append(single.reach[:, 1:2])
    accept = torch.where(terms.accept > 0, torch.cat(own, dim=1), terms.accept)
    return BlockTerms(terms.reach, accept)
