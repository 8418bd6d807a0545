"""Rules for logits: every row of a block against a restatement that sees that row alone.

Numbers are small multiples of powers of two, so that float32 and Python agree to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.batch import LogitRules, SlotSetup
from outrider.sampling.rules import BlockContext, RuleTable, unpack_mask
from tests.sampling.plain import INF, ruled_row

CPU = torch.device("cpu")
UNUSED_STOP = -1
Rows = list[list[float]]


@dataclass(frozen=True)
class Line:
    """One sequence of a pass.

    Attributes:
        text: the committed tokens; the first rules.num_prompt of them are the prompt.
        allowed: what a mask allows at each row, or None.
    """

    rules: LogitRules
    text: tuple[int, ...]
    drafts: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()
    allowed: tuple[frozenset[int], ...] | None = None


def setup(slot: int, rules: LogitRules) -> SlotSetup:
    return SlotSetup(slot, 1, 99, (), 0.0, None, 1.0, 0.0, 0, rules)


def pack(allowed: frozenset[int], vocab_size: int) -> list[int]:
    """Signed 32-bit words, lowest bit first."""
    words = [0] * math.ceil(vocab_size / 32)
    for token in allowed:
        words[token // 32] += 1 << (token % 32)
    return [word - (1 << 32) if word >= 1 << 31 else word for word in words]


def rectangle(rows: Sequence[Sequence[int]], fill: Sequence[int]) -> Tensor:
    """[S, L] of rows that are padded with the numbers of `fill`, in turn."""
    width = max(len(row) for row in rows)
    return torch.tensor(
        [[*row, *(fill[i % len(fill)] for i in range(width - len(row)))] for row in rows],
        dtype=torch.int64,
    ).view(len(rows), width)


def context_of(
    lines: Sequence[Line], vocab_size: int, past_text: Sequence[int], past_drafts: Sequence[int]
) -> BlockContext:
    num_rows = max(len(line.drafts) for line in lines) + 1
    masks = None
    if any(line.allowed is not None for line in lines):
        everything = frozenset(range(vocab_size))
        rows = [[*(line.allowed or ()), *[everything] * num_rows][:num_rows] for line in lines]
        packed = [[pack(allowed, vocab_size) for allowed in row] for row in rows]
        masks = torch.tensor(packed, dtype=torch.int64).to(torch.int32)
    longest = max(len(line.text) for line in lines)
    history = rectangle([*(line.text for line in lines), [0] * (longest + 2)], past_text)
    return BlockContext(
        history[:-1],
        torch.tensor([len(line.text) for line in lines]),
        rectangle([line.drafts for line in lines], past_drafts),
        rectangle([*(line.stops for line in lines), [0]], [UNUSED_STOP])[:-1],
        masks,
    )


def apply(
    lines: Sequence[Line],
    logits: Tensor,
    *,
    table: RuleTable | None = None,
    slots: Sequence[int] | None = None,
    past_text: Sequence[int] = (-1,),
    past_drafts: Sequence[int] = (0,),
) -> list[Rows]:
    """What the table makes of logits [S, T, V]: for each line, the rows that it verifies.

    Args:
        past_text: what stands in the history's rows after a text.
        past_drafts: what stands after a line's own drafts, which no row of its own reads.
    """
    slots = slots or range(1, len(lines) + 1)
    if table is None:
        table = RuleTable(max(slots) + 1, CPU)
        for slot, line in zip(slots, lines, strict=True):
            table.store(setup(slot, line.rules))
    context = context_of(lines, logits.shape[-1], past_text, past_drafts)
    before = logits.clone()
    changed = table.apply(logits, torch.tensor(slots), context)
    assert changed.dtype == torch.float32 and changed.shape == logits.shape
    assert torch.equal(logits, before)  # the raw logits are still wanted
    return [changed[i, : len(line.drafts) + 1].tolist() for i, line in enumerate(lines)]


def row_alone(line: Line, logits: Sequence[float], row: int) -> list[float]:
    """The definition: the row's own text is the committed one and the drafts before it."""
    allowed = None if line.allowed is None else line.allowed[row]
    text = line.text + line.drafts[:row]
    return ruled_row(logits, line.rules, text, line.stops, allowed)


