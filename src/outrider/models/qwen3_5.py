"""Qwen3.5 text model: three gated delta nets, then one gated full attention layer, repeated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from outrider.layers.attention import Attention
from outrider.layers.embedding import Embedding
from outrider.layers.gated_delta_net import GatedDeltaNet
from outrider.layers.linear import Linear
from outrider.layers.mlp import GatedMLP
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import RotaryEmbedding
from outrider.layers.rows import (
    AttentionCache,
    DeltaCache,
    DeltaCacheSpec,
    LayerCache,
    LayerCacheSpec,
    RowBatch,
)
from outrider.models.config import ModelConfig
from outrider.models.loader import WeightMap
from outrider.ops.linear import linear

PACKED_WEIGHTS = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "linear_attn.in_proj": (
        "linear_attn.in_proj_qkv",
        "linear_attn.in_proj_z",
        "linear_attn.in_proj_b",
        "linear_attn.in_proj_a",
    ),
}


def _norm(config: ModelConfig) -> RMSNorm:
    return RMSNorm(config.hidden_size, config.rms_norm_eps, zero_centred=True)


def delta_cache_spec(config: ModelConfig) -> DeltaCacheSpec:
    """Shape of the recurrent state of one linear attention layer."""
    key_size = config.linear_num_key_heads * config.linear_key_head_dim
    value_size = config.linear_num_value_heads * config.linear_value_head_dim
    return DeltaCacheSpec(
        conv_channels=2 * key_size + value_size,
        conv_kernel=config.conv_kernel,
        num_key_heads=config.linear_num_key_heads,
        num_value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
    )


class Qwen3_5DecoderLayer(nn.Module):
    """Pre-norm layer: token mixing, then the MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig, layer_type: str) -> None:
        super().__init__()
        self.input_layernorm = _norm(config)
        self.post_attention_layernorm = _norm(config)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        if layer_type == "linear_attention":
            self.linear_attn = GatedDeltaNet(
                config.hidden_size, delta_cache_spec(config), config.rms_norm_eps
            )
        else:
            self.self_attn = Attention(
                config.hidden_size,
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                config.rms_norm_eps,
                zero_centred_norm=True,
                output_gate=True,
            )
        self.is_linear = layer_type == "linear_attention"

    @property
    def cache_spec(self) -> LayerCacheSpec:
        return self.linear_attn.cache_spec if self.is_linear else self.self_attn.cache_spec

    def forward(
        self, hidden: Tensor, rows: RowBatch, rotary: tuple[Tensor, Tensor], cache: LayerCache
    ) -> Tensor:
        """hidden [R, H] -> [R, H], the residual stream entering the next layer."""
        normed = self.input_layernorm(hidden)
        if isinstance(cache, DeltaCache):
            hidden = hidden + self.linear_attn(normed, rows, cache)
        else:
            assert isinstance(cache, AttentionCache)
            hidden = hidden + self.self_attn(normed, rows, rotary, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Qwen3_5ForCausalLM(nn.Module):
    """The target model. `forward` gives hidden states after the final norm, `logits` the head."""

    weight_map = WeightMap(
        prefixes=("model.language_model.", "model.", ""),
        skip=(r"^model\.visual\.", r"^visual\."),
        packed=PACKED_WEIGHTS,
    )

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Qwen3_5DecoderLayer(config, layer_type) for layer_type in config.layer_types
        )
        self.norm = _norm(config)
        self.rotary = RotaryEmbedding(config.rotary_dim, config.rope_theta)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size)

    @property
    def cache_specs(self) -> tuple[LayerCacheSpec, ...]:
        return tuple(layer.cache_spec for layer in self.layers)  # pyright: ignore[reportReturnType]

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, rows: RowBatch, caches: Sequence[LayerCache]) -> Tensor:
        """token_ids [R] -> hidden states after the final norm [R, H]."""
        hidden = self.embed_tokens(token_ids)
        rotary = self.rotary(rows.positions)
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden = layer(hidden, rows, rotary, cache)
        return self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden after the final norm [R, H] -> [R, V] in the model's dtype."""
        head = self.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return linear(hidden, head.weight)
