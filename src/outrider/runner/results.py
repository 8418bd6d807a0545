"""What a pass tells the host: copied as one matrix, unpacked when it has arrived."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.batch import FinishReason, Span, SpanResult, TokenLogprobs
from outrider.errors import StuckRoundError
from outrider.ops.bookkeeping import NUM_COUNTS
from outrider.runner.graphs import Arriving
from outrider.runner.timing import PassClock
from outrider.trace import PassTimes

LONGEST_WAIT = 120.0
"""Seconds after which a round counts as stuck; the first one compiles kernels before it runs."""

POLL_SECONDS = 20e-6


@dataclass(frozen=True)
class ResultLayout:
    """Columns behind the counts: T tokens, T - 1 drafts, K' proposed; see ops.bookkeeping."""

    num_verified: int
    num_proposed: int


@dataclass(frozen=True)
class PassReport:
    """Results of a pass on their way to the host.

    Attributes:
        spans: those that sampled, in the order of the rows; rows past them are padding.
        packed: on the CPU; filled once `arrived` has happened.
        clock: started with the pass.
        logprobs: by sequence id, of the emitted tokens.
        asking: sequences that asked for a checkpoint.
        kept: 1 for each of them that got it.
    """

    spans: tuple[Span, ...]
    packed: Tensor
    layout: ResultLayout
    arrived: torch.cuda.Event | None
    clock: PassClock
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(
        default_factory=dict[int, tuple[TokenLogprobs, ...]]
    )
    asking: tuple[int, ...] = ()
    kept: Tensor | None = None

    @classmethod
    def of(
        cls, spans: Sequence[Span], arriving: Arriving, layout: ResultLayout, clock: PassClock
    ) -> PassReport:
        """Results that have been sent."""
        return cls(tuple(spans), arriving.packed, layout, arriving.event, clock)

    def with_kept(self, sequence_ids: tuple[int, ...], kept: Arriving) -> PassReport:
        """With the checkpoints that sequences asked for, and which were kept.

        They were sent before the results, so they are there when those are.
        """
        return dataclasses.replace(self, asking=sequence_ids, kept=kept.packed)

    def with_logprobs(self, logprobs: Mapping[int, tuple[TokenLogprobs, ...]]) -> PassReport:
        return dataclasses.replace(self, logprobs=logprobs) if logprobs else self

    def times(self) -> PassTimes:
        """What the pass took; after `wait`."""
        return self.clock.times(self.arrived)

    def results(self, times: PassTimes) -> dict[int, SpanResult]:
        """By sequence id; after `wait`."""
        flags: list[int] = [] if self.kept is None else self.kept.tolist()
        kept = {number for number, flag in zip(self.asking, flags, strict=True) if flag}
        rows: list[list[int]] = self.packed.tolist()
        return {
            span.sequence_id: self._result(span, row, times, span.sequence_id in kept)
            for span, row in zip(self.spans, rows, strict=False)  # the rest is padding
        }

    def wait(self) -> None:
        """Until the copy has arrived, but not for ever."""
        if self.arrived is None:
            return
        deadline = time.monotonic() + LONGEST_WAIT
        while not self.arrived.query():
            if time.monotonic() > deadline:
                raise StuckRoundError(
                    f"the results of a round did not come within {LONGEST_WAIT} s",
                    got=[span.sequence_id for span in self.spans],
                )
            time.sleep(POLL_SECONDS)

    def _result(
        self, span: Span, row: list[int], times: PassTimes, checkpoint_kept: bool
    ) -> SpanResult:
        num_accepted, num_emitted, stopped, at_limit, num_drafts, num_proposed = row[:NUM_COUNTS]
        tokens = row[NUM_COUNTS:]
        drafts = tokens[self.layout.num_verified :]
        proposed = drafts[self.layout.num_verified - 1 :]
        finish = FinishReason.LENGTH if at_limit else None
        return SpanResult(
            sequence_id=span.sequence_id,
            token_ids=tuple(tokens[:num_emitted]),
            finish_reason=FinishReason.STOP if stopped else finish,
            draft_token_ids=tuple(drafts[:num_drafts]),
            num_accepted=num_accepted,
            proposed_token_ids=tuple(proposed[:num_proposed]),
            checkpoint_kept=checkpoint_kept,
            logprobs=self.logprobs.get(span.sequence_id, ()),
            times=times,
        )
