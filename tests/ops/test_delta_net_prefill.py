"""Prompt chunks of the gated delta net's kernels: float64, the reference, and where a cut lies."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from outrider.ops.gated_delta_net import delta_net_prefill
from outrider.ops.gated_delta_net.prefill import calls
from outrider.ops.gated_delta_net.reference import delta_net_prefill_reference
from tests.ops.delta_nets import (
    GPU_NETS,
    TINY,
    TOLERANCE,
    Net,
    Store,
    exact,
    interpreted,
    on,
    relative_error,
    same_bits,
)

pytest.importorskip("triton")


@pytest.mark.parametrize("by_piece", [False, True])
@pytest.mark.parametrize("grid", [1, 16, 64, 100, 128])
def test_calls_do_not_depend_on_where_a_prompt_was_cut(grid: int, by_piece: bool) -> None:
    length = 430

    def pieces_of_calls(cuts: list[int]) -> list[int]:
        """Absolute ends of everything that is computed as one piece of at most 64 rows."""
        ends: list[int] = []
        for begin, end in zip([0, *cuts], [*cuts, length], strict=True):
            inner = range((begin // grid + 1) * grid, end, grid)
            for first, last in calls((*(e - begin for e in inner), end - begin), by_piece):
                ends += [begin + e for e in (*range(first + 64, last, 64), last)]
        return ends

    rng = random.Random(grid)
    whole = pieces_of_calls([])
    assert whole[-1] == length and whole == sorted(set(whole))
    for _ in range(20):
        points = sorted(rng.sample(range(grid, length, grid), min(3, (length - 1) // grid)))
        assert pieces_of_calls(points) == whole


def prefill(store: Store, slot: int, text: Tensor, cuts: list[int], grid: int) -> Iterator[Tensor]:
    """Run text [L, width] from position 0 in chunks that end at `cuts`; outputs of each."""
    net, device = store.net, store.device
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        inner = range((begin // grid + 1) * grid, end, grid)
        yield delta_net_prefill(
            net.views(text[begin:end]),
            store.weights,
            store.ring,
            store.delta,
            on(device, [slot]),
            on(device, [begin]),
            (*(e - begin for e in inner), end - begin),
            starts_sequence=begin == 0,
        )


@interpreted
@pytest.mark.parametrize("net", TINY, ids=str)
@pytest.mark.parametrize(("start", "length"), [(0, 1), (0, 2), (0, 30), (5, 7), (1, 12), (40, 13)])
def test_inputs_of_a_chunk_equal_the_reference_in_the_interpreter(
    net: Net, start: int, length: int
) -> None:
    from outrider.ops.gated_delta_net.reference import _recurrence_inputs
    from outrider.ops.gated_delta_net.triton import prefill_inputs

    mine = Store(net, 3, "cpu")
    mine.ring[1] = net.projections(mine.ring.shape[1], seed=3, device="cpu")[:, : net.channels]
    theirs = mine.copy()
    rows = net.views(net.projections(length, seed=length, device="cpu"))
    slot, at = on("cpu", [1]), on("cpu", [start])
    arguments = (rows, mine.weights, mine.ring, mine.delta, slot, at)
    results = prefill_inputs(*arguments, torch.float32)
    expected = _recurrence_inputs(
        rows, mine.weights, theirs.ring, theirs.delta, slot, at, on("cpu", [length])
    )
    for result, value in zip(results, expected, strict=True):
        assert relative_error(result, value[0]) < TOLERANCE[net.dtype]
    assert same_bits(mine.ring, theirs.ring)


# A chunk in 16 bits rounds keys, and the products between them, to the rows' type.
CHUNK_ERROR = {torch.float32: 3e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@pytest.mark.gpu
@pytest.mark.parametrize("net", GPU_NETS, ids=str)
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 200])
def test_a_prompt_follows_the_recurrence_in_float64(net: Net, length: int) -> None:
    store = Store(net, 3, "cuda")
    text = net.projections(length, seed=length, device="cuda")
    output = torch.cat(list(prefill(store, 1, text, [], grid=64)))
    zero = torch.zeros_like(store.delta.state[1], dtype=torch.float64)
    expected, state = exact(net, text, store.weights, zero)
    tolerance = max(CHUNK_ERROR[net.dtype], CHUNK_ERROR[net.state_dtype])
    assert output.dtype == net.dtype and output.shape == expected.shape
    assert relative_error(output, expected) < tolerance
    assert relative_error(store.delta.state[1], state) < tolerance
    assert store.delta.state[[0, 2]].isnan().all() and store.ring[[0, 2]].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("net", GPU_NETS, ids=str)
@pytest.mark.parametrize("grid", [16, 64, 100, 128])
def test_a_prompts_bits_do_not_depend_on_its_cuts(net: Net, grid: int) -> None:
    length = 530
    text = net.projections(length, seed=8, device="cuda")
    rng = random.Random(f"{net} {grid}")
    whole: list[Tensor] = []
    for turn in range(4):
        count = turn if turn < 3 else (length - 1) // grid
        cuts = sorted(rng.sample(range(grid, length, grid), count))
        store = Store(net, 2, "cuda")
        output = torch.cat(list(prefill(store, 1, text, cuts, grid)))
        result = [output, store.delta.state[1], store.ring[1]]
        whole = whole or result
        for x, y in zip(whole, result, strict=True):
            assert same_bits(x, y), cuts


@pytest.mark.gpu
@pytest.mark.parametrize("net", GPU_NETS, ids=str)
def test_rounds_after_a_prompt_equal_the_reference_after_a_prompt(net: Net) -> None:
    mine, slots, at = Store(net, 2, "cuda"), on("cuda", [1]), on("cuda", [0])
    theirs = mine.copy()
    text = net.projections(1, 147, seed=6, device="cuda")
    list(prefill(mine, 1, text[0, :140], [128], grid=64))
    delta_net_prefill_reference(
        net.views(text[0, :140]), theirs.weights, theirs.ring, theirs.delta, slots, at,
        (64, 128, 140), starts_sequence=True,
    )  # fmt: skip
    tolerance = max(CHUNK_ERROR[net.dtype], CHUNK_ERROR[net.state_dtype])
    for begin in (140, 143, 146):
        count = min(3, 147 - begin)
        rows = text[:, begin : begin + count]
        output, expected = (
            store.round(rows, slots, on("cuda", [begin]), on("cuda", [count]), reference=reference)
            for store, reference in ((mine, False), (theirs, True))
        )
        assert relative_error(output, expected) < tolerance
        for store in (mine, theirs):
            store.pending.num_accepted_rows[slots] = count
