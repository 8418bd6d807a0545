"""What target models share: the decoder stack, taps, and the head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from outrider.layers.attention import Attention
from outrider.layers.embedding import Embedding
from outrider.layers.gated_delta_net import GatedDeltaNet
from outrider.layers.linear import Linear
from outrider.layers.mlp import GatedMLP
from outrider.layers.norm import NormConfig, RMSNorm
from outrider.layers.rotary import RotaryEmbedding
from outrider.layers.rows import DeltaCache, LayerCache, LayerCacheSpec, RowBatch
from outrider.models.config import ModelConfig
from outrider.models.loader import WeightMap
from outrider.ops.linear import linear

ATTENTION_WEIGHTS = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Packed weights of an ordinary decoder layer."""


class DecoderLayer(nn.Module):
    """Pre-norm layer: token mixing, then the MLP, each added to the residual stream."""

    def __init__(
        self, config: ModelConfig, norm: NormConfig, mixer: Attention | GatedDeltaNet
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, norm)
        if isinstance(mixer, GatedDeltaNet):
            self.linear_attn = mixer
        else:
            self.self_attn = mixer
        self.post_attention_layernorm = RMSNorm(config.hidden_size, norm)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        self.cache_spec: LayerCacheSpec = mixer.cache_spec

    def forward(
        self,
        added: Tensor | None,
        residual: Tensor,
        rows: RowBatch,
        rotary: tuple[Tensor, Tensor],
        cache: LayerCache,
    ) -> tuple[Tensor, Tensor]:
        """Run on the stream residual + added.

        Args:
            added: [R, H], what the layer before adds to the stream, or None.
            residual: [R, H].

        Returns:
            What this layer's MLP adds, and the stream that it adds to. Left apart so that the sum
            and the next norm are one operation.
        """
        normed, residual = self.input_layernorm.add(added, residual)
        if isinstance(cache, DeltaCache):
            mixed = self.linear_attn(normed, rows, cache)
        else:
            mixed = self.self_attn(normed, rows, rotary, cache)
        normed, residual = self.post_attention_layernorm.add(mixed, residual)
        return self.mlp(normed), residual


@dataclass(frozen=True)
class TargetOutput:
    """What a target pass leaves.

    Attributes:
        hidden: [R, H] after the final norm; the head's input.
        residuals: [R, taps * H], the residual stream entering each tapped layer, in ascending
            order of layers; None where nothing is tapped.
    """

    hidden: Tensor
    residuals: Tensor | None


class CausalLM(nn.Module):
    """A target model: embedding, decoder layers, final norm, head."""

    weight_map: ClassVar[WeightMap]

    def __init__(
        self, config: ModelConfig, norm: NormConfig, layers: Sequence[DecoderLayer]
    ) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, norm)
        self.rotary = RotaryEmbedding(
            config.rotary_dim, config.rope_theta, config.yarn, config.mrope_section
        )
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size)

    @property
    def cache_specs(self) -> tuple[LayerCacheSpec, ...]:
        return tuple(cast(DecoderLayer, layer).cache_spec for layer in self.layers)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        rows: RowBatch,
        caches: Sequence[LayerCache],
        tapped_layers: tuple[int, ...] = (),
    ) -> TargetOutput:
        """Run all layers over token_ids [R].

        Args:
            tapped_layers: layers whose input is kept, ascending.
        """
        added, residual = None, self.embed_tokens(token_ids)
        rotary = self.rotary(rows.positions)
        residuals: list[Tensor] = []
        for index, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            if index in tapped_layers:
                residuals.append(residual if added is None else residual + added)
            added, residual = layer(added, residual, rows, rotary, cache)
        hidden, _ = self.norm.add(added, residual)
        return TargetOutput(hidden, torch.cat(residuals, -1) if residuals else None)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden after the final norm [R, H] -> [R, V] in the model's dtype."""
        head = self.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return linear(hidden, head.weight)
