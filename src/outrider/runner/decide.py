"""From the logits of the verified rows to what a round commits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.batch import Tier
from outrider.ops.philox import Purpose, race_times, uniforms
from outrider.runner.inputs import PassInputs, Work
from outrider.runner.slots import SlotTable
from outrider.sampling.arrays import SamplingArrays
from outrider.sampling.rules import BlockContext
from outrider.sampling.sampler import sample_rows, target_probs
from outrider.spec.choose import MODES
from outrider.spec.names import DraftSampling
from outrider.spec.verify import (
    RoundOutcome,
    SparseLaw,
    accept_block,
    accept_matching,
    accept_synthetic,
    block_terms,
    residual_probs,
    trim_round,
)


@dataclass(frozen=True)
class Decision:
    """What became of the drafts.

    Attributes:
        num_accepted: [S] int64, before trimming.
        outcome: what is emitted.
        logits: [S, T, V] as the target gave them.
        ruled_logits: [S, T, V] after the rules; the same tensor where there are none.
        by_row: sampling entries of shape [S * T].
    """

    num_accepted: Tensor
    outcome: RoundOutcome
    logits: Tensor
    ruled_logits: Tensor
    by_row: SamplingArrays


class Decider:
    """Draws the target's tokens and applies the verification rule that each request has."""

    def __init__(self, table: SlotTable, synthetic_rates: Tensor | None) -> None:
        """synthetic_rates: [K], for benchmarks: accept by these instead of a rule."""
        self._table = table
        self._synthetic_rates = synthetic_rates

    def decide(
        self, inputs: PassInputs, work: Work, logits: Tensor, masks: Tensor | None
    ) -> Decision:
        """
        Args:
            logits: [S, T, V].
            masks: [S, T, ceil(V / 32)] int32 from grammars, or None.
        """
        table, slots = self._table, inputs.slots
        batch, rows, vocab_size = logits.shape
        num_committed = table.num_committed[slots]
        ruled = logits
        if work.tier is Tier.FULL:
            context = BlockContext(
                table.history(slots, work.history_len),
                num_committed,
                inputs.draft_token_ids,
                table.stop_token_ids.values[slots],
                masks,
            )
            ruled = table.rules.apply(logits, slots, context)
        drawn_at = num_committed[:, None] + torch.arange(rows, device=slots.device)
        by_row = table.sampling.gather(slots.repeat_interleave(rows))
        sampled = sample_rows(
            ruled.view(-1, vocab_size),
            by_row,
            drawn_at.flatten(),
            all_greedy=work.tier is Tier.GREEDY,
        )
        sampled = sampled.view(batch, rows)

        num_accepted = accept_matching(sampled, inputs.draft_token_ids, inputs.num_drafts)
        own = sampled.gather(1, num_accepted[:, None])[:, 0]
        if work.verifies_sampled:
            probs = target_probs(ruled.view(-1, vocab_size), by_row).view(logits.shape)
            block_accepted, block_own = self._block(inputs, probs, sampled)
            is_block = table.draft_modes[slots] == MODES.index(DraftSampling.SAMPLED)
            num_accepted = torch.where(is_block, block_accepted, num_accepted)
            own = torch.where(is_block, block_own, own)
        if self._synthetic_rates is not None:
            seeds = table.sampling.seeds[slots]
            uniform = uniforms(seeds, num_committed, 1, Purpose.SYNTHETIC)[:, 0]
            num_accepted = accept_synthetic(uniform, self._synthetic_rates, inputs.num_drafts)
            own = sampled.gather(1, num_accepted[:, None])[:, 0]

        # Accepted drafts, the round's own token, and entries that nobody reads.
        token_ids = torch.cat((inputs.draft_token_ids, own[:, None]), dim=1)
        token_ids = token_ids.scatter(1, num_accepted[:, None], own[:, None])
        outcome = trim_round(
            token_ids,
            num_accepted,
            num_committed,
            table.length_limits[slots],
            table.stop_token_ids.values[slots],
        )
        live = ~table.finished[slots]
        return Decision(
            torch.where(live, num_accepted, 0), _of_live(outcome, live), logits, ruled, by_row
        )

    def _block(self, inputs: PassInputs, probs: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor]:
        """num_accepted and the round's own token [S] under the rule `block`."""
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
        times = race_times(
            seeds, num_committed, probs.shape[-1], Purpose.RESIDUAL, index=num_accepted
        )
        redrawn = (times / weights).argmin(-1)
        # After a whole block the token is the target's own draw, as without speculation.
        bonus = sampled.gather(1, num_accepted[:, None])[:, 0]
        return num_accepted, torch.where(num_accepted < inputs.num_drafts, redrawn, bonus)


def _of_live(outcome: RoundOutcome, live: Tensor) -> RoundOutcome:
    """A slot that has finished emits nothing, and does not finish again."""
    return RoundOutcome(
        outcome.token_ids,
        torch.where(live, outcome.num_emitted, 0),
        outcome.stopped & live,
        outcome.at_limit & live,
    )
