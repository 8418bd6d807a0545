"""From the logits of the verified rows to what a round commits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.batch import Tier
from outrider.ops.bookkeeping import RoundOutcome, Verdict, commit_round
from outrider.ops.philox import Purpose, uniforms
from outrider.ops.sampling import argmax, race
from outrider.runner.inputs import PassInputs, Work
from outrider.runner.slots import SlotTable
from outrider.runner.timing import PassClock, Phase, lap
from outrider.sampling.rules import BlockContext
from outrider.sampling.sampler import sample_rows, target_probs
from outrider.spec.choose import MODES
from outrider.spec.names import DraftSampling
from outrider.spec.verify import SparseLaw, accept_block, block_terms, residual_probs


@dataclass(frozen=True)
class Decision:
    """What became of the drafts.

    Attributes:
        outcome: what is emitted; the slot table has moved on already.
        logits: [S, T, V] as the target gave them.
        ruled_logits: [S, T, V] after the rules; the same tensor where there are none.
    """

    outcome: RoundOutcome
    logits: Tensor
    ruled_logits: Tensor


class Decider:
    """Draws the target's tokens, and commits by the verification rule that each request has."""

    def __init__(self, table: SlotTable, synthetic_rates: Tensor | None) -> None:
        """synthetic_rates: [K] float32, for benchmarks: accept by these instead of a rule."""
        self._table = table
        self._synthetic_rates = synthetic_rates

    def decide(
        self,
        inputs: PassInputs,
        work: Work,
        logits: Tensor,
        masks: Tensor | None,
        clock: PassClock | None,
    ) -> Decision:
        """
        Args:
            logits: [S, T, V].
            masks: [S, T, ceil(V / 32)] int32 from grammars, or None.
            clock: is told where the decision ends and the commit begins.
        """
        table, slots = self._table, inputs.slots
        ruled = logits
        if work.tier is Tier.FULL:
            context = BlockContext(
                table.history(slots, work.history_len),
                table.num_committed[slots],
                inputs.draft_token_ids,
                table.stop_token_ids.values[slots],
                masks,
            )
            ruled = table.rules.apply(logits, slots, context)
        flat = ruled.view(-1, logits.shape[-1])
        verdict = None
        if work.tier is Tier.GREEDY:
            sampled = argmax(flat).view(logits.shape[:2])
        else:
            by_row = table.sampling.gather(slots.repeat_interleave(logits.shape[1]))
            row = torch.arange(logits.shape[1], device=slots.device)
            drawn_at = table.num_committed[slots][:, None] + row
            sampled = sample_rows(flat, by_row, drawn_at.flatten()).view(logits.shape[:2])
            if work.verifies_sampled:
                probs = target_probs(flat, by_row).view(logits.shape)
                verdict = self._block(inputs, probs, sampled)
        lap(clock, Phase.VERIFY)
        outcome = commit_round(
            sampled,
            slots,
            inputs.num_drafts,
            inputs.draft_token_ids,
            table.tensors,
            is_round=inputs.is_round,
            verdict=verdict,
            synthetic_rates=self._synthetic_rates,
        )
        return Decision(outcome, logits, ruled)

    def _block(self, inputs: PassInputs, probs: Tensor, sampled: Tensor) -> Verdict:
        """What the rule `block` says, for the sequences that sample their drafts."""
        table, slots = self._table, inputs.slots
        most = inputs.draft_token_ids.shape[1]
        law = SparseLaw(
            table.draft_law.token_ids[slots, :most], table.draft_law.probs[slots, :most]
        )
        seeds, num_committed = table.sampling.seeds[slots], table.num_committed[slots]
        terms = block_terms(probs, inputs.draft_token_ids, inputs.num_drafts, law)
        draws = uniforms(seeds, num_committed, most, Purpose.ACCEPT)
        num_accepted = accept_block(terms, draws)
        weights = residual_probs(probs, num_accepted, inputs.num_drafts, law, terms)
        redrawn = race(weights, seeds, num_committed, Purpose.RESIDUAL, num_accepted)
        # After a whole block the token is the target's own draw, as without speculation.
        bonus = sampled.gather(1, num_accepted[:, None])[:, 0]
        own_token = torch.where(num_accepted < inputs.num_drafts, redrawn, bonus)
        applies = table.draft_modes[slots] == MODES.index(DraftSampling.SAMPLED)
        return Verdict(applies, num_accepted, own_token)
