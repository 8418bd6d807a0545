"""Bookkeeping kernels do exactly what the reference does, to the table and to what they return."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.ops.bookkeeping import (
    NUM_COLUMNS,
    SlotTensors,
    Verdict,
    reference,
)
from outrider.ops.gated_delta_rule import PendingRecords

NUM_SLOTS, K, LENGTH, NUM_BLOCKS = 40, 8, 300, 64

DEVICES = ["cuda"] if torch.cuda.is_available() else ["cpu"]
"""Without a GPU the kernels run in Triton's interpreter."""

SHAPES = [(1, 1), (1, 4), (3, 2), (7, 9), (8, 4), (33, 6)]
"""Sequences and rows."""


def table_of(rng: torch.Generator, num_stops: int = 3) -> SlotTensors:
    """Every slot somewhere in its text; some have finished, some are near their end."""

    def ints(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape or (NUM_SLOTS,), generator=rng)

    num_committed = ints(1, LENGTH - 12)
    near = ints(1, 12)
    limits = torch.where(ints(0, 2) == 0, num_committed + near, LENGTH)
    finished = ints(0, 5) == 0
    finished[0] = True
    return SlotTensors(
        num_committed=num_committed,
        last_token_ids=ints(0, 5),
        token_ids=ints(0, 5, NUM_SLOTS, LENGTH + 1).int(),
        draft_token_ids=ints(0, 3, NUM_SLOTS, K),
        num_proposed=ints(0, K + 1),
        length_limits=limits,
        finished=finished,
        stop_token_ids=ints(-1, 4, NUM_SLOTS, num_stops),
        seeds=ints(0, 2**62),
        pending=PendingRecords(ints(0, 2), ints(0, 9), ints(0, 9)),
    )


def moved(value: Any, device: str) -> Any:
    if isinstance(value, Tensor):
        return value.clone().to(device)
    if dataclasses.is_dataclass(value):
        return type(value)(**{f.name: moved(getattr(value, f.name), device) for f in fields(value)})
    return copy.copy(value)


def assert_same(expected: Any, got: Any, name: str, skip: tuple[str, ...] = ()) -> None:
    if isinstance(expected, Tensor):
        assert expected.dtype == got.dtype, name
        assert torch.equal(expected, got.cpu()), (name, expected, got)
    elif dataclasses.is_dataclass(expected):
        for field in fields(expected):
            if field.name not in skip:
                assert_same(getattr(expected, field.name), getattr(got, field.name), field.name)


def without_waste(table: SlotTensors) -> SlotTensors:
    """The text's last column is unspecified."""
    return dataclasses.replace(table, token_ids=table.token_ids[:, :-1])


def kernels() -> Any:
    from outrider.ops.bookkeeping import triton

    return triton


