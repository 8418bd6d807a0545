"""A request as the user made it, and the sequence that the scheduler moves through the engine."""

from dataclasses import dataclass, field
from enum import Enum

from outrider.batch import NO_RULES, Effects, FinishReason, LogitRules, Span, Tier
from outrider.params import SamplingParams
from outrider.spec.names import DraftSampling


@dataclass(frozen=True)
class Request:
    """A validated request.

    Attributes:
        stop_token_ids: every id that ends the text, end-of-sequence ids included.
        seed: key of its random numbers, drawn by the engine where the user gave none.
        tier: what it takes to turn logits into its tokens.
        output_index: which of the n outputs of its prompt it is.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    stop_token_ids: tuple[int, ...]
    length_limit: int
    seed: int
    rules: LogitRules = NO_RULES
    draft_sampling: DraftSampling = DraftSampling.ARGMAX
    tier: Tier = Tier.SAMPLED
    output_index: int = 0

    @property
    def needs_drafts_on_host(self) -> bool:
        """A grammar's masks are made from the drafts that the coming round verifies."""
        return self.params.grammar is not None


NEVER = -1
"""Less than any number of tokens."""


class Status(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """The scheduler's state of one request.

    Only the scheduler changes it, and its SpanRules: round, round_holds_to and known_effects.

    Attributes:
        sequence_id: unique for the life of the engine, ascending by arrival.
        num_prefill: tokens that the current prefill has to cover; the prompt, or after a
            preemption everything committed so far.
        num_computed: positions whose keys, values and recurrent state stand.
        num_computed_before: the same before the newest result.
        block_end: num_computed at which another block is full.
        num_submitted: how far spans have been submitted of the prefill.
        num_shared: how far cached blocks hold the same text, state or no state.
        num_kept: position of its newest checkpoint.
        num_cached: tokens of the prompt that were found in the prefix cache, when it was admitted.
        proposed_token_ids: drafts waiting on the device, as of the newest result.
        in_flight: spans submitted whose results have not come yet, oldest first.
        num_committed: tokens of prompt and output.
        num_committed_at_most: the same once everything in flight has ended, if all drafts of it
            are accepted.
        round: its newest round. While nothing that it says has changed, which is nearly always,
            it is submitted again as it is.
        round_holds_to: how large num_committed_at_most may be for that, or NEVER.
        known_effects: effects of rounds by drafts verified and drafts wanted, made once each.
    """

    sequence_id: int
    request: Request
    output_token_ids: list[int] = field(default_factory=list[int])
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    slot: int | None = None
    num_prefill: int = 0
    num_computed: int = 0
    num_computed_before: int = 0
    block_end: int = 0
    num_submitted: int = 0
    num_cached: int = 0
    num_shared: int = 0
    num_kept: int = 0
    proposed_token_ids: tuple[int, ...] = ()
    in_flight: list[Span] = field(default_factory=list[Span])

    num_committed: int = 0
    num_committed_at_most: int = 0
    round: Span | None = None
    round_holds_to: int = NEVER
    known_effects: dict[tuple[int, int], Effects] = field(
        default_factory=dict["tuple[int, int]", Effects]
    )

    def __post_init__(self) -> None:
        self.lost()

    def submitted_round(self) -> Span:
        """The round that was set is in flight from now on."""
        span = self.round
        assert span is not None, "no round was set"
        self.in_flight.append(span)
        self.num_committed_at_most += span.num_rows
        return span

    def submitted_chunk(self, span: Span) -> None:
        """A chunk of the text is in flight from now on."""
        self.in_flight.append(span)
        self.num_submitted = span.start + span.num_rows
        if span.effects.samples:
            self.num_committed_at_most += 1
            self.status = Status.DECODING

    def returned(self, span: Span, token_ids: tuple[int, ...]) -> None:
        """The results of the oldest span in flight are here: the text grows by these tokens."""
        oldest = self.in_flight.pop(0)
        assert oldest is span, "results come in the order of submission"
        num_tokens = len(token_ids)
        self.output_token_ids += token_ids
        self.num_committed += num_tokens
        self.num_computed_before = self.num_computed
        if not span.token_ids:  # is_prefill, but this is asked too often for a call
            self.num_committed_at_most += num_tokens - span.num_rows
            self.num_computed += num_tokens
            return
        if span.effects.samples:
            self.num_committed_at_most += num_tokens - 1
        self.num_computed += span.num_rows

    def lost(self) -> None:
        """Nothing that is in flight will return."""
        self.in_flight.clear()
        self.num_committed = len(self.request.prompt_token_ids) + len(self.output_token_ids)
        self.num_committed_at_most = self.num_committed

    def gave_way(self) -> None:
        """It holds nothing any more, and waits to be prefilled again."""
        self.status, self.slot = Status.WAITING, None
        self.num_computed = self.num_submitted = 0
        self.proposed_token_ids = ()
        self.round_holds_to = NEVER

    @property
    def num_committed_at_least(self) -> int:
        """Tokens of the text once everything in flight has ended: each round emits one or more.

        Exact where nothing is in flight, and short where a round ended the text.
        """
        return self.num_committed + sum(span.effects.samples for span in self.in_flight)

    @property
    def num_proposed(self) -> int:
        """Drafts that the next round may find, an upper bound while something is in flight."""
        if self.in_flight:
            return self.in_flight[-1].effects.num_drafts_next
        return len(self.proposed_token_ids)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Once for a prompt; after a preemption that had output they are reported already."""
        wanted = self.request.params.prompt_logprobs is not None and self.request.output_index == 0
        return wanted and not self.output_token_ids

    @property
    def text(self) -> tuple[int, ...]:
        """All committed tokens."""
        return self.committed(0, self.num_committed)

    def committed(self, begin: int, end: int) -> tuple[int, ...]:
        """Tokens at positions begin .. end - 1 of prompt and output together."""
        num_prompt = len(self.request.prompt_token_ids)
        if begin >= num_prompt:
            return tuple(self.output_token_ids[begin - num_prompt : end - num_prompt])
        return self.request.prompt_token_ids[begin:end] + tuple(
            self.output_token_ids[max(begin - num_prompt, 0) : max(end - num_prompt, 0)]
        )
