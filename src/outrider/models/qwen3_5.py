"""Qwen3.5 text model: three gated delta nets, then one gated full attention layer, repeated."""

from __future__ import annotations

from outrider.layers.attention import Attention
from outrider.layers.gated_delta_net import GatedDeltaNet
from outrider.layers.norm import NormConfig
from outrider.layers.rows import DeltaCacheSpec
from outrider.models.base import ATTENTION_WEIGHTS, CausalLM, DecoderLayer
from outrider.models.config import LINEAR_ATTENTION, ModelConfig
from outrider.models.loader import WeightMap

PACKED_WEIGHTS = ATTENTION_WEIGHTS | {
    "linear_attn.in_proj": (
        "linear_attn.in_proj_qkv",
        "linear_attn.in_proj_z",
        "linear_attn.in_proj_b",
        "linear_attn.in_proj_a",
    ),
}


def norm_config(config: ModelConfig) -> NormConfig:
    """Every norm of the family but the delta net's own is zero-centred."""
    return NormConfig(config.rms_norm_eps, zero_centred=True)


def full_attention_layer(config: ModelConfig) -> DecoderLayer:
    """A layer with gated full attention, in the target and in its MTP head."""
    norm = norm_config(config)
    attention = Attention(
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        qk_norm=norm,
        output_gate=True,
    )
    return DecoderLayer(config, norm, attention)


def _linear_attention_layer(config: ModelConfig) -> DecoderLayer:
    key_size = config.linear_num_key_heads * config.linear_key_head_dim
    value_size = config.linear_num_value_heads * config.linear_value_head_dim
    spec = DeltaCacheSpec(
        conv_channels=2 * key_size + value_size,
        conv_kernel=config.conv_kernel,
        num_key_heads=config.linear_num_key_heads,
        num_value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
    )
    mixer = GatedDeltaNet(config.hidden_size, spec, config.rms_norm_eps)
    return DecoderLayer(config, norm_config(config), mixer)


class Qwen3_5ForCausalLM(CausalLM):
    """The target model, without its vision tower."""

    weight_map = WeightMap(
        prefixes=("model.language_model.", "model.", ""),
        skip=(r"^model\.visual\.", r"^visual\."),
        packed=PACKED_WEIGHTS,
    )

    def __init__(self, config: ModelConfig) -> None:
        layers = [
            _linear_attention_layer(config)
            if layer_type == LINEAR_ATTENTION
            else full_attention_layer(config)
            for layer_type in config.layer_types
        ]
        super().__init__(config, norm_config(config), layers)
