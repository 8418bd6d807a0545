"""Many texts of a decoder whose model is a table, against the law that the table states.

The model is faked; sampling, its noise, verification, trimming and the draft-length policy are the
engine's own, over batches of sequences whose rounds differ in length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from outrider.ops.bookkeeping.reference import accept_matching, trim_round
from outrider.sampling.arrays import SamplingArrays
from outrider.sampling.sampler import sample_rows
from outrider.spec.policy import num_drafts_to_verify

VOCAB_SIZE = 3
LENGTH = 4
NUM_TEXTS = VOCAB_SIZE**LENGTH
MAX_DRAFTS = 3
NUM_PROMPT = 2**32 - 2
"""Tokens before the text, so that its positions cross a word of the noise's counter."""
NO_ID = -1
FALSE_ALARM = 1e-9
CHUNK = 2**16

# A text is a node of the tree of all texts: the empty one is node 0, and token t leads from node c
# to its child V c + 1 + t. Nodes are in order of length.
NUM_CONTEXTS = (NUM_TEXTS - 1) // (VOCAB_SIZE - 1)
"""Texts that are not whole; whole ones are numbered from here."""


def child(nodes: Tensor, token_ids: Tensor) -> Tensor:
    return VOCAB_SIZE * nodes + 1 + token_ids


def random_tables() -> tuple[Tensor, Tensor, Tensor]:
    """Logits of each context, its draft, and how many drafts a round that starts there wants."""
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(NUM_CONTEXTS, VOCAB_SIZE, generator=generator)
    guesses = torch.randint(0, VOCAB_SIZE, (NUM_CONTEXTS,), generator=generator)
    right = torch.rand(NUM_CONTEXTS, generator=generator) < 0.5
    wanted = torch.randint(0, MAX_DRAFTS + 1, (NUM_CONTEXTS,), generator=generator)
    wanted[0] = MAX_DRAFTS
    return logits, torch.where(right, logits.argmax(-1), guesses), wanted


LOGITS, DRAFTS, WANTED = random_tables()
PROBS = LOGITS.double().softmax(-1)


@dataclass(frozen=True)
class Texts:
    """What a run wrote, a text for each seed.

    Attributes:
        nodes: [N], the whole texts.
        corrected: [N], the text after the first round that accepted some drafts and refused
            others; the whole text where no such round left anything to write.
        num_rounds: [N].
    """

    nodes: Tensor
    corrected: Tensor
    num_rounds: Tensor


Positions = Callable[[Tensor, Tensor], Tensor]
"""What keys the noise: (tokens before the round [B, 1], row in the block [T]) -> [B, T]."""


def absolute(num_committed: Tensor, row: Tensor) -> Tensor:
    return num_committed + row


def write(seeds: Tensor, speculate: bool = True, positions: Positions = absolute) -> Texts:
    """Decode one text for each seed, in batches."""
    parts = [_write(chunk, speculate, positions) for chunk in seeds.split(CHUNK)]
    return Texts(
        torch.cat([part.nodes for part in parts]),
        torch.cat([part.corrected for part in parts]),
        torch.cat([part.num_rounds for part in parts]),
    )


def _write(seeds: Tensor, speculate: bool, positions: Positions) -> Texts:
    nodes, lengths, num_rounds = torch.zeros(3, len(seeds), dtype=torch.int64)
    corrected = torch.full_like(nodes, NUM_CONTEXTS)
    limit = NUM_PROMPT + LENGTH
    allowed = torch.tensor(
        [
            [num_drafts_to_verify(wanted, NUM_PROMPT + n, limit) for n in range(LENGTH)]
            for wanted in range(MAX_DRAFTS + 1)
        ]
    )
    while len(live := (lengths < LENGTH).nonzero()[:, 0]):
        start, committed = nodes[live], NUM_PROMPT + lengths[live]
        num_drafts = allowed[WANTED[start] * speculate, lengths[live]]
        rows, drafts = _rows(start, int(num_drafts.max()))
        keys = positions(committed[:, None], torch.arange(rows.shape[1])).expand(rows.shape)
        sampled = _sample(rows, seeds[live], keys)
        num_accepted = accept_matching(sampled, drafts, num_drafts)
        outcome = trim_round(
            sampled,
            num_accepted,
            committed,
            torch.full_like(start, limit),
            torch.full_like(start, NO_ID)[:, None],
        )
        assert torch.equal(outcome.num_emitted, num_accepted + 1), (
            "drafts that no text has room for"
        )
        node = start
        for row in range(rows.shape[1]):
            longer = child(node, outcome.token_ids[:, row])
            node = torch.where(row < outcome.num_emitted, longer, node)
        partial = (num_accepted > 0) & (num_accepted < num_drafts) & ~outcome.at_limit
        first = partial & (corrected[live] == NUM_CONTEXTS)
        corrected[live] = torch.where(first, node, corrected[live])
        nodes[live] = node
        lengths[live] += outcome.num_emitted
        num_rounds[live] += 1
    return Texts(nodes, corrected, num_rounds)


def _rows(start: Tensor, most_drafts: int) -> tuple[Tensor, Tensor]:
    """Contexts [B, T] of a round's rows, garbage past the end, and its drafts [B, T - 1]."""
    contexts, drafts = [start], list[Tensor]()
    for _ in range(most_drafts):
        drafts.append(DRAFTS[contexts[-1]])
        contexts.append(child(contexts[-1], drafts[-1]).clamp(max=NUM_CONTEXTS - 1))
    block = torch.stack(drafts, 1) if drafts else start.new_zeros(len(start), 0)
    return torch.stack(contexts, 1), block


