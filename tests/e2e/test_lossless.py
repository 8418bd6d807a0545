"""Speculation changes no token: the text is that of plain decoding, greedy or at a fixed seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import torch

from outrider.params import SamplingParams
from tests.checkpoints import TinyShape
from tests.harness import (
    ScriptedDrafter,
    make_engine,
    random_tokens,
    run_requests,
    tokens_of,
    transformers_model,
)

Checkpoints = Callable[[TinyShape], Path]
Tokens = list[tuple[int, ...]]

PROMPT_LENGTHS = (1, 2, 200, 7, 64, 16, 129, 65, 33)
NUM_TOKENS = 10
TRAINED = "trained"
MODELS = {
    "ratio2": TinyShape(num_layers=2, interval=2),
    "ratio3": TinyShape(
        num_key_heads=1, num_value_heads=3, hidden_size=48, num_layers=3, interval=2, tied=False
    ),
    TRAINED: None,
}


@dataclass(frozen=True)
class Case:
    """One run. `drafts` says who proposes: the checkpoint's MTP head, or a script that is mostly
    right, since the random heads of random checkpoints are hardly ever.
    """

    num_drafts: int
    batch: int
    block_size: int
    grid: int
    model: str
    drafts: str
    temperature: float


CHOICES: dict[str, Sequence[object]] = {
    "num_drafts": range(1, 9),
    "batch": range(1, 10),
    "block_size": (16, 64),
    "grid": (7, 64),
    "model": tuple(MODELS),
    "drafts": ("mtp", "script"),
    "temperature": (0.0, 0.7, 1.0),
}
assert tuple(CHOICES) == tuple(field.name for field in fields(Case))


def pairwise(seed: int = 0) -> list[Case]:
    """Cases in which every two choices of different columns meet at least once."""
    columns, rng = list(CHOICES.values()), random.Random(seed)
    open_pairs = {
        (i, a, j, b)
        for (i, left), (j, right) in itertools.combinations(enumerate(columns), 2)
        for a in left
        for b in right
    }

    def pairs(row: Sequence[object]) -> set[tuple[int, object, int, object]]:
        return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(columns)), 2)}

    cases: list[Case] = []
    while open_pairs:
        seed_pair = min(open_pairs, key=repr)
        best: list[object] = []
        gain = -9
        for _ in range(30):
            row = [rng.choice(list(column)) for column in columns]
            row[seed_pair[0]], row[seed_pair[2]] = seed_pair[1], seed_pair[3]
            # The trained model is slow, so it joins only where it covers more.
            covered = len(pairs(row) & open_pairs) - 3 * (TRAINED in row)
            if covered > gain:
                best, gain = row, covered
        open_pairs -= pairs(best)
        cases.append(Case(*best))  # type: ignore[arg-type]
    return cases


class Models:
    """Checkpoints by name, and plain decoding of the shared prompts, each computed once."""

    def __init__(self, checkpoint: Checkpoints, trained: Callable[[], Path]) -> None:
        self._checkpoint, self._trained = checkpoint, trained
        self._plain: dict[tuple[str, int, float], Tokens] = {}

    def path(self, model: str) -> Path:
        shape = MODELS[model]
        return self._trained() if shape is None else self._checkpoint(shape)

    def vocab_size(self, model: str) -> int:
        shape = MODELS[model]
        return 4096 if shape is None else shape.vocab_size

    def prompts(self, model: str) -> list[list[int]]:
        return [random_tokens(n, self.vocab_size(model), n) for n in PROMPT_LENGTHS]

    def plain(self, model: str, grid: int, temperature: float) -> Tokens:
        """Tokens of every prompt without speculation."""
        key = (model, grid, temperature)
        if key not in self._plain:
            engine = make_engine(self.path(model), prefill_grid=grid, max_prefill_tokens=512)
            params = [sampled(index, temperature) for index in range(len(PROMPT_LENGTHS))]
            outputs = run_requests(engine, self.prompts(model), params)
            self._plain[key] = tokens_of(outputs)
        return self._plain[key]


def sampled(index: int, temperature: float, **options: object) -> SamplingParams:
    """Parameters of prompt `index`; with top-k, top-p and min-p on some of them."""
    narrowed = [{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.02}][index % 4]
    return SamplingParams(
        max_tokens=NUM_TOKENS,
        temperature=temperature,
        seed=1000 + index,
        draft_sampling="coupled",
        ignore_eos=True,
        **narrowed,
        **options,  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def models(random_checkpoint: Checkpoints, request: pytest.FixtureRequest) -> Models:
    return Models(random_checkpoint, lambda: request.getfixturevalue("trained_model"))


def mostly_right(sequence_id: int, turn: int, index: int) -> bool:
    return random.Random(f"{sequence_id} {turn} {index}").random() < 0.8


def check(models: Models, case: Case) -> None:
    """Run a case's batch and compare it with plain decoding."""
    expected = models.plain(case.model, case.grid, case.temperature)
    # Which prompts stand together varies with the case.
    chosen = [(case.num_drafts + i) % len(PROMPT_LENGTHS) for i in range(case.batch)]
    prompts = models.prompts(case.model)
    drafter = None
    if case.drafts == "script":
        texts = {i: [*prompts[c], *expected[c]] for i, c in enumerate(chosen)}
        drafter = ScriptedDrafter(mostly_right, texts, models.vocab_size(case.model))
    engine = make_engine(
        models.path(case.model),
        case.num_drafts,
        drafter=drafter,
        block_size=case.block_size,
        prefill_grid=case.grid,
        max_prefill_tokens=max(case.grid, 70),
    )
    params = [sampled(c, case.temperature) for c in chosen]
    outputs = run_requests(engine, [prompts[c] for c in chosen], params)
    assert tokens_of(outputs) == [expected[c] for c in chosen]
    for output in outputs:
        stats = output.speculation
        assert stats.num_tokens == NUM_TOKENS and stats.num_drafted > 0
        if drafter is not None:
            assert stats.num_accepted > 0


