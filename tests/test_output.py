"""Tokens become text round by round: nothing is shown too early, and the earliest end wins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from unittest import mock

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from outrider.batch import FinishReason, SpanResult
from outrider.errors import RequestError
from outrider.output import Completion, OutputBuilder, RequestOutput, total_speculation
from outrider.params import SamplingParams
from outrider.request import Request
from outrider.tokenizer import REPLACEMENT, Tokenizer
from outrider.trace import RoundTrace, SpeculationStats

MERGES = [("a", "b"), ("ab", "c"), ("x", "y"), ("e", "n"), ("en", "d"), ("ab", "end")]
PROMPT = (1, 2, 3)
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def byte_level() -> tokenizers.Tokenizer:
    """All bytes, a few merges, and two special tokens."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in MERGES)]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=MERGES)
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|turn|>"])
    return backend


BACKEND = byte_level()
TOKENIZER = Tokenizer(BACKEND)


def ids(*pieces: str) -> tuple[int, ...]:
    """Ids of pieces that are tokens each."""
    found = tuple(BACKEND.token_to_id(piece) for piece in pieces)
    assert None not in found
    return found


def byte_ids(text: str) -> tuple[int, ...]:
    """One token for each byte of each character: none of the merges is made of these."""
    return tuple(token_id for char in text for token_id in TOKENIZER.encode(char))


END, TURN = ids("<|end|>", "<|turn|>")
HORSE = byte_ids("🏇")


def builder(
    stops: Sequence[str] = (), limit: int = 1000, tokenizer: Tokenizer | None = TOKENIZER
) -> OutputBuilder:
    params = SamplingParams(stop=tuple(stops))
    request = Request("r", PROMPT, params, (END,), len(PROMPT) + limit, seed=0)
    return OutputBuilder(request, tokenizer)


def result(
    token_ids: Sequence[int], reason: FinishReason | None = None, rejected: Sequence[int] = ()
) -> SpanResult:
    """A round that accepted all but its last token, and refused `rejected`."""
    drafts = (*token_ids[:-1], *rejected)
    return SpanResult(0, tuple(token_ids), reason, drafts, max(len(token_ids) - 1, 0))


