"""What is read from the prefix cache changes no text, no draft and no later state."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from outrider.cache.prefix_tree import Node
from outrider.engine import Engine
from outrider.layers.rows import DeltaCache
from outrider.output import RequestOutput
from outrider.params import SamplingParams
from tests.harness import freeze, make_engine, random_tokens, run_requests, tokens_of
from tests.pools import is_idle
from tests.trained import trained_folder, trained_pair

METHODS = ["plain", "mtp", "eagle3", "ngram"]
NUM_TOKENS = 20
SHARED = random_tokens(150, 4096, 1)
"""Nine blocks of 16 and a bit."""

FIRST = [*SHARED, *random_tokens(7, 4096, 2)]
SECOND = [*SHARED, *random_tokens(21, 4096, 3)]
DIVERGES_AT_A_BLOCK = [*FIRST[:144], FIRST[144] ^ 1, *random_tokens(9, 4096, 4)]
SHORT = SHARED[:16]
PROMPTS = [FIRST, SECOND, FIRST, DIVERGES_AT_A_BLOCK, SHORT, SECOND, FIRST]


def engine_for(method: str, **options: Any) -> Engine:
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "prefill_grid": 16,
        "max_prefill_tokens": 64,
        "enable_prefix_caching": True,
        **options,
    }
    if method == "plain":
        return make_engine(trained_folder("tiny-qwen3.5"), **defaults)
    if method == "eagle3":  # its target has no recurrent state, and refuses what is said of it
        for name in ("num_state_checkpoints", "checkpoint_interval"):
            defaults.pop(name, None)
        target, draft = trained_pair()
        return make_engine(target, 3, method=method, draft=draft, **defaults)
    return make_engine(trained_folder("tiny-qwen3.5"), 3, method=method, **defaults)


def params(temperature: float = 0.0, **options: Any) -> SamplingParams:
    return SamplingParams(
        max_tokens=NUM_TOKENS,
        temperature=temperature,
        seed=5,
        ignore_eos=True,
        draft_sampling="coupled" if temperature else None,
        **options,
    )


def one_by_one(engine: Engine, temperature: float = 0.0) -> list[RequestOutput]:
    return [run_requests(engine, [prompt], params(temperature))[0] for prompt in PROMPTS]


@cache
def cold(method: str, grid: int, temperature: float) -> list[RequestOutput]:
    engine = engine_for(method, prefill_grid=grid, enable_prefix_caching=False)
    return one_by_one(engine, temperature)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("grid", [16, 24])
@pytest.mark.parametrize("method", METHODS)
def test_texts_and_rounds_are_those_of_a_cold_run(
    method: str, grid: int, temperature: float
) -> None:
    engine = engine_for(method, prefill_grid=grid)
    outputs = one_by_one(engine, temperature)
    expected = cold(method, grid, temperature)
    assert tokens_of(outputs) == tokens_of(expected)
    # The same drafts were proposed and accepted: the draft's keys and values are a cold run's too.
    assert [output.rounds for output in outputs] == [output.rounds for output in expected]
    unit = 16 if grid == 16 else 48
    last = 144 // unit * unit
    hits = [output.num_cached_tokens for output in outputs]
    assert hits[0] == 0 and hits[4] == 0  # a token must be left to compute
    assert hits[2] == hits[6] == last
    assert hits[5] >= last
    # The cached block before the new token was followed by another one.
    assert hits[3] in (128 // unit * unit, 0)
    assert is_idle(engine.cache)
    engine.cache.check_integrity()


@pytest.mark.parametrize("method", METHODS)
def test_twenty_repeats_and_company_change_nothing(method: str) -> None:
    engine = engine_for(method, max_num_seqs=5)
    prompts = [FIRST, SECOND] * 10
    outputs = run_requests(engine, prompts, params(), arrivals=list(range(20)))
    expected = cold(method, 16, 0.0)
    assert tokens_of(outputs) == tokens_of(expected[:2]) * 10
    assert sum(output.num_cached_tokens for output in outputs) > 15 * 100


@pytest.mark.parametrize("look_ahead", [0, 1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_memory_that_is_short_evicts_and_preempts_without_harm(
    method: str, look_ahead: int
) -> None:
    engine = engine_for(
        method,
        look_ahead=look_ahead,
        num_kv_blocks=26,
        max_model_len=200,
        max_num_seqs=4,
        num_state_checkpoints=1,
    )
    outputs = run_requests(engine, PROMPTS, params(), arrivals=[0, 1, 2, 3, 4, 5, 6])
    assert tokens_of(outputs) == tokens_of(cold(method, 16, 0.0))
    assert is_idle(engine.cache)
    engine.cache.check_integrity()
    engine.cache.clear()
    for pool in (engine.cache.blocks, engine.cache.slots, engine.cache.checkpoints):
        assert pool.num_free == pool.size


@pytest.mark.parametrize("method", ["plain", "mtp", "eagle3"])
def test_the_state_after_a_hit_is_that_of_a_cold_run_bit_for_bit(method: str) -> None:
    held = []
    for warm in (False, True):
        engine = engine_for(method)
        if warm:
            run_requests(engine, [FIRST], params())
        engine.add_request("again", SECOND, params())
        outputs: list[RequestOutput] = []
        while not outputs:
            outputs = engine.step()
        number = engine._live["again"].outputs[0].sequence.sequence_id
        assert (outputs[0].num_cached_tokens > 0) == warm
        held.append(freeze(engine, number))
    assert not held[0].differences(held[1])


@pytest.mark.parametrize("look_ahead", [0, 1, 2])
@pytest.mark.parametrize("method", ["plain", "mtp", "eagle3"])
def test_the_next_turn_of_a_chat_finds_the_text_that_was_generated(
    method: str, look_ahead: int
) -> None:
    engine = engine_for(method, checkpoint_interval=32, look_ahead=look_ahead)
    wish = SamplingParams(max_tokens=90, temperature=0, ignore_eos=True)
    [first] = run_requests(engine, [FIRST], wish)
    length = len(FIRST) + 90
    prompt = [*FIRST, *first.token_ids, *random_tokens(10, 4096, 9)]
    [second] = run_requests(engine, [prompt], params())
    # At most one interval and a block are computed again, or a block without recurrent state.
    again = 16 if method == "eagle3" else 32 + 16
    assert second.num_cached_tokens >= length - again
    [alone] = run_requests(engine_for(method, enable_prefix_caching=False), [prompt], params())
    assert second.token_ids == alone.token_ids
    assert second.rounds == alone.rounds
    engine.cache.check_integrity()


@pytest.mark.parametrize("look_ahead", [0, 1])
def test_a_state_kept_in_the_middle_of_a_round_is_that_of_decoding_to_there(
    look_ahead: int,
) -> None:
    """Bit for bit what a run that decodes one token at a time has at that position."""
    wish = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    kept: list[list[torch.Tensor]] = []
    for method in ("plain", "mtp"):
        engine = engine_for(method, checkpoint_interval=32, look_ahead=look_ahead)
        run_requests(engine, [FIRST], wish)
        nodes = [node for node in engine.cache._tree.nodes() if node.checkpoint is not None]
        depths = [_depth(node) for node in nodes]
        assert 192 in depths  # past the prompt's 157 tokens
        slot = nodes[depths.index(192)].checkpoint
        kept.append(
            [
                layer.delta.state[slot]
                for layer in engine.runner.target_caches
                if isinstance(layer, DeltaCache)
            ]
        )
    assert len(kept[0]) > 0
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))


def _depth(node: Node) -> int:
    """Tokens up to the end of the node's block."""
    return len(node.key) - 1 + (0 if node.parent is None else _depth(node.parent))


