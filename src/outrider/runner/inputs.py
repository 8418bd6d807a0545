"""Turns the spans of a batch into the tensors of one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from outrider.batch import NULL_BLOCK, NULL_SLOT, Span, Tier
from outrider.layers.rows import RowBatch, RowGroup
from outrider.ops.bookkeeping import NUM_COLUMNS, ChainRows, chain_rows, round_rows
from outrider.ops.bookkeeping.reference import kv_index_reference
from outrider.runner.slots import SlotTable, to_device
from outrider.spec.names import DraftSampling


@dataclass(frozen=True)
class Work:
    """What a pass has to do, as far as the host decides it.

    Two rounds of equal shape and equal work are the same operations on other numbers, which is what
    a CUDA graph can replay.

    Attributes:
        tier: what turns the logits into tokens.
        draft_modes: how the tokens for the next round are drawn.
        verifies_sampled: the round's own drafts were drawn from a distribution.
        feeds_draft: the draft sees the rows.
        max_drafts_next: most tokens to propose.
        history_len: columns of the texts that somebody may read, an upper bound.
    """

    tier: Tier
    draft_modes: frozenset[DraftSampling]
    verifies_sampled: bool
    feeds_draft: bool
    max_drafts_next: int
    history_len: int


@dataclass(frozen=True)
class PassInputs:
    """One target pass, and what the speculative round after it works on.

    The S sequences that sample have T verified rows each: their last rows, whose outputs decide
    which drafts survive. A prompt's end has one.

    Attributes:
        token_ids: [R] int64.
        next_token_ids: [R] int64, the token after each row of a prompt chunk, 0 at its end;
            None in a round, which finds out.
        slots: [S] int64.
        block_tables: [S, M] int64.
        last_rows: [S] int64, flat rows of the prompts' ends; None in a round.
        num_drafts: [S] int64, valid drafts, at most T - 1.
        num_wanted: [S] int64, drafts to propose.
        draft_token_ids: [S, T - 1] int64.
    """

    token_ids: Tensor
    next_token_ids: Tensor | None
    rows: RowBatch
    slots: Tensor
    block_tables: Tensor
    last_rows: Tensor | None
    num_drafts: Tensor
    num_wanted: Tensor
    draft_token_ids: Tensor

    @property
    def is_round(self) -> bool:
        """The rows come from the device and leave records behind."""
        return self.next_token_ids is None

    @property
    def num_sampling(self) -> int:
        """S."""
        return self.slots.shape[0]

    @property
    def num_verified(self) -> int:
        """T."""
        return self.draft_token_ids.shape[1] + 1


def round_numbers(spans: Sequence[Span], num_rows: int, width: int) -> Tensor:
    """What the host says of a round: [num_rows, 3 + width] int64 on the CPU.

    Args:
        num_rows: at least one for each span; the rest name the null slot, which is inert.
        width: columns of the block tables.
    """
    numbers = torch.zeros((num_rows, NUM_COLUMNS + width), dtype=torch.int64)
    numbers[:, 0] = NULL_SLOT
    lists = numbers.numpy()
    for row, span in enumerate(spans):
        effects = span.effects
        lists[row, :NUM_COLUMNS] = (span.slot, effects.num_drafts, effects.num_drafts_next)
        lists[row, NUM_COLUMNS : NUM_COLUMNS + len(span.block_ids)] = span.block_ids
    return numbers


class InputBuilder:
    """Builds passes for one slot table."""

    def __init__(self, slots: SlotTable, block_size: int, prefill_grid: int) -> None:
        self._slots = slots
        self._block_size = block_size
        self._prefill_grid = prefill_grid
        self._device = slots.num_committed.device

    def _tensor(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return to_device(values, torch.int64, self._device)

    def _block_tables(self, spans: Sequence[Span]) -> Tensor:
        width = max(len(span.block_ids) for span in spans)
        return self._tensor(
            [list(s.block_ids) + [NULL_BLOCK] * (width - len(s.block_ids)) for s in spans]
        )

    def prefill(self, spans: Sequence[Span]) -> PassInputs:
        """Prompt chunks, each a group of its own."""
        groups: list[RowGroup] = []
        places: list[Tensor] = []
        token_ids: list[int] = []
        next_token_ids: list[int] = []
        last_rows: list[int] = []
        for span in spans:
            tables = self._block_tables([span])
            group = RowGroup(
                begin=len(token_ids),
                rows_per_sequence=span.num_rows,
                slots=self._tensor([span.slot]),
                starts=self._tensor([span.start]),
                num_rows=self._tensor([span.num_rows]),
                block_tables=tables,
                piece_ends=self._piece_ends(span),
                starts_sequence=span.start == 0,
            )
            positions = group.starts[:, None] + torch.arange(span.num_rows, device=self._device)
            kept = torch.ones_like(positions, dtype=torch.bool)
            index = kv_index_reference(tables, positions, kept, self._block_size)
            places.append(index.flatten())
            groups.append(group)
            token_ids += span.token_ids
            self._slots.token_ids[span.slot, span.start : span.start + span.num_rows] = (
                self._tensor(span.token_ids).to(self._slots.token_ids.dtype)
            )
            # After a prompt's last row comes a token that only the round will know.
            next_token_ids += [*span.token_ids[1:], span.next_token_id or 0]
            if span.effects.samples:
                last_rows.append(len(token_ids) - 1)
        sampling = [span for span in spans if span.effects.samples]
        positions = [span.start + row for span in spans for row in range(span.num_rows)]
        none = torch.zeros((len(sampling), 0), dtype=torch.int64, device=self._device)
        return PassInputs(
            token_ids=self._tensor(token_ids),
            next_token_ids=self._tensor(next_token_ids),
            rows=RowBatch(
                tuple(groups), self._tensor(positions), torch.cat(places), self._slots.pending
            ),
            slots=self._tensor([span.slot for span in sampling]),
            block_tables=self._block_tables(sampling) if sampling else none,
            last_rows=self._tensor(last_rows),
            num_drafts=self._tensor([0] * len(sampling)),
            num_wanted=self._tensor([span.effects.num_drafts_next for span in sampling]),
            draft_token_ids=none,
        )

    def _piece_ends(self, span: Span) -> tuple[int, ...]:
        grid, end = self._prefill_grid, span.start + span.num_rows
        inner = range((span.start // grid + 1) * grid, end, grid)
        return (*(position - span.start for position in inner), span.num_rows)

    def rounds(self, numbers: Tensor, num_verified: int) -> PassInputs:
        """The newest token and the drafts of every sequence, as one rectangle of rows.

        Args:
            numbers: see `round_numbers`, on the device.
            num_verified: T.
        """
        rows = round_rows(numbers, self._slots.tensors, num_verified, self._block_size)
        group = RowGroup(0, num_verified, rows.slots, rows.starts, rows.num_rows, rows.block_tables)
        return PassInputs(
            token_ids=rows.token_ids,
            next_token_ids=None,
            rows=RowBatch((group,), rows.positions, rows.kv_index, self._slots.pending),
            slots=rows.slots,
            block_tables=rows.block_tables,
            last_rows=None,
            num_drafts=rows.num_drafts,
            num_wanted=rows.num_wanted,
            draft_token_ids=rows.draft_token_ids,
        )

    def chain(self, inputs: PassInputs, max_drafts: int) -> Callable[[int], RowBatch]:
        """Rows of a draft's steps 2 .. max_drafts; to be asked for once the round is committed."""

        @cache
        def rows() -> ChainRows:
            return chain_rows(
                inputs.slots,
                inputs.num_wanted,
                inputs.block_tables,
                self._slots.tensors,
                max(max_drafts, 2),
                self._block_size,
            )

        def rows_at(step: int) -> RowBatch:
            starts, num_rows = rows().positions[step - 2], rows().num_rows[step - 2]
            group = RowGroup(0, 1, inputs.slots, starts, num_rows, inputs.block_tables)
            return RowBatch((group,), starts, rows().kv_index[step - 2], self._slots.pending)

        return rows_at
