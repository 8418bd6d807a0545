"""Picking a draft token: argmax, coupled to the target's noise, or sampled from a truncated q."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.ops.philox import Purpose
from outrider.ops.sampling import argmax, draw_listed, sample, top_m
from outrider.sampling.arrays import SamplingArrays
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
        modes = [mode for mode in MODES if mode in self._used] or [DraftSampling.ARGMAX]
        drawn = {mode: self._draw(mode, logits, target_ids) for mode in modes}
        chosen = drawn.pop(modes[0])
        for mode, tokens in drawn.items():
            chosen = torch.where(self._modes == MODES.index(mode), tokens, chosen)
        self._chosen.append(chosen)
        return chosen

    def _draw(self, mode: DraftSampling, logits: Tensor, target_ids: Tensor | None) -> Tensor:
        """Every sequence's token [B], as if all of them had this mode."""
        if mode is DraftSampling.COUPLED:
            return self._coupled(logits, target_ids)
        if mode is DraftSampling.SAMPLED:
            return self._sampled(logits, target_ids)
        return argmax(logits, target_ids)

    def _coupled(self, logits: Tensor, target_ids: Tensor | None) -> Tensor:
        """The token that the target would draw here if its distribution were the draft's."""
        law = self._sampling
        return sample(
            logits,
            law.temperature,
            law.top_k,
            law.top_p,
            law.min_p,
            law.seeds,
            self._num_committed + len(self._chosen),
            target_ids,
        )

    def _sampled(self, logits: Tensor, target_ids: Tensor | None) -> Tensor:
        scores, draft_ids = top_m(logits, min(self._top_m, logits.shape[-1]))
        ids = draft_ids if target_ids is None else target_ids[draft_ids]
        law = self._sampling
        tokens, probs = draw_listed(
            scores,
            ids,
            law.temperature,
            law.top_k,
            law.top_p,
            law.min_p,
            law.seeds,
            self._num_committed,
            Purpose.DRAFT,
            len(self._chosen),
        )
        self._laws.append(SparseLaw(ids, probs))
        return tokens

    def proposal(self, num_drafts: Tensor) -> Proposal:
        """Everything chosen so far."""
        q = None
        if self._laws:
            q = SparseLaw(
                torch.stack([law.token_ids for law in self._laws], dim=1),
                torch.stack([law.probs for law in self._laws], dim=1),
            )
        return Proposal(torch.stack(self._chosen, dim=1), num_drafts, q)
