"""Exact law of a speculative decoder's text over a tiny vocabulary, by walking every branch.

Three parts are put together: tables of p and q for every context, a way to propose drafts, and a
rule that judges them. Whatever is random is drawn from named uniform numbers, so that two draws of
the same name share their number, as they do in an engine that keys its noise. A number is never
drawn as a whole: the walk splits its interval where a decision needs it (`Noise`), and remembers
the part it is in. Rounds that meet the same name again split that part further. Everything is
float64.

Knows nothing of the engine; the rules, and production code with them, are in rules.py.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Protocol

Context = tuple[int, ...]
"""Tokens after the prompt: committed ones, and drafts behind them."""

Row = tuple[float, ...]
"""A distribution over the vocabulary."""

Table = Callable[[Context], Row]
"""The distribution after each context."""

Law = Mapping[Context, float]
"""Probability of each text; texts that are not in it have none."""


@dataclass(frozen=True)
class Noise:
    """Uniform numbers by name, each known to lie in an interval; [0, 1) where nothing is known."""

    known: Mapping[Hashable, tuple[float, float]] = field(default_factory=dict)

    def split(self, name: Hashable, widths: Row) -> Iterator[tuple[int, float, Noise]]:
        """Decide which part of [0, 1) the number lies in, parts laid end to end.

        Yields:
            (index of the part, probability of it given what is known, what is known then). The
            middle of the interval can stand for the number in any code that decides alike.
        """
        low, high = self.known.get(name, (0.0, 1.0))
        ends = list(accumulate(widths))
        assert abs(ends[-1] - 1.0) < 1e-12, "parts of [0, 1) that do not fill it"
        begins, ends[-1] = [0.0, *ends[:-1]], 1.0
        for index, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            begin, end = max(begin, low), min(end, high)
            # A part of width 0 cannot be drawn, also where rounding left it a sliver of the end.
            if end > begin and widths[index] > 0:
                narrowed = {**self.known, name: (begin, end)}
                yield index, (end - begin) / (high - low), Noise(narrowed)


@dataclass(frozen=True)
class Chain:
    """Drafts x_1 .. x_k, and the distribution that each was really drawn from."""

    token_ids: Context = ()
    rows: tuple[Row, ...] = ()

    def then(self, token_id: int, row: Row) -> Chain:
        return Chain((*self.token_ids, token_id), (*self.rows, row))


class Proposal(Protocol):
    """How one draft is chosen: `text` is what has been committed, `chain` the drafts so far."""

    def branches(
        self, text: Context, chain: Chain, noise: Noise
    ) -> Iterator[tuple[float, Chain, Noise]]:
        """Every next draft with its probability, appended to the chain."""
        ...


class Rule(Protocol):
    """How drafts are judged."""

    def branches(
        self, p: Table, text: Context, chain: Chain, noise: Noise, end: End
    ) -> Iterator[tuple[float, Context, Noise]]:
        """Every outcome of a round with its probability: the tokens emitted, trimmed at `end`."""
        ...


@dataclass(frozen=True)
class End:
    """Where a text ends: after a stop id, or when it holds `limit` tokens."""

    limit: int
    stop_token_ids: frozenset[int] = frozenset()

    def reached(self, text: Context) -> bool:
        return len(text) == self.limit or (len(text) > 0 and text[-1] in self.stop_token_ids)

    def trim(self, text: Context, emitted: Context) -> Context:
        """`emitted` up to the first token that ends the text."""
        for count in range(1, len(emitted) + 1):
            if self.reached(text + emitted[:count]):
                return emitted[:count]
        return emitted


GoesOn = Callable[[Context, Chain], bool]
"""Whether another draft is drawn, given the text and the drafts so far."""


def always(num_drafts: int) -> GoesOn:
    """The same number of drafts in every round."""
    return lambda _text, chain: len(chain.token_ids) < num_drafts


@dataclass(frozen=True)
class Decoder:
    """A speculative decoder.

    Attributes:
        goes_on: decides the number of drafts, before each of them is drawn.
        keeps: decides after a draft was drawn whether it is verified; where it is not, the chain
            ends before it. Deciding from the value of a sampled draft is a mistake to be caught.
    """

    p: Table
    proposal: Proposal
    rule: Rule
    goes_on: GoesOn
    keeps: GoesOn = lambda _text, _chain: True

    def chains(self, text: Context, noise: Noise) -> Iterator[tuple[float, Chain, Noise]]:
        """Every chain that a round starting from `text` may verify."""
        branches = [(1.0, Chain(), noise)]
        while branches:
            probability, chain, known = branches.pop()
            if not self.goes_on(text, chain):
                yield probability, chain, known
                continue
            for chance, longer, after in self.proposal.branches(text, chain, known):
                if self.keeps(text, longer):
                    branches.append((probability * chance, longer, after))
                else:
                    yield probability * chance, chain, after

    def law(self, num_rounds: int, end: End) -> Law:
        """Law of whole texts: `num_rounds` speculative rounds, then p until the text ends."""
        states = [(1.0, (), Noise())]
        for _ in range(num_rounds):
            states = [after for state in states for after in self._round(state, end)]
        texts: dict[Context, float] = defaultdict(float)
        for probability, text, _ in states:
            texts[text] += probability
        return completed(texts, self.p, end)

    def _round(
        self, state: tuple[float, Context, Noise], end: End
    ) -> Iterator[tuple[float, Context, Noise]]:
        probability, text, noise = state
        if end.reached(text):
            yield state
            return
        for drawn, chain, known in self.chains(text, noise):
            for judged, emitted, after in self.rule.branches(self.p, text, chain, known, end):
                assert emitted and emitted == end.trim(text, emitted), "emitted past the end"
                yield probability * drawn * judged, text + emitted, after


def completed(texts: Law, p: Table, end: End) -> Law:
    """Law of the texts that begin like `texts` and go on by p until they end."""
    law = defaultdict(float, texts)
    for length in range(end.limit):
        for text in [text for text in law if len(text) == length and not end.reached(text)]:
            mass = law.pop(text)
            for token_id, chance in enumerate(p(text)):
                if chance > 0:
                    law[*text, token_id] += mass * chance
    return law


def target_law(p: Table, end: End) -> Law:
    """What plain decoding writes."""
    return completed({(): 1.0}, p, end)


def total_variation(one: Law, other: Law) -> float:
    """Half the sum of absolute differences: the most by which any event's probability differs."""
    return sum(abs(one.get(text, 0.0) - other.get(text, 0.0)) for text in {*one, *other}) / 2


