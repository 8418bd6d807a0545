"""One step on the device: target pass, then the speculative round (verify, commit, draft)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.batch import Batch, Span, SpanResult, Tier, TokenLogprobs
from outrider.layers.rows import LayerCache, LayerCacheSpec
from outrider.models.base import CausalLM, TargetOutput
from outrider.ops.bookkeeping import store_proposal
from outrider.runner.decide import Decider, Decision
from outrider.runner.graphs import Arriving, RoundGraphs, RoundKey, bucket, power_of_two
from outrider.runner.inputs import InputBuilder, PassInputs, Work, round_numbers
from outrider.runner.logprobs import emitted_logprobs, prompt_logprobs
from outrider.runner.results import PassReport, ResultLayout
from outrider.runner.slots import SlotTable, to_device
from outrider.runner.storage import StorageSize, allocate_caches, copy_states, keep_states
from outrider.runner.timing import PassClock, Phase, lap
from outrider.spec.base import Drafter, Frontier
from outrider.spec.choose import DraftChooser, Proposal
from outrider.spec.names import DraftSampling
from outrider.trace import PassTimes

Masks = dict[int, Tensor]
"""Grammar masks by sequence id: [rows, ceil(V / 32)] int32, one row for each verified row."""

MIN_TABLE_WIDTH = 32
"""Columns of the smallest block table of a graph: wider ones double, so that there are few."""

_MOST_TIMES = 1024
"""Passes whose times are kept for whoever asks."""

_ARGMAX_ONLY = frozenset((DraftSampling.ARGMAX,))


@dataclass(frozen=True)
class RunnerOptions:
    """What a runner is built for.

    Attributes:
        draft_top_m: most ids that a sampled draft's distribution keeps.
        synthetic_rates: for benchmarks, probability that drafts 1 .. i are all accepted.
        state_dtype: storage type of recurrent states.
        use_graphs: replay rounds as CUDA graphs.
    """

    size: StorageSize
    max_model_len: int
    prefill_grid: int
    dtype: torch.dtype
    device: torch.device
    draft_top_m: int
    synthetic_rates: tuple[float, ...] | None = None
    state_dtype: torch.dtype = torch.float32
    use_graphs: bool = False


@dataclass(frozen=True)
class Submission:
    """A batch that the device works on.

    Attributes:
        reports: what comes back of each pass.
        prompt_logprobs: by sequence id.
    """

    batch: Batch
    reports: tuple[PassReport, ...]
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)


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
        self.target_caches = self._allocate(target.cache_specs)
        self.draft_caches: tuple[LayerCache, ...] = ()
        if drafter is not None:
            self.draft_caches = self._allocate(drafter.cache_specs)
            drafter.bind(self.draft_caches)
        self._inputs = InputBuilder(self.slots, size.block_size, options.prefill_grid)
        rates = options.synthetic_rates
        self._decider = Decider(
            self.slots, None if rates is None else torch.tensor(rates, device=device)
        )
        self._graphs = RoundGraphs(self._replayable_round, device) if options.use_graphs else None
        self._times: deque[PassTimes] = deque(maxlen=_MOST_TIMES)

    def _allocate(self, specs: Sequence[LayerCacheSpec]) -> tuple[LayerCache, ...]:
        options = self.options
        return allocate_caches(
            specs, options.size, options.dtype, options.state_dtype, options.device
        )

    @torch.inference_mode()
    def submit(self, batch: Batch, masks: Masks | None = None) -> Submission:
        """Put a batch on the device's queue; waits for it only where log probabilities are wanted.

        What a round reads of its sequences (counts, drafts) is on the device, so that the next
        batch may be submitted before this one has ended.
        """
        for setup in batch.setups:
            self.slots.set_up(setup)
        self._copy_states(
            [(s.restore_from, s.slot) for s in batch.setups if s.restore_from is not None]
        )
        reports: list[PassReport] = []
        prompts: dict[int, tuple[TokenLogprobs, ...]] = {}
        if batch.prefill:
            sampling = tuple(span for span in batch.prefill if span.effects.samples)
            clock = PassClock(self.options.device, len(sampling), is_round=False)
            inputs = self._inputs.prefill(batch.prefill)
            work = self._work(batch.prefill, is_round=False)
            output = self._target_pass(inputs)
            prompts = self._prompt_logprobs(batch.prefill, inputs, output)
            if sampling:
                report = self._speculate(sampling, inputs, work, output, masks or {}, clock)
                reports.append(report)
            else:
                assert inputs.next_token_ids is not None, "a prompt chunk"
                self._feed(inputs, work, output, inputs.next_token_ids)
            self._copy_states(
                [
                    (span.slot, span.effects.checkpoint.slot)
                    for span in batch.prefill
                    if span.effects.checkpoint is not None
                ]
            )
        if batch.rounds:
            kept = self._keep_states(batch.rounds)
            report = self._round(batch.rounds, masks or {})
            reports.append(report if kept is None else report.with_kept(*kept))
        return Submission(batch, tuple(reports), prompts)

    def _copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Recurrent states from one slot to another, for each (source, target)."""
        if pairs:
            device = self.options.device
            sources, targets = (
                to_device(ids, torch.int64, device) for ids in zip(*pairs, strict=True)
            )
            copy_states(self.target_caches, sources, targets)

    def _keep_states(self, spans: Sequence[Span]) -> tuple[tuple[int, ...], Arriving] | None:
        """Checkpoints that rounds ask for: sequence ids, and whether the text had come so far.

        The state lies before the pending rows: those up to the position are replayed in the copy.
        """
        asking = [span for span in spans if span.effects.checkpoint is not None]
        if not asking:
            return None
        numbers = [
            (span.slot, span.effects.checkpoint.slot, span.effects.checkpoint.position)
            for span in asking
            if span.effects.checkpoint is not None
        ]
        slots, targets, positions = (
            to_device(numbers, torch.int64, self.options.device).t().contiguous()
        )
        kept = keep_states(
            self.target_caches,
            self.slots.pending,
            slots,
            targets,
            positions,
            self.slots.num_committed,
        )
        return tuple(span.sequence_id for span in asking), Arriving.send(kept)

    def wait(self, submission: Submission) -> None:
        """Until the device is done with a batch whose results nobody wants."""
        for report in submission.reports:
            report.wait()

    def collect(self, submission: Submission) -> list[SpanResult]:
        """Wait for a batch; one result for each of its spans, in the order of batch.spans."""
        results: dict[int, SpanResult] = {}
        for report in submission.reports:
            report.wait()
            times = report.times()
            self._times.append(times)
            results.update(report.results(times))
        for sequence_id, reports in submission.prompt_logprobs.items():
            result = results.get(sequence_id, SpanResult(sequence_id))
            results[sequence_id] = result.with_prompt_logprobs(reports)
        return [
            results.get(span.sequence_id, SpanResult(span.sequence_id))
            for span in submission.batch.spans
        ]

    def take_times(self) -> tuple[PassTimes, ...]:
        """Of the passes collected since the last call, the newest 1024 of them."""
        taken = tuple(self._times)
        self._times.clear()
        return taken

    def _work(self, spans: Sequence[Span], *, is_round: bool) -> Work:
        effects = [span.effects for span in spans]
        tier = max(effect.tier for effect in effects)
        reads_history = self.drafter is not None and self.drafter.reads_history
        most_next = max(effect.num_drafts_next for effect in effects)
        if is_round and self.options.device.type == "cuda" and most_next > 0:
            most_next = self.options.size.max_rows - 1  # one graph for every smaller wish
        history_len = 0
        if tier is Tier.FULL or reads_history:
            # A text is at most one token longer than the positions that are reserved for it.
            most_blocks = max(len(span.block_ids) for span in spans)
            history_len = most_blocks * self.options.size.block_size + 1
            if self.options.device.type == "cuda":  # few lengths, few graphs
                history_len = power_of_two(history_len)
            history_len = min(history_len, self.options.max_model_len)
        return Work(
            tier=tier,
            draft_modes=frozenset(effect.draft_sampling for effect in effects),
            verifies_sampled=any(effect.verifies_sampled for effect in effects),
            feeds_draft=any(effect.feeds_draft for effect in effects),
            max_drafts_next=most_next,
            history_len=history_len,
        )

    def _round(self, spans: Sequence[Span], masks: Masks) -> PassReport:
        clock = PassClock(self.options.device, len(spans), is_round=True)
        work = self._work(spans, is_round=True)
        num_rows, most_rows = len(spans), max(span.num_rows for span in spans)
        width = max(len(span.block_ids) for span in spans)
        if self.options.device.type == "cuda":
            num_rows = bucket(num_rows)
            most = -(-self.options.max_model_len // self.options.size.block_size)
            width = min(max(power_of_two(width), MIN_TABLE_WIDTH), most)
            most_rows = 1 if most_rows == 1 else self.options.size.max_rows
        numbers = round_numbers(spans, num_rows, width)
        plain = work.tier is not Tier.FULL and not any(s.effects.reports_logprobs for s in spans)
        if self._graphs is not None and plain:
            key = RoundKey(num_rows, most_rows, width, work, self.slots.layout)
            arriving = self._graphs.run(key, numbers)
            return PassReport.of(spans, arriving, _layout(work, most_rows), clock)
        if numbers.device != self.options.device:
            numbers = numbers.pin_memory().to(self.options.device, non_blocking=True)
        inputs = self._inputs.rounds(numbers, most_rows)
        return self._speculate(spans, inputs, work, self._target_pass(inputs), masks, clock)

    def _replayable_round(self, key: RoundKey, numbers: Tensor) -> Tensor:
        """Packed results of a whole round; reads and writes the device only."""
        inputs = self._inputs.rounds(numbers, key.num_verified)
        return self._decide_and_draft(inputs, key.work, self._target_pass(inputs), None, None)[1]

    def _target_pass(self, inputs: PassInputs) -> TargetOutput:
        layers = () if self.drafter is None else self.drafter.taps.layers
        return self.target(inputs.token_ids, inputs.rows, self.target_caches, layers)

    def _speculate(
        self,
        spans: Sequence[Span],
        inputs: PassInputs,
        work: Work,
        output: TargetOutput,
        masks: Masks,
        clock: PassClock,
    ) -> PassReport:
        stacked = _stack_masks(spans, inputs, masks, self.target.config.vocab_size)
        decision, packed = self._decide_and_draft(inputs, work, output, stacked, clock)
        layout = _layout(work, inputs.num_verified)
        report = PassReport.of(spans, Arriving.send(packed), layout, clock)
        return report.with_logprobs(emitted_logprobs(spans, decision, self.slots.sampling))

    def _decide_and_draft(
        self,
        inputs: PassInputs,
        work: Work,
        output: TargetOutput,
        masks: Tensor | None,
        clock: PassClock | None,
    ) -> tuple[Decision, Tensor]:
        """Verify, commit and draft; what was decided, and the packed results.

        Args:
            clock: None inside a graph, which runs without the host.
        """
        shape = (inputs.num_sampling, inputs.num_verified)
        verified = output.hidden if inputs.last_rows is None else output.hidden[inputs.last_rows]
        logits = self.target.logits(verified).view(*shape, -1)
        decision = self._decider.decide(inputs, work, logits, masks, clock)
        lap(clock, Phase.COMMIT)
        proposal = self._draft(inputs, work, output, decision)
        lap(clock, Phase.DRAFT)
        packed = store_proposal(
            decision.outcome,
            inputs.slots,
            inputs.num_drafts,
            inputs.draft_token_ids,
            None if proposal is None else (proposal.token_ids, proposal.num_drafts),
            self.slots.tensors,
        )
        lap(clock, Phase.COMMIT)
        return decision, packed

    def _feed(
        self, inputs: PassInputs, work: Work, output: TargetOutput, next_token_ids: Tensor
    ) -> Tensor | None:
        if self.drafter is None or not work.feeds_draft:
            return None
        tapped = output.hidden if output.residuals is None else output.residuals
        return self.drafter.feed(tapped, next_token_ids, inputs.rows)

    def _draft(
        self, inputs: PassInputs, work: Work, output: TargetOutput, decision: Decision
    ) -> Proposal | None:
        """Step 1 on every row, then the rest of the chain; None where nobody wants a draft."""
        # The last committed row of a sequence is followed by the round's own token; the rows
        # before it are followed by drafts that were accepted, the rows after it by garbage.
        outcome = decision.outcome
        if inputs.next_token_ids is None or inputs.last_rows is None:
            last_row, next_token_ids = outcome.last_row, outcome.token_ids.flatten()
        else:
            last_row = inputs.last_rows
            next_token_ids = inputs.next_token_ids.index_copy(0, last_row, outcome.own_token)
        fed = self._feed(inputs, work, output, next_token_ids)
        if fed is None or self.drafter is None or work.max_drafts_next == 0:
            return None
        proposal = self.drafter.propose(fed[last_row], self._frontier(inputs, work))
        if proposal.q is not None:
            self.slots.store_law(inputs.slots, proposal.q)
        return proposal

    def _frontier(self, inputs: PassInputs, work: Work) -> Frontier:
        table, slots = self.slots, inputs.slots
        num_committed = table.num_committed[slots]
        draws = work.draft_modes != _ARGMAX_ONLY  # else nobody reads the parameters
        chooser = DraftChooser(
            table.draft_modes[slots] if draws else table.draft_modes,
            table.sampling.gather(slots) if draws else table.sampling,
            num_committed,
            self.options.draft_top_m,
            work.draft_modes,
        )
        return Frontier(
            work.max_drafts_next,
            inputs.num_wanted,
            num_committed,
            lambda: table.history(slots, work.history_len),
            self._inputs.chain(inputs, work.max_drafts_next),
            chooser,
        )

    def _prompt_logprobs(
        self, spans: Sequence[Span], inputs: PassInputs, output: TargetOutput
    ) -> dict[int, tuple[TokenLogprobs, ...]]:
        """For prompt chunks that ask: what was predicted after each row, about the next token."""
        reports: dict[int, tuple[TokenLogprobs, ...]] = {}
        begin = 0
        for span in spans:
            if span.effects.num_prompt_logprobs is not None:
                assert inputs.next_token_ids is not None, "a prompt chunk"
                known = span.num_rows - (1 if span.next_token_id is None else 0)
                rows = slice(begin, begin + known)
                reports[span.sequence_id] = prompt_logprobs(
                    span,
                    self.target.logits(output.hidden[rows]),
                    inputs.next_token_ids[rows],
                    self.slots.sampling,
                )
            begin += span.num_rows
        return reports


def _layout(work: Work, num_verified: int) -> ResultLayout:
    return ResultLayout(num_verified, work.max_drafts_next if work.feeds_draft else 0)


def _stack_masks(
    spans: Sequence[Span], inputs: PassInputs, masks: Masks, vocab_size: int
) -> Tensor | None:
    """[S, T, ceil(V / 32)] int32; rows without a mask allow everything."""
    if not any(span.sequence_id in masks for span in spans):
        return None
    shape = (inputs.num_sampling, inputs.num_verified, -(-vocab_size // 32))
    stacked = torch.full(shape, -1, dtype=torch.int32)
    for index, span in enumerate(spans):
        mask = masks.get(span.sequence_id)
        if mask is not None:
            stacked[index, : mask.shape[0]] = mask
    return stacked.to(inputs.slots.device)
