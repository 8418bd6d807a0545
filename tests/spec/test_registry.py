"""A draft method is one entry of the registry, and a target that cannot host it says so."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine import Engine
from outrider.errors import ConfigError, RequestError
from outrider.layers.rows import RowBatch
from outrider.models.base import CausalLM
from outrider.models.build import Checkpoint
from outrider.params import SamplingParams
from outrider.spec import names, registry
from outrider.spec.base import ChainDrafter, Drafter, Frontier
from outrider.spec.choose import Proposal
from outrider.spec.names import SIDECAR_METHODS
from outrider.spec.registry import DraftMethod
from tests.checkpoints import SHAPES, TinyShape, write_qwen3_5
from tests.checkpoints_qwen3 import QWEN3_SHAPES
from tests.harness import make_engine, random_tokens, run_requests, tokens_of
from tests.trained import Folders

Checkpoints = Callable[[TinyShape], Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory)


def register(monkeypatch: pytest.MonkeyPatch, name: str, method: DraftMethod) -> None:
    """One name and one entry, as CONTRIBUTING says."""
    monkeypatch.setattr(names, "METHODS", (*names.METHODS, name))
    monkeypatch.setattr(registry, "METHODS", {**registry.METHODS, name: method})


class Successor(Drafter):
    """A toy without weights: proposes the newest token plus 1, plus 2, ..."""

    samples = False
    reads_history = True

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def propose(self, hidden: Tensor, frontier: Frontier) -> Proposal:
        last = frontier.history().gather(1, frontier.num_committed[:, None] - 1)
        steps = torch.arange(1, frontier.max_drafts + 1)
        return Proposal((last + steps) % self.vocab_size, frontier.num_wanted, None)


class Bigram(ChainDrafter):
    """A toy chain: its hidden state is the newest token, and its scores prefer twice that token.

    Its vocabulary is the odd target ids. It reads the final hidden state and keeps no cache.
    """

    def __init__(self, target: CausalLM) -> None:
        self.target = target
        self.vocab_size = target.config.vocab_size
        self.tapped_widths: set[int] = set()

    @property
    def target_ids(self) -> Tensor:
        return torch.arange(1, self.vocab_size, 2)

    def feed(self, tapped: Tensor, next_token_ids: Tensor, rows: RowBatch) -> Tensor:
        self.tapped_widths.add(tapped.shape[1])
        return self.step(tapped, next_token_ids, rows)

    def step(self, hidden: Tensor, token_ids: Tensor, rows: RowBatch) -> Tensor:
        assert rows.positions.shape == token_ids.shape
        return token_ids[:, None].float()

    def logits(self, hidden: Tensor) -> Tensor:
        ids = torch.arange(self.vocab_size // 2)
        return -((ids - hidden * 2 % (self.vocab_size // 2)).abs())


def run(path: Path, method: str | None, params: SamplingParams) -> tuple[Engine, list[Any]]:
    engine = make_engine(path, 0 if method is None else 3, method=method or "mtp")
    prompts = [random_tokens(n, 128, n) for n in (3, 20, 70)]
    return engine, run_requests(engine, prompts, params)


GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)


@pytest.mark.parametrize("model", ["qwen3", "qwen3.5"])
def test_a_method_without_weights_is_one_entry(
    monkeypatch: pytest.MonkeyPatch, folders: Folders, random_checkpoint: Checkpoints, model: str
) -> None:
    path = folders.target(QWEN3_SHAPES[0]) if model == "qwen3" else random_checkpoint(SHAPES[0])
    method = DraftMethod(
        refusal=lambda _config: None,
        set_up=lambda _checkpoint, target, _config: Successor(target.config.vocab_size),
    )
    register(monkeypatch, "successor", method)
    engine, outputs = run(path, "Successor", GREEDY)
    assert isinstance(engine.runner.drafter, Successor)
    assert engine.config.speculative_config == SpeculativeConfig("successor")
    assert tokens_of(outputs) == tokens_of(run(path, None, GREEDY)[1])
    for prompt_length, output in zip((3, 20, 70), outputs, strict=True):
        assert not output.rounds[0].draft_token_ids
        text = [*random_tokens(prompt_length, 128, prompt_length), *output.token_ids]
        at = prompt_length
        for index, round_ in enumerate(output.rounds):
            drafts = round_.draft_token_ids
            assert drafts == tuple((text[at - 1] + i + 1) % 128 for i in range(len(drafts)))
            assert len(drafts) == (min(3, 10 - (at - prompt_length) - 1) if index else 0)
            at += round_.num_emitted


@pytest.mark.parametrize("draft_sampling", ["argmax", "coupled", "sampled"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_chain_with_a_vocabulary_of_its_own_is_one_entry_too(
    monkeypatch: pytest.MonkeyPatch, folders: Folders, draft_sampling: str, temperature: float
) -> None:
    seen: list[Any] = []

    def set_up(checkpoint: Checkpoint, target: CausalLM, config: SpeculativeConfig) -> Drafter:
        seen.append((checkpoint.config.model_type, config.num_speculative_tokens))
        return Bigram(target)

    register(monkeypatch, "bigram", DraftMethod(lambda _config: None, set_up))
    path = folders.target(QWEN3_SHAPES[0])
    params = SamplingParams(
        max_tokens=10,
        temperature=temperature,
        seed=3,
        ignore_eos=True,
        draft_sampling=draft_sampling,
    )
    engine, outputs = run(path, "bigram", params)
    assert seen == [("qwen3", 3)]
    drafter = engine.runner.drafter
    assert isinstance(drafter, Bigram) and drafter.tapped_widths == {64}
    drafts = [r.draft_token_ids for output in outputs for r in output.rounds]
    assert any(drafts) and all(token % 2 == 1 for ids in drafts for token in ids)
    if draft_sampling != "sampled" or temperature == 0:
        assert tokens_of(outputs) == tokens_of(run(path, None, params)[1])
    if temperature == 0:
        for prompt_length, output in zip((3, 20, 70), outputs, strict=True):
            text = [*random_tokens(prompt_length, 128, prompt_length), *output.token_ids]
            at = prompt_length
            for round_ in output.rounds:
                token = text[at - 1]
                for draft in round_.draft_token_ids:
                    assert draft == 2 * (2 * token % 64) + 1
                    token = draft
                at += round_.num_emitted


def test_a_method_may_refuse_a_target_in_its_own_words(
    monkeypatch: pytest.MonkeyPatch, folders: Folders
) -> None:
    def never(*_: Any) -> Drafter:
        raise AssertionError("set up although it refused")

    register(monkeypatch, "picky", DraftMethod(lambda config: f"it has {config.num_layers}", never))
    with pytest.raises(ConfigError) as caught:
        make_engine(folders.target(QWEN3_SHAPES[0]), 3, method="picky")
    assert "qwen3 cannot host speculative method picky: it has 8" in str(caught.value)
    assert caught.value.allowed == "eagle3, ngram"


def test_every_method_has_a_name_an_entry_and_nothing_else() -> None:
    assert set(registry.METHODS) == set(names.METHODS)
    assert set(names.ALIASES.values()) <= set(names.METHODS)
    assert set(names.METHODS) >= SIDECAR_METHODS


@pytest.fixture(scope="module")
def targets(
    folders: Folders, random_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    without_head = tmp_path_factory.mktemp("without-head")
    write_qwen3_5(without_head, SHAPES[0])
    config = (without_head / "config.json").read_text()
    assert '"mtp_num_hidden_layers": 1' in config
    changed = config.replace('"mtp_num_hidden_layers": 1', '"mtp_num_hidden_layers": 0')
    (without_head / "config.json").write_text(changed)
    return {
        "qwen3": folders.target(QWEN3_SHAPES[0]),
        "qwen3_5": random_checkpoint(SHAPES[0]),
        "qwen3_5 without a head": without_head,
    }


HOSTED = {
    "qwen3": ("eagle3", "ngram"),
    "qwen3_5": ("mtp", "ngram"),
    "qwen3_5 without a head": ("ngram",),
}


@pytest.mark.parametrize("method", ["mtp", "eagle3", "ngram"])
@pytest.mark.parametrize("target", list(HOSTED))
def test_a_target_hosts_a_method_or_lists_those_that_work(
    targets: dict[str, Path], folders: Folders, target: str, method: str
) -> None:
    draft = folders.draft(QWEN3_SHAPES[0]) if method in SIDECAR_METHODS else None
    if method in HOSTED[target]:
        assert make_engine(targets[target], 2, method=method, draft=draft).runner.drafter
        return
    with pytest.raises(ConfigError) as caught:
        make_engine(targets[target], 2, method=method, draft=draft)
    model_type = target.split()[0]
    assert f"{model_type} cannot host speculative method {method}: " in str(caught.value)
    assert caught.value.got == method
    assert caught.value.allowed == ", ".join(HOSTED[target])
    assert caught.value.hint is not None


def ngram_engine(path: Path, draft_sampling: str | None = None) -> Engine:
    return make_engine(path, 3, method="ngram", draft_sampling=draft_sampling)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampled_drafts_are_refused_where_the_method_has_no_distribution(
    targets: dict[str, Path], temperature: float
) -> None:
    engine = ngram_engine(targets["qwen3"])
    params = SamplingParams(max_tokens=4, temperature=temperature, draft_sampling="sampled")
    with pytest.raises(RequestError) as caught:
        engine.add_request("0", [3, 4], params)
    assert "draft_sampling: the draft method looks tokens up" in str(caught.value)
    assert caught.value.got == "sampled" and caught.value.allowed == "argmax, coupled"
    assert not engine.has_work


def test_an_engine_that_would_sample_from_no_distribution_is_not_built(
    targets: dict[str, Path],
) -> None:
    with pytest.raises(ConfigError, match="ngram looks tokens up"):
        ngram_engine(targets["qwen3"], "sampled")


@pytest.mark.parametrize("wish", [None, "argmax", "coupled"])
def test_its_drafts_are_verified_so_that_the_text_at_a_seed_stays(
    targets: dict[str, Path], wish: str | None
) -> None:
    letters = dict.fromkeys((7, 8, 9), 60.0)
    params = SamplingParams(
        max_tokens=12, seed=5, ignore_eos=True, draft_sampling=wish, logit_bias=letters
    )
    prompts = [[7, 8, 9, 7, 8], [3, 4]]
    plain = tokens_of(run_requests(make_engine(targets["qwen3"]), prompts, params))
    outputs = run_requests(ngram_engine(targets["qwen3"]), prompts, params)
    assert tokens_of(outputs) == plain
    assert sum(output.speculation.num_accepted for output in outputs) > 0


def test_a_draft_of_a_method_with_a_distribution_is_sampled_by_default_when_warm(
    targets: dict[str, Path], folders: Folders
) -> None:
    # Sampled drafts change which numbers decide, so that the text at a seed differs; the law stays.
    path, draft = targets["qwen3"], folders.draft(QWEN3_SHAPES[0], 128)
    params = SamplingParams(max_tokens=30, seed=5, ignore_eos=True)
    engine = make_engine(path, 3, method="eagle3", draft=draft)
    engine.add_request("0", [3, 4, 5], params)
    engine.step()
    law = engine.runner.slots.draft_law.probs[engine.scheduler.sequence(0).slot]
    assert law.sum(-1).tolist() == pytest.approx([1.0, 1.0, 1.0])
    assert all(math.isfinite(x) for x in law.flatten().tolist())
    cool = make_engine(path, 3, method="eagle3", draft=draft)
    cool.add_request("0", [3, 4, 5], SamplingParams(max_tokens=30, temperature=0.2, seed=5))
    cool.step()
    assert cool.runner.slots.draft_law.probs.sum() == 0


def test_the_config_takes_a_sidecar_for_methods_that_have_one_only() -> None:
    assert SpeculativeConfig("eagle3", "somewhere").model == "somewhere"
    with pytest.raises(ConfigError, match="eagle3 needs a draft checkpoint"):
        SpeculativeConfig("eagle3")
    with pytest.raises(ConfigError, match="ngram has no checkpoint of its own"):
        SpeculativeConfig("ngram", "somewhere")
    assert EngineConfig("m", speculative_config=SpeculativeConfig("prompt_lookup"))
