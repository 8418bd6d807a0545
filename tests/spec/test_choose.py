"""DraftChooser: what is drawn is what is recorded, alike in any company, with noise of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import pytest
import torch
from torch import Tensor

from outrider.sampling.arrays import SamplingArrays
from outrider.sampling.sampler import sample_rows
from outrider.spec.choose import MODES, DraftChooser, Proposal
from outrider.spec.names import DraftSampling

ARGMAX, COUPLED, SAMPLED = DraftSampling.ARGMAX, DraftSampling.COUPLED, DraftSampling.SAMPLED

VOCAB_SIZE = 11
"""Of the target."""

MAP = torch.tensor([7, 2, 10, 0, 5])
"""Target id of each id of a draft with five tokens, in no order."""


def arrays(
    size: int,
    *,
    temperature: float = 0.8,
    top_k: int = VOCAB_SIZE,
    top_p: float = 1.0,
    min_p: float = 0.0,
    first_seed: int = 0,
) -> SamplingArrays:
    """The same parameters for every entry, and a seed of its own for each."""
    return SamplingArrays(
        torch.full((size,), temperature),
        torch.full((size,), top_k),
        torch.full((size,), top_p),
        torch.full((size,), min_p),
        torch.arange(first_seed, first_seed + size),
    )


def chooser(
    mode: DraftSampling | Sequence[DraftSampling],
    sampling: SamplingArrays,
    *,
    num_committed: Tensor | int = 20,
    top_m: int = 32,
) -> DraftChooser:
    size = len(sampling.seeds)
    modes = [mode] * size if isinstance(mode, DraftSampling) else mode
    if isinstance(num_committed, int):
        num_committed = torch.full((size,), num_committed)
    indices = torch.tensor([MODES.index(each) for each in modes])
    return DraftChooser(indices, sampling, num_committed, top_m, frozenset(modes))


def noise_logits(size: int, width: int, seed: int) -> Tensor:
    return 2 * torch.randn((size, width), generator=torch.Generator().manual_seed(seed))


def repeated(logits: Sequence[float], size: int) -> Tensor:
    return torch.tensor([list(logits)]).expand(size, -1)


def proposal_of(chooser: DraftChooser, steps: Sequence[Tensor], ids: Tensor | None) -> Proposal:
    for logits in steps:
        chooser.choose(logits, ids)
    return chooser.proposal(torch.full((steps[0].shape[0],), len(steps)))


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_argmax_takes_the_likeliest_token_and_the_lowest_id_among_equals(
    temperature: float,
) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 0.0, 5.0, 5.0], [-1.0, -2.0, -3.0, -0.5]])
    chosen = chooser(ARGMAX, arrays(3, temperature=temperature)).choose(logits, None)
    assert chosen.tolist() == [1, 0, 3]


def test_argmax_is_mapped_to_target_ids() -> None:
    logits = torch.eye(5)
    assert torch.equal(chooser(ARGMAX, arrays(5)).choose(logits, MAP), MAP)


@pytest.mark.parametrize("mode", [ARGMAX, COUPLED])
def test_point_masses_record_no_distribution(mode: DraftSampling) -> None:
    steps = [noise_logits(4, 5, step) for step in range(3)]
    proposal = proposal_of(chooser(mode, arrays(4)), steps, MAP)
    assert proposal.q is None
    assert proposal.token_ids.shape == (4, 3)
    assert proposal.num_drafts.tolist() == [3] * 4


NARROWED = (
    {},
    {"temperature": 0.3},
    {"temperature": 2.0, "top_k": 3},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"top_k": 6, "top_p": 0.8, "min_p": 0.05},
)


@pytest.mark.parametrize("narrowed", NARROWED, ids=str)
def test_coupled_drafts_are_the_targets_own_draws_where_the_logits_are(
    narrowed: dict[str, float],
) -> None:
    size = 400
    sampling = arrays(size, **narrowed)  # type: ignore[arg-type]
    num_committed = torch.arange(size) % 50 + 1
    own = chooser(COUPLED, sampling, num_committed=num_committed)
    for step in range(4):
        logits = noise_logits(size, VOCAB_SIZE, step)
        # The draft of step s stands at position n + s, the target's n-th token having index n.
        expected = sample_rows(logits, sampling, num_committed + step)
        assert torch.equal(own.choose(logits, None), expected)


def test_coupled_drafts_over_a_part_of_the_vocabulary_meet_the_same_noise() -> None:
    size = 400
    sampling, logits = arrays(size), noise_logits(size, len(MAP), 0)
    # A target that gives everything else no probability has the draft's distribution.
    wide = torch.full((size, VOCAB_SIZE), float("-inf"))
    wide[:, MAP] = logits
    expected = sample_rows(wide, sampling, torch.full((size,), 20))
    assert torch.equal(chooser(COUPLED, sampling).choose(logits, MAP), expected)
    assert len(expected.unique()) == len(MAP)


def test_coupled_drafts_agree_with_a_target_that_is_nearly_the_same() -> None:
    size = 2000
    sampling, logits = arrays(size), noise_logits(size, VOCAB_SIZE, 0)
    near = logits + 0.1 * noise_logits(size, VOCAB_SIZE, 1)
    drafted = chooser(COUPLED, sampling).choose(near, None)
    own = sample_rows(logits, sampling, torch.full((size,), 20))
    # Independent draws from such rows agree in about a third of the cases.
    assert (drafted == own).float().mean() > 0.85


def test_a_coupled_draft_depends_on_its_position_and_not_on_the_round() -> None:
    sampling, logits = arrays(300), noise_logits(300, VOCAB_SIZE, 0)
    late = chooser(COUPLED, sampling, num_committed=20)
    early = chooser(COUPLED, sampling, num_committed=19)
    early.choose(logits, None)
    assert torch.equal(early.choose(logits, None), late.choose(logits, None))
    assert not torch.equal(early.choose(logits, None), late.proposal(torch.ones(1)).token_ids[:, 0])


@pytest.mark.parametrize("mode", [COUPLED, SAMPLED])
def test_a_greedy_entry_keeps_its_argmax_when_coupled_and_stays_valid_when_sampled(
    mode: DraftSampling,
) -> None:
    logits = noise_logits(50, VOCAB_SIZE, 0)
    chosen = chooser(mode, arrays(50, temperature=0.0)).choose(logits, None)
    if mode is COUPLED:
        assert torch.equal(chosen, logits.argmax(-1))
    assert bool(((chosen >= 0) & (chosen < VOCAB_SIZE)).all())


def plain_q(
    logits: Sequence[float], top_m: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> dict[int, float]:
    """q by its definition, in Python's floats: draft id -> probability."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])[:top_m]
    weights = torch.tensor([logits[i] for i in order], dtype=torch.float64) / temperature
    probs = torch.softmax(weights, 0).tolist()[:top_k]
    kept, total, before = [], sum(probs), 0.0
    for prob in probs:
        if before / total < top_p or top_p >= 1:
            kept.append(prob)
        before += prob
    kept = [prob for prob in kept if prob >= min_p * kept[0]]
    return {order[i]: prob / sum(kept) for i, prob in enumerate(kept)}


