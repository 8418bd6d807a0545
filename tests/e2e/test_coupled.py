"""At a fixed seed the text is the same with and without drafts; sampled drafts keep its law."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.engine import Engine
from outrider.layers.rows import RowBatch
from outrider.output import total_speculation
from outrider.params import SamplingParams
from outrider.runner import decide
from outrider.spec.base import ChainDrafter
from outrider.tokenizer import Tokenizer
from tests.checkpoints import SHAPES, TinyShape
from tests.checkpoints_qwen3 import QWEN3_SHAPES
from tests.harness import (
    ScriptedDrafter,
    make_engine,
    random_tokens,
    run_requests,
    tokens_of,
)
from tests.sampled_law import (
    CHI_SQUARE_LIMIT,
    assert_that_drafts_decide,
    draw,
    exact_law,
    statistic,
    tiny_engines,
)
from tests.trained import Folders, trained_folder, trained_pair

Checkpoints = Callable[[TinyShape], Path]
Tokens = list[tuple[int, ...]]

NUM_TOKENS = 10


class Adversary(ChainDrafter):
    """Scores of its own for every step that have nothing to do with the text."""

    samples = True

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.generator = torch.Generator().manual_seed(0)

    def step(self, hidden: Tensor, token_ids: Tensor, rows: RowBatch) -> Tensor:
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return 3 * torch.randn((len(hidden), self.vocab_size), generator=self.generator)


@dataclass(frozen=True)
class Request:
    """One line of a batch: a prompt and how it is drawn."""

    prompt: tuple[int, ...]
    params: SamplingParams

    @property
    def keeps_its_text(self) -> bool:
        return self.params.draft_sampling != "sampled"


def requests(vocab_size: int, *, may_sample: bool) -> list[Request]:
    """A batch of greedy, coupled, argmax and sampled requests, cool and warm, with and without."""
    base = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    wishes: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7, "draft_sampling": "coupled"},
        {"temperature": 1.0, "draft_sampling": "coupled"},
        {"temperature": 1.0, "draft_sampling": "sampled" if may_sample else None},
        {"temperature": 0.7, "draft_sampling": "argmax", "top_p": 0.9},
        {"temperature": 1.0, "draft_sampling": "argmax"},
        {"temperature": 1.0, "draft_sampling": "coupled", "top_k": 9, "min_p": 0.02},
        {"temperature": 0.7, "draft_sampling": "sampled" if may_sample else None, "top_k": 5},
        {"temperature": 0.7, "draft_sampling": "coupled", "max_draft_tokens": 2},
        {"temperature": 1.0, "draft_sampling": "coupled", "speculation": False},
    ]
    lengths = (3, 1, 40, 17, 18, 5, 33, 2, 9, 21)
    return [
        Request(
            tuple(random_tokens(length, vocab_size, length)),
            replace(base, seed=100 + length, **wish),
        )
        for length, wish in zip(lengths, wishes, strict=True)
    ]


class Models:
    """Checkpoints by name, and what plain decoding makes of the batch, computed once."""

    def __init__(self, checkpoint: Checkpoints, folders: Folders) -> None:
        self.paths = {"qwen3": folders.target(QWEN3_SHAPES[0]), "qwen3.5": checkpoint(SHAPES[0])}
        self.draft = folders.draft(QWEN3_SHAPES[0], 100)
        self._plain: dict[str, Tokens] = {}

    def path(self, model: str) -> Path:
        return self.paths[model] if model in self.paths else trained_folder(model)

    def batch(self, model: str, *, may_sample: bool) -> list[Request]:
        if model in self.paths:
            return requests(128, may_sample=may_sample)
        tokenizer = Tokenizer.from_pretrained(self.path(model))
        return [
            Request(tuple(tokenizer.encode(text)), request.params)
            for text, request in zip(TEXTS, requests(128, may_sample=may_sample), strict=True)
        ]

    def plain(self, model: str) -> Tokens:
        if model not in self._plain:
            batch = self.batch(model, may_sample=False)
            engine = make_engine(self.path(model), dtype="float32")
            self._plain[model] = tokens_of(run(engine, batch))
        return self._plain[model]

    def engine(self, model: str, method: str, num_drafts: int, **options: Any) -> Engine:
        options = {"dtype": "float32", **options}
        path = self.path(model)
        if method == "eagle3":
            draft = self.draft if model in self.paths else trained_pair()[1]
            return make_engine(path, num_drafts, method="eagle3", draft=draft, **options)
        if method == "adversary":
            own = Adversary(128 if model in self.paths else 4096)
            return make_engine(path, num_drafts, drafter=own, **options)
        if method == "mostly right":
            batch = self.batch(model, may_sample=False)
            texts = {
                i: [*request.prompt, *tokens]
                for i, (request, tokens) in enumerate(zip(batch, self.plain(model), strict=True))
            }
            script = ScriptedDrafter(mostly_right, texts, 128)
            return make_engine(path, num_drafts, drafter=script, **options)
        return make_engine(path, num_drafts, method=method, **options)


TEXTS = (
    "def main():\n",
    "import os\nimport sys\n",
    "The following options",
    "    for key, value in",
    "To install the package,",
    "class Test",
    "        return",
    "if __name__ == ",
    "    raise ValueError(",
    "When the user",
)


def mostly_right(sequence_id: int, turn: int, index: int) -> bool:
    return random.Random(f"{sequence_id} {turn} {index}").random() < 0.8


def run(engine: Engine, batch: Sequence[Request]) -> list[Any]:
    return run_requests(engine, [r.prompt for r in batch], [r.params for r in batch])


@pytest.fixture(scope="module")
def models(random_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(random_checkpoint, Folders(tmp_path_factory))


def check(models: Models, model: str, method: str, num_drafts: int, **options: Any) -> None:
    """Run the batch with drafts; every request that keeps its text has that of plain decoding."""
    batch = models.batch(model, may_sample=method in ("eagle3", "mtp", "adversary"))
    expected = models.plain(model)
    outputs = run(models.engine(model, method, num_drafts, **options), batch)
    for request, output, tokens in zip(batch, outputs, expected, strict=True):
        assert len(output.token_ids) == NUM_TOKENS
        if request.keeps_its_text:
            assert output.token_ids == tokens, request.params
        drafted = max(len(r.draft_token_ids) for r in output.rounds)
        cap = request.params.max_draft_tokens
        most = min(num_drafts, num_drafts if cap is None else cap)
        assert drafted <= (most if request.params.speculation else 0)
        if method != "ngram" and request.params.speculation:
            assert drafted == most
    if method == "mostly right":
        assert total_speculation(outputs).num_accepted > 10


METHODS = (
    ("qwen3", "eagle3"),
    ("qwen3", "ngram"),
    ("qwen3", "adversary"),
    ("qwen3", "mostly right"),
    ("qwen3.5", "mtp"),
    ("qwen3.5", "ngram"),
    ("qwen3.5", "adversary"),
    ("qwen3.5", "mostly right"),
)

SAMPLE = [
    (model, method, (3 * index + shift) % 8 + 1)
    for index, (model, method) in enumerate(METHODS)
    for shift in (0, 5)
]
"""Every method with two numbers of drafts, every number of drafts with two methods."""


def test_the_sample_meets_every_method_and_every_number_of_drafts_twice() -> None:
    assert set(Counter((model, method) for model, method, _ in SAMPLE).values()) == {2}
    assert Counter(num_drafts for *_, num_drafts in SAMPLE) == dict.fromkeys(range(1, 9), 2)


@pytest.mark.parametrize(("model", "method", "num_drafts"), SAMPLE)
def test_text_at_a_seed_does_not_depend_on_drafts(
    models: Models, model: str, method: str, num_drafts: int
) -> None:
    check(models, model, method, num_drafts)


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", range(1, 9))
@pytest.mark.parametrize(("model", "method"), METHODS)
@pytest.mark.parametrize(("block_size", "grid"), [(16, 64), (64, 7), (32, 16)])
def test_text_at_a_seed_does_not_depend_on_drafts_blocks_or_chunks(
    models: Models, model: str, method: str, num_drafts: int, block_size: int, grid: int
) -> None:
    options = {"block_size": block_size, "prefill_grid": grid, "max_prefill_tokens": max(grid, 70)}
    check(models, model, method, num_drafts, **options)


TRAINED = (
    ("tiny-qwen3", "eagle3"),
    ("tiny-qwen3", "ngram"),
    ("tiny-qwen3.5", "mtp"),
    ("tiny-qwen3.5", "ngram"),
)


@pytest.mark.parametrize(("model", "method", "num_drafts"), [(*TRAINED[0], 4), (*TRAINED[2], 5)])
def test_text_at_a_seed_of_a_trained_model_does_not_depend_on_drafts(
    models: Models, model: str, method: str, num_drafts: int
) -> None:
    check(models, model, method, num_drafts)


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", range(1, 9))
@pytest.mark.parametrize(("model", "method"), [*TRAINED, ("tiny-qwen3", "adversary")])
def test_text_at_a_seed_of_a_trained_model_does_not_depend_on_any_drafts(
    models: Models, model: str, method: str, num_drafts: int
) -> None:
    check(models, model, method, num_drafts)


def test_an_engine_may_couple_drafts_for_requests_that_do_not_say(models: Models) -> None:
    batch = [
        replace(request, params=replace(request.params, draft_sampling=None))
        for request in models.batch("qwen3", may_sample=False)
    ]
    engine = models.engine("qwen3", "eagle3", 3, draft_sampling="coupled")
    assert tokens_of(run(engine, batch)) == models.plain("qwen3")


@pytest.mark.parametrize(("model", "method"), [("qwen3", "eagle3"), ("qwen3.5", "mtp")])
def test_the_text_of_sampled_drafts_does_not_depend_on_company(
    models: Models, model: str, method: str
) -> None:
    batch = models.batch(model, may_sample=True)
    together = run(models.engine(model, method, 4), batch)
    for index, request in enumerate(batch):
        if not request.keeps_its_text:
            [alone] = run(models.engine(model, method, 4), [request])
            assert alone.token_ids == together[index].token_ids
            assert alone.rounds == together[index].rounds


def test_coupled_drafts_of_the_trained_pair_are_accepted_more_often_than_its_argmax(
    models: Models,
) -> None:
    # Sharing the target's noise is what makes a draft at temperature 1 agree with it.
    tokenizer = Tokenizer.from_pretrained(trained_pair()[0])
    lengths: dict[str, float] = {}
    for draft_sampling in ("argmax", "coupled"):
        batch = [
            Request(
                tuple(tokenizer.encode(text)),
                SamplingParams(
                    max_tokens=20, seed=seed, ignore_eos=True, draft_sampling=draft_sampling
                ),
            )
            for seed, text in enumerate(TEXTS)
        ]
        outputs = run(models.engine("tiny-qwen3", "eagle3", 3), batch)
        length = total_speculation(outputs).acceptance_length
        assert length is not None
        lengths[draft_sampling] = length
    assert lengths["coupled"] > lengths["argmax"] + 0.1, lengths


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[], Engine]]:
    return tiny_engines(tmp_path_factory)


PROMPT = (2, 3, 0)


def distance(tiny: dict[str, Callable[[], Engine]], method: str, num_seeds: int) -> float:
    """How far the drawn texts are from the target's law."""
    engine = tiny[method]()
    law = exact_law(Path(engine.config.model), PROMPT)
    outputs = draw(engine, PROMPT, num_seeds)
    assert_that_drafts_decide(outputs)
    return statistic(outputs, law)


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_sampled_drafts_keep_the_law_of_the_text(
    tiny: dict[str, Callable[[], Engine]], method: str
) -> None:
    assert distance(tiny, method, 700) < CHI_SQUARE_LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_many_sampled_drafts_keep_the_law_of_the_text(
    tiny: dict[str, Callable[[], Engine]], method: str
) -> None:
    assert distance(tiny, method, 8000) < CHI_SQUARE_LIMIT


def target_alone(probs: Tensor, num_accepted: Tensor, *_: Any) -> Tensor:
    """A mistake: what replaces a refused draft is drawn from p instead of from what is left."""
    return probs[torch.arange(len(num_accepted)), num_accepted]


def test_a_wrong_residual_changes_the_law(
    tiny: dict[str, Callable[[], Engine]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decide, "residual_probs", target_alone)
    assert distance(tiny, "eagle3", 600) > 1.3 * CHI_SQUARE_LIMIT