def label(case: Case) -> str:
    return "-".join(str(value) for value in vars(case).values())


PAIRWISE = pairwise()


@pytest.mark.parametrize("case", PAIRWISE, ids=label)
def test_text_with_speculation_equals_text_without(models: Models, case: Case) -> None:
    check(models, case)


def test_the_sample_of_cases_covers_every_pair_of_choices() -> None:
    for (name, left), (other, right) in itertools.combinations(CHOICES.items(), 2):
        met = {(getattr(case, name), getattr(case, other)) for case in PAIRWISE}
        assert met == set(itertools.product(left, right))


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", CHOICES["num_drafts"])
@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_full_grid_of_batches_blocks_and_prefill_grids_is_lossless(
    models: Models, num_drafts: int, model: str, temperature: float
) -> None:
    others = ("batch", "block_size", "grid", "drafts")
    for batch, block_size, grid, drafts in itertools.product(*(CHOICES[o] for o in others)):
        case = Case(num_drafts, batch, block_size, grid, model, drafts, temperature)  # type: ignore[arg-type]
        check(models, case)


@pytest.mark.slow
@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("grid", [7, 64])
def test_greedy_text_is_lossless_for_prompts_of_1_to_200_tokens(
    models: Models, model: str, grid: int
) -> None:
    path, vocab_size = models.path(model), models.vocab_size(model)
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    prompts = [random_tokens(n, vocab_size, n) for n in range(1, 201)]
    options = {"prefill_grid": grid, "max_prefill_tokens": 128, "max_num_seqs": 9}
    plain = run_requests(make_engine(path, num_kv_blocks=300, **options), prompts, params)
    for num_drafts in range(1, 9):
        engine = make_engine(path, num_drafts, num_kv_blocks=300, **options)
        assert tokens_of(run_requests(engine, prompts, params)) == tokens_of(plain)


@pytest.mark.parametrize(
    ("model", "temperature"), [("ratio3", 0.0), ("ratio2", 1.0), (TRAINED, 0.7)]
)
def test_text_does_not_depend_on_company(models: Models, model: str, temperature: float) -> None:
    expected, prompts = models.plain(model, 64, temperature), models.prompts(model)
    for index in (0, 4, 8):
        engine = make_engine(models.path(model))
        [output] = run_requests(engine, [prompts[index]], sampled(index, temperature))
        assert output.token_ids == expected[index]


@pytest.mark.parametrize(
    ("model", "drafts", "temperature"),
    [("ratio3", "mtp", 0.0), ("ratio3", "script", 0.7), (TRAINED, "mtp", 0.7)],
)
def test_requests_with_different_wishes_for_drafts_share_a_batch(
    models: Models, model: str, drafts: str, temperature: float
) -> None:
    expected, prompts = models.plain(model, 64, temperature), models.prompts(model)
    wishes: list[dict[str, object]] = [
        {"max_draft_tokens": 0},
        {"speculation": False},
        {"max_draft_tokens": 1},
        {},
        {"max_draft_tokens": 3},
        {"max_draft_tokens": 100},
        {"speculation": False, "max_draft_tokens": 2},
        {"max_draft_tokens": 5},
        {"max_draft_tokens": 2},
    ]
    params = [sampled(i, temperature, **wish) for i, wish in enumerate(wishes)]
    drafter = None
    if drafts == "script":
        texts = {i: [*prompts[i], *expected[i]] for i in range(len(prompts))}
        drafter = ScriptedDrafter(mostly_right, texts, models.vocab_size(model))
    engine = make_engine(models.path(model), 6, drafter=drafter)
    outputs = run_requests(engine, prompts, params)
    assert tokens_of(outputs) == expected
    longest = [max(len(r.draft_token_ids) for r in output.rounds) for output in outputs]
    assert longest == [0, 0, 1, 6, 3, 6, 0, 5, 2]


@pytest.mark.parametrize(
    ("model", "temperature"), [("ratio3", 0.0), ("ratio2", 1.0), (TRAINED, 0.0)]
)
def test_requests_that_arrive_while_others_run_change_nothing(
    models: Models, model: str, temperature: float
) -> None:
    expected, prompts = models.plain(model, 7, temperature), models.prompts(model)
    engine = make_engine(
        models.path(model), 4, prefill_grid=7, max_prefill_tokens=70, max_num_seqs=4
    )
    params = [sampled(i, temperature) for i in range(len(prompts))]
    outputs = run_requests(engine, prompts, params, arrivals=[0, 3, 1, 0, 9, 2, 2, 6, 4])
    assert tokens_of(outputs) == expected


@pytest.mark.parametrize("model", list(MODELS))
def test_greedy_text_is_transformers_own(models: Models, model: str) -> None:
    reference, prompts = transformers_model(models.path(model)), models.prompts(model)
    chosen = [0, 3, 6]
    engine = make_engine(models.path(model), 3)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    outputs = run_requests(engine, [prompts[i] for i in chosen], params)
    for index, output in zip(chosen, outputs, strict=True):
        generated = reference.generate(
            torch.tensor([prompts[index]]),
            attention_mask=torch.ones(1, len(prompts[index]), dtype=torch.int64),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert output.token_ids == tuple(generated[0, len(prompts[index]) :].tolist())