def expected(lines: Sequence[Line], logits: Tensor) -> list[Rows]:
    return [
        [row_alone(line, logits[i, row].tolist(), row) for row in range(len(line.drafts) + 1)]
        for i, line in enumerate(lines)
    ]


LOGITS = [8.0, 4.0, 2.0, 1.0, -1.0, -2.0, -4.0, -8.0]
"""Of every row; tokens 0 to 7."""
PROMPT, OUTPUT = 0, 6
TEXT = (PROMPT, OUTPUT)
EVERY = frozenset(range(8))


def but(**changes: float) -> list[float]:
    """LOGITS with some of them changed: but(_3=0.5) is another value for token 3."""
    row = list(LOGITS)
    for name, value in changes.items():
        row[int(name[1:])] = value
    return row


@dataclass(frozen=True)
class Case:
    """A block after TEXT and its four rows, worked out by hand."""

    line: Line
    rows: Rows


def case(
    rules: LogitRules,
    drafts: tuple[int, int, int],
    rows: Rows,
    stops: tuple[int, ...] = (),
    allowed: tuple[frozenset[int], ...] | None = None,
) -> Case:
    return Case(Line(replace(rules, num_prompt=1), TEXT, drafts, stops, allowed), rows)


BY_HAND = {
    # Prompt and output count; a positive logit is divided, a negative one multiplied.
    "repetition_penalty": case(
        LogitRules(repetition_penalty=2.0),
        (1, 4, 2),
        [
            but(_0=4, _6=-8),
            but(_0=4, _6=-8, _1=2),
            but(_0=4, _6=-8, _1=2, _4=-2),
            but(_0=4, _6=-8, _1=2, _4=-2, _2=1),
        ],
    ),
    # Output only, and once however often.
    "presence_penalty": case(
        LogitRules(presence_penalty=0.5),
        (1, 6, 0),
        [
            but(_6=-4.5),
            but(_6=-4.5, _1=3.5),
            but(_6=-4.5, _1=3.5),
            but(_6=-4.5, _1=3.5, _0=7.5),
        ],
    ),
    # Output only, and every time.
    "frequency_penalty": case(
        LogitRules(frequency_penalty=0.5),
        (1, 6, 0),
        [
            but(_6=-4.5),
            but(_6=-4.5, _1=3.5),
            but(_6=-5.0, _1=3.5),
            but(_6=-5.0, _1=3.5, _0=7.5),
        ],
    ),
    "logit_bias": case(
        LogitRules(logit_bias=((3, 4.0), (0, -2.0))), (1, 2, 3), [but(_3=5, _0=6)] * 4
    ),
    # One output token is there already, so the third one comes from row 2.
    "min_tokens": case(
        LogitRules(min_tokens=3),
        (1, 1, 1),
        [but(_2=-INF, _5=-INF), but(_2=-INF, _5=-INF), LOGITS, LOGITS],
        stops=(2, 5),
    ),
    "bad_words of one token": case(LogitRules(bad_words=((7,),)), (1, 2, 3), [but(_7=-INF)] * 4),
    # 6 is the committed text's end, then the second draft.
    "bad_words of two tokens": case(
        LogitRules(bad_words=((6, 1),)),
        (2, 6, 3),
        [but(_1=-INF), LOGITS, but(_1=-INF), LOGITS],
    ),
    "bad_words over the end of the committed text": case(
        LogitRules(bad_words=((6, 2, 3), (0, 6, 2, 3, 4), (0, 6, 2, 3, 4, 5))),
        (2, 3, 4),
        [LOGITS, but(_3=-INF), but(_4=-INF), but(_5=-INF)],
    ),
    "bad_words longer than the text": case(
        LogitRules(bad_words=((9, 9, 9, 0, 6, 2, 3), (1, 0, 6, 5), (0, 0, 6, 2, 3, 4, 1, 1))),
        (2, 3, 4),
        [LOGITS] * 4,
    ),
    "mask": case(
        LogitRules(),
        (1, 2, 3),
        [
            but(_1=-INF),
            but(_0=-INF, _2=-INF),
            but(_7=-INF),
            [-INF] * 5 + LOGITS[5:6] + [-INF] * 2,
        ],
        allowed=(EVERY - {1}, EVERY - {0, 2}, EVERY - {7}, frozenset({5})),
    ),
}
BY_ROW = {"repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens", "mask"} | {
    "bad_words of two tokens",
    "bad_words over the end of the committed text",
}
"""Rules whose effect differs from row to row."""


