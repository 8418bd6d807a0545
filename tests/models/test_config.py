"""ModelConfig reads every way a checkpoint may say a thing, and refuses the rest by name."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import CheckpointError
from outrider.models.config import ModelConfig
from outrider.models.files import resolve_checkpoint

TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 2, 1],
        "mrope_interleaved": True,
    },
    "full_attention_interval": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "eos_token_id": 7,
    "mtp_num_hidden_layers": 1,
}


def text_with(**changes: Any) -> dict[str, Any]:
    """TEXT with some keys changed; `...` takes a key out."""
    merged = {**TEXT, **changes}
    return {key: value for key, value in merged.items() if value is not ...}


def read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(text_with(**changes))


def test_a_text_config_is_read_whole() -> None:
    assert read() == ModelConfig(
        model_type="qwen3_5",
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=96,
        num_layers=8,
        layer_types=(*["linear_attention"] * 3, "full_attention") * 2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rotary_dim=8,
        rope_theta=1e7,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=16,
        conv_kernel=4,
        rms_norm_eps=1e-6,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        dtype="bfloat16",
        eos_token_ids=(7,),
        num_mtp_layers=1,
        sampling_defaults={},
        vision=False,
        mrope_section=(1, 2, 1),
    )


def test_a_multimodal_wrapper_gives_the_same_text_model() -> None:
    wrapper = {"model_type": "qwen3_5", "text_config": TEXT, "vision_config": {"depth": 2}}
    nested = ModelConfig.from_dict(wrapper)
    assert nested.vision
    assert nested == ModelConfig.from_dict({**wrapper, "text_config": text_with()})
    flat = ModelConfig.from_dict({**wrapper, "vision_config": None})
    assert flat == read()


@pytest.mark.parametrize(
    ("top", "nested", "tied"),
    [
        (True, False, True),
        (False, True, False),
        (None, True, True),
        (None, False, False),
        (None, None, False),
    ],
)
def test_the_wrapper_decides_whether_the_head_is_tied_if_it_says_so(
    top: bool | None, nested: bool | None, tied: bool
) -> None:
    wrapper = {
        "model_type": "qwen3_5",
        "text_config": text_with(tie_word_embeddings=nested),
        "tie_word_embeddings": top,
    }
    assert ModelConfig.from_dict(wrapper).tie_word_embeddings is tied


def test_layer_types_go_before_the_interval() -> None:
    kinds = ["full_attention", "linear_attention"] * 4
    assert read(layer_types=kinds).layer_types == tuple(kinds)
    assert read(full_attention_interval=2).layer_types == tuple(reversed(kinds))
    default = read(full_attention_interval=...).layer_types
    assert [i for i, kind in enumerate(default) if kind == "full_attention"] == [3, 7]


def test_without_linear_layers_their_keys_are_not_needed() -> None:
    gone = {key: ... for key in TEXT if key.startswith("linear_")}
    config = read(layer_types=["full_attention"] * 8, **gone)
    assert (config.linear_num_key_heads, config.conv_kernel) == (0, 0)


@pytest.mark.parametrize("missing", [..., None])
def test_a_missing_head_dim_is_hidden_size_over_heads(missing: Any) -> None:
    assert read(head_dim=missing, rope_parameters={"rope_theta": 1e6}).head_dim == 16


@pytest.mark.parametrize(
    ("changes", "theta", "rotary_dim"),
    [
        ({"rope_parameters": ..., "rope_theta": 5e5}, 5e5, 8),
        ({"rope_parameters": ..., "rope_theta": 5e5, "partial_rotary_factor": 0.5}, 5e5, 16),
        ({"rope_parameters": ..., "rope_theta": 5e5, "rope_scaling": None}, 5e5, 8),
        (
            {
                "rope_parameters": ...,
                "rope_theta": 5e5,
                "rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 1]},
            },
            5e5,
            8,
        ),
        (
            {
                "rope_parameters": ...,
                "rope_scaling": {"rope_type": "default", "rope_theta": 3e5},
                "partial_rotary_factor": 1.0,
            },
            3e5,
            32,
        ),
        ({"rope_parameters": {"rope_theta": 2e5}, "partial_rotary_factor": 1}, 2e5, 32),
    ],
)
def test_rope_is_found_in_old_and_new_places(
    changes: dict[str, Any], theta: float, rotary_dim: int
) -> None:
    config = read(**changes)
    assert (config.rope_theta, config.rotary_dim) == (theta, rotary_dim)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "longrope", "llama3"])
@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_other_kinds_of_rope_are_refused_by_name(kind: str, place: str, key: str) -> None:
    with pytest.raises(CheckpointError, match=f"{place}: rope type is not built yet: got '{kind}'"):
        read(**{place: {key: kind, "factor": 4.0, "rope_theta": 1e6}})


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "torch.float16"])
def test_dtype_is_read_under_its_old_and_new_key(key: str, name: str) -> None:
    config = read(**{"dtype": ..., key: name})
    assert config.dtype == name.removeprefix("torch.")


def test_dtype_may_stand_on_the_wrapper_or_nowhere() -> None:
    wrapper = {"model_type": "qwen3_5", "text_config": text_with(dtype=...), "dtype": "float16"}
    assert ModelConfig.from_dict(wrapper).dtype == "float16"
    assert read(dtype=...).dtype == "float32"


def test_generation_config_goes_first_for_end_of_sequence_ids() -> None:
    generation = {"eos_token_id": [9, 7, 9]}
    assert ModelConfig.from_dict(TEXT, generation).eos_token_ids == (9, 7)
    assert ModelConfig.from_dict(TEXT, {}).eos_token_ids == (7,)
    assert read(eos_token_id=[1, 2]).eos_token_ids == (1, 2)
    assert read(eos_token_id=...).eos_token_ids == ()
    wrapper = {"model_type": "qwen3_5", "text_config": text_with(eos_token_id=...)}
    assert ModelConfig.from_dict({**wrapper, "eos_token_id": 3}).eos_token_ids == (3,)


@pytest.mark.parametrize(
    ("generation", "defaults"),
    [
        (
            {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1},
            {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1},
        ),
        ({"temperature": 0.7, "bos_token_id": 1}, {"temperature": 0.7}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
        ({"top_k": 0}, {}),
        ({}, {}),
    ],
)
def test_sampling_defaults_come_from_generation_config(
    generation: dict[str, Any], defaults: dict[str, Any]
) -> None:
    assert ModelConfig.from_dict(TEXT, generation).sampling_defaults == defaults


def test_a_model_without_mtp_layers_has_none() -> None:
    assert read(mtp_num_hidden_layers=...).num_mtp_layers == 0


def test_a_config_can_be_hashed_and_pickled() -> None:
    config = ModelConfig.from_dict(TEXT, {"top_p": 0.5})
    assert hash(config) == hash(pickle.loads(pickle.dumps(config)))
    assert pickle.loads(pickle.dumps(config)) == config


REQUIRED = [
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "rms_norm_eps",
    "max_position_embeddings",
]


@pytest.mark.parametrize("key", REQUIRED)
@pytest.mark.parametrize("nested", [False, True])
def test_a_missing_key_is_named_with_its_place(key: str, nested: bool) -> None:
    text = text_with(**{key: ...})
    config = {"model_type": "qwen3_5", "text_config": text} if nested else text
    place = r"config\.json, text_config" if nested else r"config\.json"
    with pytest.raises(CheckpointError, match=f"{place}: {key} is missing"):
        ModelConfig.from_dict(config)


def test_a_missing_rope_theta_is_named() -> None:
    with pytest.raises(CheckpointError, match="rope_theta is missing"):
        read(rope_parameters={"rope_type": "default"})


BAD: list[tuple[str, Any]] = [
    ("vocab_size", "1000"),
    ("vocab_size", 0),
    ("hidden_size", 64.0),
    ("hidden_size", True),
    ("num_hidden_layers", -1),
    ("num_attention_heads", 3),
    ("num_key_value_heads", 3),
    ("head_dim", 0),
    ("linear_num_value_heads", 3),
    ("linear_conv_kernel_dim", 0),
    ("rms_norm_eps", "1e-6"),
    ("rms_norm_eps", 0),
    ("rms_norm_eps", float("nan")),
    ("rope_parameters", 3),
    ("layer_types", "full_attention"),
    ("layer_types", ["sliding_attention"] * 8),
    ("layer_types", ["full_attention"] * 7),
    ("full_attention_interval", 0),
    ("tie_word_embeddings", "yes"),
    ("dtype", "float64"),
    ("dtype", 16),
    ("eos_token_id", "7"),
    ("eos_token_id", [7, 1000]),
    ("eos_token_id", -1),
    ("mtp_num_hidden_layers", -1),
    ("partial_rotary_factor", 1.0),
    ("hidden_act", "gelu"),
    ("attention_bias", True),
    ("attn_output_gate", False),
    ("mtp_use_dedicated_embeddings", True),
    ("quantization_config", {"quant_method": "fp8"}),
    ("vision_config", []),
    ("text_config", "none"),
    ("model_type", 5),
]


@pytest.mark.parametrize(("key", "value"), BAD, ids=str)
def test_a_value_that_cannot_be_served_is_refused_by_its_key(key: str, value: Any) -> None:
    changes: dict[str, Any] = {key: value}
    if key == "partial_rotary_factor":
        changes = {"rope_parameters": {"rope_theta": 1e6, key: 1.5}}
    with pytest.raises(CheckpointError, match=key):
        read(**changes)


def test_a_rotary_share_of_an_odd_number_of_dims_is_refused() -> None:
    with pytest.raises(CheckpointError, match="partial_rotary_factor rotates 3 of 32 dims"):
        read(rope_parameters={"rope_theta": 1e6, "partial_rotary_factor": 0.1})


MROPE = {"rope_theta": 1e6, "partial_rotary_factor": 0.5}
"""Rotates 16 of 32 dims."""


def test_mrope_sections_are_read_and_may_be_absent() -> None:
    assert read(rope_parameters=MROPE).mrope_section is None
    assert read(rope_parameters={**MROPE, "mrope_section": [3, 3, 2]}).mrope_section == (3, 3, 2)
    text_only = {**MROPE, "mrope_section": [8, 0, 0], "mrope_interleaved": True}
    assert read(rope_parameters=text_only).mrope_section == (8, 0, 0)


@pytest.mark.parametrize(
    "section", [[3, 3, 3], [3, 3, 1], [8], [4, 4], [2, 2, 2, 2], [9, -1, 0], [3, 3, 2.0], "332"]
)
def test_mrope_sections_must_add_up_to_the_frequencies_that_are_rotated(section: Any) -> None:
    with pytest.raises(CheckpointError, match="mrope_section") as refusal:
        read(rope_parameters={**MROPE, "mrope_section": section})
    assert "that add up to 8, half of the 16 dims that are rotated" in str(refusal.value)


def test_mrope_sections_that_are_not_interleaved_rotate_text_as_no_sections_do() -> None:
    chunked = {**MROPE, "mrope_section": [3, 3, 2], "mrope_interleaved": False}
    assert read(rope_parameters=chunked) == read(rope_parameters=MROPE)
    assert read(rope_parameters=chunked).mrope_section is None
    for section in ([3, 3, 3], [8], [9, -1, 0]):
        with pytest.raises(CheckpointError, match="mrope_section: got"):
            read(rope_parameters={**chunked, "mrope_section": section})
    with pytest.raises(CheckpointError, match="mrope_interleaved"):
        read(rope_parameters={**chunked, "mrope_interleaved": "no"})


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_5_moe_text"])
def test_mixtures_of_experts_are_refused_by_name(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"mixture-of-experts.*got '{name}'"):
        read(model_type=name)


def test_an_unknown_model_type_is_refused_and_the_known_ones_are_listed() -> None:
    with pytest.raises(CheckpointError, match="got 'gpt2'; allowed: qwen3, qwen3_5, qwen3_5_text"):
        read(model_type="gpt2")
    with pytest.raises(CheckpointError, match="text_config: model_type"):
        ModelConfig.from_dict({"model_type": "qwen3_5", "text_config": text_with(model_type="x")})


def test_from_hf_reads_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TEXT))
    assert ModelConfig.from_hf(tmp_path) == read()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1, "top_p": 0.5}')
    config = ModelConfig.from_hf(tmp_path)
    assert config.eos_token_ids == (1,)
    assert config.sampling_defaults == {"top_p": 0.5}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"config\.json is missing"),
        ("{", "cannot be read as JSON"),
        ("[]", "allowed: a JSON object"),
    ],
)
def test_a_config_file_that_is_no_config_is_refused(
    tmp_path: Path, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_hf(tmp_path)


def test_what_transformers_saves_is_read_as_transformers_means_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    text = transformers.Qwen3_5TextConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    )
    wrapper = transformers.Qwen3_5Config(text_config=text.to_dict(), tie_word_embeddings=True)
    for saved, tied in ((text, False), (wrapper, True)):
        saved.save_pretrained(tmp_path)
        config = ModelConfig.from_hf(tmp_path)
        assert config.layer_types == tuple(text.layer_types)
        assert (config.head_dim, config.rotary_dim, config.rope_theta) == (16, 8, 1e6)
        assert config.linear_num_value_heads == text.linear_num_value_heads
        assert config.tie_word_embeddings is tied


# Folders and hub ids.


def no_network(*_: object, **__: object) -> str:
    raise AssertionError("a local path must not touch the network")


def test_a_local_folder_is_itself_and_never_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", no_network)
    assert resolve_checkpoint(str(tmp_path)) == tmp_path
    monkeypatch.chdir(tmp_path.parent)
    assert resolve_checkpoint(tmp_path.name).samefile(tmp_path)


@pytest.mark.parametrize("model", ["./gone", "/gone/model", "../gone", "~/gone", "a/b/c", "a\\b"])
def test_a_path_that_does_not_exist_is_refused_and_never_fetched(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", no_network)
    with pytest.raises(CheckpointError, match="model folder does not exist"):
        resolve_checkpoint(model)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(CheckpointError, match="allowed: a folder"):
        resolve_checkpoint(str(file))


def test_a_hub_id_is_fetched_at_its_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None, list[str]]] = []

    def fetch(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    monkeypatch.chdir(tmp_path)
    assert resolve_checkpoint("owner/name", "v1") == tmp_path
    assert asked == [("owner/name", "v1", ["*.json", "*.safetensors", "*.jinja", "*.txt"])]


def test_a_failed_download_is_a_checkpoint_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise OSError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"could not be fetched.*no route.*got 'owner/name'"):
        resolve_checkpoint("owner/name")