@pytest.mark.parametrize("top_m", [1, 3, 5, 32])
@pytest.mark.parametrize("narrowed", NARROWED, ids=str)
def test_the_recorded_distribution_is_the_draft_cut_to_its_best_and_made_whole(
    narrowed: dict[str, float], top_m: int
) -> None:
    logits = noise_logits(60, VOCAB_SIZE, 0)
    sampling = arrays(60, **narrowed)  # type: ignore[arg-type]
    q = proposal_of(chooser(SAMPLED, sampling, top_m=top_m), [logits], None).q
    assert q is not None
    assert q.token_ids.shape == q.probs.shape == (60, 1, min(top_m, VOCAB_SIZE))
    options = {"temperature": 0.8, "top_k": VOCAB_SIZE, "top_p": 1.0, "min_p": 0.0} | narrowed
    for row in range(60):
        ids, probs = q.token_ids[row, 0].tolist(), q.probs[row, 0].tolist()
        assert len(set(ids)) == len(ids)
        assert sum(probs) == pytest.approx(1.0, abs=1e-6)
        recorded = {i: prob for i, prob in zip(ids, probs, strict=True) if prob > 0}
        expected = plain_q(logits[row].tolist(), top_m, **options)  # type: ignore[arg-type]
        assert recorded == pytest.approx(expected, rel=1e-5)


def test_the_recorded_ids_are_the_targets() -> None:
    logits = noise_logits(60, len(MAP), 0)
    mapped = proposal_of(chooser(SAMPLED, arrays(60), top_m=3), [logits], MAP)
    plain = proposal_of(chooser(SAMPLED, arrays(60), top_m=3), [logits], None)
    assert mapped.q is not None and plain.q is not None
    assert torch.equal(mapped.q.token_ids, MAP[plain.q.token_ids])
    assert torch.equal(mapped.q.probs, plain.q.probs)
    assert bool((mapped.q.token_ids == mapped.token_ids[..., None]).any(-1).all())


