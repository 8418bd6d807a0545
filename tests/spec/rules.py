"""Rules for the walk of enumeration.py: the production code, a yardstick, and mistaken ones."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import cache

import torch

from outrider.ops.bookkeeping.reference import accept_matching, trim_round
from tests.spec.enumeration import Chain, Context, End, Noise, Row, Table, target_number

NO_ID = -1
"""Fills unused stop entries."""

Judge = Callable[[Context, Context, Context, End], Context]
"""(text, the target's tokens, drafts, end) -> tokens emitted."""


def production(text: Context, sampled: Context, drafts: Context, end: End) -> Context:
    """A round of the code under test."""
    stops = tuple(sorted(end.stop_token_ids))
    return _production(sampled, drafts, len(text), end.limit, stops)


@cache
def _production(
    sampled: Context, drafts: Context, num_committed: int, limit: int, stops: Context
) -> Context:
    # The row stands between two others. What lies after its own drafts is garbage, and the worst
    # there is: it continues a run of matches.
    garbage = (sampled[-1],) * 2
    rows = torch.tensor([[0] * (len(sampled) + 2), sampled + garbage, [1] * (len(sampled) + 2)])
    proposed = torch.tensor([[0] * (len(drafts) + 2), drafts + garbage, [0] * (len(drafts) + 2)])
    num_drafts = torch.tensor([len(drafts), len(drafts), 0])
    num_accepted = accept_matching(rows, proposed, num_drafts)
    outcome = trim_round(
        rows,
        num_accepted,
        torch.full((3,), num_committed),
        torch.tensor([num_committed + 1, limit, num_committed + 9]),
        torch.tensor([[0, NO_ID], [*stops, NO_ID, NO_ID][:2], [NO_ID, NO_ID]]),
    )
    emitted = int(outcome.num_emitted[1])
    return tuple(outcome.token_ids[1, :emitted].tolist())


def row_by_row(text: Context, drafts: Context, row: int) -> Context:
    """Row i follows the text and the first i drafts."""
    return text + drafts[:row]


@dataclass(frozen=True)
class Match:
    """The target draws its own token at every row; production code judges.

    Args:
        number: names the noise of a row.
        context: what the row's distribution is conditioned on.
    """

    judge: Judge = production
    number: Callable[[Context, int], Hashable] = target_number
    context: Callable[[Context, Context, int], Context] = row_by_row

    def branches(
        self, p: Table, text: Context, chain: Chain, noise: Noise, end: End
    ) -> Iterator[tuple[float, Context, Noise]]:
        drafts = chain.token_ids
        partial: list[tuple[float, Context, Noise]] = [(1.0, (), noise)]
        for row in range(len(drafts) + 1):
            probs, name = p(self.context(text, drafts, row)), self.number(text, row)
            partial = [
                (probability * chance, (*sampled, token_id), after)
                for probability, sampled, known in partial
                for token_id, chance, after in known.split(name, probs)
            ]
        for probability, sampled, known in partial:
            yield probability, self.judge(text, sampled, drafts, end), known


def residual(p: Row, q: Row) -> Row:
    """max(p - q, 0), normalised; p where nothing is left."""
    left = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
    total = sum(left)
    return tuple(part / total for part in left) if total > 0 else p


@dataclass(frozen=True)
class TokenWise:
    """Token-wise rejection, the yardstick: accept x if u q(x) < p(x), else draw from p - q.

    Args:
        acceptance: chance of accepting x, given the rows of p and q.
        residual: distribution of the token that takes the place of a rejected draft.
    """

    acceptance: Callable[[Row, Row, int], float] = lambda p, q, x: min(1.0, p[x] / q[x])
    residual: Callable[[Row, Row], Row] = residual

    def branches(
        self, p: Table, text: Context, chain: Chain, noise: Noise, end: End
    ) -> Iterator[tuple[float, Context, Noise]]:
        begun = len(text)

        def walk(
            probability: float, num_accepted: int, noise: Noise
        ) -> Iterator[tuple[float, Context, Noise]]:
            accepted = chain.token_ids[:num_accepted]
            row = p(text + accepted)
            if num_accepted == len(chain.token_ids):
                yield from emit(probability, accepted, row, noise)
                return
            drawn_from, token_id = chain.rows[num_accepted], chain.token_ids[num_accepted]
            chance = self.acceptance(row, drawn_from, token_id)
            name = ("accept", begun, num_accepted)
            for refused, part, after in noise.split(name, (chance, 1.0 - chance)):
                if refused:
                    rest = self.residual(row, drawn_from)
                    yield from emit(probability * part, accepted, rest, after)
                else:
                    yield from walk(probability * part, num_accepted + 1, after)

        def emit(
            probability: float, accepted: Context, row: Row, noise: Noise
        ) -> Iterator[tuple[float, Context, Noise]]:
            for token_id, chance, after in noise.split(("residual", begun), row):
                yield probability * chance, end.trim(text, (*accepted, token_id)), after

        return walk(1.0, 0, noise)


# Mistakes, for the checks that must notice them.


def equality_for_rejection(p: Row, _q: Row, token_id: int) -> float:
    """The chance that a draw from p equals the draft."""
    return p[token_id]


def last_row_after_a_rejection(
    _text: Context, sampled: Context, drafts: Context, _end: End
) -> Context:
    num_accepted = leading_run(sampled, drafts)
    return (*drafts[:num_accepted], sampled[-1])


def bonus_from_the_row_before(
    _text: Context, sampled: Context, drafts: Context, _end: End
) -> Context:
    num_accepted = leading_run(sampled, drafts)
    own = num_accepted - 1 if num_accepted == len(drafts) else num_accepted
    return (*drafts[:num_accepted], sampled[own])


def every_match_counts(_text: Context, sampled: Context, drafts: Context, _end: End) -> Context:
    count = sum(a == b for a, b in zip(sampled, drafts, strict=False))
    return (*drafts[:count], sampled[count])


def rejected_draft_is_kept(_text: Context, sampled: Context, drafts: Context, _end: End) -> Context:
    num_accepted = leading_run(sampled, drafts)
    return (drafts + sampled[-1:])[: num_accepted + 1]


def leading_run(sampled: Context, drafts: Context) -> int:
    return next((i for i, x in enumerate(drafts) if sampled[i] != x), len(drafts))
