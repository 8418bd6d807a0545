"""One step on the device: target pass, then the speculative round (verify, commit, draft)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.batch import Batch, FinishReason, Span, SpanResult, TokenLogprobs
from outrider.layers.rows import LayerCache, RowBatch
from outrider.models.base import CausalLM, TargetOutput
from outrider.runner.decide import Decider, Decision
from outrider.runner.inputs import InputBuilder, PassInputs
from outrider.runner.logprobs import describe, processed_logprobs, raw_logprobs
from outrider.runner.slots import SlotTable
from outrider.runner.storage import StorageSize, allocate_caches
from outrider.spec.base import Drafter, Frontier
from outrider.spec.choose import DraftChooser, Proposal

Masks = dict[int, Tensor]
"""Grammar masks by sequence id: [rows, ceil(V / 32)] int32, one row for each verified row."""


@dataclass(frozen=True)
class RunnerOptions:
    """What a runner is built for.

    Attributes:
        draft_top_m: most ids that a sampled draft's distribution keeps.
        synthetic_rates: for benchmarks, probability that drafts 1 .. i are all accepted.
    """

    size: StorageSize
    max_model_len: int
    prefill_grid: int
    dtype: torch.dtype
    device: torch.device
    draft_top_m: int
    synthetic_rates: tuple[float, ...] | None = None


class Runner:
    """Owns the models' storage and the slot table, and runs batches on them."""

    def __init__(self, target: CausalLM, drafter: Drafter | None, options: RunnerOptions) -> None:
        size, device = options.size, options.device
        self.options = options
        self.target = target
        self.drafter = drafter
        self.slots = SlotTable(
            size.num_slots,
            size.max_rows - 1,
            options.draft_top_m,
            target.config.vocab_size,
            options.max_model_len,
            device,
        )
        self.target_caches = allocate_caches(target.cache_specs, size, options.dtype, device)
        self.draft_caches: tuple[LayerCache, ...] = ()
        if drafter is not None:
            self.draft_caches = allocate_caches(drafter.cache_specs, size, options.dtype, device)
            drafter.bind(self.draft_caches)
        self._inputs = InputBuilder(self.slots, size.block_size, options.prefill_grid)
        rates = options.synthetic_rates
        self._decider = Decider(
            self.slots, None if rates is None else torch.tensor(rates, device=device)
        )

    @torch.inference_mode()
    def execute(self, batch: Batch, masks: Masks | None = None) -> list[SpanResult]:
        """Run a batch; one result for each of its spans, in the order of batch.spans."""
        for setup in batch.setups:
            self.slots.set_up(setup)
        results: list[SpanResult] = []
        if batch.prefill:
            inputs = self._inputs.prefill(batch.prefill)
            results += self._run_pass(batch.prefill, inputs, masks or {})
        if batch.rounds:
            inputs = self._inputs.rounds(batch.rounds)
            results += self._run_pass(batch.rounds, inputs, masks or {})
        return results

    def _run_pass(
        self, spans: Sequence[Span], inputs: PassInputs, masks: Masks
    ) -> list[SpanResult]:
        layers = () if self.drafter is None else self.drafter.taps.layers
        output = self.target(inputs.token_ids, inputs.rows, self.target_caches, layers)
        prompt_logprobs = self._prompt_logprobs(spans, inputs, output)
        sampled: dict[int, SpanResult] = {}
        if inputs.sampling_spans:
            decision = self._decide(inputs, output, masks)
            self._commit(inputs, decision)
            proposal = self._draft(spans, inputs, output, decision)
            sampled = _results(inputs, decision, proposal)
        else:
            self._feed(spans, inputs, output, inputs.next_token_ids)
        return [
            _with_prompt(
                sampled.get(span.sequence_id, SpanResult(span.sequence_id)),
                prompt_logprobs.get(span.sequence_id, ()),
            )
            for span in spans
        ]

    def _decide(self, inputs: PassInputs, output: TargetOutput, masks: Masks) -> Decision:
        shape = (len(inputs.sampling_spans), inputs.num_verified)
        offsets = torch.arange(shape[1], device=inputs.first_verified.device)
        rows = inputs.first_verified[:, None] + offsets
        logits = self.target.logits(output.hidden[rows.flatten()]).view(*shape, -1)
        return self._decider.decide(inputs, logits, _stack_masks(inputs, masks, logits.shape[-1]))

    def _commit(self, inputs: PassInputs, decision: Decision) -> None:
        """Move the counts on. Caches need nothing: what was refused is written over."""
        table, slots, outcome = self.slots, inputs.slots, decision.outcome
        live = ~table.finished[slots]
        num_emitted = torch.where(live, outcome.num_emitted, 0)
        index = torch.arange(outcome.token_ids.shape[1], device=slots.device)
        sequence, place = (index < num_emitted[:, None]).nonzero(as_tuple=True)
        positions = table.num_committed[slots][sequence] + place
        tokens = outcome.token_ids[sequence, place]
        table.token_ids[slots[sequence], positions] = tokens.to(table.token_ids.dtype)
        newest_row = (outcome.num_emitted - 1).clamp(min=0)  # a finished slot emits nothing
        newest = outcome.token_ids.gather(1, newest_row[:, None])[:, 0]
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
        self,
        spans: Sequence[Span],
        inputs: PassInputs,
        output: TargetOutput,
        next_token_ids: Tensor,
    ) -> Tensor | None:
        if self.drafter is None or not any(span.effects.feeds_draft for span in spans):
            return None
        tapped = output.hidden if output.residuals is None else output.residuals
        return self.drafter.feed(tapped, next_token_ids, inputs.rows)

    def _draft(
        self,
        spans: Sequence[Span],
        inputs: PassInputs,
        output: TargetOutput,
        decision: Decision,
    ) -> Proposal | None:
        """Step 1 on every row, then the rest of the chain; None where nobody wants a draft."""
        # The last committed row of a sequence is followed by the round's own token; the rows
        # before it are followed by drafts that were accepted, the rows after it by garbage.
        last_row = inputs.first_verified + decision.num_accepted
        own_token = decision.outcome.token_ids.gather(1, decision.num_accepted[:, None])[:, 0]
        next_token_ids = inputs.next_token_ids.index_copy(0, last_row, own_token)
        fed = self._feed(spans, inputs, output, next_token_ids)
        max_drafts = max(span.effects.num_drafts_next for span in inputs.sampling_spans)
        if fed is None or self.drafter is None or max_drafts == 0:
            return None
        proposal = self.drafter.propose(fed[last_row], self._frontier(inputs, max_drafts))
        table, slots = self.slots, inputs.slots
        table.draft_token_ids[slots, : proposal.token_ids.shape[1]] = proposal.token_ids
        if proposal.q is not None:
            table.store_law(slots, proposal.q)
        return proposal

    def _frontier(self, inputs: PassInputs, max_drafts: int) -> Frontier:
        table, slots = self.slots, inputs.slots
        effects = [span.effects for span in inputs.sampling_spans]
        wanted = torch.tensor([e.num_drafts_next for e in effects], device=slots.device)

        def rows_at(step: int) -> RowBatch:
            starts = table.num_committed[slots] + step - 3
            alive = (step <= wanted) & ~table.finished[slots]
            # A chain may run past the end of the text; drafts there are never verified.
            alive &= starts < table.length_limits[slots]
            return self._inputs.rectangle(slots, starts, alive.long(), 1, inputs.block_tables)

        num_committed = table.num_committed[slots]
        chooser = DraftChooser(
            table.draft_modes[slots],
            table.sampling.gather(slots),
            num_committed,
            self.options.draft_top_m,
            frozenset(effect.draft_sampling for effect in effects),
        )
        return Frontier(
            max_drafts, wanted, num_committed, lambda: table.history(slots), rows_at, chooser
        )

    def _prompt_logprobs(
        self, spans: Sequence[Span], inputs: PassInputs, output: TargetOutput
    ) -> dict[int, tuple[TokenLogprobs, ...]]:
        """For prompt chunks that ask: what was predicted after each row, about the next token."""
        reports: dict[int, tuple[TokenLogprobs, ...]] = {}
        begin = 0
        for span in spans:
            num_top = span.effects.num_prompt_logprobs
            if num_top is not None and not inputs.is_round:
                known = span.num_rows - (1 if span.next_token_id is None else 0)
                rows = slice(begin, begin + known)
                logits = self.target.logits(output.hidden[rows])
                scores = raw_logprobs(logits)
                if span.effects.processed_logprobs:
                    slots = torch.full((known,), span.slot, device=logits.device)
                    scores = processed_logprobs(logits, self.slots.sampling.gather(slots))
                next_ids = inputs.next_token_ids[rows]
                reports[span.sequence_id] = describe(scores, next_ids, num_top)
            begin += span.num_rows
        return reports


