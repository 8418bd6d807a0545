"""Shapes of released models by name, for engines that run with random weights.

`preset:qwen3-8b` stands where a checkpoint's folder would, and `preset:eagle3` where a draft's
would; there are no files behind them, so they need load_format "dummy". Knows the shapes and
nothing of how weights are made.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from outrider.errors import ConfigError
from outrider.models.config import ModelConfig
from outrider.models.eagle3_config import Eagle3Config

PREFIX = "preset:"
EAGLE3 = "preset:eagle3"

_EAGLE3_HEAD_DIM = 128
_EAGLE3_VOCAB_SIZE = 32_000


def _qwen3(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, *, tied: bool
) -> Mapping[str, object]:
    return {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
    }


def _qwen3_5(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    value_heads: int,
    intermediate: int,
    *,
    tied: bool,
) -> Mapping[str, object]:
    return {
        "model_type": "qwen3_5_text",
        "vocab_size": 248_320,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "full_attention_interval": 4,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "max_position_embeddings": 262_144,
        "tie_word_embeddings": tied,
        "mtp_num_hidden_layers": 1,
        "dtype": "bfloat16",
    }


PRESETS: Mapping[str, Mapping[str, object]] = {
    "qwen3-0.6b": _qwen3(1024, 28, 16, 8, 3072, tied=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 8, 6144, tied=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 8, 9728, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 8, 12_288, tied=False),
    "qwen3-14b": _qwen3(5120, 40, 40, 8, 17_408, tied=False),
    "qwen3-32b": _qwen3(5120, 64, 64, 8, 25_600, tied=False),
    "qwen3.5-0.8b": _qwen3_5(1024, 24, 8, 2, 16, 3584, tied=True),
    "qwen3.5-2b": _qwen3_5(2048, 24, 8, 2, 16, 6144, tied=True),
    "qwen3.5-4b": _qwen3_5(2560, 32, 16, 4, 32, 9216, tied=True),
    "qwen3.5-9b": _qwen3_5(4096, 32, 16, 4, 32, 12_288, tied=False),
    "qwen3.5-27b": _qwen3_5(5120, 64, 24, 4, 48, 17_408, tied=False),
}
"""Contents of config.json by the name that follows the prefix."""


def is_preset(model: str | Path) -> bool:
    """Whether this names a preset and not a folder or a hub id."""
    return str(model).startswith(PREFIX)


def preset_config(model: str | Path) -> ModelConfig:
    """The configuration of a target.

    Raises:
        ConfigError: there is no such preset.
    """
    name = str(model).removeprefix(PREFIX)
    if name not in PRESETS:
        raise ConfigError("no such model preset", got=str(model), allowed=_names(PRESETS))
    return ModelConfig.from_dict(PRESETS[name])


def preset_draft_config(model: str | Path, target: ModelConfig) -> Eagle3Config:
    """The configuration of an EAGLE3 draft of the usual shape, made to measure for a target.

    Raises:
        ConfigError: there is no such preset.
        CheckpointError: the target is too shallow to be tapped at three places.
    """
    if str(model) != EAGLE3:
        raise ConfigError("no such draft preset", got=str(model), allowed=EAGLE3)
    config = {
        "num_hidden_layers": 1,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": _EAGLE3_HEAD_DIM,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": target.rope_theta,
        "max_position_embeddings": target.max_position_embeddings,
        "draft_vocab_size": min(_EAGLE3_VOCAB_SIZE, target.vocab_size),
    }
    query_rows = target.num_heads * _EAGLE3_HEAD_DIM
    return Eagle3Config.from_dict(EAGLE3, config, target, query_rows)


def _names(presets: Mapping[str, object]) -> list[str]:
    return [PREFIX + name for name in presets]
