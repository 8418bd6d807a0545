"""Colours by origin, rejected guesses, statistics, the progress bar."""

import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import render
from outrider.batch import FinishReason, SpanResult
from outrider.output import Completion, OutputBuilder
from outrider.params import SamplingParams
from outrider.render import ProgressBar, TextPainter
from outrider.request import Request
from outrider.trace import Origin, RoundTrace, SpeculationStats, TokenOrigin
from tests.tiny_tokenizer import END, backend, byte_ids, tokenizer

TOKENIZER = tokenizer()
END_ID = backend().token_to_id(END)
DRAFT_1, DRAFT_2, CORRECTED, BONUS = "38;5;28", "38;5;34", "38;5;208", "38;5;33"
REJECTED = "2;9"


def coloured(code: str, text: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m"


def without_guesses_and_colours(painted: str) -> str:
    kept = re.sub(r"\x1b\[2;9m.*?\x1b\[0m", "", painted)
    return re.sub(r"\x1b\[[\d;]*m", "", kept)


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def output(rounds: list[tuple[bytes, int, bytes]], text: str, finished: bool = True) -> Completion:
    """A text of rounds (drafts, how many were accepted, emitted bytes)."""
    return Completion(
        text=text,
        new_text="",
        token_ids=tuple(i for _, _, emitted in rounds for i in byte_ids(emitted)),
        finish_reason=FinishReason.LENGTH if finished else None,
        rounds=tuple(RoundTrace(byte_ids(d), a, len(e)) for d, a, e in rounds),
    )


def painted(rounds: list[tuple[bytes, int, bytes]], text: str) -> str:
    return TextPainter(TOKENIZER, color=True).push(output(rounds, text))


def test_each_origin_has_its_colour_and_a_rejected_guess_stands_before_the_correction() -> None:
    rounds = [(b"", 0, b"a"), (b"bc", 2, b"bcd"), (b"exy", 1, b"ef")]
    assert painted(rounds, "abcdef") == (
        "a"
        + coloured(DRAFT_1, "b")
        + coloured(DRAFT_2, "c")
        + coloured(BONUS, "d")
        + coloured(DRAFT_1, "e")
        + coloured(REJECTED, "xy")
        + coloured(CORRECTED, "f")
    )


def test_the_greens_differ_by_position_and_the_last_serves_those_beyond() -> None:
    codes = [render.origin_code(TokenOrigin(Origin.DRAFTED, i)) for i in range(1, 9)]
    assert len(set(codes)) == 8
    assert render.origin_code(TokenOrigin(Origin.DRAFTED, 12)) == codes[-1]


def test_a_character_split_over_tokens_appears_once_in_the_colour_that_completes_it() -> None:
    horse = "🐎".encode()
    rounds = [(b"", 0, horse[:1]), (horse[1:3], 2, horse[1:]), (b"", 0, b"!")]
    assert painted(rounds, "🐎!") == coloured(BONUS, "🐎") + "!"
    rounds = [(b"", 0, horse[:1]), (horse[1:], 3, horse[1:] + b"!")]
    assert painted(rounds, "🐎!") == coloured("38;5;40", "🐎") + coloured(BONUS, "!")


def test_a_rejected_guess_that_would_have_completed_a_character_shows_the_character() -> None:
    assert painted([(b"", 0, b"\xc3"), (b"\xa9", 0, b"\xa8")], "è") == (
        coloured(REJECTED, "é") + coloured(CORRECTED, "è")
    )


def test_a_rejected_guess_stays_on_one_line_and_shows_special_tokens() -> None:
    guess = (*byte_ids(b"\n\t\x1b"), END_ID)
    result = output([(b"", 0, b"a")], "ab")
    rounds = (*result.rounds, RoundTrace(guess, 0, 1))
    result = Completion(0, "ab", "", byte_ids(b"ab"), FinishReason.LENGTH, rounds)
    assert TextPainter(TOKENIZER, color=True).push(result) == (
        "a" + coloured(REJECTED, f"↵⇥␛{END}") + coloured(CORRECTED, "b")
    )


def test_a_round_cut_before_its_own_token_shows_no_guesses() -> None:
    assert painted([(b"bxy", 1, b"b")], "b") == coloured(DRAFT_1, "b")


def test_control_characters_in_the_text_do_not_reach_the_terminal() -> None:
    text = "a\x1b[2J\n\tb\x7f"
    assert painted([(b"", 0, bytes([byte])) for byte in text.encode()], text) == "a␛[2J\n\tb␡"


@pytest.mark.parametrize(
    ("steering", "shown"),
    [
        ("\x1b[2J", "␛[2J"),
        ("\x07", "␇"),
        ("\r", "␍"),
        ("\x9b2J", "\ufffd2J"),  # CSI in one character
        ("\x90q\x9c", "\ufffdq\ufffd"),  # a device control string and its end
        ("\x80\x85\x9f\xa0é", "\ufffd\ufffd\ufffd\xa0é"),
    ],
)
def test_what_steers_a_terminal_is_shown_and_not_obeyed(steering: str, shown: str) -> None:
    assert render.harmless(steering) == shown
    result = output([(b"", 0, bytes([byte])) for byte in steering.encode()], steering)
    assert TextPainter(TOKENIZER, color=False, at_terminal=True).push(result) == shown
    assert TextPainter(TOKENIZER, color=False).push(result) == steering  # a pipe gets the text


def test_an_error_steers_no_terminal_whatever_it_quotes() -> None:
    error = ValueError("the server says \x1b]0;title\x07\x9b2J\nand more")
    assert render.error_line(error) == (
        "outrider: error: the server says ␛]0;title␇\ufffd2J and more"
    )


def test_text_that_a_stop_string_may_take_back_is_held_and_then_cut() -> None:
    rounds = [(b"bcd", 3, b"bcde")]
    painter = TextPainter(TOKENIZER, color=True)
    assert painter.push(output(rounds, "b", finished=False)) == coloured(DRAFT_1, "b")
    assert painter.push(output(rounds, "bc")) == coloured(DRAFT_2, "c")


def test_a_token_that_a_stop_string_cuts_in_two_is_shown_up_to_the_cut() -> None:
    (word,) = backend().encode("def").ids
    result = Completion(0, "de", "", (word,), FinishReason.STOP, (RoundTrace((word,), 1, 1),))
    assert TextPainter(TOKENIZER, color=True).push(result) == coloured(DRAFT_1, "de")


def test_without_colour_the_painter_gives_the_bare_text() -> None:
    painter = TextPainter(TOKENIZER, color=False)
    assert painter.push(output([(b"x", 0, b"a")], "a", finished=False)) == "a"
    assert painter.push(output([(b"x", 0, b"a"), (b"y", 0, b"b")], "ab")) == "b"


TEXT_BYTES = st.sampled_from(list("ab é🐎\n".encode()))


@st.composite
def span_results(draw: st.DrawFn) -> list[SpanResult]:
    """A request of random rounds over bytes that are often not UTF-8, the end among them."""
    results: list[SpanResult] = []
    count = draw(st.integers(1, 6))
    for index in range(count):
        drafts = byte_ids(bytes(draw(st.lists(TEXT_BYTES, max_size=3))))
        num_accepted = draw(st.integers(0, len(drafts)))
        emitted = (*drafts[:num_accepted], *byte_ids(bytes([draw(TEXT_BYTES)])))
        reason = None
        if index == count - 1:
            reason = draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
            if reason is FinishReason.STOP:
                emitted = (*emitted[:-1], END_ID)
        results.append(SpanResult(0, emitted, reason, drafts, num_accepted))
    return results


@settings(max_examples=60, deadline=None)
@given(results=span_results(), stop=st.sampled_from([(), ("b ",), ("é",), ("aa", "ab")]))
def test_the_coloured_text_is_the_text_however_it_is_streamed(
    results: list[SpanResult], stop: tuple[str, ...]
) -> None:
    params = SamplingParams(stop=stop)
    builder = OutputBuilder(Request("r", (), params, (END_ID,), 99, 0), TOKENIZER)
    streaming, pieces, last = TextPainter(TOKENIZER, color=True), [], None
    for result in results:
        builder.add(result)
        last = builder.completion
        pieces.append(streaming.push(last))
        if last.finished:
            break
    assert last is not None and last.finished
    streamed = "".join(pieces)
    assert without_guesses_and_colours(streamed) == last.text
    whole = TextPainter(TOKENIZER, color=True).push(last)
    assert without_guesses_and_colours(whole) == last.text


@pytest.mark.parametrize(
    ("mode", "stream", "environment", "expected"),
    [
        ("always", io.StringIO(), {"NO_COLOR": "1"}, True),
        ("never", Tty(), {}, False),
        ("auto", Tty(), {}, True),
        ("auto", io.StringIO(), {}, False),
        ("auto", Tty(), {"NO_COLOR": "1"}, False),
        ("auto", Tty(), {"NO_COLOR": ""}, True),
        ("auto", Tty(), {"TERM": "dumb"}, False),
    ],
)
def test_colour_follows_the_flag_then_no_color_then_the_terminal(
    mode: str, stream: io.StringIO, environment: dict[str, str], expected: bool
) -> None:
    assert render.use_color(mode, stream, environment) is expected


def test_the_legend_names_every_colour() -> None:
    assert render.legend(2) == (
        f"drafted at {coloured(DRAFT_1, '1')} {coloured(DRAFT_2, '2')}  "
        f"{coloured(CORRECTED, 'corrected')}  {coloured(BONUS, 'bonus')}  plain  "
        f"{coloured(REJECTED, 'rejected')}"
    )


STATS = SpeculationStats(
    num_passes=5,
    num_rounds=4,
    num_drafted=12,
    num_accepted=6,
    accepted_per_position=(3, 2, 1),
    num_tokens=11,
)


def test_statistics_give_rates_by_position_and_speed() -> None:
    assert render.statistics_lines(STATS, seconds=2.0) == [
        "target passes      5",
        "tokens             11 (2.20 a pass)",
        "acceptance length  2.50 over 4 rounds",
        "accepted at        1: 75%, 2: 50%, 3: 25%",
        "time               2.00 s, 5.5 tokens/s",
    ]
    assert render.acceptance_line(STATS) == (
        "11 tokens in 5 target passes, acceptance length 2.50, accepted at 1: 75%, 2: 50%, 3: 25%"
    )


def test_statistics_of_plain_decoding_do_not_speak_of_acceptance() -> None:
    stats = SpeculationStats(num_passes=3, num_tokens=3)
    assert render.statistics_lines(stats, seconds=1.5) == [
        "target passes      3",
        "tokens             3 (1.00 a pass)",
        "time               1.50 s, 2.0 tokens/s",
    ]
    assert (
        render.statistics_lines(SpeculationStats(), 0.0)[-1]
        == "time               0.00 s, 0.0 tokens/s"
    )


def test_a_table_lines_up_its_columns() -> None:
    rows = [("", "passes", "s"), ("plain", "96", "1.25"), ("mtp, k = 3", "40", "0.50")]
    assert render.table(rows) == [
        "            passes     s",
        "plain           96  1.25",
        "mtp, k = 3      40  0.50",
    ]


def test_the_progress_bar_redraws_one_line_and_wipes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("outrider.render.time.monotonic", lambda: now)
    stream = Tty()
    bar = ProgressBar(stream)
    now = 102.0
    bar(1, 4, 10)
    bar(2, 4, 20)  # too soon after the first
    now = 104.0
    bar(3, 4, 30)
    bar(4, 4, 40)  # the end is always shown
    bar.close()
    assert stream.getvalue() == (
        "\r[######..................] 1/4  10 tokens  5 tokens/s\x1b[K"
        "\r[##################......] 3/4  30 tokens  8 tokens/s\x1b[K"
        "\r[########################] 4/4  40 tokens  10 tokens/s\x1b[K"
        "\r\x1b[K"
    )


def test_a_progress_bar_that_was_never_drawn_leaves_nothing_to_wipe() -> None:
    stream = Tty()
    ProgressBar(stream).close()
    assert stream.getvalue() == ""