def test_the_numbers_that_decide_belong_to_target_ids() -> None:
    # The same distribution over target ids, spelled with and without a map, draws the same tokens.
    logits = noise_logits(300, len(MAP), 0)
    wide = torch.full((300, VOCAB_SIZE), float("-inf"))
    wide[:, MAP] = logits
    mapped = chooser(SAMPLED, arrays(300), top_m=5).choose(logits, MAP)
    assert torch.equal(mapped, chooser(SAMPLED, arrays(300), top_m=5).choose(wide, None))


SAMPLES = 40_000
LOGITS = (0.3, -1.2, 2.0, 1.4, 0.0)

# Pearson's statistic stays below these with probability 0.9999; seeds are fixed.
CHI_SQUARE_LIMIT = {2: 18.5, 3: 21.2, 4: 23.6, 15: 44.3, 24: 57.4}


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """counts and expected of any shape; what is not expected must not occur."""
    possible = expected > 0
    assert not counts[~possible].any()
    return float(((counts - expected)[possible] ** 2 / expected[possible]).sum())


def assert_follows(counts: Tensor, probs: Tensor) -> None:
    expected = probs * counts.sum()
    limit = CHI_SQUARE_LIMIT[int((expected > 0).sum()) - 1]
    assert chi_square(counts.double(), expected) < limit


def joint_counts(one: Tensor, other: Tensor, size: int) -> Tensor:
    return torch.bincount(one * size + other, minlength=size * size).view(size, size)


def law_of_all(proposal: Proposal, step: int, size: int) -> Tensor:
    """[size] float64: q of a step, which is the same for all entries."""
    assert proposal.q is not None
    ids, probs = proposal.q.token_ids[:, step], proposal.q.probs[:, step]
    assert bool((ids == ids[0]).all()) and bool((probs == probs[0]).all())
    law = torch.zeros(size, dtype=torch.float64)
    law[ids[0]] = probs[0].double()
    return law / law.sum()


@pytest.mark.parametrize(
    ("top_m", "narrowed"), [(32, {}), (4, {}), (3, {"temperature": 2.0}), (32, {"top_k": 3})]
)
@pytest.mark.parametrize("mapped", [False, True])
def test_drawn_tokens_follow_the_recorded_distribution(
    top_m: int, narrowed: dict[str, float], mapped: bool
) -> None:
    sampling = arrays(SAMPLES, **narrowed)  # type: ignore[arg-type]
    ids = MAP if mapped else None
    own = chooser(SAMPLED, sampling, top_m=top_m)
    proposal = proposal_of(own, [repeated(LOGITS, SAMPLES)], ids)
    counts = torch.bincount(proposal.token_ids[:, 0], minlength=VOCAB_SIZE)
    assert_follows(counts, law_of_all(proposal, 0, VOCAB_SIZE))


def test_a_wrong_distribution_fails_the_same_check() -> None:
    proposal = proposal_of(chooser(SAMPLED, arrays(SAMPLES)), [repeated(LOGITS, SAMPLES)], None)
    counts = torch.bincount(proposal.token_ids[:, 0], minlength=5)
    with pytest.raises(AssertionError):
        assert_follows(counts, torch.softmax(torch.tensor(LOGITS).double(), 0))  # temperature 1


def test_the_drafts_of_a_block_are_independent_of_each_other() -> None:
    steps = [repeated(LOGITS, SAMPLES), repeated(LOGITS[::-1], SAMPLES)]
    proposal = proposal_of(chooser(SAMPLED, arrays(SAMPLES)), steps, None)
    first, second = (law_of_all(proposal, step, 5) for step in range(2))
    counts = joint_counts(proposal.token_ids[:, 0], proposal.token_ids[:, 1], 5)
    assert_follows(counts, torch.outer(first, second))


def test_a_position_drawn_again_in_a_later_round_meets_fresh_numbers() -> None:
    logits = repeated(LOGITS, SAMPLES)
    earlier = proposal_of(chooser(SAMPLED, arrays(SAMPLES), num_committed=20), [logits] * 2, None)
    later = proposal_of(chooser(SAMPLED, arrays(SAMPLES), num_committed=21), [logits], None)
    law = law_of_all(later, 0, 5)
    counts = joint_counts(earlier.token_ids[:, 1], later.token_ids[:, 0], 5)
    assert_follows(counts, torch.outer(law, law))


