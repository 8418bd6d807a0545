"""What the scheduler asks of the runner for one step, and what comes back. Plain values, no torch.

A span says what a row range does by its effects, not by a kind: a prompt chunk, the end of a
prompt, a plain decoding step and a verification are combinations of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum

from outrider.spec.names import DraftSampling
from outrider.trace import PassTimes

NULL_BLOCK = 0
"""Block id that rows nobody keeps are written to; never allocated, never read."""

NULL_SLOT = 0
"""Slot id for rows of no sequence; never allocated."""


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Tier(IntEnum):
    """How much work it takes to get from logits to a token; a pass does what its highest needs."""

    GREEDY = 0
    SAMPLED = 1
    FULL = 2
    """Logits are changed by rules: penalties, bias, masks."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A recurrent state to be kept in a slot of its own.

    Attributes:
        position: the state behind this many tokens. A prompt chunk ends there. A round keeps it
            before it runs its rows, if the tokens committed by then reach it, and says whether.
    """

    position: int
    slot: int


@dataclass(frozen=True, slots=True)
class Effects:
    """What a span's rows do.

    Attributes:
        samples: a token comes out after the last committed row.
        num_drafts: how many of the rows are drafts to verify.
        feeds_draft: the draft model sees every row, so that its cache has no holes.
        num_drafts_next: how many tokens to propose for the next round.
        tier: what turns the logits into tokens.
        draft_sampling: how the proposed tokens are drawn, and how this round's drafts were.
        checkpoint: where a recurrent state is kept; None keeps none.
        num_logprobs: alternatives to report for each emitted token; None reports nothing.
        num_prompt_logprobs: the same for the rows of a prompt chunk.
        processed_logprobs: report the processed distribution instead of the raw one.
    """

    samples: bool
    num_drafts: int
    feeds_draft: bool
    num_drafts_next: int
    tier: Tier = Tier.GREEDY
    draft_sampling: DraftSampling = DraftSampling.ARGMAX
    checkpoint: Checkpoint | None = None
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    processed_logprobs: bool = False

    @property
    def verifies_sampled(self) -> bool:
        """Drafts of this round were drawn from a distribution."""
        return self.num_drafts > 0 and self.draft_sampling is DraftSampling.SAMPLED

    @property
    def reports_logprobs(self) -> bool:
        """Whether log probabilities of emitted tokens are wanted."""
        return self.num_logprobs is not None


@dataclass(slots=True)  # frozen ones take longer to make, and a step makes many
class Span:
    """Rows of one sequence. Nobody changes one.

    Attributes:
        sequence_id: names the sequence in the result.
        slot: where its device state lives.
        start: position of a chunk's first row. A round uses the device's own count, which is this
            one or more.
        num_rows: rows to run.
        token_ids: the rows' tokens for a prompt chunk; empty in a round, whose rows are the last
            token and the drafts, both on the device.
        next_token_id: the token after a chunk that does not end the prompt.
        block_ids: blocks in order of position, covering every position the step may write.
    """

    sequence_id: int
    slot: int
    start: int
    num_rows: int
    token_ids: tuple[int, ...]
    next_token_id: int | None
    block_ids: tuple[int, ...]
    effects: Effects

    @property
    def is_prefill(self) -> bool:
        """The rows' tokens come from the host."""
        return bool(self.token_ids)


@dataclass(frozen=True, slots=True)
class LogitRules:
    """What changes a sequence's logits before they become a distribution.

    Attributes:
        num_prompt: tokens of the prompt; repetition counts them, the other penalties do not.
        min_tokens: output tokens before a stop id may be drawn.
        logit_bias: (token id, value added to its logit).
        bad_words: token sequences whose last token must not follow the others.
    """

    num_prompt: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()


NO_RULES = LogitRules()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability of one token, and of the most likely ones at its place.

    Attributes:
        rank: 1 for the most likely token.
        top: (token id, log probability), most likely first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class SlotSetup:
    """Everything the device must know of a sequence before its first span.

    Attributes:
        num_committed: tokens of the text so far; all of them are prefilled.
        length_limit: the sequence ends when it holds this many tokens.
        stop_token_ids: the sequence ends after any of these.
        seed: key of its random numbers, 64 bits.
        cached_token_ids: the beginning of the text whose keys, values and state are cached.
        restore_from: slot that holds the recurrent state behind it, or None.
    """

    slot: int
    num_committed: int
    length_limit: int
    stop_token_ids: tuple[int, ...]
    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    seed: int
    rules: LogitRules = NO_RULES
    draft_sampling: DraftSampling = DraftSampling.ARGMAX
    cached_token_ids: tuple[int, ...] = ()
    restore_from: int | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. Prompt chunks and rounds are two passes: neither changes the other's bits."""

    setups: tuple[SlotSetup, ...] = ()
    prefill: tuple[Span, ...] = ()
    rounds: tuple[Span, ...] = ()

    @property
    def spans(self) -> tuple[Span, ...]:
        return self.prefill + self.rounds


@dataclass(slots=True)  # as with spans
class SpanResult:
    """What became of one span. Nobody changes one.

    Attributes:
        token_ids: committed tokens, trimmed at stop ids and the length limit.
        finish_reason: STOP or LENGTH where the device ended the sequence.
        draft_token_ids: the drafts that were verified.
        num_accepted: how many of them the verification rule kept, before trimming.
        proposed_token_ids: drafts that wait on the device for the next round.
        checkpoint_kept: the span's checkpoint holds the state that was asked for.
        logprobs: one entry for each of token_ids, where they were asked for.
        prompt_logprobs: one entry for each row of a prompt chunk, about the token after it; one
            fewer where the chunk ends the prompt.
        times: what the pass took that brought the tokens.
    """

    sequence_id: int
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    draft_token_ids: tuple[int, ...] = ()
    num_accepted: int = 0
    proposed_token_ids: tuple[int, ...] = ()
    checkpoint_kept: bool = False
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    times: PassTimes | None = field(default=None, compare=False)

    def with_prompt_logprobs(self, reports: tuple[TokenLogprobs, ...]) -> SpanResult:
        """A copy that holds these."""
        return replace(self, prompt_logprobs=reports)
