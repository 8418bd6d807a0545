"""The law of short texts over four tokens: exact from transformers' logits, and as engines draw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine import Engine
from outrider.output import RequestOutput, total_speculation
from outrider.params import SamplingParams
from tests.checkpoints import TinyShape, write_qwen3_5
from tests.checkpoints_qwen3 import Qwen3Shape
from tests.harness import make_engine, run_requests, transformers_logits
from tests.trained import Folders

VOCAB_SIZE = 4
TEMPERATURE = 0.7
LENGTH = 3
"""Tokens looked at: one of the prompt's pass, and two or more of the first rounds."""

CHI_SQUARE_LIMIT = 113.7
"""Pearson's statistic with 63 degrees of freedom stays below this with probability 0.9999."""


def exact_law(path: Path, prompt: Sequence[int]) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of LENGTH tokens, from transformers' own logits."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for text, probability in law.items():
            logits = transformers_logits(path, [*prompt, *text])[-1].double()
            row = torch.softmax(logits / TEMPERATURE, 0).tolist()
            longer |= {(*text, token): probability * row[token] for token in range(VOCAB_SIZE)}
        law = longer
    assert sum(law.values()) == pytest.approx(1.0)
    return law


def draw(engine: Engine, prompt: Sequence[int], num_seeds: int) -> list[RequestOutput]:
    """One request for each seed."""
    params = SamplingParams(
        max_tokens=LENGTH + 2, temperature=TEMPERATURE, ignore_eos=True, draft_sampling="sampled"
    )
    each = [replace(params, seed=seed) for seed in range(num_seeds)]
    return run_requests(engine, [list(prompt)] * num_seeds, each)


def assert_that_drafts_decide(outputs: Sequence[RequestOutput]) -> None:
    """Both branches of the rule are well travelled."""
    accepted = total_speculation(outputs).accepted_per_position
    assert min(accepted) > len(outputs) / 20, accepted


def statistic(outputs: Iterable[RequestOutput], law: Mapping[tuple[int, ...], float]) -> float:
    """Pearson's, of the first tokens; texts that are expected less than 4 times count as one."""
    counts = Counter(output.token_ids[:LENGTH] for output in outputs)
    groups: dict[tuple[int, ...], list[float]] = {}
    for text, probability in law.items():
        expected = probability * counts.total()
        group = groups.setdefault(text if expected >= 4 else (), [0.0, 0.0])
        group[0] += counts[text]
        group[1] += expected
    return sum((count - expected) ** 2 / expected for count, expected in groups.values())


def tiny_engines(factory: pytest.TempPathFactory, **more: Any) -> dict[str, Callable[[], Engine]]:
    """Engines with four tokens: an EAGLE3 draft that knows three of them, and an MTP head."""
    folders = Folders(factory)
    shape = Qwen3Shape(32, 3, 2, 1, 16, VOCAB_SIZE)
    target = folders.target(shape)
    taps = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    draft = folders.draft(shape, 3, **taps)
    hybrid = factory.mktemp("hybrid")
    write_qwen3_5(
        hybrid, TinyShape(hidden_size=32, num_layers=2, interval=2, vocab_size=VOCAB_SIZE)
    )
    options: dict[str, Any] = {
        "max_num_seqs": 250,
        "num_kv_blocks": 250,
        "max_model_len": 16,
        "debug_checks": False,
        **more,
    }
    return {
        "eagle3": lambda: make_engine(target, 2, method="eagle3", draft=draft, **options),
        "mtp": lambda: make_engine(hybrid, 2, method="mtp", **options),
    }
