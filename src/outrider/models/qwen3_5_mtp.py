"""The multi-token-prediction head that ships inside Qwen3.5 checkpoints, as a draft model.

z = fc([norm_e(embed(x_{t+1})), norm_h(h_t)]) goes through one full-attention decoder layer at
position t and a norm; the target's head then gives the distribution of x_{t+2}. h_t is the target's
hidden state after its final norm, or the head's own output when it continues a chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from outrider.errors import CheckpointError
from outrider.layers.linear import Linear
from outrider.layers.norm import RMSNorm
from outrider.layers.rows import LayerCache, LayerCacheSpec, RowBatch
from outrider.models.base import CausalLM, DecoderLayer
from outrider.models.config import ModelConfig
from outrider.models.loader import WeightMap
from outrider.models.qwen3_5 import PACKED_WEIGHTS, full_attention_layer, norm_config


class Qwen3_5MTP(nn.Module):
    """Draft network; embedding and output head are the target's."""

    weight_map = WeightMap(prefixes=("mtp.",), skip=(), packed=PACKED_WEIGHTS)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, norm = config.hidden_size, norm_config(config)
        self.pre_fc_norm_embedding = RMSNorm(size, norm)
        self.pre_fc_norm_hidden = RMSNorm(size, norm)
        self.fc = Linear(2 * size, size)
        if config.num_mtp_layers != 1:
            raise CheckpointError(
                "mtp_num_hidden_layers",
                got=config.num_mtp_layers,
                allowed="1, as in every released checkpoint",
                hint="draft with another method, or without one",
            )
        self.layers = nn.ModuleList([full_attention_layer(config)])
        self.norm = RMSNorm(size, norm)

    @property
    def cache_specs(self) -> tuple[LayerCacheSpec, ...]:
        return tuple(cast(DecoderLayer, layer).cache_spec for layer in self.layers)

    @torch.inference_mode()
    def forward(
        self,
        target: CausalLM,
        next_token_ids: Tensor,
        hidden: Tensor,
        rows: RowBatch,
        caches: Sequence[LayerCache],
    ) -> Tensor:
        """next_token_ids [R], hidden [R, H] -> [R, H] after the head's norm."""
        pair = target.embed_tokens.beside(
            next_token_ids, hidden, self.pre_fc_norm_embedding, self.pre_fc_norm_hidden
        )
        mixed = self.fc(pair)
        rotary = target.rotary(rows.positions)
        added, residual = self.layers[0](None, mixed, rows, rotary, caches[0])
        return self.norm.add(added, residual)[0]
