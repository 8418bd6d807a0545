"""What speculation did for one request: counts, and where every token came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class Origin(Enum):
    """Who chose a token first."""

    PLAIN = "plain"
    """Sampled by the target in a pass that verified nothing."""
    DRAFTED = "drafted"
    """Proposed by the draft and accepted."""
    CORRECTED = "corrected"
    """The target's own token in place of a rejected draft."""
    BONUS = "bonus"
    """The target's own token after a block that was accepted whole."""


@dataclass(frozen=True, slots=True)
class TokenOrigin:
    """Origin of one token; `position` counts from 1 within the block, for drafted tokens."""

    origin: Origin
    position: int | None = None


class PassTimes(NamedTuple):
    """What one pass took, in seconds. Sequences that share a pass share this.

    Attributes:
        started: by a clock of the process that has no zero of its own.
        seconds: from the first operation to the results; what the host does between two passes is
            not in it.
        parts: target pass and decision, commit, draft; None where they cannot be told apart, as on
            a GPU. Together they are `seconds`.
        num_sequences: sequences that got tokens from it.
        is_round: False for the pass that ends a prompt.
    """

    started: float
    seconds: float
    parts: tuple[float, float, float] | None
    num_sequences: int
    is_round: bool


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """One pass that emitted tokens.

    Attributes:
        draft_token_ids: what was verified.
        num_accepted: how many of them the rule kept, before trimming.
        num_emitted: how many tokens the text gained, after trimming.
        times: what the pass took; no part of what makes two traces equal.
    """

    draft_token_ids: tuple[int, ...]
    num_accepted: int
    num_emitted: int
    times: PassTimes | None = field(default=None, compare=False)

    @property
    def origins(self) -> list[TokenOrigin]:
        """One for each emitted token."""
        if not self.draft_token_ids:
            own = Origin.PLAIN
        elif self.num_accepted < len(self.draft_token_ids):
            own = Origin.CORRECTED
        else:
            own = Origin.BONUS
        block = [TokenOrigin(Origin.DRAFTED, i + 1) for i in range(self.num_accepted)]
        return [*block, TokenOrigin(own)][: self.num_emitted]

    @property
    def rejected_token_ids(self) -> tuple[int, ...]:
        """Drafts that the rule refused."""
        return self.draft_token_ids[self.num_accepted :]


@dataclass(frozen=True)
class SpeculationStats:
    """Totals over one request or many.

    Attributes:
        num_passes: target passes that emitted tokens, the one that ends the prompt included.
        num_rounds: those of them that verified at least one draft.
        num_drafted: drafts verified.
        num_accepted: drafts accepted, before trimming.
        accepted_per_position: entry i counts the rounds that accepted draft i + 1.
        num_tokens: tokens emitted.
    """

    num_passes: int = 0
    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()
    num_tokens: int = 0

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens of a round that verified drafts, the target's own included; None if none."""
        return 1 + self.num_accepted / self.num_rounds if self.num_rounds else None

    @classmethod
    def of(cls, rounds: list[RoundTrace]) -> SpeculationStats:
        """Totals of a request's rounds."""
        longest = max((len(r.draft_token_ids) for r in rounds), default=0)
        return cls(
            num_passes=len(rounds),
            num_rounds=sum(bool(r.draft_token_ids) for r in rounds),
            num_drafted=sum(len(r.draft_token_ids) for r in rounds),
            num_accepted=sum(r.num_accepted for r in rounds),
            accepted_per_position=tuple(
                sum(r.num_accepted > i for r in rounds) for i in range(longest)
            ),
            num_tokens=sum(r.num_emitted for r in rounds),
        )

    def __add__(self, other: SpeculationStats) -> SpeculationStats:
        longest = max(len(self.accepted_per_position), len(other.accepted_per_position))

        def padded(counts: tuple[int, ...]) -> tuple[int, ...]:
            return counts + (0,) * (longest - len(counts))

        per_position = zip(
            padded(self.accepted_per_position), padded(other.accepted_per_position), strict=True
        )
        return SpeculationStats(
            self.num_passes + other.num_passes,
            self.num_rounds + other.num_rounds,
            self.num_drafted + other.num_drafted,
            self.num_accepted + other.num_accepted,
            tuple(a + b for a, b in per_position),
            self.num_tokens + other.num_tokens,
        )