def _with_prompt(result: SpanResult, reports: tuple[TokenLogprobs, ...]) -> SpanResult:
    return dataclasses.replace(result, prompt_logprobs=reports) if reports else result


def _stack_masks(inputs: PassInputs, masks: Masks, vocab_size: int) -> Tensor | None:
    """[S, T, ceil(V / 32)] int32; rows without a mask allow everything."""
    if not any(span.sequence_id in masks for span in inputs.sampling_spans):
        return None
    shape = (len(inputs.sampling_spans), inputs.num_verified, -(-vocab_size // 32))
    stacked = torch.full(shape, -1, dtype=torch.int32, device=inputs.slots.device)
    for index, span in enumerate(inputs.sampling_spans):
        mask = masks.get(span.sequence_id)
        if mask is not None:
            stacked[index, : mask.shape[0]] = mask
    return stacked


def _results(
    inputs: PassInputs, decision: Decision, proposal: Proposal | None
) -> dict[int, SpanResult]:
    """The one copy to the host, by sequence id."""
    outcome = decision.outcome
    accepted: list[int] = decision.num_accepted.tolist()
    emitted: list[int] = outcome.num_emitted.tolist()
    stopped: list[bool] = outcome.stopped.tolist()
    at_limit: list[bool] = outcome.at_limit.tolist()
    tokens: list[list[int]] = outcome.token_ids.tolist()
    drafts: list[list[int]] = inputs.draft_token_ids.tolist()
    num_proposed: list[int] = [] if proposal is None else proposal.num_drafts.tolist()
    proposed: list[list[int]] = [] if proposal is None else proposal.token_ids.tolist()
    results: dict[int, SpanResult] = {}
    for i, span in enumerate(inputs.sampling_spans):
        finish = FinishReason.LENGTH if at_limit[i] else None
        results[span.sequence_id] = SpanResult(
            sequence_id=span.sequence_id,
            token_ids=tuple(tokens[i][: emitted[i]]),
            finish_reason=FinishReason.STOP if stopped[i] else finish,
            draft_token_ids=tuple(drafts[i][: span.effects.num_drafts]),
            num_accepted=accepted[i],
            proposed_token_ids=tuple(proposed[i][: num_proposed[i]]) if proposed else (),
            logprobs=_emitted_logprobs(span, decision, i, emitted[i]),
        )
    return results


def _emitted_logprobs(
    span: Span, decision: Decision, index: int, num_emitted: int
) -> tuple[TokenLogprobs, ...]:
    num_top = span.effects.num_logprobs
    if num_top is None:
        return ()
    if span.effects.processed_logprobs:
        num_rows = decision.logits.shape[1]
        rows = torch.arange(num_emitted, device=decision.logits.device) + index * num_rows
        scores = processed_logprobs(
            decision.ruled_logits[index, :num_emitted], decision.by_row.gather(rows)
        )
    else:
        scores = raw_logprobs(decision.logits[index, :num_emitted])
    return describe(scores, decision.outcome.token_ids[index, :num_emitted], num_top)
