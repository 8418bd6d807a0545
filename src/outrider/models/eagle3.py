"""EAGLE3 draft: one Llama-style layer over the target's tapped residual streams.

g = fc(taps at position t); the layer attends from [norm_in(embed(x_{t+1})), norm_h(g)] and adds to
g; its output before the final norm is the g of the next chain step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from outrider.layers.attention import Attention
from outrider.layers.embedding import Embedding
from outrider.layers.linear import Linear
from outrider.layers.mlp import GatedMLP
from outrider.layers.norm import NormConfig, RMSNorm
from outrider.layers.rotary import RotaryEmbedding
from outrider.layers.rows import AttentionCacheSpec, LayerCache, RowBatch
from outrider.models.base import ATTENTION_WEIGHTS
from outrider.models.eagle3_config import Eagle3Config
from outrider.models.loader import WeightMap


class Eagle3Layer(nn.Module):
    """The one decoder layer, whose attention reads two vectors side by side."""

    def __init__(self, config: Eagle3Config, norm: NormConfig) -> None:
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = RMSNorm(config.hidden_size, norm)
        self.input_layernorm = RMSNorm(config.hidden_size, norm)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, norm)
        self.self_attn = Attention(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            input_size=2 * config.hidden_size,
        )
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def forward(
        self,
        embedding: Embedding,
        token_ids: Tensor,
        hidden: Tensor,
        rows: RowBatch,
        rotary: tuple[Tensor, Tensor],
        cache: LayerCache,
    ) -> Tensor:
        """token_ids [R], hidden [R, H] -> [R, H]."""
        mixed = embedding.beside(token_ids, hidden, self.input_layernorm, self.hidden_norm)
        normed_hidden = mixed[:, hidden.shape[1] :]
        residual = normed_hidden if self.norm_before_residual else hidden
        attended = self.self_attn(mixed, rows, rotary, cache)
        normed, residual = self.post_attention_layernorm.add(attended, residual)
        return residual + self.mlp(normed)


class Eagle3(nn.Module):
    """Draft network.

    Args:
        own_embedding: the checkpoint brings embed_tokens; else the caller passes the target's.
    """

    weight_map = WeightMap(
        prefixes=("model.", ""), skip=(r"^(model\.)?(d2t|t2d)$",), packed=ATTENTION_WEIGHTS
    )

    def __init__(self, config: Eagle3Config, *, own_embedding: bool) -> None:
        super().__init__()
        norm = NormConfig(config.rms_norm_eps, zero_centred=False)
        self.config = config
        tapped = len(config.tapped_layers) * config.target_hidden_size
        self.fc = Linear(tapped, config.hidden_size)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(tapped, norm)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(config.target_hidden_size, norm) for _ in config.tapped_layers
            )
        if own_embedding:
            self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.midlayer = Eagle3Layer(config, norm)
        self.norm = RMSNorm(config.hidden_size, norm)
        self.lm_head = Linear(config.hidden_size, config.draft_vocab_size)
        self.rotary = RotaryEmbedding(config.rotary_dim, config.rope_theta, config.yarn)

    @property
    def cache_specs(self) -> tuple[AttentionCacheSpec, ...]:
        return (self.midlayer.self_attn.cache_spec,)

    @torch.inference_mode()
    def project(self, taps: Tensor) -> Tensor:
        """taps [R, number of taps * target's H] -> g [R, H]."""
        if self.config.norm_before_fc:
            taps = self.input_norm(taps)
        if self.config.fc_norm:
            parts = taps.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            taps = torch.cat(normed, dim=-1)
        return self.fc(taps)

    @torch.inference_mode()
    def forward(
        self,
        embedding: Embedding,
        next_token_ids: Tensor,
        hidden: Tensor,
        rows: RowBatch,
        caches: Sequence[LayerCache],
    ) -> Tensor:
        """next_token_ids [R], hidden [R, H] -> the hidden state to recycle [R, H].

        Args:
            embedding: of the checkpoint, or the target's where it brings none.
        """
        rotary = self.rotary(rows.positions)
        output = self.midlayer(embedding, next_token_ids, hidden, rows, rotary, caches[0])
        return self.norm(output) if self.config.norm_output else output

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Recycled hidden [R, H] -> [R, draft_vocab_size]."""
        return self.lm_head(hidden if self.config.norm_output else self.norm(hidden))
