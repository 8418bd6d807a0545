"""Qwen3 dense: full attention with plain per-head norms of q and k in every layer."""

from __future__ import annotations

from outrider.layers.attention import Attention
from outrider.layers.norm import NormConfig
from outrider.models.base import ATTENTION_WEIGHTS, CausalLM, DecoderLayer
from outrider.models.config import ModelConfig
from outrider.models.loader import WeightMap


class Qwen3ForCausalLM(CausalLM):
    """The target model."""

    weight_map = WeightMap(prefixes=("model.", ""), packed=ATTENTION_WEIGHTS)

    def __init__(self, config: ModelConfig) -> None:
        norm = NormConfig(config.rms_norm_eps, zero_centred=False)
        layers = [_layer(config, norm) for _ in config.layer_types]
        super().__init__(config, norm, layers)


def _layer(config: ModelConfig, norm: NormConfig) -> DecoderLayer:
    attention = Attention(
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        qk_norm=norm,
    )
    return DecoderLayer(config, norm, attention)
