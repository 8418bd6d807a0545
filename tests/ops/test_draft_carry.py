"""What a round hands to the draft: the accepted row's hidden state, the token behind it, the place.

`commit_round` says which row of the pass was accepted last and which token follows each row,
`chain_rows` where the next step stands; the runner takes that row of what the draft was fed. The
expected values are worked out one sequence at a time, in plain Python, and the kernels must agree
with them and with their references.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.ops.bookkeeping import SlotTensors, Verdict, reference
from tests.ops.test_bookkeeping import (
    DEVICES,
    NUM_BLOCKS,
    SHAPES,
    assert_same,
    kernels,
    moved,
    round_of,
    table_of,
)

BLOCK_SIZE, WIDTH = 16, 40


@dataclass(frozen=True)
class Carry:
    """What reaches the draft of B sequences.

    Attributes:
        next_token_ids: [B, T], the token after each row, as far as the text goes.
        hidden: [B, H] of the last accepted rows.
        chain: where steps 2 .. K run.
    """

    next_token_ids: Tensor
    hidden: Tensor
    chain: Any


@dataclass(frozen=True)
class Round:
    """A round's decision over B sequences by T rows, and what the pass left for each row."""

    table: SlotTensors
    slots: Tensor
    drafts: Tensor
    num_drafts: Tensor
    sampled: Tensor
    num_wanted: Tensor
    block_tables: Tensor
    hidden: Tensor
    verdict: Verdict | None
    max_drafts: int

    @classmethod
    def random(
        cls, shape: tuple[int, int], rule: str, max_drafts: int, dtype: torch.dtype
    ) -> Round:
        batch, rows = shape
        rng = torch.Generator().manual_seed(100 * batch + rows + max_drafts)

        def ints(low: int, high: int, *size: int) -> Tensor:
            return torch.randint(low, high, size, generator=rng)

        table = table_of(rng)
        slots, drafts, num_drafts = round_of(rng, batch, rows)
        verdict = None
        if rule == "verdict":
            accepted = torch.minimum(ints(0, rows, batch), num_drafts)
            verdict = Verdict(ints(0, 2, batch) == 0, accepted, ints(0, 3, batch))
        hidden = torch.randn(batch * rows, WIDTH, generator=rng).to(dtype)
        return cls(
            table,
            slots,
            drafts,
            num_drafts,
            ints(0, 3, batch, rows),
            ints(0, max_drafts + 1, batch),
            ints(1, NUM_BLOCKS, batch, 30),
            hidden,
            verdict,
            max_drafts,
        )

    def carried(self, commit: Any, place: Any, device: str) -> Carry:
        """By these two operations, on a table of their own."""
        table = moved(self.table, device)
        slots, wanted = self.slots.to(device), self.num_wanted.to(device)
        decided = (self.sampled, self.slots, self.num_drafts, self.drafts)
        verdict = moved(self.verdict, device)
        outcome = commit(*(x.to(device) for x in decided), table, True, verdict, None)
        blocks = self.block_tables.to(device)
        chain = place(slots, wanted, blocks, table, self.max_drafts, BLOCK_SIZE)
        hidden = self.hidden.to(device)[outcome.last_row]
        return Carry(outcome.token_ids, hidden, chain)

    def decided(self, b: int) -> tuple[int, int]:
        """Drafts accepted of sequence b, before anything is trimmed, and the token behind them."""
        if self.verdict is not None and bool(self.verdict.applies[b]):
            return int(self.verdict.num_accepted[b]), int(self.verdict.own_token[b])
        accepted = 0
        while accepted < int(self.num_drafts[b]) and int(self.drafts[b, accepted]) == int(
            self.sampled[b, accepted]
        ):
            accepted += 1
        return accepted, int(self.sampled[b, accepted])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("max_drafts", [2, 8])
@pytest.mark.parametrize("rule", ["match", "verdict"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_draft_goes_on_from_the_last_accepted_row(
    shape: tuple[int, int], dtype: torch.dtype, rule: str, max_drafts: int, device: str
) -> None:
    case = Round.random(shape, rule, max_drafts, dtype)
    got = case.carried(kernels().commit_round_kernel, kernels().chain_rows_kernel, device)
    expected = case.carried(reference.commit_round_reference, reference.chain_rows_reference, "cpu")
    assert_same(expected, got, "carry")

    (batch, rows), table = shape, case.table
    for b in range(batch):
        slot = int(case.slots[b])
        if bool(table.finished[slot]):
            assert not got.chain.num_rows[:, b].any()
            continue
        accepted, own = case.decided(b)
        assert torch.equal(got.hidden[b].cpu(), case.hidden[b * rows + accepted])
        tokens = [*case.drafts[b, :accepted].tolist(), own]
        assert got.next_token_ids[b, : accepted + 1].tolist() == tokens
        row = int(table.num_committed[slot]) - 1 + accepted  # position of the accepted row
        stops = set(table.stop_token_ids[slot].tolist())
        ends = stops & set(tokens) or row + 2 >= int(table.length_limits[slot])
        for step in range(2, case.max_drafts + 1):
            runs = int(got.chain.num_rows[step - 2, b])
            position = row + step - 1
            room = position < int(table.length_limits[slot])
            assert runs == (not ends and room and step <= int(case.num_wanted[b]))
            if runs:
                assert int(got.chain.positions[step - 2, b]) == position
                block = int(case.block_tables[b, min(position // BLOCK_SIZE, 29)])
                place = block * BLOCK_SIZE + position % BLOCK_SIZE
                assert int(got.chain.kv_index[step - 2, b]) == place