def test_prompts_that_want_log_probabilities_are_computed_whole() -> None:
    engine = engine_for("mtp")
    outputs = [run_requests(engine, [FIRST], params(prompt_logprobs=1))[0] for _ in range(2)]
    assert [output.num_cached_tokens for output in outputs] == [0, 0]
    assert outputs[0].prompt_logprobs == outputs[1].prompt_logprobs
    assert outputs[0].prompt_logprobs is not None and len(outputs[0].prompt_logprobs) == 156


def test_what_was_computed_without_drafts_is_not_shared_with_those_who_draft() -> None:
    engine = engine_for("mtp")
    run_requests(engine, [FIRST], params(speculation=False))
    [after] = run_requests(engine, [FIRST], params())
    assert after.num_cached_tokens == 0  # the draft never saw those blocks
    [plain] = run_requests(engine, [FIRST], params(speculation=False))
    assert plain.num_cached_tokens == 144


def test_penalties_count_the_cached_prompt() -> None:
    engine = engine_for("mtp")
    wish = params(repetition_penalty=1.3, frequency_penalty=0.5)
    outputs = [run_requests(engine, [FIRST], wish)[0] for _ in range(2)]
    assert outputs[1].num_cached_tokens == 144
    assert outputs[0].token_ids == outputs[1].token_ids
