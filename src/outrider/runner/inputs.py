"""Turns the spans of a batch into the tensors of one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.batch import NULL_BLOCK, Span
from outrider.layers.rows import RowBatch, RowGroup
from outrider.runner.slots import SlotTable


@dataclass(frozen=True)
class PassInputs:
    """One target pass, and what the speculative round after it works on.

    The S sequences that sample have T verified rows each: their last rows, whose outputs decide
    which drafts survive. A prompt's end has one.

    Attributes:
        token_ids: [R] int64.
        next_token_ids: [R] int64, the token after each row as far as it is known before the round.
        sampling_spans: the S spans, in the order of the tensors below.
        slots: [S] int64.
        block_tables: [S, M] int64.
        first_verified: [S] int64, flat row of the first verified row.
        num_drafts: [S] int64, valid drafts, at most T - 1.
        draft_token_ids: [S, T - 1] int64.
        is_round: the rows come from the device and leave records behind.
    """

    token_ids: Tensor
    next_token_ids: Tensor
    rows: RowBatch
    sampling_spans: tuple[Span, ...]
    slots: Tensor
    block_tables: Tensor
    first_verified: Tensor
    num_drafts: Tensor
    draft_token_ids: Tensor
    is_round: bool

    @property
    def num_verified(self) -> int:
        """T."""
        return self.draft_token_ids.shape[1] + 1


def kv_index(block_tables: Tensor, positions: Tensor, kept: Tensor, block_size: int) -> Tensor:
    """Flat place of each row's keys and values; rows not kept go to the null block.

    Args:
        block_tables: [B, M].
        positions, kept: [B, T].

    Returns:
        [B * T] int64.
    """
    column = (positions // block_size).clamp(max=block_tables.shape[1] - 1)
    index = block_tables.gather(1, column) * block_size + positions % block_size
    return torch.where(kept, index, NULL_BLOCK * block_size).flatten()


class InputBuilder:
    """Builds passes for one slot table."""

    def __init__(self, slots: SlotTable, block_size: int, prefill_grid: int) -> None:
        self._slots = slots
        self._block_size = block_size
        self._prefill_grid = prefill_grid
        self._device = slots.num_committed.device

    def _tensor(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

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
            places.append(kv_index(tables, positions, kept, self._block_size))
            groups.append(group)
            token_ids += span.token_ids
            self._slots.token_ids[span.slot, span.start : span.start + span.num_rows] = (
                self._tensor(span.token_ids).to(self._slots.token_ids.dtype)
            )
            # After a prompt's last row comes a token that only the round will know.
            next_token_ids += [*span.token_ids[1:], span.next_token_id or 0]
            if span.effects.samples:
                last_rows.append(len(token_ids) - 1)
        sampling = tuple(span for span in spans if span.effects.samples)
        positions = [span.start + row for span in spans for row in range(span.num_rows)]
        none = torch.zeros((len(sampling), 0), dtype=torch.int64, device=self._device)
        return PassInputs(
            token_ids=self._tensor(token_ids),
            next_token_ids=self._tensor(next_token_ids),
            rows=RowBatch(
                tuple(groups), self._tensor(positions), torch.cat(places), self._slots.pending
            ),
            sampling_spans=sampling,
            slots=self._tensor([span.slot for span in sampling]),
            block_tables=self._block_tables(sampling) if sampling else none,
            first_verified=self._tensor(last_rows),
            num_drafts=self._tensor([0] * len(sampling)),
            draft_token_ids=none,
            is_round=False,
        )

    def _piece_ends(self, span: Span) -> tuple[int, ...]:
        grid, end = self._prefill_grid, span.start + span.num_rows
        inner = range((span.start // grid + 1) * grid, end, grid)
        return (*(position - span.start for position in inner), span.num_rows)

    def rounds(self, spans: Sequence[Span]) -> PassInputs:
        """The newest token and the drafts of every sequence, as one rectangle of rows."""
        table = self._slots
        slots = self._tensor([span.slot for span in spans])
        num_drafts = self._tensor([span.effects.num_drafts for span in spans])
        num_verified = max(span.num_rows for span in spans)
        drafts = table.draft_token_ids[slots, : num_verified - 1]
        token_ids = torch.cat((table.last_token_ids[slots][:, None], drafts), dim=1)
        starts = table.num_committed[slots] - 1
        block_tables = self._block_tables(spans)
        num_rows = torch.where(table.finished[slots], 0, num_drafts + 1)
        rows = self.rectangle(slots, starts, num_rows, num_verified, block_tables)
        return PassInputs(
            token_ids=token_ids.flatten(),
            next_token_ids=torch.nn.functional.pad(drafts, (0, 1)).flatten(),
            rows=rows,
            sampling_spans=tuple(spans),
            slots=slots,
            block_tables=block_tables,
            first_verified=torch.arange(len(spans), device=self._device) * num_verified,
            num_drafts=num_drafts,
            draft_token_ids=drafts,
            is_round=True,
        )

    def rectangle(
        self, slots: Tensor, starts: Tensor, num_rows: Tensor, width: int, block_tables: Tensor
    ) -> RowBatch:
        """Rows starts[b] .. starts[b] + width - 1 of each sequence, num_rows[b] of them kept."""
        row = torch.arange(width, device=self._device)
        positions = starts[:, None] + row
        kept = row < num_rows[:, None]
        group = RowGroup(0, width, slots, starts, num_rows, block_tables)
        index = kv_index(block_tables, positions, kept, self._block_size)
        return RowBatch((group,), positions.flatten(), index, self._slots.pending)
