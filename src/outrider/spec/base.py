"""What the engine asks of a draft method. It asks nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from outrider.layers.rows import LayerCache, LayerCacheSpec, RowBatch


class Taps(Enum):
    """Hidden states of the target that a draft reads."""

    NONE = "none"
    FINAL_HIDDEN = "final hidden"


@dataclass(frozen=True)
class Frontier:
    """Where sequences stand when they are drafted for.

    Attributes:
        max_drafts: most drafts that any of the sequences wants, at least 1.
        rows_at: rows of chain step 2, 3, ...: step s runs one row per sequence at the position of
            its newest committed token plus s - 2, inert where the sequence wants fewer drafts.
    """

    max_drafts: int
    rows_at: Callable[[int], RowBatch]


class Drafter(ABC):
    """A draft method, ready to run.

    Attributes:
        name: canonical name of the method.
        taps: what `feed` is given of the target.
        cache_specs: layers of its own, whose caches share block ids and positions with the target.
    """

    name: str
    taps: Taps
    cache_specs: tuple[LayerCacheSpec, ...]

    @abstractmethod
    def bind(self, caches: tuple[LayerCache, ...]) -> None:
        """Receive the storage that was allocated for cache_specs. Called once."""

    @abstractmethod
    def feed(self, tapped: Tensor, next_token_ids: Tensor, rows: RowBatch) -> Tensor:
        """See every row of a pass, whether or not something will be proposed from it.

        Args:
            tapped: [R, H], what `taps` names.
            next_token_ids: [R], the token after each row. Rows past a sequence's last accepted one
                hold garbage that a later feed overwrites.

        Returns:
            [R, H'], handed back to `propose` for one row of each sequence.
        """

    @abstractmethod
    def propose(self, hidden: Tensor, frontier: Frontier) -> Tensor:
        """Draft tokens.

        Args:
            hidden: [B, H'] of each sequence's last committed row.

        Returns:
            [B, max_drafts] int64. Entries past a sequence's wish are unspecified.
        """


class ChainDrafter(Drafter):
    """A draft network that continues from its own output, proposing its argmax at every step."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[B, H'] -> [B, V], scores of target token ids."""

    @abstractmethod
    def step(self, hidden: Tensor, token_ids: Tensor, rows: RowBatch) -> Tensor:
        """Feed a drafted token: hidden [B, H'], token_ids [B] -> [B, H']."""

    def propose(self, hidden: Tensor, frontier: Frontier) -> Tensor:
        drafts = [self.logits(hidden).argmax(-1)]
        for step in range(2, frontier.max_drafts + 1):
            hidden = self.step(hidden, drafts[-1], frontier.rows_at(step))
            drafts.append(self.logits(hidden).argmax(-1))
        return torch.stack(drafts, dim=-1)