def fixed_table(rows: Mapping[Context, Row], otherwise: Row) -> Table:
    """Rows as listed, one row everywhere else."""
    return lambda context: rows.get(context, otherwise)


def random_table(vocab_size: int, seed: int, share_of_zeros: float = 0.0) -> Table:
    """An unrelated random row after each context; one token at least keeps its probability."""

    @cache
    def row(context: Context) -> Row:
        draw = random.Random(f"{seed} {context}")
        weights = [draw.expovariate(1.0) for _ in range(vocab_size)]
        kept = draw.randrange(vocab_size)
        weights = [
            0.0 if token_id != kept and draw.random() < share_of_zeros else weight
            for token_id, weight in enumerate(weights)
        ]
        return tuple(weight / sum(weights) for weight in weights)

    return row


def one_hot(vocab_size: int, token_id: int) -> Row:
    return tuple(float(other == token_id) for other in range(vocab_size))


def one_hot_table(vocab_size: int, seed: int) -> Table:
    """All probability on a random token after each context."""

    @cache
    def row(context: Context) -> Row:
        return one_hot(vocab_size, random.Random(f"{seed} {context}").randrange(vocab_size))

    return row


@dataclass(frozen=True)
class Argmax:
    """Point-mass drafts: the likeliest token of q, the lowest id first."""

    q: Table

    def branches(
        self, text: Context, chain: Chain, noise: Noise
    ) -> Iterator[tuple[float, Chain, Noise]]:
        row = self.q(text + chain.token_ids)
        best = max(range(len(row)), key=lambda token_id: (row[token_id], -token_id))
        yield 1.0, chain.then(best, one_hot(len(row), best)), noise


def draft_number(text: Context, index: int) -> Hashable:
    """Noise of a draft, named by the round and the index in the block."""
    return "draft", len(text), index


def target_number(text: Context, index: int) -> Hashable:
    """Noise of the target's own token, named by its absolute position."""
    return "target", len(text) + index


@dataclass(frozen=True)
class Sampled:
    """Drafts drawn from q. Sharing the target's numbers makes them coupled."""

    q: Table
    number: Callable[[Context, int], Hashable] = draft_number

    def branches(
        self, text: Context, chain: Chain, noise: Noise
    ) -> Iterator[tuple[float, Chain, Noise]]:
        row = self.q(text + chain.token_ids)
        name = self.number(text, len(chain.token_ids))
        for token_id, chance, after in noise.split(name, row):
            yield chance, chain.then(token_id, row), after