def test_sampled_drafts_are_independent_of_the_targets_own_draw() -> None:
    logits = repeated(LOGITS, SAMPLES)
    proposal = proposal_of(chooser(SAMPLED, arrays(SAMPLES)), [logits], None)
    own = sample_rows(logits, arrays(SAMPLES), torch.full((SAMPLES,), 20))
    law = law_of_all(proposal, 0, 5)
    counts = joint_counts(proposal.token_ids[:, 0], own, 5)
    assert_follows(counts, torch.outer(law, law))


@dataclass(frozen=True)
class Crowd:
    """Requests of all modes with different parameters, and the logits of three steps."""

    modes: list[DraftSampling]
    sampling: SamplingArrays
    num_committed: Tensor
    steps: list[Tensor]

    @classmethod
    def of(cls, size: int) -> Crowd:
        generator = torch.Generator().manual_seed(0)
        choice = [0.0, 0.5, 0.8, 1.3]
        sampling = SamplingArrays(
            torch.tensor([choice[i % 4] for i in range(size)]),
            torch.randint(1, VOCAB_SIZE + 1, (size,), generator=generator),
            torch.rand(size, generator=generator) * 0.5 + 0.5,
            torch.rand(size, generator=generator) * 0.1,
            torch.randint(0, 2**62, (size,), generator=generator),
        )
        num_committed = torch.randint(1, 2**40, (size,), generator=generator)
        steps = [noise_logits(size, len(MAP), step) for step in range(3)]
        return cls([MODES[i % 3] for i in range(size)], sampling, num_committed, steps)

    def part(self, index: Sequence[int]) -> Crowd:
        rows = torch.tensor(index)
        return Crowd(
            [self.modes[i] for i in index],
            self.sampling.gather(rows),
            self.num_committed[rows],
            [logits[rows] for logits in self.steps],
        )

    def proposal(self) -> Proposal:
        own = chooser(self.modes, self.sampling, num_committed=self.num_committed, top_m=4)
        return proposal_of(own, self.steps, MAP)


@pytest.mark.parametrize("order", [[3, 1, 0, 2], [*range(29, -1, -1)], [5], [6], [7], [8, 11, 14]])
def test_an_entry_is_drawn_alike_in_any_company(order: list[int]) -> None:
    crowd = Crowd.of(30)
    together, apart = crowd.proposal(), crowd.part(order).proposal()
    assert torch.equal(apart.token_ids, together.token_ids[order])
    sampled = [place for place, i in enumerate(order) if crowd.modes[i] is SAMPLED]
    if sampled:
        assert apart.q is not None and together.q is not None
        rows = [order[place] for place in sampled]
        assert torch.equal(apart.q.probs[sampled], together.q.probs[rows])
        assert torch.equal(apart.q.token_ids[sampled], together.q.token_ids[rows])
    else:
        assert apart.q is None


def test_in_a_mixed_batch_every_entry_gets_the_mode_it_asks_for() -> None:
    crowd = Crowd.of(300)
    mixed = crowd.proposal()
    for mode in MODES:
        alone = Crowd([mode] * 300, crowd.sampling, crowd.num_committed, crowd.steps).proposal()
        rows = [i for i in range(300) if crowd.modes[i] is mode]
        assert torch.equal(mixed.token_ids[rows], alone.token_ids[rows])
    argmax = torch.stack([MAP[logits.argmax(-1)] for logits in crowd.steps], dim=1)
    warm = crowd.sampling.temperature > 0.7
    for index, mode in enumerate(MODES):
        rows = torch.tensor([crowd.modes[i] is mode for i in range(300)]) & warm
        same = (mixed.token_ids[rows] == argmax[rows]).float().mean()
        assert same == 1 if mode is ARGMAX else 0.3 < same < 0.95, (index, same)


def test_nothing_of_the_inputs_is_changed() -> None:
    crowd = Crowd.of(12)
    before = [logits.clone() for logits in crowd.steps]
    held = {f.name: getattr(crowd.sampling, f.name).clone() for f in fields(crowd.sampling)}
    crowd.proposal()
    assert all(torch.equal(a, b) for a, b in zip(before, crowd.steps, strict=True))
    assert all(torch.equal(held[name], getattr(crowd.sampling, name)) for name in held)
