"""ModelConfig: a checkpoint's config.json and generation_config.json, read once.

The only reader of checkpoint quirks: nesting, renamed keys, defaults. Everything else asks the
fields below. Knows no tensors and no architecture's modules.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from outrider.errors import CheckpointError
from outrider.layers.rotary import YarnScaling
from outrider.models.reading import Section
from outrider.models.rope import read_rotary

LINEAR_ATTENTION = "linear_attention"
FULL_ATTENTION = "full_attention"


@dataclass(frozen=True)
class _Family:
    """What the configurations of one model family leave unsaid."""

    name: str
    hybrid: bool
    rotary_factor: float
    gated: bool


_QWEN3_5 = _Family("qwen3_5", hybrid=True, rotary_factor=0.25, gated=True)

_FAMILIES: Mapping[str, _Family] = {
    "qwen3": _Family("qwen3", hybrid=False, rotary_factor=1.0, gated=False),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
}

_REFUSED: Mapping[str, str] = {
    "qwen3_moe": "mixture-of-experts models are not built yet",
    "qwen3_5_moe": "mixture-of-experts models are not built yet",
    "qwen3_5_moe_text": "mixture-of-experts models are not built yet",
}

_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a target and of the draft head inside its checkpoint.

    `model_type` names the architecture's file. `layer_types` has one entry for each layer,
    "linear_attention" or "full_attention". `rotary_dim` counts the leading dimensions of a head
    that are rotated; `mrope_section` says how many frequencies turn with time, height and width
    where tokens have three positions. The linear_* fields and `conv_kernel` are 0 where no layer is
    a gated delta net. `dtype` is "float32", "bfloat16" or "float16". `sampling_defaults` holds what
    the checkpoint recommends among temperature, top_k, top_p and min_p. `vision` says that the
    checkpoint carries a vision tower, which is not loaded.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    layer_types: tuple[str, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    conv_kernel: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str
    eos_token_ids: tuple[int, ...] = ()
    num_mtp_layers: int = 0
    sampling_defaults: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    vision: bool = False
    yarn: YarnScaling | None = None
    mrope_section: tuple[int, int, int] | None = None

    @classmethod
    def from_hf(cls, path: Path) -> ModelConfig:
        """Read config.json and, where there is one, generation_config.json in the folder `path`.

        Raises:
            CheckpointError: a file is missing or not JSON, a key is missing or has a value of the
                wrong type, or the model is one that cannot be served; the message names it.
        """
        config = read_json(path / "config.json")
        generation = path / "generation_config.json"
        return cls.from_dict(config, read_json(generation) if generation.exists() else None)

    @classmethod
    def from_dict(
        cls, config: Mapping[str, object], generation_config: Mapping[str, object] | None = None
    ) -> ModelConfig:
        """The same from parsed JSON; raises as `from_hf` does."""
        top = Section("config.json", config)
        family = _family(top)
        nested = top.section("text_config")
        text = top if nested is None else nested
        _family(text)
        _refuse_unbuilt(top, text, family)
        num_layers = text.positive_int("num_hidden_layers")
        layer_types = _layer_types(text, family, num_layers)
        hidden_size = text.positive_int("hidden_size")
        num_heads = text.positive_int("num_attention_heads")
        num_kv_heads = text.positive_int("num_key_value_heads", default=num_heads)
        _check_multiple(text, "num_attention_heads", num_heads, "num_key_value_heads", num_kv_heads)
        head_dim = text.positive_int("head_dim", default=0)
        if head_dim == 0:
            _check_multiple(text, "hidden_size", hidden_size, "num_attention_heads", num_heads)
            head_dim = hidden_size // num_heads
        rotary = read_rotary(text, family.rotary_factor, head_dim)
        vocab_size = text.positive_int("vocab_size")
        linear = _linear_attention(text) if LINEAR_ATTENTION in layer_types else (0, 0, 0, 0, 0)
        generation = Section("generation_config.json", generation_config or {})
        return cls(
            model_type=family.name,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=text.positive_int("intermediate_size"),
            num_layers=num_layers,
            layer_types=layer_types,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rotary_dim=rotary.rotary_dim,
            rope_theta=rotary.theta,
            linear_num_key_heads=linear[0],
            linear_num_value_heads=linear[1],
            linear_key_head_dim=linear[2],
            linear_value_head_dim=linear[3],
            conv_kernel=linear[4],
            rms_norm_eps=text.positive_float("rms_norm_eps"),
            max_position_embeddings=_max_positions(text, rotary.yarn),
            tie_word_embeddings=_tied(top, text),
            dtype=_dtype(top, text),
            eos_token_ids=_eos_token_ids((generation, text, top), vocab_size),
            num_mtp_layers=_first_int((text, top), "mtp_num_hidden_layers"),
            sampling_defaults=_sampling_defaults(generation),
            vision=top.section("vision_config") is not None,
            yarn=rotary.yarn,
            mrope_section=rotary.mrope_section,
        )


def read_json(path: Path) -> Mapping[str, object]:
    try:
        value: object = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.name} is missing",
            got=str(path.parent),
            allowed="a folder in the Hugging Face layout",
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}", got=value, allowed="a JSON object")
    return cast(dict[str, object], value)


def _family(section: Section) -> _Family:
    model_type = section.text("model_type")
    if model_type in _REFUSED:
        raise CheckpointError(
            f"{section.name}: {_REFUSED[model_type]}", got=model_type, allowed=_FAMILIES
        )
    if model_type not in _FAMILIES:
        raise CheckpointError(
            f"{section.name}: model_type is not supported", got=model_type, allowed=_FAMILIES
        )
    return _FAMILIES[model_type]


def _refuse_unbuilt(top: Section, text: Section, family: _Family) -> None:
    """Refuse, by name, variants that would load and then compute something else."""
    refuse_quantized(top, text)
    for key, wanted in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("use_sliding_window", False),
        ("attn_output_gate", family.gated),
        ("mtp_use_dedicated_embeddings", False),
    ):
        value = text.get(key, wanted)
        if value != wanted:
            raise CheckpointError(f"{text.name}: {key}", got=value, allowed=str(wanted))


def refuse_quantized(*sections: Section) -> None:
    """Refuse quantised checkpoints by name."""
    for section in sections:
        quantization = section.section("quantization_config")
        if quantization is not None:
            raise CheckpointError(
                f"{section.name}: quantization_config is not built yet",
                got=quantization.get("quant_method"),
                hint="use the checkpoint that is not quantised",
            )


def _layer_types(text: Section, family: _Family, num_layers: int) -> tuple[str, ...]:
    layer_types = _listed_layer_types(text, family, num_layers)
    if FULL_ATTENTION not in layer_types:
        raise CheckpointError(
            f"{text.name}: layer_types or full_attention_interval leave no attention layer",
            got=num_layers,
            allowed="at least one full_attention layer",
        )
    return layer_types


def _listed_layer_types(text: Section, family: _Family, num_layers: int) -> tuple[str, ...]:
    if not family.hybrid:
        return (FULL_ATTENTION,) * num_layers
    listed = text.get("layer_types")
    if listed is None:
        interval = text.positive_int("full_attention_interval", default=4)
        return tuple(
            LINEAR_ATTENTION if (index + 1) % interval else FULL_ATTENTION
            for index in range(num_layers)
        )
    known = (LINEAR_ATTENTION, FULL_ATTENTION)
    if not isinstance(listed, list):
        raise CheckpointError(f"{text.name}: layer_types", got=listed, allowed=f"a list of {known}")
    names = cast(list[object], listed)
    for name in names:
        if name not in known:
            raise CheckpointError(f"{text.name}: layer_types", got=name, allowed=known)
    if len(names) != num_layers:
        raise CheckpointError(
            f"{text.name}: number of layer_types",
            got=len(names),
            allowed=f"{num_layers}, which is num_hidden_layers",
        )
    return tuple(str(name) for name in names)


def _max_positions(text: Section, yarn: YarnScaling | None) -> int:
    """Longest context: what the configuration says, or what YaRN stretches it to."""
    listed = text.positive_int("max_position_embeddings")
    if yarn is None:
        return listed
    return max(listed, int(yarn.factor * yarn.original_max_position_embeddings))


def _linear_attention(text: Section) -> tuple[int, int, int, int, int]:
    key_heads = text.positive_int("linear_num_key_heads")
    value_heads = text.positive_int("linear_num_value_heads")
    _check_multiple(text, "linear_num_value_heads", value_heads, "linear_num_key_heads", key_heads)
    return (
        key_heads,
        value_heads,
        text.positive_int("linear_key_head_dim"),
        text.positive_int("linear_value_head_dim"),
        text.positive_int("linear_conv_kernel_dim"),
    )


def _check_multiple(section: Section, what: str, value: int, of: str, unit: int) -> None:
    if value % unit:
        raise CheckpointError(
            f"{section.name}: {what}", got=value, allowed=f"a multiple of {of} ({unit})"
        )


def _tied(top: Section, text: Section) -> bool:
    """The wrapper's own key decides, as it does for the class that owns lm_head."""
    section = top if top.get("tie_word_embeddings") is not None else text
    return section.boolean("tie_word_embeddings", default=False)