def rounds_of(token_ids: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """`token_ids` in rounds of `sizes`, the last taking what is left."""
    begin = 0
    for size in sizes:
        yield tuple(token_ids[begin : begin + size])
        begin += size
    yield tuple(token_ids[begin:])


def device(
    token_ids: Sequence[int], sizes: Sequence[int], stop_ids: frozenset[int], limit: int
) -> Iterator[SpanResult]:
    """What the device sends: rounds cut at the first stop id or at the limit, none after that."""
    num_sent = 0
    for block in rounds_of(token_ids, sizes):
        for count, token_id in enumerate(block, 1):
            if token_id in stop_ids:
                yield result(block[:count], STOP)
                return
            if num_sent + count == limit:
                yield result(block[:count], LENGTH)
                return
        if block:
            yield result(block)
        num_sent += len(block)


def play(outputs: OutputBuilder, results: Iterator[SpanResult]) -> list[Completion]:
    """The output after every round; what is shown only grows, by what is called new."""
    seen: list[Completion] = []
    text = ""
    for one in results:
        kept = outputs.add(one)
        output = outputs.completion
        outputs.reported()
        text += output.new_text
        assert output.text == text
        assert kept == one.token_ids[: len(kept)]
        seen.append(output)
        if output.finished:
            break
    return seen


def final(
    token_ids: Sequence[int],
    stops: Sequence[str] = (),
    limit: int = 1000,
    sizes: Sequence[int] = (),
) -> tuple[str, int, FinishReason | None]:
    """Text, number of tokens, reason; in one round where no sizes are given."""
    results = device(token_ids, sizes, frozenset({END}), limit)
    output = play(builder(stops, limit), results)[-1]
    assert output.token_ids == tuple(token_ids[: len(output.token_ids)])
    return output.text, len(output.token_ids), output.finish_reason


def shown(token_ids: Sequence[int], stops: Sequence[str]) -> str:
    """What may be shown of a text that goes on: no half character, nothing a stop may take back."""
    text = TOKENIZER.decode(token_ids).removesuffix(REPLACEMENT)
    held = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return text[: len(text) - max(held, default=0)]


def expected(
    token_ids: Sequence[int], stops: Sequence[str], stop_ids: frozenset[int], limit: int
) -> tuple[str, int, FinishReason | None]:
    """The definition, on the whole text after each token."""
    for count, token_id in enumerate(token_ids, 1):
        if token_id in stop_ids:
            return TOKENIZER.decode(token_ids[: count - 1]), count, STOP
        text = TOKENIZER.decode(token_ids[:count])
        whole = text.removesuffix(REPLACEMENT)
        found = [whole.index(stop) for stop in stops if stop in whole]
        if found:
            return whole[: min(found)], count, STOP
        if count == limit:
            return text, count, LENGTH
    return shown(token_ids, stops), len(token_ids), None


SOME_IDS = st.lists(
    st.sampled_from(
        [
            *ids("a", "b", "c", "ab", "abc", "x", "xy", "e", "end", "abend", "Ġ"),
            *byte_ids("é🏇"),
            TURN,
        ]
    ),
    max_size=24,
)
SOME_TEXT_IDS = st.text(alphabet="abcxyend é🏇🏇", max_size=20).map(TOKENIZER.encode)
SOME_STOPS = st.lists(st.text(alphabet="abcxend é🏇", min_size=1, max_size=4), max_size=3)
SIZES = st.lists(st.integers(1, 5), max_size=24)


@settings(max_examples=400, deadline=None)
@given(
    token_ids=SOME_IDS | SOME_TEXT_IDS,
    sizes=SIZES,
    stops=SOME_STOPS,
    stop_ids=st.frozensets(st.sampled_from([*ids("x", "end"), TURN]), max_size=2),
    limit=st.integers(1, 30),
)
def test_any_split_into_rounds_shows_the_same_text_as_soon_as_it_is_safe(
    token_ids: list[int],
    sizes: list[int],
    stops: list[str],
    stop_ids: frozenset[int],
    limit: int,
) -> None:
    text, num_tokens, reason = expected(token_ids, stops, stop_ids, limit)
    outputs = play(builder(stops, limit), device(token_ids, sizes, stop_ids, limit))
    for output in outputs:
        assert text.startswith(output.text)
        assert output.finished or output.text == shown(output.token_ids, stops)
    if outputs:
        last = outputs[-1]
        assert (last.text, len(last.token_ids), last.finish_reason) == (text, num_tokens, reason)
        assert last.token_ids == tuple(token_ids[:num_tokens])
        assert sum(one.num_emitted for one in last.rounds) == num_tokens


@pytest.mark.parametrize("sizes", [(), (1, 1, 1, 1, 1), (2, 1), (1, 3)], ids=str)
def test_a_stop_string_over_token_and_round_borders_is_cut_out(sizes: tuple[int, ...]) -> None:
    token_ids = ids("x", "ab", "c", "en", "d")
    assert final(token_ids, ["bce"], sizes=sizes) == ("xa", 4, STOP)


def test_the_stop_string_that_was_completed_first_wins() -> None:
    token_ids = ids("x", "ab", "c", "e", "n", "d")
    assert final(token_ids, ["end", "cen", "bcend"]) == ("xab", 5, STOP)
    assert final(token_ids, ["end", "b"]) == ("xa", 2, STOP)
    assert final(token_ids, ["end", "c", "bc"]) == ("xa", 3, STOP)


def test_of_stop_strings_completed_by_one_token_the_one_that_begins_first_cuts() -> None:
    token_ids = ids("x", "abend", "y")
    for stops in (["end", "abe"], ["abe", "end"], ["b", "abend"]):
        assert final(token_ids, stops) == ("x", 2, STOP)


def test_a_stop_string_that_comes_twice_cuts_at_the_first() -> None:
    assert final(ids("x", "ab", "ab"), ["ab"]) == ("x", 2, STOP)


def test_a_text_that_is_nothing_but_a_stop_string_is_empty() -> None:
    assert final(ids("en", "d"), ["end"]) == ("", 2, STOP)


def test_a_near_miss_is_held_back_until_it_is_one() -> None:
    outputs = play(
        builder(["abcabx"]),
        device(ids("abc", "ab", "c", "abc", "y"), (1, 1, 1, 1), frozenset(), 9),
    )
    assert [one.new_text for one in outputs] == ["", "", "abc", "abc", "abcy"]


@pytest.mark.parametrize(
    ("token_ids", "limit", "want"),
    [
        (ids("x", "en", "d"), 3, ("x", 3, STOP)),  # stop string and length
        ((*ids("x", "en"), END), 3, ("xen", 3, STOP)),  # stop id and length
        ((*ids("x", "en", "d"), END), 4, ("x", 3, STOP)),  # stop string one token earlier
        ((*ids("x", "en"), END, *ids("d")), 9, ("xen", 3, STOP)),  # stop id before it is completed
        (ids("x", "en", "d"), 2, ("xen", 2, LENGTH)),  # length before it is completed
        ((*ids("x"), END), 1, ("x", 1, LENGTH)),  # length before the stop id
    ],
    ids=str,
)
@pytest.mark.parametrize("sizes", [(), (1, 1, 1)], ids=["one round", "a round a token"])
def test_the_earliest_end_wins_and_at_one_token_id_string_length_in_this_order(
    token_ids: tuple[int, ...],
    limit: int,
    want: tuple[str, int, FinishReason],
    sizes: tuple[int, ...],
) -> None:
    assert final(token_ids, ["end"], limit, sizes) == want


def test_a_stop_id_whose_own_text_would_complete_a_stop_string_adds_no_text() -> None:
    (d,) = ids("d")
    outputs = builder(["end"])
    assert outputs.add(result(ids("x", "en", "d"), STOP)) == ids("x", "en", "d")
    output = outputs.completion
    assert output.finish_reason is STOP
    assert output.token_ids[-1] == d
    assert (output.text, output.new_text) == ("xen", "xen")


@pytest.mark.parametrize(
    ("last", "reason"), [((END,), STOP), (ids("a"), LENGTH)], ids=["stop id", "length"]
)
def test_what_was_held_back_is_released_when_the_text_ends(
    last: tuple[int, ...], reason: FinishReason
) -> None:
    outputs = builder(["abcend", "nda"])
    outputs.add(result(ids("x", "abc", "en")))
    assert outputs.completion.text == "x"
    outputs.reported()
    outputs.add(result(last, reason))
    released = "abcen" + ("a" if reason is LENGTH else "")
    assert outputs.completion.new_text == released


def test_half_a_character_is_released_as_a_replacement_when_the_text_ends() -> None:
    assert final((*ids("x"), *HORSE[:3], END)) == ("x" + REPLACEMENT, 5, STOP)
    assert final((*ids("x"), *HORSE[:3]), limit=4) == ("x" + REPLACEMENT, 4, LENGTH)


def test_a_character_split_over_rounds_appears_with_its_last_byte() -> None:
    token_ids = (*ids("x"), *HORSE, *ids("y"))
    outputs = play(builder(), device(token_ids, (2, 1, 1), frozenset(), 99))
    assert [one.new_text for one in outputs] == ["x", "", "", "🏇y"]


def test_a_stop_string_of_characters_split_over_rounds_is_found() -> None:
    token_ids = (*ids("x"), *byte_ids("é🏇"), *ids("y"))
    for sizes in ((), (1, 1, 1, 1, 1, 1), (2, 4), (3, 2)):
        assert final(token_ids, ["é🏇"], sizes=sizes) == ("x", 7, STOP)


def test_special_tokens_leave_no_text_and_do_not_part_a_stop_string() -> None:
    assert final((*ids("x", "en"), TURN, *ids("d")), ["end"]) == ("x", 4, STOP)
    assert final((*ids("x"), TURN, *ids("y"), END)) == ("xy", 4, STOP)


def test_a_step_without_tokens_changes_nothing() -> None:
    outputs = builder()
    outputs.add(result(ids("x")))
    assert outputs.add(SpanResult(0)) == ()
    output = outputs.completion
    assert (output.text, output.new_text, len(output.rounds)) == ("x", "x", 1)


def test_without_a_tokenizer_tokens_are_kept_and_the_text_is_empty() -> None:
    outputs = builder(tokenizer=None)
    assert outputs.add(result((7, 8))) == (7, 8)
    assert outputs.add(result((9,), LENGTH)) == (9,)
    output = outputs.completion
    assert (output.text, output.token_ids, output.finish_reason) == ("", (7, 8, 9), LENGTH)


def test_an_output_begins_empty() -> None:
    output = builder().completion
    assert (output.text, output.token_ids, output.rounds) == ("", (), ())
    assert not output.finished


def test_an_abort_shows_what_was_held_back_and_nothing_twice() -> None:
    outputs = builder(["end"])
    outputs.add(result(ids("x", "en")))
    shown = outputs.completion.new_text
    outputs.reported()
    outputs.abort()
    output = outputs.completion
    assert (shown, output.new_text, output.text) == ("x", "en", "xen")
    assert output.finish_reason is FinishReason.ABORT


def test_a_stop_string_that_a_broken_character_completes_comes_before_the_length() -> None:
    assert final((*ids("x"), HORSE[0]), [REPLACEMENT], limit=2) == ("x", 2, STOP)


def test_a_stop_string_may_end_the_text_after_min_tokens_only() -> None:
    params = SamplingParams(stop="x", min_tokens=2)
    request = Request("r", PROMPT, params, (END,), len(PROMPT) + 9, seed=0)
    outputs = OutputBuilder(request, TOKENIZER)
    assert outputs.add(result(ids("x", "x", "y", "x", "y"))) == ids("x", "x", "y", "x")
    assert (outputs.completion.text, outputs.completion.finish_reason) == ("xxy", STOP)


def test_rounds_count_the_tokens_that_a_stop_string_left() -> None:
    outputs = builder(["bc"])
    outputs.add(result(ids("x")))  # the end of the prompt: no drafts
    outputs.add(result(ids("y", "a"), rejected=ids("x", "y")))
    outputs.add(result(ids("b", "c", "x", "y")))
    output = outputs.completion
    assert output.text == "xya"
    assert output.rounds == (
        RoundTrace((), 0, 1),
        RoundTrace(ids("y", "x", "y"), 1, 2),
        RoundTrace(ids("b", "c", "x"), 3, 2),
    )
    assert output.speculation == SpeculationStats(
        num_passes=3,
        num_rounds=2,
        num_drafted=6,
        num_accepted=4,
        accepted_per_position=(2, 1, 1),
        num_tokens=5,
    )
    assert output.speculation.acceptance_length == 3.0


def test_totals_of_many_outputs_add_up_and_of_none_are_nothing() -> None:
    one, other = builder(), builder()
    one.add(result(ids("x", "y", "a")))
    other.add(result(ids("x")))
    other.add(result(ids("x", "y"), rejected=ids("a")))
    outputs = [RequestOutput("r", (), (part.completion,)) for part in (one, other)]
    assert total_speculation(outputs) == SpeculationStats(3, 2, 4, 3, (2, 1), 6)
    assert total_speculation([]) == SpeculationStats()


def test_a_refused_request_has_an_error_and_nothing_else() -> None:
    error = RequestError("prompt is empty")
    output = RequestOutput.failed("r", error)
    assert (output.error, output.finish_reason) == (error, FinishReason.ERROR)
    assert output.finished
    assert (output.text, output.token_ids, output.rounds) == ("", (), ())
    assert output.speculation == SpeculationStats()


def test_what_has_been_reported_is_not_new_again() -> None:
    outputs = builder()
    outputs.add(result(ids("x", "y")))
    assert outputs.completion.new_text == "xy"
    outputs.reported()
    assert (outputs.completion.new_text, outputs.completion.text) == ("", "xy")


def test_what_is_not_reported_stays_new_through_later_steps_and_an_abort() -> None:
    outputs = builder(["end"])
    outputs.add(result(ids("x")))
    outputs.add(result(ids("y", "a")))
    outputs.add(SpanResult(0))
    assert outputs.completion.new_text == "xya"
    outputs.add(result(ids("en")))
    outputs.abort()
    assert outputs.completion.new_text == outputs.completion.text == "xyaen"


def test_a_text_is_not_whole_where_taking_tokens_failed_half_way() -> None:
    outputs = builder(["end"])
    outputs.add(result(ids("x")))
    assert outputs.is_whole
    fails = mock.patch.object(outputs, "_show", side_effect=[None, MemoryError])
    with fails, pytest.raises(MemoryError):
        outputs.add(result(ids("y", "a")))
    assert not outputs.is_whole
