"""Method `mtp`: the multi-token-prediction head inside the target's own checkpoint."""

from __future__ import annotations

from torch import Tensor

from outrider.layers.rows import LayerCache, RowBatch
from outrider.models.qwen3_5 import Qwen3_5ForCausalLM
from outrider.models.qwen3_5_mtp import Qwen3_5MTP
from outrider.spec.base import ChainDrafter, Taps


class MTPDrafter(ChainDrafter):
    """Reads the target's final hidden state; recycles its own normed output."""

    name = "mtp"
    taps = Taps.FINAL_HIDDEN

    def __init__(self, head: Qwen3_5MTP, target: Qwen3_5ForCausalLM) -> None:
        self._head = head
        self._target = target
        self._caches: tuple[LayerCache, ...] = ()
        self.cache_specs = head.cache_specs

    def bind(self, caches: tuple[LayerCache, ...]) -> None:
        self._caches = caches

    def feed(self, tapped: Tensor, next_token_ids: Tensor, rows: RowBatch) -> Tensor:
        return self._head(self._target, next_token_ids, tapped, rows, self._caches)

    def step(self, hidden: Tensor, token_ids: Tensor, rows: RowBatch) -> Tensor:
        return self._head(self._target, token_ids, hidden, rows, self._caches)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._target.logits(hidden)