def _dtype(top: Section, text: Section) -> str:
    for section in (text, top):
        for key in ("dtype", "torch_dtype"):
            if section.get(key) is not None:
                name = section.text(key).removeprefix("torch.")
                if name not in _DTYPES:
                    raise CheckpointError(f"{section.name}: {key}", got=name, allowed=_DTYPES)
                return name
    return "float32"


def _eos_token_ids(sections: Sequence[Section], vocab_size: int) -> tuple[int, ...]:
    """End-of-sequence ids of the first section that has any, without repeats."""
    for section in sections:
        value = section.get("eos_token_id")
        if value is None:
            continue
        ids = cast(list[object], value) if isinstance(value, list) else [value]
        for token_id in ids:
            if (
                not isinstance(token_id, int)
                or isinstance(token_id, bool)
                or not 0 <= token_id < vocab_size
            ):
                raise CheckpointError(
                    f"{section.name}: eos_token_id",
                    got=token_id,
                    allowed=f"token ids from 0 to {vocab_size - 1}",
                )
        return tuple(dict.fromkeys(cast(list[int], ids)))
    return ()


def _first_int(sections: Sequence[Section], key: str) -> int:
    section = next((s for s in sections if s.get(key) is not None), sections[0])
    return section.natural_int(key, default=0)


_SAMPLING_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 1000.0),
    "top_p": (1e-6, 1.0),
    "min_p": (0.0, 1.0),
}


def _sampling_defaults(generation: Section) -> dict[str, float]:
    if not generation.boolean("do_sample", default=True):
        return {"temperature": 0.0}
    defaults: dict[str, float] = {}
    for key in ("temperature", "top_p", "min_p"):
        if generation.get(key) is not None:
            defaults[key] = generation.natural_float(key)
            low, high = _SAMPLING_RANGES[key]
            if not low <= defaults[key] <= high:
                raise CheckpointError(
                    f"{generation.name}: {key}", got=defaults[key], allowed=f"{low} to {high}"
                )
    if generation.get("top_k") is not None:
        top_k = generation.natural_int("top_k")
        if top_k > 0:  # 0 keeps all tokens, which is the default here
            defaults["top_k"] = top_k
    return defaults
