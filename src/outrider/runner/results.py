"""What a pass tells the host: packed into one matrix on the device, unpacked when it arrives."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.batch import FinishReason, Span, SpanResult, TokenLogprobs
from outrider.runner.decide import Decision
from outrider.runner.inputs import PassInputs
from outrider.spec.choose import Proposal

_NUM_COUNTS = 6
"""num_accepted, num_emitted, stopped, at_limit, num_drafts, num_proposed."""


@dataclass(frozen=True)
class ResultLayout:
    """Columns of a packed row: counts, then T tokens, T - 1 drafts, and the proposed ones."""

    num_verified: int
    num_proposed: int


def pack_results(inputs: PassInputs, decision: Decision, proposal: Proposal | None) -> Tensor:
    """[S, 6 + 2 T - 1 + K'] int64; see ResultLayout."""
    outcome = decision.outcome
    none = torch.zeros_like(outcome.num_emitted)
    counts = torch.stack(
        (
            decision.num_accepted,
            outcome.num_emitted,
            outcome.stopped.long(),
            outcome.at_limit.long(),
            inputs.num_drafts,
            none if proposal is None else proposal.num_drafts,
        ),
        dim=1,
    )
    parts = [counts, outcome.token_ids, inputs.draft_token_ids]
    return torch.cat(parts if proposal is None else [*parts, proposal.token_ids], dim=1)


@dataclass(frozen=True)
class PassReport:
    """Results of a pass on their way to the host.

    Attributes:
        spans: those that sampled, in the order of the rows; rows past them are padding.
        packed: on the CPU; filled once `arrived` has happened.
        logprobs: by sequence id, of the emitted tokens.
    """

    spans: tuple[Span, ...]
    packed: Tensor
    layout: ResultLayout
    arrived: torch.cuda.Event | None
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(
        default_factory=dict[int, tuple[TokenLogprobs, ...]]
    )

    @classmethod
    def begin(cls, spans: Sequence[Span], packed: Tensor, layout: ResultLayout) -> PassReport:
        """Start the copy to the host; nothing waits."""
        if not packed.is_cuda:
            return cls(tuple(spans), packed, layout, None)
        host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        host.copy_(packed, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(tuple(spans), host, layout, arrived)

    def with_logprobs(self, logprobs: Mapping[int, tuple[TokenLogprobs, ...]]) -> PassReport:
        return dataclasses.replace(self, logprobs=logprobs) if logprobs else self

    def results(self) -> dict[int, SpanResult]:
        """By sequence id; waits for the copy."""
        if self.arrived is not None:
            self.arrived.synchronize()
        rows: list[list[int]] = self.packed.tolist()
        return {
            span.sequence_id: self._result(span, row)
            for span, row in zip(self.spans, rows, strict=False)  # the rest is padding
        }

    def _result(self, span: Span, row: list[int]) -> SpanResult:
        num_accepted, num_emitted, stopped, at_limit, num_drafts, num_proposed = row[:_NUM_COUNTS]
        tokens = row[_NUM_COUNTS:]
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
            logprobs=self.logprobs.get(span.sequence_id, ()),
        )
