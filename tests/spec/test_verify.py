"""The rule `match` is lossless: every branch of every small case, and controls that must fail.

A control is the same decoder with one mistake in it. A check that cannot fail proves nothing.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import Tensor

from outrider.ops.bookkeeping.reference import accept_matching, trim_round
from tests.spec import rules
from tests.spec.enumeration import (
    Argmax,
    Context,
    Decoder,
    End,
    GoesOn,
    Noise,
    Proposal,
    Sampled,
    Table,
    always,
    fixed_table,
    one_hot,
    one_hot_table,
    random_table,
    target_law,
    target_number,
    total_variation,
)
from tests.spec.rules import NO_ID, Match, TokenWise, leading_run

ROUNDING = 1e-12
VISIBLE = 1e-3


def bias(decoder: Decoder, num_rounds: int, end: End) -> float:
    """Total variation between the decoder's law and the target's."""
    law = decoder.law(num_rounds, end)
    assert sum(law.values()) == pytest.approx(1.0, abs=ROUNDING)
    return total_variation(law, target_law(decoder.p, end))


def check_lossless(decoder: Decoder, num_drafts: int) -> None:
    """One round and the k + 1 tokens that it may emit, then two rounds and theirs."""
    for num_rounds in (1, 2):
        end = End(num_rounds * (num_drafts + 1))
        law, want = decoder.law(num_rounds, end), target_law(decoder.p, end)
        assert total_variation(law, want) < ROUNDING
        assert set(law) <= set(want), "a text that the target cannot write"


P3, Q3 = random_table(3, 1), random_table(3, 2)
SKEWED = fixed_table({}, (0.9, 0.1, 0.0))
LAST = fixed_table({}, one_hot(3, 2))
TABLES: dict[str, tuple[Table, Table]] = {
    "unrelated": (P3, Q3),
    "unrelated too": (random_table(3, 3), random_table(3, 4)),
    "zeros in p": (random_table(3, 5, 0.5), random_table(3, 6)),
    "zeros in p and q": (random_table(3, 7, 0.5), random_table(3, 8, 0.5)),
    "one-hot p": (one_hot_table(3, 9), random_table(3, 10)),
    "one-hot q": (random_table(3, 11), one_hot_table(3, 12)),
    "both one-hot": (one_hot_table(3, 13), one_hot_table(3, 14)),
    "p equals q": (P3, P3),
    "one-hot p equals q": (one_hot_table(3, 15), one_hot_table(3, 15)),
    "draft outside the support": (SKEWED, LAST),
    "draft nearly always right": (SKEWED, SKEWED),
    "uniform": (fixed_table({}, (1 / 3, 1 / 3, 1 / 3)), Q3),
    "certain after the first token": (
        fixed_table({(): (0.25, 0.25, 0.5)}, (0.0, 1.0, 0.0)),
        fixed_table({}, (0.0, 0.5, 0.5)),
    ),
}


@pytest.mark.parametrize("num_drafts", [1, 2])
@pytest.mark.parametrize(("p", "q"), TABLES.values(), ids=list(TABLES))
def test_argmax_drafts_leave_the_law_of_the_text_as_it_is(
    p: Table, q: Table, num_drafts: int
) -> None:
    check_lossless(Decoder(p, Argmax(q), Match(), always(num_drafts)), num_drafts)


@pytest.mark.parametrize("name", ["unrelated", "zeros in p and q", "draft outside the support"])
def test_three_drafts_leave_the_law_of_the_text_as_it_is(name: str) -> None:
    p, q = TABLES[name]
    check_lossless(Decoder(p, Argmax(q), Match(), always(3)), 3)


@pytest.mark.parametrize("seed", range(20))
def test_a_vocabulary_of_four_is_no_different(seed: int) -> None:
    p, q = random_table(4, 100 + seed, 0.4), random_table(4, 200 + seed, 0.4)
    check_lossless(Decoder(p, Argmax(q), Match(), always(1)), 1)


@pytest.mark.slow
@pytest.mark.parametrize(("vocab_size", "num_drafts"), [(3, 3), (4, 2)])
@pytest.mark.parametrize("seed", range(12))
def test_many_more_tables_leave_the_law_of_the_text_as_it_is(
    seed: int, vocab_size: int, num_drafts: int
) -> None:
    zeros = 0.2 * (seed % 3)
    p, q = random_table(vocab_size, 500 + seed, zeros), random_table(vocab_size, 600 + seed, zeros)
    check_lossless(Decoder(p, Argmax(q), Match(), always(num_drafts)), num_drafts)
    check_lossless(Decoder(p, Argmax(q), Match(), length_from_drafts(num_drafts, seed)), num_drafts)


def length_from_text(most: int, seed: int) -> GoesOn:
    """0 .. most drafts, fixed when the round starts."""

    @cache
    def wanted(text: Context) -> int:
        return random.Random(f"{seed} {text}").randint(0, most)

    return lambda text, chain: len(chain.token_ids) < wanted(text)


def length_from_drafts(most: int, seed: int) -> GoesOn:
    """A stop that looks at the drafts before the one that would be drawn next."""

    @cache
    def stops(text: Context) -> bool:
        return random.Random(f"{seed} {text}").random() < 0.3

    return lambda text, chain: len(chain.token_ids) < most and not stops(text + chain.token_ids)


ADAPTIVE = {
    "no drafts": always(0),
    "by text": length_from_text(2, 1),
    "by text, longer": length_from_text(3, 6),
    "by drafts": length_from_drafts(2, 1),
    "by drafts, longer": length_from_drafts(3, 3),
    "one then none": lambda text, chain: len(text) + len(chain.token_ids) < 1,
    "none then two": lambda text, chain: len(text) >= 1 and len(chain.token_ids) < 2,
    "always two": always(2),
}


@pytest.mark.parametrize("name", ["unrelated", "zeros in p", "one-hot q"])
@pytest.mark.parametrize("goes_on", ADAPTIVE.values(), ids=list(ADAPTIVE))
def test_lengths_that_adapt_leave_the_law_of_the_text_as_it_is(goes_on: GoesOn, name: str) -> None:
    p, q = TABLES[name]
    check_lossless(Decoder(p, Argmax(q), Match(), goes_on), 2)


@pytest.mark.parametrize("num_drafts", [1, 2])
@pytest.mark.parametrize("stops", [frozenset({0}), frozenset({2}), frozenset({0, 1})], ids=str)
@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5])
def test_texts_that_end_inside_a_block_keep_their_law(
    limit: int, stops: frozenset[int], num_drafts: int
) -> None:
    for p, q in (TABLES["unrelated"], TABLES["zeros in p"]):
        decoder = Decoder(p, Argmax(q), Match(), always(num_drafts))
        assert bias(decoder, 2, End(limit, stops)) < ROUNDING


def drop_unlikely(q: Table, least: float) -> GoesOn:
    """Drops a draft, after it was drawn, where q gave it little."""
    return lambda text, chain: q(text + chain.token_ids[:-1])[chain.token_ids[-1]] >= least


def test_argmax_drafts_may_be_dropped_for_their_value() -> None:
    decoder = Decoder(P3, Argmax(Q3), Match(), always(2), keeps=drop_unlikely(Q3, 0.6))
    assert {len(chain.token_ids) for _, chain, _ in decoder.chains((), Noise())} == {0}
    check_lossless(decoder, 2)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("coupled", [False, True], ids=["independent", "coupled"])
def test_match_is_lossless_for_sampled_and_for_coupled_drafts(seed: int, coupled: bool) -> None:
    p, q = random_table(3, 300 + seed, 0.3), random_table(3, 400 + seed, 0.3)
    proposal = Sampled(q, target_number) if coupled else Sampled(q)
    check_lossless(Decoder(p, proposal, Match(), always(2)), 2)


# The yardstick, which shows that the walk knows sampled drafts and that the controls below fail for
# the mistake in them and for nothing else.


@pytest.mark.parametrize("goes_on", ADAPTIVE.values(), ids=list(ADAPTIVE))
@pytest.mark.parametrize("name", ["unrelated", "zeros in p and q", "p equals q", "one-hot q"])
def test_token_wise_rejection_of_sampled_drafts_is_lossless(name: str, goes_on: GoesOn) -> None:
    p, q = TABLES[name]
    check_lossless(Decoder(p, Sampled(q), TokenWise(), goes_on), 2)


def test_for_point_mass_drafts_an_equality_test_is_token_wise_rejection() -> None:
    equality = TokenWise(acceptance=lambda p, _q, x: p[x])
    check_lossless(Decoder(P3, Argmax(Q3), equality, always(2)), 2)


# Controls.


MISTAKES = {
    "equality test labelled rejection": Decoder(
        P3, Sampled(Q3), TokenWise(acceptance=rules.equality_for_rejection), always(2)
    ),
    "residual without q": Decoder(P3, Sampled(Q3), TokenWise(residual=lambda p, _q: p), always(2)),
    "sampled draft dropped for its value": Decoder(
        P3, Sampled(Q3), TokenWise(), always(2), keeps=drop_unlikely(Q3, 0.3)
    ),
    "one number for all rows of a round": Decoder(
        P3, Argmax(Q3), Match(number=lambda text, _row: len(text)), always(2)
    ),
    "correction from the last row": Decoder(
        P3, Argmax(Q3), Match(rules.last_row_after_a_rejection), always(2)
    ),
    "bonus from the row before": Decoder(
        P3, Argmax(Q3), Match(rules.bonus_from_the_row_before), always(2)
    ),
    "bonus conditioned on one draft too few": Decoder(
        P3,
        Argmax(Q3),
        Match(context=lambda text, drafts, row: text + drafts[: min(row, 1)]),
        always(2),
    ),
    "rows conditioned on drafts that come later": Decoder(
        P3,
        Argmax(Q3),
        Match(context=lambda text, drafts, row: text + drafts[: row + 1]),
        always(2),
    ),
    "matches after a mismatch count": Decoder(
        P3, Argmax(Q3), Match(rules.every_match_counts), always(2)
    ),
    "rejected draft emitted": Decoder(
        P3, Argmax(Q3), Match(rules.rejected_draft_is_kept), always(2)
    ),
}


@pytest.mark.parametrize("decoder", MISTAKES.values(), ids=list(MISTAKES))
def test_a_decoder_with_a_mistake_fails_the_check(decoder: Decoder) -> None:
    assert bias(decoder, 1, End(3)) > VISIBLE
    assert bias(decoder, 2, End(6)) > VISIBLE


@pytest.mark.parametrize("proposal", [Argmax(Q3), Argmax(P3)], ids=["poor drafts", "good drafts"])
def test_noise_that_two_rounds_share_shows_in_the_second_round_only(proposal: Proposal) -> None:
    shared = Match(number=lambda _text, row: row)
    decoder = Decoder(P3, proposal, shared, always(2))
    assert bias(decoder, 1, End(3)) < ROUNDING
    assert bias(decoder, 2, End(6)) > VISIBLE


def test_rejection_is_biased_where_drafts_and_acceptance_share_their_numbers() -> None:
    """Coupling is for `match`; rejection needs numbers that no draft was drawn with."""
    shared = Sampled(Q3, lambda text, index: ("accept", len(text), index))
    assert bias(Decoder(P3, shared, TokenWise(), always(1)), 1, End(2)) > VISIBLE


# The functions alone, against a slow re-statement.


def all_rounds(vocab_size: int, num_rows: int) -> Iterator[tuple[Context, Context, int]]:
    tokens = range(vocab_size)
    for sampled in itertools.product(tokens, repeat=num_rows):
        for drafts in itertools.product(tokens, repeat=num_rows - 1):
            for num_drafts in range(num_rows):
                yield sampled, drafts, num_drafts


def columns(rows: list[tuple[Context, Context, int]], width: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.tensor([sampled for sampled, _, _ in rows]),
        torch.tensor([drafts for _, drafts, _ in rows]).view(len(rows), width - 1).long(),
        torch.tensor([num_drafts for _, _, num_drafts in rows]),
    )


@pytest.mark.parametrize(("vocab_size", "num_rows"), [(2, 1), (3, 2), (3, 3), (3, 4), (2, 5)])
def test_every_small_round_accepts_the_leading_run_of_its_valid_drafts(
    vocab_size: int, num_rows: int
) -> None:
    rows = list(all_rounds(vocab_size, num_rows))
    got = accept_matching(*columns(rows, num_rows))
    assert got.dtype == torch.int64
    want = [leading_run(sampled, drafts[:num_drafts]) for sampled, drafts, num_drafts in rows]
    assert got.tolist() == want
    assert all(
        0 <= count <= num_drafts and sampled[:count] == drafts[:count]
        for count, (sampled, drafts, num_drafts) in zip(got.tolist(), rows, strict=True)
    )


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4])
def test_every_small_round_is_cut_at_its_earliest_end(num_rows: int) -> None:
    cases = [
        (sampled, num_accepted, room, stops)
        for sampled in itertools.product(range(3), repeat=num_rows)
        for num_accepted in range(num_rows)
        for room in range(1, num_rows + 2)
        for stops in itertools.product((NO_ID, 0, 2), repeat=2)
    ]
    committed = [7 + 3 * (index % 5) for index in range(len(cases))]
    outcome = trim_round(
        torch.tensor([sampled for sampled, *_ in cases]),
        torch.tensor([num_accepted for _, num_accepted, *_ in cases]),
        torch.tensor(committed),
        torch.tensor([n + room for n, (_, _, room, _) in zip(committed, cases, strict=True)]),
        torch.tensor([stops for *_, stops in cases]),
    )
    got = zip(
        outcome.token_ids.tolist(),
        outcome.num_emitted.tolist(),
        outcome.stopped.tolist(),
        outcome.at_limit.tolist(),
        strict=True,
    )
    for (sampled, num_accepted, room, stops), result in zip(cases, got, strict=True):
        emitted: list[int] = []
        while True:
            emitted.append(sampled[len(emitted)])
            stopped, at_limit = emitted[-1] in stops, len(emitted) == room
            if stopped or at_limit or len(emitted) == num_accepted + 1:
                break
        token_ids, num_emitted, *flags = result
        assert (token_ids[:num_emitted], flags) == (emitted, [stopped, at_limit])


def test_without_stop_entries_only_the_length_ends_a_round() -> None:
    outcome = trim_round(
        torch.tensor([[4, 9, 5], [4, 9, 5]]),
        torch.tensor([2, 2]),
        torch.tensor([10, 10]),
        torch.tensor([12, 100]),
        torch.empty(2, 0, dtype=torch.int64),
    )
    assert outcome.num_emitted.tolist() == [2, 3]
    assert outcome.stopped.tolist() == [False, False]
    assert outcome.at_limit.tolist() == [True, False]


def random_batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sampled = torch.randint(0, 3, (200, 6), generator=generator)
    drafts = torch.randint(0, 3, (200, 5), generator=generator)
    agree = torch.rand(200, 5, generator=generator) < 0.7
    drafts = torch.where(agree, sampled[:, :-1], drafts)
    return sampled, drafts, torch.randint(0, 6, (200,), generator=generator)


def test_what_lies_beyond_the_valid_drafts_is_ignored() -> None:
    sampled, drafts, num_drafts = random_batch(0)
    want = accept_matching(sampled, drafts, num_drafts)
    beyond = torch.arange(5) >= num_drafts[:, None]
    for garbage in (sampled[:, :-1], torch.full_like(drafts, NO_ID), drafts.flip(0)):
        dirty = torch.where(beyond, garbage, drafts)
        assert torch.equal(accept_matching(sampled, dirty, num_drafts), want)
    assert bool((beyond & (drafts == sampled[:, :-1])).any())


def test_a_sequence_does_not_depend_on_its_neighbours_or_on_the_width_of_the_batch() -> None:
    sampled, drafts, num_drafts = random_batch(1)
    whole = accept_matching(sampled, drafts, num_drafts)
    limits = torch.full((200,), 13) + torch.arange(200) % 5
    stops = torch.arange(200)[:, None] % 4
    committed = torch.full((200,), 10)
    trimmed = trim_round(sampled, whole, committed, limits, stops)
    for row in range(0, 200, 7):
        one, width = slice(row, row + 1), int(num_drafts[row]) + 1
        alone = accept_matching(sampled[one, :width], drafts[one, : width - 1], num_drafts[one])
        assert alone[0] == whole[row]
        outcome = trim_round(sampled[one, :width], alone, committed[one], limits[one], stops[one])
        count = int(outcome.num_emitted[0])
        assert count == trimmed.num_emitted[row]
        assert torch.equal(outcome.token_ids[0, :count], trimmed.token_ids[row, :count])
        assert outcome.stopped[0] == trimmed.stopped[row]
        assert outcome.at_limit[0] == trimmed.at_limit[row]


@pytest.mark.parametrize("names", list(itertools.permutations(range(3))))
def test_renaming_the_tokens_renames_the_result(names: tuple[int, ...]) -> None:
    sampled, drafts, num_drafts = random_batch(2)
    renamed = torch.tensor(names)
    num_accepted = accept_matching(sampled, drafts, num_drafts)
    assert torch.equal(accept_matching(renamed[sampled], renamed[drafts], num_drafts), num_accepted)
    stops = torch.arange(200)[:, None] % 3
    committed, limits = torch.full((200,), 10), torch.full((200,), 14)
    one = trim_round(sampled, num_accepted, committed, limits, stops)
    other = trim_round(renamed[sampled], num_accepted, committed, limits, renamed[stops])
    assert torch.equal(other.token_ids, renamed[one.token_ids])
    assert torch.equal(other.num_emitted, one.num_emitted)
    assert torch.equal(other.stopped, one.stopped)