def same_logits(num_rows: int = 4) -> Tensor:
    return torch.tensor([LOGITS] * num_rows)[None]


@pytest.mark.parametrize("name", BY_HAND)
def test_a_rule_changes_every_row_as_worked_out_by_hand(name: str) -> None:
    one = BY_HAND[name]
    assert apply([one.line], same_logits()) == [one.rows]


@pytest.mark.parametrize("name", BY_HAND)
def test_the_restatement_gives_the_rows_that_were_worked_out_by_hand(name: str) -> None:
    one = BY_HAND[name]
    assert expected([one.line], same_logits()) == [one.rows]


BROKEN: dict[str, Callable[[Line, int], list[float]]] = {
    "the first row only": lambda line, row: row_alone(line, LOGITS, 0) if row == 0 else LOGITS,
    "the bonus row only": lambda line, row: row_alone(line, LOGITS, 3) if row == 3 else LOGITS,
    "all rows as the first": lambda line, row: row_alone(line, LOGITS, 0),
    "all rows as the bonus": lambda line, row: row_alone(line, LOGITS, 3),
}


BANS_NOTHING = "bad_words longer than the text"


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        (name, broken)
        for name in BY_HAND
        for broken in BROKEN
        if name != BANS_NOTHING and (name in BY_ROW or not broken.startswith("all"))
    ],
)
def test_the_rows_by_hand_find_a_rule_that_looks_at_one_row_only(name: str, broken: str) -> None:
    one = BY_HAND[name]
    assert [BROKEN[broken](one.line, row) for row in range(4)] != one.rows


EIGHTHS = st.integers(-64, 64).map(lambda number: number / 8)
QUARTERS = st.integers(-8, 8).map(lambda number: number / 4)


@st.composite
def lines(draw: st.DrawFn, vocab_size: int, max_drafts: int, *, masks: bool) -> Line:
    token = st.integers(0, vocab_size - 1)
    # Few different tokens, so that repetitions and bad words happen.
    few = st.sampled_from(draw(st.lists(token, min_size=1, max_size=4)))
    text = tuple(draw(st.lists(few, min_size=1, max_size=9)))
    drafts = tuple(draw(st.lists(few, max_size=max_drafts)))
    words = st.lists(few | token, min_size=1, max_size=5).map(tuple)
    bias = draw(st.dictionaries(few | token, QUARTERS, max_size=4))
    rules = LogitRules(
        num_prompt=draw(st.integers(1, len(text))),
        repetition_penalty=draw(st.sampled_from([1.0, 0.5, 2.0, 4.0])),
        presence_penalty=draw(st.just(0.0) | QUARTERS),
        frequency_penalty=draw(st.just(0.0) | QUARTERS),
        min_tokens=draw(st.integers(0, 9)),
        logit_bias=tuple(bias.items()),
        bad_words=tuple(draw(st.lists(words, max_size=4))),
    )
    stops = tuple(draw(st.lists(token, max_size=3)))
    allowed = None
    if masks and draw(st.booleans()):
        sets = st.frozensets(few | token)
        allowed = tuple(draw(sets) for _ in range(len(drafts) + 1))
    return Line(rules, text, drafts, stops, allowed)


