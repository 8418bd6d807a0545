"""Everything at once: shared prompts, one state that is kept, chunks of odd sizes, a place that is
lost after every round, results that come late. Drafts are scripted; the texts are plain decoding's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from outrider.engine import Engine
from outrider.output import RequestOutput
from outrider.params import SamplingParams
from outrider.request import Status
from tests.checkpoints import TinyShape
from tests.harness import ScriptedDrafter, make_engine, random_tokens, run_requests, tokens_of
from tests.pools import is_idle

SHAPE = TinyShape(num_layers=2, interval=2, hidden_size=48, vocab_size=100)
SHARED = random_tokens(50, 100, 1)
A, B = [*SHARED, *random_tokens(9, 100, 2)], [*SHARED, *random_tokens(21, 100, 3)]
SHORT = random_tokens(5, 100, 4)
PROMPTS = [A, B, A, SHORT, B, A]
NUM_TOKENS = 12
CACHE_WITH_ONE_STATE = {
    "enable_prefix_caching": True,
    "num_state_checkpoints": 1,
    "checkpoint_interval": 16,
}

LAWS = {
    "greedy": {"temperature": 0.0},
    "match": {"temperature": 0.8, "draft_sampling": "argmax"},
    "coupled": {"temperature": 0.8, "draft_sampling": "coupled"},
}


def wishes(law: str) -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=NUM_TOKENS, seed=seed, ignore_eos=True, **LAWS[law])  # type: ignore[arg-type]
        for seed in range(len(PROMPTS))
    ]


@pytest.fixture(scope="module")
def path(random_checkpoint: Callable[[TinyShape], Path]) -> Path:
    return random_checkpoint(SHAPE)


@pytest.fixture(scope="module")
def expected(path: Path) -> dict[str, list[tuple[int, ...]]]:
    """Plain decoding, one request after the other, nothing cached."""
    engine = make_engine(path, dtype="float32", max_num_seqs=1)
    return {law: tokens_of(run_requests(engine, PROMPTS, wishes(law))) for law in LAWS}


def lose_places(engine: Engine) -> None:
    """From now on everybody gives way after each round that gained it a token."""
    step, lengths = engine.step, dict[int, int]()

    def stepped() -> list[RequestOutput]:
        outputs = step()
        for sequence in list(engine.scheduler._running):
            length = len(sequence.output_token_ids)
            may_go = sequence.status is Status.DECODING and not sequence.in_flight
            if may_go and length > lengths.get(sequence.sequence_id, 1):
                lengths[sequence.sequence_id] = length
                engine.scheduler._preempt(sequence)
        return outputs

    engine.step = stepped  # type: ignore[method-assign]


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("gives_way", [False, True])
@pytest.mark.parametrize("caches", [False, True])
@pytest.mark.parametrize("look_ahead", [0, 1, 2])
def test_text_is_that_of_plain_decoding(
    path: Path,
    expected: dict[str, list[tuple[int, ...]]],
    look_ahead: int,
    caches: bool,
    gives_way: bool,
    law: str,
) -> None:
    texts = {
        index: [*prompt, *text]
        for index, (prompt, text) in enumerate(zip(PROMPTS, expected[law], strict=True))
    }
    drafter = ScriptedDrafter(
        lambda sequence_id, turn, index: (sequence_id + turn) % 3 > index, texts, SHAPE.vocab_size
    )
    engine = make_engine(
        path,
        3,
        drafter=drafter,
        dtype="float32",
        **(CACHE_WITH_ONE_STATE if caches else {}),
        prefill_grid=16,
        max_prefill_tokens=37,
        max_model_len=100,
        num_kv_blocks=13,
        max_num_seqs=3,
        look_ahead=look_ahead,
    )
    if gives_way:
        lose_places(engine)
    evict = engine.cache._give_back_checkpoint
    with mock.patch.object(engine.cache, "_give_back_checkpoint", side_effect=evict) as evicted:
        outputs = run_requests(engine, PROMPTS, wishes(law), arrivals=[0, 0, 2, 5, 9, 14])
    assert tokens_of(outputs) == expected[law]
    assert sum(output.speculation.num_accepted for output in outputs) > 5
    if gives_way and look_ahead == 0:
        assert engine.scheduler.num_preemptions > len(PROMPTS)
    assert evicted.call_count >= 3 * caches  # one state is kept, and gives way to the next
    assert is_idle(engine.cache)
    engine.cache.clear()
    for pool in (engine.cache.blocks, engine.cache.slots, engine.cache.checkpoints):
        assert pool.num_free == pool.size
