"""Where tokens came from, and what speculation did, worked out by hand."""

import pytest

from outrider.trace import Origin, RoundTrace, SpeculationStats, TokenOrigin

D1, D2, D3 = (TokenOrigin(Origin.DRAFTED, position) for position in (1, 2, 3))
PLAIN, CORRECTED, BONUS = (
    TokenOrigin(origin) for origin in (Origin.PLAIN, Origin.CORRECTED, Origin.BONUS)
)

# drafts, accepted, emitted -> origins, rejected
ROUNDS = {
    "plain": (RoundTrace((), 0, 1), [PLAIN], ()),
    "nothing accepted": (RoundTrace((5, 6), 0, 1), [CORRECTED], (5, 6)),
    "some accepted": (RoundTrace((5, 6, 7), 2, 3), [D1, D2, CORRECTED], (7,)),
    "all accepted": (RoundTrace((5, 6, 7), 3, 4), [D1, D2, D3, BONUS], ()),
    "one draft accepted": (RoundTrace((5,), 1, 2), [D1, BONUS], ()),
    "all accepted, bonus trimmed": (RoundTrace((5, 6), 2, 2), [D1, D2], ()),
    "trimmed at the first draft": (RoundTrace((5, 6, 7), 3, 1), [D1], ()),
    "correction trimmed": (RoundTrace((5, 6, 7), 1, 1), [D1], (6, 7)),
}


@pytest.mark.parametrize(("trace", "origins", "rejected"), ROUNDS.values(), ids=list(ROUNDS))
def test_every_emitted_token_has_its_origin_and_the_rejected_drafts_are_kept(
    trace: RoundTrace, origins: list[TokenOrigin], rejected: tuple[int, ...]
) -> None:
    assert trace.origins == origins
    assert trace.rejected_token_ids == rejected


def deep_to_three() -> SpeculationStats:
    return SpeculationStats.of(
        [
            RoundTrace((), 0, 1),
            RoundTrace((1, 2, 3), 3, 4),
            RoundTrace((1, 2, 3), 0, 1),
            RoundTrace((1, 2), 1, 2),
            RoundTrace((), 0, 1),
            RoundTrace((1, 2, 3), 2, 1),
        ]
    )


def deep_to_four() -> SpeculationStats:
    return SpeculationStats.of([RoundTrace((), 0, 1), RoundTrace((1, 2, 3, 4), 4, 5)])


def test_totals_count_rounds_with_drafts_apart_from_plain_passes() -> None:
    assert deep_to_three() == SpeculationStats(
        num_passes=6,
        num_rounds=4,
        num_drafted=11,
        num_accepted=6,
        accepted_per_position=(3, 2, 1),
        num_tokens=10,
    )


def test_acceptance_length_counts_the_targets_own_token_and_is_not_trimmed() -> None:
    assert (
        deep_to_three().acceptance_length == 2.5
    )  # (4 + 1 + 2 + 3) / 4, though the last one kept 1 token
    assert deep_to_four().acceptance_length == 5.0


def test_totals_of_several_requests_add_up_whatever_their_depth() -> None:
    assert deep_to_three() + deep_to_four() == deep_to_four() + deep_to_three()
    assert deep_to_three() + deep_to_four() == SpeculationStats(
        num_passes=8,
        num_rounds=5,
        num_drafted=15,
        num_accepted=10,
        accepted_per_position=(4, 3, 2, 1),
        num_tokens=16,
    )
    assert (deep_to_three() + deep_to_four()).acceptance_length == 3.0


def test_without_drafts_there_is_no_acceptance_length() -> None:
    plain = SpeculationStats.of([RoundTrace((), 0, 1)] * 3)
    assert plain == SpeculationStats(num_passes=3, num_tokens=3)
    assert plain.acceptance_length is None
    assert SpeculationStats.of([]) == SpeculationStats()
    assert deep_to_three() + SpeculationStats() == deep_to_three()