@st.composite
def passes(draw: st.DrawFn) -> tuple[list[Line], Tensor]:
    """Some sequences of different lengths, and logits [S, T, V]."""
    vocab_size = draw(st.integers(2, 70))
    masks = draw(st.booleans())
    one = lines(vocab_size, draw(st.integers(0, 5)), masks=masks)
    batch = draw(st.lists(one, min_size=1, max_size=4))
    num_rows = max(len(line.drafts) for line in batch) + 1
    size = len(batch) * num_rows * vocab_size
    seed = draw(st.integers(0, 2**31))
    eighths = torch.randint(-64, 65, (size,), generator=torch.Generator().manual_seed(seed)) / 8
    return batch, eighths.view(len(batch), num_rows, vocab_size)


@settings(max_examples=80, deadline=None)
@given(passes(), st.data())
def test_random_combinations_give_each_row_what_it_would_get_alone(
    drawn: tuple[list[Line], Tensor], data: st.DataObject
) -> None:
    batch, logits = drawn
    garbage = data.draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=5))
    token = st.integers(0, logits.shape[-1] - 1)
    past_drafts = data.draw(st.lists(token, min_size=1, max_size=4))
    got = apply(batch, logits, past_text=garbage, past_drafts=past_drafts)
    assert got == expected(batch, logits)


NEUTRAL = LogitRules(num_prompt=1)
ONLY = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_tokens",
    "bad_words",
)


@pytest.mark.parametrize("rule", [*ONLY, "mask"])
@settings(max_examples=12, deadline=None)
@given(passes())
def test_each_rule_alone_gives_each_row_what_it_would_get_alone(
    rule: str, drawn: tuple[list[Line], Tensor]
) -> None:
    batch, logits = drawn
    alone = [
        replace(
            line,
            rules=replace(
                NEUTRAL,
                num_prompt=line.rules.num_prompt,
                **({} if rule == "mask" else {rule: getattr(line.rules, rule)}),
            ),
            allowed=line.allowed if rule == "mask" else None,
        )
        for line in batch
    ]
    assert apply(alone, logits) == expected(alone, logits)


@settings(max_examples=15, deadline=None)
@given(passes())
def test_rows_do_not_depend_on_the_other_sequences_of_the_pass(
    drawn: tuple[list[Line], Tensor],
) -> None:
    batch, logits = drawn
    together = apply(batch, logits)
    for index, line in enumerate(batch):
        own = logits[index : index + 1, : len(line.drafts) + 1]
        assert apply([line], own) == [together[index]]


@settings(max_examples=15, deadline=None)
@given(passes(), passes())
def test_a_slot_that_served_another_request_before_keeps_nothing_of_it(
    former: tuple[list[Line], Tensor], latter: tuple[list[Line], Tensor]
) -> None:
    batch, logits = latter
    slots = [3, 1, 4, 2][: len(batch)]
    table = RuleTable(5, CPU)
    for slot, line in enumerate(former[0], start=1):
        table.store(setup(slot, line.rules))
    for slot, line in zip(slots, batch, strict=True):
        table.store(setup(slot, line.rules))
    assert apply(batch, logits, table=table, slots=slots) == expected(batch, logits)


def test_without_rules_every_bit_of_the_logits_is_kept() -> None:
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0))
    batch = [Line(NEUTRAL, (1, 2, 3), (4, 4), (1,)), Line(NEUTRAL, (7,), (1, 2), (1,))]
    assert apply(batch, logits) == logits.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_changed_in_float32(dtype: torch.dtype) -> None:
    # In bfloat16, 256 - 0.25 is 256 again.
    logits = torch.tensor([[[256.0, 1.0]]], dtype=dtype)
    rules = LogitRules(num_prompt=1, presence_penalty=0.25)
    assert apply([Line(rules, (1, 0))], logits) == [[[255.75, 1.0]]]


