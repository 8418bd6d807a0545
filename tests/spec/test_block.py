"""The rule `block` is lossless and accepts the most: every branch of every small case.

A control is the same decoder with one mistake in it. A check that cannot fail proves nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

import pytest
import torch

from outrider.ops.bookkeeping.reference import accept_synthetic
from outrider.spec.verify import (
    SparseLaw,
    accept_block,
    block_terms,
    residual_probs,
)
from tests.spec import block_rule
from tests.spec.block_rule import Block, by_position
from tests.spec.enumeration import (
    Chain,
    Context,
    Decoder,
    End,
    GoesOn,
    Noise,
    Row,
    Rule,
    Sampled,
    Table,
    always,
    one_hot,
    random_table,
)
from tests.spec.rules import TokenWise, equality_for_rejection
from tests.spec.test_verify import TABLES, VISIBLE, bias, check_lossless

CASES = list(TABLES.items())


def truncated(table: Table, most: int) -> Table:
    """The `most` likeliest tokens of each row, renormalised: what a draft really samples from."""

    @cache
    def row(context: Context) -> Row:
        whole = table(context)
        kept = sorted(range(len(whole)), key=lambda i: (-whole[i], i))[:most]
        total = sum(whole[i] for i in kept)
        return tuple(q / total if i in kept else 0.0 for i, q in enumerate(whole))

    return row


def within(table: Table, token_ids: frozenset[int]) -> Table:
    """A draft vocabulary: q is zero outside it."""

    @cache
    def row(context: Context) -> Row:
        kept = [q if i in token_ids else 0.0 for i, q in enumerate(table(context))]
        if sum(kept) == 0:
            return one_hot(len(kept), min(token_ids))
        return tuple(q / sum(kept) for q in kept)

    return row


def from_text(most: int, seed: int) -> GoesOn:
    """0 .. most drafts, as the text at the round's start decides."""

    def goes_on(text: Context, chain: Chain) -> bool:
        wanted = random.Random(f"{seed} {text}").randint(0, most)
        return len(chain.token_ids) < wanted

    return goes_on


def from_drafts(most: int, seed: int) -> GoesOn:
    """Whether another draft is drawn depends on the drafts before it, never on itself."""

    def goes_on(text: Context, chain: Chain) -> bool:
        if len(chain.token_ids) == most:
            return False
        return random.Random(f"{seed} {text} {chain.token_ids}").random() < 0.6

    return goes_on


@pytest.mark.parametrize("num_drafts", [1, 2])
@pytest.mark.parametrize(("name", "tables"), CASES, ids=list(TABLES))
def test_sampled_drafts_leave_the_law_of_the_text_as_it_is(
    name: str, tables: tuple[Table, Table], num_drafts: int
) -> None:
    p, q = tables
    check_lossless(Decoder(p, Sampled(q), Block(), always(num_drafts)), num_drafts)


@pytest.mark.parametrize("seed", range(2))
def test_three_drafts_leave_the_law_of_the_text_as_it_is(seed: int) -> None:
    p, q = random_table(2, 40 + seed), random_table(2, 50 + seed)
    check_lossless(Decoder(p, Sampled(q), Block(), always(3)), 3)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tables"), CASES, ids=list(TABLES))
def test_three_drafts_over_three_tokens_leave_the_law_as_it_is(
    name: str, tables: tuple[Table, Table]
) -> None:
    p, q = tables
    check_lossless(Decoder(p, Sampled(q), Block(), always(3)), 3)


@pytest.mark.parametrize("seed", range(4))
def test_a_truncated_q_is_as_good_as_any(seed: int) -> None:
    p, q = random_table(4, 60 + seed), truncated(random_table(4, 70 + seed), 2)
    check_lossless(Decoder(p, Sampled(q), Block(), always(1)), 1)
    p, q = random_table(3, 80 + seed), truncated(random_table(3, 90 + seed), 2)
    check_lossless(Decoder(p, Sampled(q), Block(), always(2)), 2)


@pytest.mark.parametrize("seed", range(4))
def test_a_draft_vocabulary_smaller_than_the_targets_is_as_good_as_any(seed: int) -> None:
    p, q = random_table(3, 110 + seed), within(random_table(3, 120 + seed), frozenset({0, 2}))
    check_lossless(Decoder(p, Sampled(q), Block(), always(2)), 2)


@pytest.mark.parametrize("stops", [from_text, from_drafts])
@pytest.mark.parametrize("seed", range(3))
def test_lengths_decided_before_a_draft_is_drawn_leave_the_law_as_it_is(
    seed: int, stops: type[from_text]
) -> None:
    p, q = random_table(3, 130 + seed), random_table(3, 140 + seed)
    check_lossless(Decoder(p, Sampled(q), Block(), stops(2, seed)), 2)


