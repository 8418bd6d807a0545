"""Method `mtp`: the multi-token-prediction head inside the target's own checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.config import SpeculativeConfig
from outrider.layers.rows import RowBatch
from outrider.models.base import CausalLM
from outrider.models.build import Checkpoint
from outrider.models.config import ModelConfig
from outrider.models.qwen3_5_mtp import Qwen3_5MTP
from outrider.ops.linear import linear
from outrider.spec.base import ChainDrafter, Drafter
from outrider.spec.draft_ids import draft_ids

logger = logging.getLogger(__name__)


class MTPDrafter(ChainDrafter):
    """Reads the target's final hidden state; recycles its own normed output."""

    def __init__(
        self, head: Qwen3_5MTP, target: CausalLM, target_ids: Tensor | None = None
    ) -> None:
        """
        Args:
            target_ids: [N] int64, ascending ids that are proposed from; None is the whole
                vocabulary. Their rows of the target's output head are copied here.
        """
        self._head = head
        self._target = target
        self._target_ids = target_ids
        self._rows: Tensor | None = None
        if target_ids is not None:
            self._rows = target.head_weight.index_select(0, target_ids)
        self.cache_specs = head.cache_specs

    @property
    def target_ids(self) -> Tensor | None:
        return self._target_ids

    @property
    def network(self) -> Qwen3_5MTP:
        return self._head

    @property
    def output_weight(self) -> Tensor:
        """[N, H], the output head that drafts are scored with."""
        return self._target.head_weight if self._rows is None else self._rows

    def feed(self, tapped: Tensor, next_token_ids: Tensor, rows: RowBatch) -> Tensor:
        return self._head(self._target, next_token_ids, tapped, rows, self._caches)

    def step(self, hidden: Tensor, token_ids: Tensor, rows: RowBatch) -> Tensor:
        return self._head(self._target, token_ids, hidden, rows, self._caches)

    def step_weights(self, step: int) -> Sequence[Tensor]:
        return (*self._head.parameters(), self.output_weight)

    def logits(self, hidden: Tensor) -> Tensor:
        if self._rows is None:
            return self._target.logits(hidden)
        return linear(hidden, self._rows)


def refusal(config: ModelConfig) -> str | None:
    """Why a target cannot host the method."""
    if config.num_mtp_layers == 0:
        return "its checkpoint has no MTP head (mtp_num_hidden_layers is 0 or absent)"
    return None


def set_up(checkpoint: Checkpoint, target: CausalLM, config: SpeculativeConfig) -> Drafter:
    """Load the head from the target's checkpoint, and trim the output head as `config` wants.

    Raises:
        ConfigError: draft_vocab names no ids of the target's vocabulary.
    """
    with torch.device("meta"):
        head = Qwen3_5MTP(checkpoint.config)
    checkpoint.fill(head, Qwen3_5MTP.weight_map)
    return MTPDrafter(head, target, _target_ids(checkpoint, config))


def _target_ids(checkpoint: Checkpoint, config: SpeculativeConfig) -> Tensor | None:
    if config.draft_vocab is None:
        return None
    ids = draft_ids(config.draft_vocab, checkpoint)
    num_ids, vocab_size = len(ids), checkpoint.config.vocab_size
    size = num_ids * checkpoint.config.hidden_size * checkpoint.dtype.itemsize
    if num_ids == vocab_size:  # a copy of the whole head would serve nothing
        logger.info("draft head: all %d ids", vocab_size)
        return None
    logger.info("draft head: %d of %d ids, %.1f MiB", num_ids, vocab_size, size / 2**20)
    return ids.to(checkpoint.device)