def round_of(rng: torch.Generator, batch: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct slots, drafts of the round, how many count."""
    slots = torch.randperm(NUM_SLOTS - 1, generator=rng)[:batch] + 1
    drafts = torch.randint(0, 3, (batch, rows - 1), generator=rng)
    num_drafts = torch.randint(0, rows, (batch,), generator=rng)
    return slots, drafts, num_drafts


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [5, 131])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_of_a_round(shape: tuple[int, int], width: int, device: str) -> None:
    batch, rows = shape
    rng = torch.Generator().manual_seed(batch * 10 + rows)
    table = table_of(rng)
    numbers = torch.randint(1, NUM_BLOCKS, (batch, NUM_COLUMNS + width), generator=rng)
    numbers[:, 0] = torch.randperm(NUM_SLOTS, generator=rng)[:batch]
    numbers[:, 1:3] = torch.randint(0, rows, (batch, 2), generator=rng)
    expected = reference.round_rows_reference(numbers, table, rows, 64)
    got = kernels().round_rows_kernel(numbers.to(device), moved(table, device), rows, 64)
    assert_same(expected, got, "rows")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("extra", ["match", "verdict", "synthetic", "prompt"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_commit(shape: tuple[int, int], extra: str, device: str) -> None:
    batch, rows = shape
    rng = torch.Generator().manual_seed(batch * 100 + rows)
    for turn in range(4):
        table = table_of(rng, num_stops=turn)
        slots, drafts, num_drafts = round_of(rng, batch, rows)
        sampled = torch.randint(0, 3, (batch, rows), generator=rng)
        verdict = rates = None
        if extra == "verdict":
            applies = torch.randint(0, 2, (batch,), generator=rng) == 0
            accepted = torch.minimum(torch.randint(0, rows, (batch,), generator=rng), num_drafts)
            verdict = Verdict(applies, accepted, torch.randint(0, 3, (batch,), generator=rng))
        if extra == "synthetic":
            rates = torch.linspace(0.9, 0.1, K)
        on_device = moved(table, device)
        arguments = (sampled, slots, num_drafts, drafts)
        expected = reference.commit_round_reference(
            *arguments, table, extra != "prompt", verdict, rates
        )
        got = kernels().commit_round_kernel(
            *(x.to(device) for x in arguments),
            on_device,
            extra != "prompt",
            moved(verdict, device),
            moved(rates, device),
        )
        assert_same(expected, got, "outcome")
        assert_same(without_waste(table), without_waste(on_device), "table")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("max_drafts", [2, 3, 8])
@pytest.mark.parametrize("batch", [1, 5, 32])
def test_rows_of_a_chain(batch: int, max_drafts: int, device: str) -> None:
    rng = torch.Generator().manual_seed(batch + max_drafts)
    table = table_of(rng)
    slots, _, _ = round_of(rng, batch, 2)
    wanted = torch.randint(0, max_drafts + 1, (batch,), generator=rng)
    tables = torch.randint(1, NUM_BLOCKS, (batch, 7), generator=rng)
    expected = reference.chain_rows_reference(slots, wanted, tables, table, max_drafts, 64)
    arguments = (x.to(device) for x in (slots, wanted, tables))
    got = kernels().chain_rows_kernel(*arguments, moved(table, device), max_drafts, 64)
    assert_same(expected, got, "chain")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_next", [0, 1, 3, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_proposals_are_kept_and_everything_is_packed(
    shape: tuple[int, int], num_next: int, device: str
) -> None:
    batch, rows = shape
    rng = torch.Generator().manual_seed(batch * 100 + rows + num_next)
    table = table_of(rng)
    slots, drafts, num_drafts = round_of(rng, batch, rows)
    sampled = torch.randint(0, 3, (batch, rows), generator=rng)
    outcome = reference.commit_round_reference(
        sampled, slots, num_drafts, drafts, table, True, None, None
    )
    proposed = None
    if num_next:
        token_ids = torch.randint(0, 9, (batch, num_next), generator=rng)
        proposed = (token_ids, torch.randint(0, num_next + 1, (batch,), generator=rng))
    on_device = moved(table, device)
    expected = reference.store_proposal_reference(
        outcome, slots, num_drafts, drafts, proposed, table
    )
    got = kernels().store_proposal_kernel(
        moved(outcome, device),
        *(x.to(device) for x in (slots, num_drafts, drafts)),
        None if proposed is None else tuple(x.to(device) for x in proposed),
        on_device,
    )
    assert_same(expected, got, "packed")
    assert_same(table, on_device, "table")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 4), (7, 43), (64, 643)], ids=str)
def test_numbers_cross_the_bus_both_ways(shape: tuple[int, int]) -> None:
    from outrider.ops.bookkeeping import transfer

    numbers = torch.randint(-(2**60), 2**60, shape).pin_memory()
    there = torch.full(shape, -1, device="cuda")
    back = torch.full(shape, -1, dtype=torch.int64).pin_memory()
    transfer(numbers, there)
    transfer(there, back)
    torch.cuda.synchronize()
    assert torch.equal(numbers, there.cpu()) and torch.equal(numbers, back)
