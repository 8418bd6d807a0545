"""Method `mtp`: the multi-token-prediction head inside the target's own checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.config import SpeculativeConfig
from outrider.layers.rows import RowBatch
from outrider.models.base import CausalLM
from outrider.models.build import Checkpoint
from outrider.models.config import ModelConfig
from outrider.models.qwen3_5_mtp import Qwen3_5MTP
from outrider.spec.base import ChainDrafter, Drafter


class MTPDrafter(ChainDrafter):
    """Reads the target's final hidden state; recycles its own normed output."""

    def __init__(self, head: Qwen3_5MTP, target: CausalLM) -> None:
        self._head = head
        self._target = target
        self.cache_specs = head.cache_specs

    def feed(self, tapped: Tensor, next_token_ids: Tensor, rows: RowBatch) -> Tensor:
        return self._head(self._target, next_token_ids, tapped, rows, self._caches)

    def step(self, hidden: Tensor, token_ids: Tensor, rows: RowBatch) -> Tensor:
        return self._head(self._target, token_ids, hidden, rows, self._caches)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._target.logits(hidden)


def refusal(config: ModelConfig) -> str | None:
    """Why a target cannot host the method."""
    if config.num_mtp_layers == 0:
        return "its checkpoint has no MTP head (mtp_num_hidden_layers is 0 or absent)"
    return None


def set_up(checkpoint: Checkpoint, target: CausalLM, _config: SpeculativeConfig) -> Drafter:
    """Load the head from the target's checkpoint."""
    with torch.device("meta"):
        head = Qwen3_5MTP(checkpoint.config)
    return MTPDrafter(checkpoint.fill(head, Qwen3_5MTP.weight_map), target)