def test_a_text_that_ends_inside_a_block_has_the_targets_law() -> None:
    p, q = TABLES["unrelated"]
    decoder = Decoder(p, Sampled(q), Block(), always(2))
    for end in (End(4, frozenset({1})), End(2), End(3, frozenset({0, 2}))):
        assert bias(decoder, 2, end) < 1e-12


CONTROLS: dict[str, Rule] = {
    "the first refusal stops the scan": Block(accept=block_rule.first_refusal_stops),
    "residual without P": Block(residual=block_rule.residual_without_reach),
    "the target's row for the residual": Block(residual=block_rule.target_for_residual),
    "inner form at the last draft": Block(terms=block_rule.inner_form_at_the_end),
    "token-wise chances taken for h": Block(terms=block_rule.token_wise_terms),
    "an equality test called rejection": TokenWise(acceptance=equality_for_rejection),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_a_mistaken_rule_is_noticed(name: str) -> None:
    p, q = TABLES["unrelated"]
    decoder = Decoder(p, Sampled(q), CONTROLS[name], always(2))
    assert bias(decoder, 1, End(3)) > VISIBLE


def test_noise_keyed_by_position_alone_is_noticed_over_two_rounds() -> None:
    def number(text: Context, index: int) -> tuple[str, int]:
        return "draft", len(text) + index

    p, q = random_table(3, 150), random_table(3, 160)
    decoder = Decoder(p, Sampled(q, number), Block(number=by_position), always(2))
    assert bias(decoder, 1, End(3)) < 1e-12, "one round cannot show it"
    assert bias(decoder, 2, End(6)) > VISIBLE


def test_dropping_a_draft_for_its_own_small_probability_is_noticed() -> None:
    p, q = TABLES["unrelated"]

    def keeps(_text: Context, chain: Chain) -> bool:
        return chain.rows[-1][chain.token_ids[-1]] > 0.3

    decoder = Decoder(p, Sampled(q), Block(), always(2), keeps=keeps)
    assert bias(decoder, 1, End(3)) > VISIBLE


def mean_accepted(decoder: Decoder, num_drafts: int) -> float:
    end = End(num_drafts + 1)
    total = 0.0
    for probability, chain, known in decoder.chains((), Noise()):
        for judged, emitted, _ in decoder.rule.branches(decoder.p, (), chain, known, end):
            total += probability * judged * (len(emitted) - 1)
    return total


@pytest.mark.parametrize(("name", "tables"), CASES, ids=list(TABLES))
def test_block_accepts_at_least_as_much_as_token_wise_rejection(
    name: str, tables: tuple[Table, Table]
) -> None:
    p, q = tables
    for num_drafts in (1, 2, 3):
        block, token_wise = (
            mean_accepted(Decoder(p, Sampled(q), rule, always(num_drafts)), num_drafts)
            for rule in (Block(), TokenWise())
        )
        assert block >= token_wise - 1e-12
        if num_drafts == 1:
            assert block == pytest.approx(token_wise, abs=1e-12)
    if name.startswith("unrelated"):
        assert block > token_wise + VISIBLE


def batch(seed: int, size: int = 64, most: int = 4, vocab_size: int = 9, width: int = 5):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand((size, most + 1, vocab_size), generator=generator, dtype=torch.float64) ** 3
    probs /= probs.sum(-1, keepdim=True)
    ids = torch.rand((size, most, vocab_size), generator=generator).argsort(-1)[..., :width]
    q = torch.rand((size, most, width), generator=generator, dtype=torch.float64) ** 2
    q /= q.sum(-1, keepdim=True)
    place = torch.randint(width, (size, most, 1), generator=generator)
    drafts = ids.gather(-1, place)[..., 0]
    num_drafts = torch.randint(most + 1, (size,), generator=generator)
    uniforms = torch.rand((size, most), generator=generator, dtype=torch.float64)
    return probs, drafts, num_drafts, SparseLaw(ids, q), uniforms


def restated(
    probs: list[list[float]], drafts: list[int], q: list[dict[int, float]], uniforms: list[float]
) -> Iterator[object]:
    """tau and the residual of one block, from the rule's text with dense sums."""
    reach, chances = [1.0], [1.0]
    for i, token_id in enumerate(drafts):
        reach.append(min(1.0, reach[-1] * probs[i][token_id] / q[i][token_id]))
    for i in range(1, len(drafts)):
        excess = sum(max(reach[i] * x - q[i].get(t, 0.0), 0.0) for t, x in enumerate(probs[i]))
        below = excess + 1 - reach[i]
        chances.append(1.0 if below == 0 else excess / below)
    chances.append(reach[-1])
    tau = max([i for i in range(1, len(drafts) + 1) if uniforms[i - 1] <= chances[i]], default=0)
    yield tau
    if tau == len(drafts):
        yield probs[tau]
    else:
        yield [max(reach[tau] * x - q[tau].get(t, 0.0), 0.0) for t, x in enumerate(probs[tau])]


@pytest.mark.parametrize("seed", range(6))
def test_decisions_and_residuals_are_those_of_the_rule_as_it_is_written(seed: int) -> None:
    probs, drafts, num_drafts, law, uniforms = batch(seed)
    terms = block_terms(probs, drafts, num_drafts, law)
    tau = accept_block(terms, uniforms)
    weights = residual_probs(probs, tau, num_drafts, law, terms)
    for b in range(len(probs)):
        count = int(num_drafts[b])
        rows = zip(law.token_ids[b].tolist(), law.probs[b].tolist(), strict=True)
        q = [dict(zip(ids, values, strict=True)) for ids, values in rows][:count]
        want_tau, want_row = restated(
            probs[b].tolist(), drafts[b, :count].tolist(), q, uniforms[b].tolist()
        )
        assert int(tau[b]) == want_tau
        assert weights[b].tolist() == pytest.approx(want_row, abs=1e-14)


def test_float32_terms_are_close_to_float64_and_neighbours_do_not_matter() -> None:
    probs, drafts, num_drafts, law, _ = batch(7)
    terms = block_terms(probs, drafts, num_drafts, law)
    single = SparseLaw(law.token_ids, law.probs.float())
    rounded = block_terms(probs.float(), drafts, num_drafts, single)
    assert (terms.reach - rounded.reach).abs().max() < 1e-5
    assert (terms.accept - rounded.accept).abs().max() < 1e-5
    for b in (0, 17, 63):
        alone = SparseLaw(single.token_ids[b : b + 1], single.probs[b : b + 1])
        mine = block_terms(
            probs[b : b + 1].float(), drafts[b : b + 1], num_drafts[b : b + 1], alone
        )
        assert torch.equal(mine.reach[0], rounded.reach[b])
        assert torch.equal(mine.accept[0], rounded.accept[b])


def test_a_q_equal_to_p_accepts_everything_and_disjoint_supports_nothing() -> None:
    row = torch.tensor([0.5, 0.3, 0.2, 0.0])
    probs = row.expand(1, 4, 4)
    ids = torch.tensor([[[0, 1, 2]] * 3])
    law = SparseLaw(ids, row[:3].expand(1, 3, 3))
    drafts, count = torch.tensor([[2, 0, 1]]), torch.tensor([3])
    terms = block_terms(probs, drafts, count, law)
    assert accept_block(terms, torch.full((1, 3), 0.9999999)).tolist() == [3]

    elsewhere = torch.tensor([0.0, 0.0, 0.0, 1.0]).expand(1, 4, 4)
    terms = block_terms(elsewhere, drafts, count, law)
    assert accept_block(terms, torch.full((1, 3), 1e-9)).tolist() == [0]
    weights = residual_probs(elsewhere, torch.tensor([0]), count, law, terms)
    assert weights.tolist() == [[0.0, 0.0, 0.0, 1.0]]


def test_an_empty_residual_falls_back_to_the_targets_row() -> None:
    row = torch.tensor([0.5, 0.5])
    law = SparseLaw(torch.tensor([[[0, 1]]]), row.expand(1, 1, 2))
    probs = row.expand(1, 2, 2)
    terms = block_terms(probs, torch.tensor([[0]]), torch.tensor([1]), law)
    weights = residual_probs(probs, torch.tensor([0]), torch.tensor([1]), law, terms)
    assert weights.tolist() == [[0.5, 0.5]]


def test_synthetic_acceptance_keeps_to_its_rates_and_to_the_drafts_there_are() -> None:
    rates = torch.tensor([0.75, 0.5, 0.125])
    uniform = (torch.arange(1000) + 0.5) / 1000
    kept = accept_synthetic(uniform, rates, torch.full((1000,), 3))
    assert [(kept >= i).float().mean().item() for i in (1, 2, 3)] == pytest.approx(
        [0.75, 0.5, 0.125], abs=1e-6
    )
    assert accept_synthetic(uniform, rates, torch.full((1000,), 1)).max() == 1
