"""Slots are copied bit for bit, and kept states are those behind a position.

Storage is NaN of random payloads, so that a value that was rounded, converted or put elsewhere
shows in its bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

import pytest
import torch
from torch import Tensor

from outrider.layers.rows import DeltaCache
from outrider.ops.gated_delta_rule import DeltaState, delta_replay
from outrider.ops.state_copy import copy_slots
from outrider.runner.storage import copy_states, keep_states
from tests.ops.delta_nets import Net, Store, bits, on, same_bits

pytest.importorskip("triton")

PLACES = [
    "reference",
    pytest.param(
        "interpreted",
        marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled"),
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]

NETS = [
    Net(1, 1, 1, 1),
    Net(1, 3, 5, 7, "fp16", "fp16"),  # an odd number of 2-byte elements
    Net(1, 3, 8, 24, "fp32", "bf16"),
    Net(2, 4, 16, 16, "bf16", "fp32"),
    Net(5, 5, 16, 48, "fp16", "fp32"),
    Net(3, 6, 32, 48, "fp32", "fp32"),  # more than a block of every kind
    Net(2, 2, 64, 64, "bf16", "bf16"),
    pytest.param(Net(16, 32, 128, 128, "bf16", "fp32"), marks=pytest.mark.gpu),
    pytest.param(Net(16, 48, 128, 128, "fp16", "bf16"), marks=pytest.mark.gpu),
]

PAIRS = {
    "one": ([3], [1]),
    "a source for two": ([2, 2], [5, 0]),
    "many": ([0, 6, 4, 6], [7, 1, 2, 3]),
    "none": ([], []),
}


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "interpreted":
        for op in ("state_copy", "gated_delta_rule"):
            module = import_module(f"outrider.ops.{op}")
            monkeypatch.setattr(module, "uses_kernels", lambda _tensor: True)
    yield "cuda" if request.param == "cuda" else "cpu"


def filled(net: Net, device: str, seed: int = 0) -> Store:
    """Eight slots whose every bit is random."""
    store, rng = Store(net, 8, device), torch.Generator().manual_seed(seed)
    for tensor in store.tensors():
        raw = bits(tensor)
        noise = torch.randint(-(2**31), 2**31, raw.shape, generator=rng).to(raw.dtype)
        raw.copy_(noise.to(device))
        assert same_bits(tensor, noise.view(tensor.dtype).to(device))
    return store


def of_slot(tensor: Tensor, slot: int) -> Tensor:
    return tensor[:, slot] if tensor.shape[0] == 2 else tensor[slot]


def expected(before: Tensor, pairs: tuple[list[int], list[int]], copied: bool) -> Tensor:
    after = before.clone()
    for source, target in zip(*pairs, strict=True) if copied else ():
        of_slot(after, target).copy_(of_slot(before, source))
    return after


@pytest.mark.parametrize("with_records", [False, True], ids=["state", "state and records"])
@pytest.mark.parametrize("pairs", PAIRS.values(), ids=list(PAIRS))
@pytest.mark.parametrize("net", NETS, ids=str)
@pytest.mark.parametrize("device", PLACES, indirect=True)
def test_slots_are_copied_and_nothing_else_changes(
    device: str, net: Net, pairs: tuple[list[int], list[int]], with_records: bool
) -> None:
    store = filled(net, device)
    before = [tensor.clone() for tensor in store.tensors()]
    copy_slots(store.ring, store.delta, *(on(device, p) for p in pairs), with_records=with_records)
    names = ("ring", *vars(store.delta))
    for name, was, now in zip(names, before, store.tensors(), strict=True):
        copied = with_records or name in ("ring", "state")
        assert same_bits(expected(was, pairs, copied), now), name


@pytest.mark.parametrize("device", PLACES, indirect=True)
def test_slot_ids_may_lie_anywhere_in_memory(device: str) -> None:
    """Columns of one matrix, as a batch brings them, and at any alignment."""
    store = filled(NETS[3], device)
    before = [tensor.clone() for tensor in store.tensors()]
    numbers = on(device, [9, 6, 1, 9, 4, 2, 9, 6, 3]).view(3, 3)
    copy_slots(store.ring, store.delta, numbers[:, 1], numbers[:, 2], with_records=True)
    for was, now in zip(before, store.tensors(), strict=True):
        assert same_bits(expected(was, ([6, 4, 6], [1, 2, 3]), True), now)


@pytest.mark.gpu
def test_slots_past_two_to_the_31_elements_are_found() -> None:
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB")
    slots, rows = (1 << 31) // (32 * 128 * 128) + 3, 1
    state = torch.zeros((slots, 32, 128, 128), dtype=torch.float16, device="cuda")
    records = (2, slots, rows)
    delta = DeltaState(
        state,
        torch.zeros((*records, 1, 8), device="cuda"),
        torch.zeros((*records, 32, 128), device="cuda"),
        torch.zeros((*records, 32), device="cuda"),
    )
    ring = torch.zeros((slots, 4, 16), dtype=torch.float16, device="cuda")
    for tensor in (state, ring):
        tensor[slots - 1] = 3.0
    delta.record_updates[1, slots - 1] = 7.0
    copy_slots(ring, delta, on("cuda", [slots - 1]), on("cuda", [slots - 2]), with_records=True)
    assert (state[slots - 2] == 3).all() and (ring[slots - 2] == 3).all()
    assert (delta.record_updates[1, slots - 2] == 7).all()
    assert not state[slots - 3].any() and not delta.record_updates[0].any()


# What the prefix cache does with them.


KEEPING = [
    Net(1, 3, 8, 24, "fp16", "fp16"),
    Net(2, 4, 16, 16, "fp32", "fp32"),
    Net(5, 5, 16, 48, "fp16", "fp32"),
    pytest.param(Net(16, 32, 128, 128, "bf16", "fp32"), marks=pytest.mark.gpu),
    pytest.param(Net(2, 4, 64, 64, "bf16", "bf16"), marks=pytest.mark.gpu),
]


def after_a_round(net: Net, device: str) -> tuple[Store, Tensor]:
    """Slots 0 .. 3 behind a round of 5 rows from positions 7 .. 10, of which 0, 1, 3, 5 count.

    Returns the store and num_committed of its eight slots; the newest token has no row yet.
    """
    store = Store(net, 8, device)
    store.start()
    store.ring.zero_()
    starts, slots = on(device, [7, 8, 9, 10]), on(device, [0, 1, 2, 3])
    projected = net.projections(4, 5, seed=1, device=device)
    store.round(projected, slots, starts, on(device, [5, 5, 5, 5]), reference=True)
    store.pending.num_accepted_rows[:4] = accepted = on(device, [0, 1, 3, 5])
    committed = torch.zeros(8, dtype=torch.int64, device=device)
    committed[:4] = starts + accepted + 1
    return store, committed


@pytest.mark.parametrize("net", KEEPING, ids=str)
@pytest.mark.parametrize("device", PLACES, indirect=True)
def test_a_kept_state_is_the_one_behind_its_position(device: str, net: Net) -> None:
    store, committed = after_a_round(net, device)
    before = store.copy()
    slots, targets, positions = (
        on(device, x) for x in ([3, 1, 3, 2], [4, 5, 6, 7], [12, 9, 9, 13])
    )
    kept = keep_states(
        [DeltaCache(store.ring, store.delta)], store.pending, slots, targets, positions, committed
    )
    # Behind 2 of 5 rows, behind all of them, before the first, and further than the text.
    assert kept.tolist() == [1, 1, 0, 0]
    assert store.pending.num_accepted_rows[4:].tolist() == [0, 0, 0, 0]
    for source, target, num_rows in ((3, 4, 2), (1, 5, 1)):
        once = before.copy()
        once.pending.num_accepted_rows[source] = num_rows
        delta_replay(once.delta, once.pending, on(device, [source]))
        assert same_bits(store.delta.state[target], once.delta.state[source])
        assert not same_bits(store.delta.state[target], before.delta.state[source])
        assert same_bits(store.ring[target], before.ring[source])
    for was, now in zip(before.tensors(), store.tensors(), strict=True):
        for slot in range(4):
            assert same_bits(of_slot(was, slot), of_slot(now, slot)), "the sources stay"


@pytest.mark.parametrize("device", PLACES, indirect=True)
def test_a_restored_state_goes_on_as_its_source_would(device: str) -> None:
    net = KEEPING[1]
    store, _ = after_a_round(net, device)
    delta_replay(store.delta, store.pending, on(device, [2]))
    store.pending.num_accepted_rows[2] = 0
    copy_states([DeltaCache(store.ring, store.delta)], on(device, [2]), on(device, [6]))
    projected, start = net.projections(1, 3, seed=9, device=device), on(device, [12])
    outputs = [
        store.round(projected, on(device, [slot]), start, on(device, [3]), reference=True)
        for slot in (2, 6)
    ]
    assert same_bits(outputs[0], outputs[1]) and outputs[0].isfinite().all()
    assert same_bits(store.ring[2], store.ring[6])