def _sample(contexts: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """The target's own tokens [B, T] at temperature 1."""
    sampling = SamplingArrays.empty(contexts.numel(), VOCAB_SIZE, contexts.device)
    sampling.temperature.fill_(1.0)
    sampling.seeds.copy_(seeds.repeat_interleave(contexts.shape[1]))
    keys = positions.flatten().contiguous()
    return sample_rows(LOGITS[contexts.flatten()], sampling, keys).view_as(contexts)


def text_law() -> Tensor:
    """[NUM_TEXTS] float64, by the chain rule."""
    law = torch.ones(1, dtype=torch.float64)
    for length in range(LENGTH):
        first = (VOCAB_SIZE**length - 1) // (VOCAB_SIZE - 1)
        law = (law[:, None] * PROBS[first : first + len(law)]).flatten()
    return law


def total_variation(counts: Tensor, expected: Tensor) -> float:
    """Between two laws given as counts that have the same sum."""
    return float((counts - expected).abs().sum() / counts.sum() / 2)


def limit(num_samples: int, num_categories: int) -> float:
    """Total variation that samples of the right law exceed with probability FALSE_ALARM at most.

    Its mean is sqrt((C - 1) / N) / 2 at most, by Cauchy and Schwarz over the categories' standard
    deviations; one sample moves it by 1 / N, so McDiarmid bounds what it adds to its mean.
    """
    mean = math.sqrt((num_categories - 1) / num_samples) / 2
    return mean + math.sqrt(math.log(1 / FALSE_ALARM) / (2 * num_samples))


def text_bias(texts: Texts) -> float:
    counts = torch.bincount(texts.nodes - NUM_CONTEXTS, minlength=NUM_TEXTS).double()
    return total_variation(counts, text_law() * len(texts.nodes))


def after_correction(texts: Texts) -> tuple[Tensor, Tensor]:
    """Texts that a first correction left unfinished, and the token that each went on with."""
    open_ended = texts.corrected < NUM_CONTEXTS
    corrected, nodes = texts.corrected[open_ended], texts.nodes[open_ended]
    while bool((parent(nodes) > corrected).any()):
        nodes = torch.where(parent(nodes) > corrected, parent(nodes), nodes)
    assert torch.equal(parent(nodes), corrected)
    return corrected, nodes - child(corrected, torch.zeros_like(corrected))


def parent(nodes: Tensor) -> Tensor:
    return (nodes - 1) // VOCAB_SIZE


def continuation_bias(texts: Texts) -> tuple[float, float]:
    """Total variation of (text, next token) after a first correction, and its limit."""
    corrected, token_ids = after_correction(texts)
    counts = torch.zeros(NUM_CONTEXTS, VOCAB_SIZE, dtype=torch.float64)
    counts.index_put_((corrected, token_ids), torch.ones(()).double(), accumulate=True)
    seen = counts.sum(-1, keepdim=True)
    # Given the texts, each has V - 1 free categories.
    num_categories = 1 + (VOCAB_SIZE - 1) * int((seen > 0).sum())
    return total_variation(counts, seen * PROBS), limit(len(corrected), num_categories)


@cache
def a_million_texts() -> Texts:
    return write(torch.arange(1_000_000))


def test_rounds_of_every_length_and_outcome_take_part() -> None:
    texts = a_million_texts()
    assert set(texts.num_rounds.tolist()) == {1, 2, 3, 4}
    assert int((texts.corrected < NUM_CONTEXTS).sum()) > 100_000


def test_a_million_whole_texts_follow_the_law_of_the_target() -> None:
    assert NUM_TEXTS == 81
    assert limit(1_000_000, NUM_TEXTS) < 0.0078
    assert text_bias(a_million_texts()) < 0.0078


def test_the_token_after_a_partial_acceptance_follows_the_law_of_the_target() -> None:
    bias, allowed = continuation_bias(a_million_texts())
    assert bias < allowed < 0.009


def test_a_text_is_the_same_with_and_without_speculation_token_for_token() -> None:
    plain = write(torch.arange(100_000), speculate=False)
    assert set(plain.num_rounds.tolist()) == {LENGTH}
    assert torch.equal(plain.nodes, a_million_texts().nodes[:100_000])


def test_a_text_does_not_depend_on_the_texts_beside_it() -> None:
    seeds = torch.randperm(1_000_000, generator=torch.Generator().manual_seed(1))[:5_000]
    assert torch.equal(write(seeds).nodes, a_million_texts().nodes[seeds])


def test_large_seeds_are_as_good_as_small_ones() -> None:
    texts = write(2**63 - 1 - torch.arange(100_000))
    assert text_bias(texts) < limit(100_000, NUM_TEXTS)


SHARED = {
    "one number for all positions": lambda num_committed, row: 0 * num_committed,
    "one number for the rows of a round": lambda num_committed, row: num_committed,
    "numbers by the row in the block": lambda num_committed, row: row,
}


@pytest.mark.parametrize("positions", SHARED.values(), ids=list(SHARED))
def test_noise_that_is_shared_wrongly_is_noticed(positions: Positions) -> None:
    texts = write(torch.arange(100_000), positions=positions)
    assert text_bias(texts) > limit(100_000, NUM_TEXTS)


def test_noise_that_rounds_share_is_noticed_in_the_token_after_a_partial_acceptance() -> None:
    shared = SHARED["numbers by the row in the block"]
    bias, allowed = continuation_bias(write(torch.arange(100_000), positions=shared))
    assert bias > allowed


def test_one_seed_for_all_sequences_is_noticed() -> None:
    texts = write(torch.zeros(1_000, dtype=torch.int64))
    assert text_bias(texts) > limit(1_000, NUM_TEXTS)
