"""The engine on a GPU, with the reference operations: right, not yet fast."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider import LLM, SamplingParams, SpeculativeConfig
from tests.trained import trained_folder, trained_pair

pytestmark = pytest.mark.gpu

PROMPTS = ["def read_lines(path):\n", "The old house stood at the end of the lane", "import os\n"]
PARAMS = [
    SamplingParams(max_tokens=32, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=32, temperature=0, repetition_penalty=1.2, logprobs=2),
    SamplingParams(max_tokens=32, temperature=0.8, seed=5, draft_sampling="coupled"),
]


def texts(model: Path, spec: SpeculativeConfig | None, device: str) -> list[tuple[int, ...]]:
    llm = LLM(
        str(model),
        speculative_config=spec,
        device=device,
        dtype="float32",
        max_num_seqs=4,
        kv_cache_memory_gib=0.25,
    )
    outputs = llm.generate(PROMPTS, PARAMS)
    assert isinstance(outputs, list)
    assert all(output.error is None for output in outputs)
    return [output.token_ids for output in outputs]


def test_the_gpu_writes_the_same_text_with_every_method_and_without() -> None:
    hybrid, (target, draft) = trained_folder("tiny-qwen3.5"), trained_pair()
    cases = [
        (hybrid, SpeculativeConfig("mtp")),
        (hybrid, SpeculativeConfig("ngram")),
        (target, SpeculativeConfig("eagle3", str(draft))),
    ]
    for model, spec in cases:
        assert texts(model, spec, "cuda") == texts(model, None, "cuda")


def test_a_greedy_text_begins_as_on_the_cpu() -> None:
    model = trained_folder("tiny-qwen3.5")
    gpu, cpu = (texts(model, SpeculativeConfig("mtp"), device)[0] for device in ("cuda", "cpu"))
    assert gpu[:8] == cpu[:8]
