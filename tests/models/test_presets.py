"""Presets have the shapes of the models they are named after, and run with random weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine import Engine
from outrider.errors import CheckpointError, ConfigError
from outrider.llm import LLM
from outrider.models import presets
from outrider.models.build import ARCHITECTURES, Checkpoint, load_target
from outrider.models.files import resolve_checkpoint
from outrider.models.presets import PRESETS, preset_config, preset_draft_config
from outrider.output import RequestOutput
from outrider.params import SamplingParams
from outrider.spec.registry import build_drafter
from tests.trained import trained_folder, trained_pair

TINY_QWEN3 = {
    **PRESETS["qwen3-8b"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
}

# Parameters in billions without embedding and head, and all of them, as the model cards say.
PUBLISHED = {
    "qwen3-0.6b": (0.44, 0.6),
    "qwen3-1.7b": (1.4, 1.7),
    "qwen3-4b": (3.6, 4.0),
    "qwen3-8b": (6.95, 8.2),
    "qwen3-14b": (13.2, 14.8),
    "qwen3-32b": (31.2, 32.8),
}


def engine_config(model: str, **options: Any) -> EngineConfig:
    defaults: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "max_model_len": 64}
    return EngineConfig(model, **(defaults | options))


def opened(config: EngineConfig) -> Checkpoint:
    return Checkpoint.open(resolve_checkpoint(config.model, config.revision), config)


def parameter_counts(name: str) -> tuple[float, float]:
    """Billions without embedding and head, and in all."""
    config = preset_config(f"preset:{name}")
    with torch.device("meta"):
        model = ARCHITECTURES[config.model_type](config)
    sizes = {key: value.numel() / 1e9 for key, value in model.named_parameters()}
    total = sum(sizes.values())
    tables = sizes["embed_tokens.weight"] + sizes.get("lm_head.weight", 0)
    return total - tables, total


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    """A preset small enough to run."""
    monkeypatch.setattr(presets, "PRESETS", {"tiny": TINY_QWEN3})
    return "preset:tiny"


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_qwen3_preset_has_as_many_parameters_as_its_model_card_says(name: str) -> None:
    assert parameter_counts(name) == pytest.approx(PUBLISHED[name], rel=0.02)


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("qwen3.5-")])
def test_a_qwen3_5_preset_has_about_as_many_parameters_as_its_name_says(name: str) -> None:
    billions = float(name.removeprefix("qwen3.5-").removesuffix("b"))
    assert parameter_counts(name)[1] == pytest.approx(billions, rel=0.09)


@pytest.mark.parametrize(
    ("name", "num_delta", "num_full"),
    [("0.8b", 18, 6), ("2b", 18, 6), ("4b", 24, 8), ("9b", 24, 8), ("27b", 48, 16)],
)
def test_qwen3_5_presets_are_hybrids_with_an_mtp_head(
    name: str, num_delta: int, num_full: int
) -> None:
    config = preset_config(f"preset:qwen3.5-{name}")
    assert config.layer_types.count("linear_attention") == num_delta
    assert config.layer_types.count("full_attention") == num_full
    assert config.layer_types[3] == "full_attention"
    assert (config.num_mtp_layers, config.rotary_dim, config.vocab_size) == (1, 64, 248320)
    assert config.max_position_embeddings == 262144


def test_presets_are_as_long_and_as_precise_as_the_released_models() -> None:
    config = preset_config("preset:qwen3-8b")
    assert (config.max_position_embeddings, config.rope_theta) == (40960, 1e6)
    assert (config.dtype, config.tie_word_embeddings) == ("bfloat16", False)
    assert preset_config("preset:qwen3-4b").tie_word_embeddings


def test_an_unknown_preset_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(ConfigError, match=r"no such model preset: got 'preset:gpt'.*qwen3-8b"):
        opened(engine_config("preset:gpt"))
    with pytest.raises(ConfigError, match="no such model preset"):
        opened(engine_config("preset:eagle3"))


@pytest.mark.parametrize("load_format", ["auto", "safetensors"])
def test_a_preset_has_no_weights_to_load(load_format: str) -> None:
    with pytest.raises(ConfigError, match=r"which has no weights: load_format: got .* dummy"):
        opened(engine_config("preset:qwen3-8b", load_format=load_format))


def test_a_text_front_says_that_a_preset_has_no_tokenizer() -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing.*tokenizer="):
        LLM("preset:qwen3-0.6b", load_format="dummy")


def test_the_usual_draft_is_made_to_measure_for_its_target() -> None:
    target = preset_config("preset:qwen3-8b")
    draft = preset_draft_config("preset:eagle3", target)
    assert (draft.hidden_size, draft.target_hidden_size) == (4096, 4096)
    assert (draft.num_heads, draft.num_kv_heads, draft.head_dim) == (32, 8, 128)
    assert (draft.intermediate_size, draft.draft_vocab_size) == (12288, 32000)
    assert draft.tapped_layers == (2, 18, 33)
    assert draft.max_position_embeddings == 40960
    with pytest.raises(ConfigError, match="no such draft preset: got 'preset:eagle'"):
        preset_draft_config("preset:eagle", target)


def test_a_target_too_shallow_for_three_taps_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shallow = {**TINY_QWEN3, "num_hidden_layers": 4}
    monkeypatch.setattr(presets, "PRESETS", {"shallow": shallow})
    with pytest.raises(CheckpointError, match="too shallow"):
        preset_draft_config("preset:eagle3", preset_config("preset:shallow"))


def test_a_draft_vocabulary_is_distinct_ids_of_the_target_that_the_seed_decides(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presets, "_EAGLE3_VOCAB_SIZE", 40)

    def ids(seed: int) -> torch.Tensor:
        checkpoint = opened(engine_config(tiny, seed=seed))
        spec = SpeculativeConfig("eagle3", "preset:eagle3")
        drafter = build_drafter(checkpoint, load_target(checkpoint), spec)
        assert isinstance(drafter.target_ids, torch.Tensor)  # type: ignore[attr-defined]
        return drafter.target_ids  # type: ignore[attr-defined]

    first = ids(0)
    assert first.shape == (40,) and bool((first.diff() > 0).all())
    assert int(first[0]) >= 0 and int(first[-1]) < 96
    assert torch.equal(first, ids(0)) and not torch.equal(first, ids(1))


@pytest.mark.parametrize("method", [None, "eagle3", "ngram"])
def test_a_preset_generates(tiny: str, method: str | None) -> None:
    spec = None
    if method is not None:
        spec = SpeculativeConfig(method, "preset:eagle3" if method == "eagle3" else None)
    engine = Engine(engine_config(tiny, dtype="float32", speculative_config=spec))
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    engine.add_request("a", list(range(10)), params)
    outputs: list[RequestOutput] = []
    while engine.has_work:
        outputs += engine.step()
    assert len(outputs[-1].token_ids) == 12


def test_a_random_draft_goes_with_a_random_target_only() -> None:
    target, draft = trained_pair()

    def build(load_format: str, model: str) -> None:
        checkpoint = opened(engine_config(str(target), load_format=load_format))
        build_drafter(checkpoint, load_target(checkpoint), SpeculativeConfig("eagle3", model))

    with pytest.raises(ConfigError, match="go with load_format dummy only: got 'preset:eagle3'"):
        build("auto", "preset:eagle3")
    with pytest.raises(ConfigError, match="allowed: preset:eagle3"):
        build("dummy", str(draft))
    build("dummy", "preset:eagle3")


def test_a_preset_without_mtp_head_names_what_would_work(tiny: str) -> None:
    with pytest.raises(ConfigError, match="qwen3 cannot host speculative method mtp"):
        Engine(engine_config(tiny, speculative_config=SpeculativeConfig("mtp")))


def test_a_folder_is_no_preset() -> None:
    folder = trained_folder("tiny-qwen3")
    assert not presets.is_preset(folder) and presets.is_preset(Path("preset:x"))
