"""Sampled drafts keep the law of the text on cached prompts, and where sequences give way.

Their texts are not those of plain decoding token by token, so the law itself is compared: exact
from transformers' logits, and counted over many seeds. Controls show that it would be noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.engine import Engine
from outrider.output import RequestOutput
from outrider.params import SamplingParams
from outrider.request import Sequence, Status
from tests.harness import run_requests
from tests.sampled_law import (
    CHI_SQUARE_LIMIT,
    assert_that_drafts_decide,
    draw,
    exact_law,
    statistic,
    tiny_engines,
)

PROMPT = tuple((3 * i + i // 4) % 4 for i in range(21))
"""A block of 16 to be shared, and five tokens."""

NUM_SEEDS = 800
Engines = dict[str, Callable[[], Engine]]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    options = {"enable_prefix_caching": True, "max_model_len": 48, "num_kv_blocks": 600}
    return tiny_engines(tmp_path_factory, block_size=16, prefill_grid=16, **options)


def warm(engines: Engines, method: str) -> Engine:
    """An engine that has computed the prompt once."""
    engine = engines[method]()
    run_requests(engine, [PROMPT], SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
    return engine


def give_way_after_each_step(engine: Engine, gives_way: Callable[[Sequence], bool]) -> None:
    """From now on, those that are decoding and are picked lose their place once."""
    step, gone = engine.step, set[int]()

    def stepped() -> list[RequestOutput]:
        outputs = step()
        for sequence in list(engine.scheduler._running):
            number = sequence.sequence_id
            if number not in gone and sequence.status is Status.DECODING and gives_way(sequence):
                gone.add(number)
                engine.scheduler._preempt(sequence)
        return outputs

    engine.step = stepped  # type: ignore[method-assign]


def distance(engine: Engine, outputs: list[RequestOutput]) -> float:
    return statistic(outputs, exact_law(Path(engine.config.model), PROMPT))


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_the_law_after_a_hit_is_the_targets(engines: Engines, method: str) -> None:
    engine = warm(engines, method)
    outputs = draw(engine, PROMPT, NUM_SEEDS)
    assert all(output.num_cached_tokens == 16 for output in outputs)
    assert_that_drafts_decide(outputs)
    assert distance(engine, outputs) < CHI_SQUARE_LIMIT


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_the_law_of_those_that_gave_way_is_the_targets(engines: Engines, method: str) -> None:
    """A third of them after the prompt, a third after a round; their drafts are forgotten."""
    engine = warm(engines, method)
    give_way_after_each_step(
        engine, lambda sequence: len(sequence.output_token_ids) > 2 * (sequence.sequence_id % 3) - 1
    )
    outputs = draw(engine, PROMPT, NUM_SEEDS)
    assert engine.scheduler.num_preemptions > NUM_SEEDS / 2
    assert_that_drafts_decide(outputs)
    assert distance(engine, outputs) < CHI_SQUARE_LIMIT


def test_forgetting_drafts_for_their_values_would_be_noticed(engines: Engines) -> None:
    """A mistake: whoever has a certain draft gives way, and its token is drawn anew."""
    engine = warm(engines, "mtp")
    give_way_after_each_step(engine, lambda sequence: sequence.proposed_token_ids[:1] == (1,))
    assert distance(engine, draw(engine, PROMPT, 1200)) > 1.3 * CHI_SQUARE_LIMIT


def test_a_state_that_is_not_restored_would_be_noticed(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = warm(engines, "mtp")
    rules = engine.scheduler.rules
    slot_setup = rules.slot_setup

    def without_its_state(*args: Any) -> Any:
        return replace(slot_setup(*args), restore_from=None)

    monkeypatch.setattr(rules, "slot_setup", without_its_state)
    assert distance(engine, draw(engine, PROMPT, NUM_SEEDS)) > 1.3 * CHI_SQUARE_LIMIT
