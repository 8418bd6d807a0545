"""A sequence that stops drafting for a while and goes on drafts as if it had never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider import span_rules
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine import Engine
from outrider.params import SamplingParams
from outrider.request import NEVER, Sequence
from outrider.span_rules import SpanRules
from outrider.tokenizer import Tokenizer

PROMPT = "def read_lines(path):\n    "
NUM_TOKENS = 90
PAUSE = range(30, 60)
"""Output lengths at which no draft is wanted."""


def proposals(model: Path) -> tuple[dict[int, tuple[int, ...]], tuple[int, ...]]:
    """The drafts that wait at each output length, and the text."""
    config = EngineConfig(
        str(model),
        dtype="float32",
        device="cpu",
        kv_cache_memory_gib=0.1,
        speculative_config=SpeculativeConfig("mtp", num_speculative_tokens=3),
    )
    engine = Engine(config)
    prompt = Tokenizer.from_pretrained(model).encode(PROMPT)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    engine.add_request("r", prompt, params)
    (output,) = engine.step()
    waiting: dict[int, tuple[int, ...]] = {}
    while not output.finished:
        (sequence,) = engine.scheduler._running  # pyright: ignore[reportPrivateUsage]
        waiting[len(output.token_ids)] = sequence.proposed_token_ids
        (output,) = engine.step()
    return waiting, output.token_ids


def test_a_sequence_that_goes_from_3_drafts_to_0_and_back_proposes_the_same_drafts(
    trained_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        # Drafts are made at every length and never used: what a draft that saw all proposes.
        patch.setattr(span_rules, "num_drafts_to_verify", lambda *_: 0)
        steady, text = proposals(trained_model)

    def wanted(_: SpanRules, sequence: Sequence) -> int:
        return 0 if len(sequence.output_token_ids) in PAUSE else 3

    monkeypatch.setattr(SpanRules, "wanted_drafts", wanted)
    monkeypatch.setattr(SpanRules, "_holds_to", lambda *_: NEVER)  # wishes change all the time
    paused, same_text = proposals(trained_model)
    assert same_text == text
    assert all(paused[n] == () for n in range(PAUSE.start + 4, PAUSE.stop + 1))
    resumed = [n for n in paused if PAUSE.stop < n < NUM_TOKENS - 4]
    assert len(resumed) >= 6
    for length in resumed:
        assert paused[length] == steady[length]
