"""The engine on a GPU: the text does not depend on speculation, company, graphs or look-ahead.

The bundled models, at every k and method, bit for bit in all three types. bench/lossless.py does
the same at the shapes of large models.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from outrider import LLM, EngineConfig, SamplingParams, SpeculativeConfig
from outrider.engine import Engine
from outrider.output import total_speculation
from outrider.tokenizer import Tokenizer
from tests.harness import random_tokens, run_requests, tokens_of
from tests.pools import is_idle
from tests.trained import trained_folder, trained_pair

pytestmark = pytest.mark.gpu

NUM_TOKENS = 48
TEXTS = ["def read_lines(path):\n", "The old house stood at the end of the lane", "import os\n"]
METHODS = ["mtp", "eagle3", "ngram"]


def method_config(method: str, num_drafts: int) -> tuple[str, SpeculativeConfig]:
    """Folder of the target, and how to draft for it."""
    if method == "eagle3":
        target, draft = trained_pair()
        return str(target), SpeculativeConfig(method, str(draft), num_drafts)
    return str(trained_folder("tiny-qwen3.5")), SpeculativeConfig(method, None, num_drafts)


def make(
    model: str,
    dtype: str,
    spec: SpeculativeConfig | None,
    *,
    max_num_seqs: int = 8,
    **options: object,
) -> Engine:
    if "num_kv_blocks" not in options:
        options["kv_cache_memory_gib"] = 0.5
    return Engine(
        EngineConfig(
            model,
            dtype=dtype,  # type: ignore[arg-type]
            device="cuda",
            max_num_seqs=max_num_seqs,
            max_model_len=320,
            debug_checks=True,
            speculative_config=spec,
            **options,  # type: ignore[arg-type]
        )
    )


def prompts(number: int) -> list[list[int]]:
    return [random_tokens(1 + index * 29 % 200, 4096, index) for index in range(number)]


def params(number: int, temperature: float) -> list[SamplingParams]:
    return [
        SamplingParams(
            max_tokens=NUM_TOKENS,
            temperature=temperature,
            seed=index,
            ignore_eos=True,
            draft_sampling="coupled" if temperature else None,
        )
        for index in range(number)
    ]


@cache
def plain(model: str, dtype: str, number: int, temperature: float) -> list[tuple[int, ...]]:
    engine = make(model, dtype, None)
    return tokens_of(run_requests(engine, prompts(number), params(number, temperature)))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("num_drafts", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_text_does_not_depend_on_speculation(
    dtype: str, method: str, num_drafts: int, temperature: float
) -> None:
    model, spec = method_config(method, num_drafts)
    expected = plain(model, dtype, 20, temperature)
    engine = make(model, dtype, spec)
    outputs = run_requests(engine, prompts(20), params(20, temperature))
    assert tokens_of(outputs) == expected
    assert sum(r.num_accepted for output in outputs for r in output.rounds) > 0
    assert is_idle(engine.cache)


@pytest.mark.parametrize("max_num_seqs", [1, 7, 32, 64])
@pytest.mark.parametrize("method", ["mtp", "eagle3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_text_does_not_depend_on_company(dtype: str, method: str, max_num_seqs: int) -> None:
    model, spec = method_config(method, 3)
    number = min(max(max_num_seqs, 4), 64)
    expected = plain(model, dtype, number, 0.0)
    engine = make(model, dtype, spec, max_num_seqs=max_num_seqs)
    arrivals: Sequence[int] = [index * 5 % 23 for index in range(number)]
    outputs = run_requests(engine, prompts(number), params(number, 0.0), arrivals)
    assert tokens_of(outputs) == expected


@pytest.mark.parametrize("look_ahead", [0, 1, 2])
@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_text_does_not_depend_on_graphs_or_look_ahead(
    method: str, enforce_eager: bool, look_ahead: int
) -> None:
    model, spec = method_config(method, 3)
    expected = plain(model, "bfloat16", 12, 0.0)
    engine = make(model, "bfloat16", spec, enforce_eager=enforce_eager, look_ahead=look_ahead)
    outputs = run_requests(engine, prompts(12), params(12, 0.0))
    assert tokens_of(outputs) == expected


@pytest.mark.parametrize("state_dtype", ["float16", "bfloat16"])
def test_states_of_16_bits_are_rounded_alike_with_and_without_drafts(state_dtype: str) -> None:
    model, spec = method_config("mtp", 3)
    texts = [
        tokens_of(
            run_requests(
                make(model, "bfloat16", each, state_dtype=state_dtype), prompts(8), params(8, 0.0)
            )
        )
        for each in (None, spec)
    ]
    assert texts[0] == texts[1]


def test_memory_that_runs_out_moves_younger_sequences_and_loses_nobody() -> None:
    model, spec = method_config("mtp", 3)
    engine = make(model, "bfloat16", spec, num_kv_blocks=9)
    outputs = run_requests(engine, prompts(12), params(12, 0.0))
    assert [len(output.token_ids) for output in outputs] == [NUM_TOKENS] * 12
    assert engine.scheduler.num_preemptions > 0 and is_idle(engine.cache)


def test_every_kind_of_request_shares_a_batch() -> None:
    model, spec = method_config("mtp", 3)
    each = [
        SamplingParams(max_tokens=32, temperature=0, ignore_eos=True),
        SamplingParams(max_tokens=32, temperature=0, repetition_penalty=1.2, logprobs=2),
        SamplingParams(max_tokens=32, temperature=0.8, seed=5, draft_sampling="coupled"),
        SamplingParams(max_tokens=32, temperature=1.0, seed=6, top_k=20, top_p=0.9),
        SamplingParams(max_tokens=32, temperature=0, speculation=False, ignore_eos=True),
    ]
    texts = [*TEXTS, *TEXTS[:2]]
    outputs = [
        LLM(
            model,
            speculative_config=each_spec,
            device="cuda",
            dtype="float32",
            max_num_seqs=4,
            kv_cache_memory_gib=0.25,
        ).generate(texts, each)
        for each_spec in (None, spec)
    ]
    for without, with_drafts in zip(*outputs, strict=True):  # type: ignore[arg-type]
        assert without.error is None and with_drafts.error is None
    for index in (0, 1, 2, 4):  # a sampled draft keeps the law and not the text
        assert outputs[0][index].token_ids == outputs[1][index].token_ids  # type: ignore[index]


@pytest.mark.parametrize("method", ["mtp", "eagle3"])
def test_a_greedy_text_begins_as_on_the_cpu(method: str) -> None:
    model, spec = method_config(method, 3)
    gpu, cpu = (
        LLM(
            model, speculative_config=spec, device=device, dtype="float32", kv_cache_memory_gib=0.25
        ).generate(TEXTS[0], SamplingParams(max_tokens=16, temperature=0))
        for device in ("cuda", "cpu")
    )
    assert gpu.token_ids[:8] == cpu.token_ids[:8]


NUM_SEEDS = 2000
NUM_LISTED = 20
"""Next tokens told apart after a text, the likeliest; all others count as one."""

LEAST_EXPECTED = 8
"""Kinds of texts that are expected less often count as one."""


def next_token_laws(engine: Engine, texts: list[list[int]]) -> list[dict[int | None, float]]:
    """Probabilities of the listed next tokens of each text, and under None of all others."""
    params = SamplingParams(max_tokens=1, logprobs=NUM_LISTED, logprobs_mode="processed", seed=0)
    laws: list[dict[int | None, float]] = []
    for output in run_requests(engine, texts, params):
        assert output.logprobs is not None
        law: dict[int | None, float] = {i: math.exp(v) for i, v in output.logprobs[0].top}
        law[None] = max(1 - sum(law.values()), 0.0)
        laws.append(law)
    return laws


def pearson_limit(freedom: int) -> float:
    """Chi-square quantile at 1 - 1e-9, by Wilson and Hilferty's cube."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 5.998 * math.sqrt(spread)) ** 3


