"""What the engine asks of a draft method. It asks nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from outrider.layers.rows import LayerCache, LayerCacheSpec, RowBatch
from outrider.spec.choose import DraftChooser, Proposal


@dataclass(frozen=True)
class Taps:
    """Hidden states of the target that a draft reads.

    Attributes:
        layers: layers whose input (the residual stream entering them) is read, ascending. Without
            any, a draft is given the hidden state after the final norm.
    """

    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Frontier:
    """Where sequences stand when they are drafted for.

    Attributes:
        max_drafts: most drafts that any of the sequences wants, at least 1.
        num_wanted: [B] int64, drafts each of them wants.
        num_committed: [B] int64, tokens of each text.
        history: [B, L] int64, those tokens; entries past num_committed are unspecified. A method
            that does not call it costs nothing.
        rows_at: rows of chain step 2, 3, ...: step s runs one row per sequence at the position of
            its newest committed token plus s - 2, inert where the sequence wants fewer drafts.
        chooser: picks a token from a draft's scores as each request wishes, and remembers q.
    """

    max_drafts: int
    num_wanted: Tensor
    num_committed: Tensor
    history: Callable[[], Tensor]
    rows_at: Callable[[int], RowBatch]
    chooser: DraftChooser


class Drafter(ABC):
    """A draft method, ready to run.

    Attributes:
        taps: what `feed` is given of the target.
        cache_specs: layers of its own, whose caches share block ids and positions with the target.
        samples: whether it has a distribution to sample from; a lookup has none and proposes a
            point mass whatever a request asks for.
        reads_history: whether `propose` looks at the texts.
    """

    taps: Taps = Taps()
    cache_specs: tuple[LayerCacheSpec, ...] = ()
    samples: bool = True
    reads_history: bool = False
    _caches: tuple[LayerCache, ...] = ()

    def bind(self, caches: tuple[LayerCache, ...]) -> None:
        """Receive the storage that was allocated for cache_specs. Called once."""
        self._caches = caches

    def feed(self, tapped: Tensor, next_token_ids: Tensor, rows: RowBatch) -> Tensor:
        """See every row of a pass, whether or not something will be proposed from it.

        Args:
            tapped: [R, H'], what `taps` names.
            next_token_ids: [R], the token after each row. Rows past a sequence's last accepted one
                hold garbage that a later feed overwrites.

        Returns:
            [R, H''], handed back to `propose` for one row of each sequence.
        """
        return tapped

    @property
    def network(self) -> nn.Module | None:
        """Layers of its own; None for a lookup."""
        return None

    @property
    def output_weight(self) -> Tensor | None:
        """[V', H], the output head that drafts are scored with; None for a lookup."""
        return None

    def step_weights(self, step: int) -> Sequence[Tensor] | None:
        """What chain step 1, 2, ... reads whole, its output head included; benchmarks count it.

        Nothing for a lookup; None where a method does not say.
        """
        return None if self.samples else ()

    @abstractmethod
    def propose(self, hidden: Tensor, frontier: Frontier) -> Proposal:
        """Draft tokens.

        Args:
            hidden: [B, H''] of each sequence's last committed row.
        """


class ChainDrafter(Drafter):
    """A draft network that continues from its own output, one token a step."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[B, H''] -> [B, V'], scores over the draft's vocabulary."""

    @abstractmethod
    def step(self, hidden: Tensor, token_ids: Tensor, rows: RowBatch) -> Tensor:
        """Feed a drafted token: hidden [B, H''], target token_ids [B] -> [B, H'']."""

    @property
    def target_ids(self) -> Tensor | None:
        """[V'] target id of each draft id, or None where they are the same."""
        return None

    def propose(self, hidden: Tensor, frontier: Frontier) -> Proposal:
        token_ids = frontier.chooser.choose(self.logits(hidden), self.target_ids)
        for step in range(2, frontier.max_drafts + 1):
            hidden = self.step(hidden, token_ids, frontier.rows_at(step))
            token_ids = frontier.chooser.choose(self.logits(hidden), self.target_ids)
        return frontier.chooser.proposal(frontier.num_wanted)