@pytest.mark.parametrize(
    ("rules", "value"),
    [
        # Token 1 stands in the output once; its logit is 3.
        # Bias before the repetition penalty: (3 - 5) * 2, not 3 / 2 - 5.
        (LogitRules(logit_bias=((1, -5.0),), repetition_penalty=2.0), -4.0),
        # Repetition before the others: 3 / 2 - 1 - 0.5, not (3 - 1.5) / 2.
        (
            LogitRules(repetition_penalty=2.0, frequency_penalty=1.0, presence_penalty=0.5),
            0.0,
        ),
        # 3 / 2 - 1 - 2, not (3 - 1 - 2) * 2.
        (
            LogitRules(repetition_penalty=2.0, frequency_penalty=1.0, presence_penalty=2.0),
            -1.5,
        ),
        # A ban is final, whatever the bias.
        (LogitRules(logit_bias=((1, 1000.0),), bad_words=((1,),)), -INF),
    ],
)
def test_rules_apply_in_the_documented_order(rules: LogitRules, value: float) -> None:
    [[[_, got]]] = apply([Line(replace(rules, num_prompt=1), (0, 1))], torch.tensor([[[1.0, 3.0]]]))
    assert got == value


def test_a_bias_does_not_bring_back_what_a_mask_forbids() -> None:
    rules = LogitRules(num_prompt=1, logit_bias=((1, 1000.0),), presence_penalty=-2.0)
    line = Line(rules, (0, 1), allowed=(frozenset({0}),))
    assert apply([line], torch.tensor([[[1.0, 3.0]]])) == [[[1.0, -INF]]]


def test_a_stop_id_is_held_back_although_a_bias_wants_it() -> None:
    rules = LogitRules(num_prompt=1, logit_bias=((1, 1000.0),), min_tokens=2)
    line = Line(rules, (0, 0), (0,), stops=(1,))
    logits = torch.tensor([[[1.0, 3.0], [1.0, 3.0]]])
    assert apply([line], logits) == [[[1.0, -INF], [1.0, 1003.0]]]


@pytest.mark.parametrize("min_tokens", range(8))
def test_stop_ids_return_at_the_row_that_writes_token_min_tokens_plus_one(min_tokens: int) -> None:
    # Two output tokens are committed; row i writes token 3 + i.
    line = Line(LogitRules(num_prompt=3, min_tokens=min_tokens), (0,) * 5, (0,) * 4, stops=(2, 1))
    [rows] = apply([line], torch.zeros(1, 5, 4))
    assert [row[1] == row[2] == 0 for row in rows] == [
        written > min_tokens for written in (3, 4, 5, 6, 7)
    ]
    assert all(row[0] == row[3] == 0 for row in rows)


@pytest.mark.parametrize("penalty", [0.7, 1.0, 1.3, 4.0])
def test_the_repetition_penalty_is_that_of_transformers_at_every_row(penalty: float) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 6, 40, generator=rng) * 5
    tokens = torch.randint(0, 40, (25,), generator=rng).tolist()
    line = Line(
        LogitRules(num_prompt=8, repetition_penalty=penalty), tuple(tokens[:20]), tuple(tokens[20:])
    )
    [rows] = apply([line], logits)
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    for row in range(6):
        seen = torch.tensor([tokens[: 20 + row]])
        theirs = processor(seen, logits[:, row])  # pyright: ignore
        torch.testing.assert_close(torch.tensor([rows[row]]), theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 70])
def test_a_packed_mask_is_read_lowest_bit_first(vocab_size: int) -> None:
    rng = torch.Generator().manual_seed(vocab_size)
    wanted = torch.rand(3, 2, vocab_size, generator=rng) < 0.5
    wanted[0, 0] = True  # the words' sign bits as well
    wanted[1] = False
    packed = [
        [pack(frozenset(row.nonzero()[:, 0].tolist()), vocab_size) for row in block]
        for block in wanted
    ]
    masks = torch.tensor(packed, dtype=torch.int64).to(torch.int32)
    assert torch.equal(unpack_mask(masks, vocab_size), wanted)


def test_a_word_of_minus_one_allows_all_of_its_32_tokens() -> None:
    masks = torch.tensor([[-1, 0]], dtype=torch.int32)
    assert unpack_mask(masks, 40).tolist() == [[True] * 32 + [False] * 8]
