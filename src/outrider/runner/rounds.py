"""One step on the device: target pass, then the speculative round (verify, commit, draft).

Nothing here reads a tensor on the host except the results at the very end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.batch import Batch, FinishReason, Span, SpanResult
from outrider.layers.rows import LayerCache, RowBatch
from outrider.models.qwen3_5 import Qwen3_5ForCausalLM
from outrider.runner.inputs import InputBuilder, PassInputs
from outrider.runner.slots import SlotTable
from outrider.runner.storage import StorageSize, allocate_caches
from outrider.sampling.sampler import sample_rows
from outrider.spec.base import Drafter, Frontier
from outrider.spec.verify import RoundOutcome, accept_matching, trim_round


class Runner:
    """Owns the models' storage and the slot table, and runs batches on them."""

    def __init__(
        self,
        target: Qwen3_5ForCausalLM,
        drafter: Drafter | None,
        size: StorageSize,
        prefill_grid: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.slots = SlotTable(size.num_slots, size.max_rows - 1, target.config.vocab_size, device)
        self.target_caches = allocate_caches(target.cache_specs, size, dtype, device)
        self.draft_caches: tuple[LayerCache, ...] = ()
        if drafter is not None:
            self.draft_caches = allocate_caches(drafter.cache_specs, size, dtype, device)
            drafter.bind(self.draft_caches)
        self._inputs = InputBuilder(self.slots, size.block_size, prefill_grid)

    @torch.inference_mode()
    def execute(self, batch: Batch) -> list[SpanResult]:
        """Run a batch; one result for each of its spans, in the order of batch.spans."""
        for setup in batch.setups:
            self.slots.set_up(setup)
        results: list[SpanResult] = []
        if batch.prefill:
            results += self._run_pass(batch.prefill, self._inputs.prefill(batch.prefill))
        if batch.rounds:
            results += self._run_pass(batch.rounds, self._inputs.rounds(batch.rounds))
        return results

    def _run_pass(self, spans: Sequence[Span], inputs: PassInputs) -> list[SpanResult]:
        hidden = self.target(inputs.token_ids, inputs.rows, self.target_caches)
        if not inputs.sampling_spans:
            self._feed(spans, inputs, hidden, inputs.next_token_ids)
            return [SpanResult(span.sequence_id, (), None, (), 0, 0) for span in spans]
        num_accepted, outcome = self._verify(inputs, hidden)
        self._commit(inputs, outcome)
        drafts = self._draft(spans, inputs, hidden, num_accepted, outcome)
        if drafts is not None:
            self.slots.draft_token_ids[inputs.slots, : drafts.shape[1]] = drafts
        return _results(spans, inputs, num_accepted, outcome)

    def _verified_rows(self, inputs: PassInputs) -> Tensor:
        """[S, T] flat rows."""
        offsets = torch.arange(inputs.num_verified, device=inputs.first_verified.device)
        return inputs.first_verified[:, None] + offsets

    def _verify(self, inputs: PassInputs, hidden: Tensor) -> tuple[Tensor, RoundOutcome]:
        """num_accepted [S], and what the round emits."""
        shape = (len(inputs.sampling_spans), inputs.num_verified)
        table, slots = self.slots, inputs.slots
        logits = self.target.logits(hidden[self._verified_rows(inputs).flatten()])
        num_committed = table.num_committed[slots]
        drawn_at = num_committed[:, None] + torch.arange(shape[1], device=slots.device)
        by_row = table.sampling.gather(slots.repeat_interleave(shape[1]))
        sampled = sample_rows(logits, by_row, drawn_at.flatten()).view(shape)
        num_accepted = accept_matching(sampled, inputs.draft_token_ids, inputs.num_drafts)
        outcome = trim_round(
            sampled,
            num_accepted,
            num_committed,
            table.length_limits[slots],
            table.stop_token_ids[slots],
        )
        return num_accepted, outcome

    def _commit(self, inputs: PassInputs, outcome: RoundOutcome) -> None:
        """Move the counts on. Caches need nothing: what was refused is written over."""
        table, slots = self.slots, inputs.slots
        live = ~table.finished[slots]
        num_emitted = torch.where(live, outcome.num_emitted, 0)
        newest = outcome.token_ids.gather(1, (outcome.num_emitted - 1)[:, None])[:, 0]
        table.last_token_ids[slots] = torch.where(live, newest, table.last_token_ids[slots])
        table.num_committed[slots] += num_emitted
        table.finished[slots] |= outcome.stopped | outcome.at_limit
        if inputs.is_round:
            pending = table.pending
            pending.parity[slots] ^= live.long()
            for counts, value in (
                (pending.last_num_rows, inputs.num_drafts + 1),
                (pending.num_accepted_rows, num_emitted),
            ):
                counts[slots] = torch.where(live, value, counts[slots])

    def _feed(
        self, spans: Sequence[Span], inputs: PassInputs, hidden: Tensor, next_token_ids: Tensor
    ) -> Tensor | None:
        if self.drafter is None or not any(span.effects.feeds_draft for span in spans):
            return None
        return self.drafter.feed(hidden, next_token_ids, inputs.rows)

    def _draft(
        self,
        spans: Sequence[Span],
        inputs: PassInputs,
        hidden: Tensor,
        num_accepted: Tensor,
        outcome: RoundOutcome,
    ) -> Tensor | None:
        """Step 1 on every row, then the rest of the chain; [S, most drafts wanted], or None."""
        # The last committed row of a sequence is followed by the round's own token; the rows
        # before it are followed by drafts that were accepted, the rows after it by garbage.
        last_row = inputs.first_verified + num_accepted
        own_token = outcome.token_ids.gather(1, num_accepted[:, None])[:, 0]
        next_token_ids = inputs.next_token_ids.index_copy(0, last_row, own_token)
        fed = self._feed(spans, inputs, hidden, next_token_ids)
        max_drafts = max(span.effects.num_drafts_next for span in inputs.sampling_spans)
        if fed is None or self.drafter is None or max_drafts == 0:
            return None
        return self.drafter.propose(fed[last_row], self._frontier(inputs, max_drafts))

    def _frontier(self, inputs: PassInputs, max_drafts: int) -> Frontier:
        table, slots = self.slots, inputs.slots
        wanted = torch.tensor(
            [span.effects.num_drafts_next for span in inputs.sampling_spans], device=slots.device
        )

        def rows_at(step: int) -> RowBatch:
            starts = table.num_committed[slots] + step - 3
            alive = (step <= wanted) & ~table.finished[slots]
            # A chain may run past the end of the text; drafts there are never verified.
            alive &= starts < table.length_limits[slots]
            return self._inputs.rectangle(slots, starts, alive.long(), 1, inputs.block_tables)

        return Frontier(max_drafts, rows_at)


def _results(
    spans: Sequence[Span], inputs: PassInputs, num_accepted: Tensor, outcome: RoundOutcome
) -> list[SpanResult]:
    """The one copy to the host."""
    accepted: list[int] = num_accepted.tolist()
    emitted: list[int] = outcome.num_emitted.tolist()
    stopped: list[bool] = outcome.stopped.tolist()
    at_limit: list[bool] = outcome.at_limit.tolist()
    tokens: list[list[int]] = outcome.token_ids.tolist()
    drafts: list[list[int]] = inputs.draft_token_ids.tolist()
    sampled: dict[int, SpanResult] = {}
    for i, span in enumerate(inputs.sampling_spans):
        finish = FinishReason.LENGTH if at_limit[i] else None
        sampled[span.sequence_id] = SpanResult(
            sequence_id=span.sequence_id,
            token_ids=tuple(tokens[i][: emitted[i]]),
            finish_reason=FinishReason.STOP if stopped[i] else finish,
            draft_token_ids=tuple(drafts[i][: span.effects.num_drafts]),
            num_accepted=accepted[i],
            num_proposed=span.effects.num_drafts_next,
        )
    return [
        sampled.get(span.sequence_id) or SpanResult(span.sequence_id, (), None, (), 0, 0)
        for span in spans
    ]
