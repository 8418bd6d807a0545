"""A request inside the engine: its outputs, each a sequence, its text, and its grammar's state.

Knows what belongs together and what is reported of it; nothing of steps or of the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import OutriderError
from outrider.output import OutputBuilder, RequestOutput
from outrider.request import Sequence
from outrider.structured import GrammarMatcher


@dataclass
class LiveOutput:
    """One output of a request."""

    request: LiveRequest
    sequence: Sequence
    builder: OutputBuilder
    matcher: GrammarMatcher | None

    @property
    def is_half_taken_in(self) -> bool:
        """A failure came while its tokens were taken in: text and sequence differ for good.

        Only between two steps; within one, the text is ahead of the sequence.
        """
        num_tokens = len(self.sequence.output_token_ids)
        return not self.builder.is_whole or self.builder.num_tokens != num_tokens


@dataclass
class LiveRequest:
    """A request that has not ended, or whose end is still to be reported.

    Attributes:
        error: why it failed; all its outputs have ended then.
        num_failed_reports: since the last one that was handed out.
    """

    request_id: str
    outputs: list[LiveOutput]
    error: OutriderError | None = None
    num_failed_reports: int = 0

    def report(self) -> RequestOutput:
        """How it stands."""
        first = self.outputs[0].builder
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=first.request.prompt_token_ids,
            completions=tuple(output.builder.completion for output in self.outputs),
            prompt_logprobs=first.prompt_logprobs,
            error=self.error,
            num_cached_tokens=self.outputs[0].sequence.num_cached,
        )

    def reported(self) -> None:
        """The report has been handed out: its new text is new no longer."""
        self.num_failed_reports = 0
        for output in self.outputs:
            output.builder.reported()
