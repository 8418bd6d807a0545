"""Picking a draft token: argmax, coupled to the target's noise, or sampled from a truncated q."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.ops.philox import Purpose, race_times_of
from outrider.sampling.arrays import SamplingArrays
from outrider.sampling.sampler import target_probs
from outrider.spec.names import DraftSampling
from outrider.spec.verify import SparseLaw

MODES = (DraftSampling.ARGMAX, DraftSampling.COUPLED, DraftSampling.SAMPLED)
"""Order in which a mode is stored on the device as a number."""


@dataclass(frozen=True)
class Proposal:
    """Drafts for the next round.

    Attributes:
        token_ids: [B, K'] int64, valid up to num_drafts.
        num_drafts: [B] int64.
        q: what sampled drafts were drawn from; None where no sequence samples.
    """

    token_ids: Tensor
    num_drafts: Tensor
    q: SparseLaw | None


class DraftChooser:
    """Draws one token a step for each sequence, as its request wishes."""

    def __init__(
        self,
        modes: Tensor,
        sampling: SamplingArrays,
        num_committed: Tensor,
        top_m: int,
        used_modes: frozenset[DraftSampling],
    ) -> None:
        """
        Args:
            modes: [B] int64, index into MODES.
            sampling: entries of shape [B].
            num_committed: [B] int64; the drafts of step s stand for position num_committed + s - 1.
            top_m: most ids that a sampled q keeps.
            used_modes: modes that occur in the batch, known without looking at the device.
        """
        self._modes = modes
        self._sampling = sampling
        self._num_committed = num_committed
        self._top_m = top_m
        self._used = used_modes
        self._chosen: list[Tensor] = []
        self._laws: list[SparseLaw] = []

    def choose(self, logits: Tensor, target_ids: Tensor | None) -> Tensor:
        """Target ids [B] of the next step's drafts.

        Args:
            logits: [B, V'].
            target_ids: [V'], or None for the identity.
        """
        chosen = _to_target(logits.argmax(-1), target_ids)
        if DraftSampling.COUPLED in self._used:
            coupled = self._coupled(logits, target_ids)
            chosen = torch.where(self._modes == MODES.index(DraftSampling.COUPLED), coupled, chosen)
        if DraftSampling.SAMPLED in self._used:
            sampled = self._sampled(logits, target_ids)
            chosen = torch.where(self._modes == MODES.index(DraftSampling.SAMPLED), sampled, chosen)
        self._chosen.append(chosen)
        return chosen

    def _coupled(self, logits: Tensor, target_ids: Tensor | None) -> Tensor:
        """The token that the target would draw here if its distribution were the draft's."""
        ids = torch.arange(logits.shape[-1], device=logits.device)
        ids = (ids if target_ids is None else target_ids).expand(logits.shape[0], -1)
        position = self._num_committed + len(self._chosen)
        times = race_times_of(self._sampling.seeds, position, ids, Purpose.TARGET)
        best = (times / target_probs(logits, self._sampling)).argmin(-1)
        drawn = torch.where(self._sampling.temperature > 0, best, logits.argmax(-1))
        return _to_target(drawn, target_ids)

    def _sampled(self, logits: Tensor, target_ids: Tensor | None) -> Tensor:
        scores, draft_ids = logits.topk(min(self._top_m, logits.shape[-1]), dim=-1)
        ids = _to_target(draft_ids, target_ids)
        probs = target_probs(scores, self._sampling)
        index = len(self._chosen)
        times = race_times_of(self._sampling.seeds, self._num_committed, ids, Purpose.DRAFT, index)
        self._laws.append(SparseLaw(ids, probs))
        return ids.gather(-1, (times / probs).argmin(-1, keepdim=True))[:, 0]

    def proposal(self, num_drafts: Tensor) -> Proposal:
        """Everything chosen so far."""
        q = None
        if self._laws:
            q = SparseLaw(
                torch.stack([law.token_ids for law in self._laws], dim=1),
                torch.stack([law.probs for law in self._laws], dim=1),
            )
        return Proposal(torch.stack(self._chosen, dim=1), num_drafts, q)


def _to_target(draft_ids: Tensor, target_ids: Tensor | None) -> Tensor:
    return draft_ids if target_ids is None else target_ids[draft_ids]