@pytest.mark.parametrize("method", ["mtp", "eagle3"])
def test_sampled_drafts_keep_the_law_of_the_text(method: str) -> None:
    """The first token is the prompt's own draw, the second the first that drafts are verified for.

    The limit is met once in 1e9 by a statistic that follows chi-square, which leaves room for kinds
    of texts that are seldom seen.
    """
    model, spec = method_config(method, 2)
    prompt = Tokenizer.from_pretrained(Path(model)).encode(TEXTS[1])
    engine = make(model, "float32", None, max_num_seqs=32)
    [first] = next_token_laws(engine, [prompt])
    listed = [token for token in first if token is not None]
    seconds = next_token_laws(engine, [[*prompt, token] for token in listed])
    expected: dict[tuple[int | None, int | None], float] = {(None, None): first[None] * NUM_SEEDS}
    for token, law in zip(listed, seconds, strict=True):
        expected |= {(token, other): first[token] * law[other] * NUM_SEEDS for other in law}
    assert sum(expected.values()) == pytest.approx(NUM_SEEDS, rel=1e-5)

    params = [
        # Two drafts are verified for the second token only where three tokens may follow the first.
        SamplingParams(max_tokens=4, seed=seed, ignore_eos=True, draft_sampling="sampled")
        for seed in range(NUM_SEEDS)
    ]
    engine = make(model, "float32", spec, max_num_seqs=64)
    outputs = run_requests(engine, [prompt] * NUM_SEEDS, params)
    rates = [count / NUM_SEEDS for count in total_speculation(outputs).accepted_per_position]
    assert len(rates) == 2 and all(0.05 < rate < 0.95 for rate in rates), rates

    counts: Counter[tuple[int | None, int | None]] = Counter()
    known = dict(zip(listed, seconds, strict=True))
    for one, two in (output.token_ids[:2] for output in outputs):
        if one in known:
            counts[one, two if two in known[one] else None] += 1
        else:
            counts[None, None] += 1
    groups: dict[tuple[int | None, int | None] | None, list[float]] = {}
    for kind, number in expected.items():
        group = groups.setdefault(kind if number >= LEAST_EXPECTED else None, [0.0, 0.0])
        group[0] += counts[kind]
        group[1] += number
    assert len(groups) > 20
    statistic = sum((count - number) ** 2 / number for count, number in groups.values())
    assert statistic < pearson_limit(len(groups) - 1)
