"""Rounds of the gated delta net's kernels: the reference, float64, and the bits of decoding."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from outrider.ops.gated_delta_net import delta_net_round
from outrider.ops.gated_delta_rule.reference import delta_replay_reference
from tests.ops.delta_nets import (
    GPU_NETS,
    TINY,
    TOLERANCE,
    WIDTH,
    Net,
    Store,
    exact,
    interpreted,
    kernel_replay,
    on,
    relative_error,
    same_bits,
)

pytest.importorskip("triton")

# A round against the reference


def check_a_round(net: Net, device: str, num_rows: list[int], width: int) -> None:
    """Two rounds of a ragged batch beside the reference, over poisoned storage."""
    batch = len(num_rows)
    mine = Store(net, batch + 2, device)
    mine.start()
    slots = on(device, [batch + 1 - i for i in range(batch)])
    starts, lengths = on(device, list(range(batch))), on(device, num_rows)
    for position in range(batch):  # what the convolution reads before its rows
        for back in range(1, min(position, WIDTH - 1) + 1):
            entry = (position - back) % mine.ring.shape[1]
            mine.ring[slots[position], entry] = net.projections(
                seed=50 * position + back, device=device
            )[: net.channels]
    theirs = mine.copy()
    for turn in range(2):
        projected = net.projections(batch, width, seed=20 + turn, device=device)
        before = [x.clone() for x in mine.tensors()]
        output = mine.round(projected, slots, starts, lengths)
        expected = theirs.round(projected, slots, starts, lengths, reference=True)
        for b, count in enumerate(num_rows):
            if count:
                assert relative_error(output[b, :count], expected[b, :count]) < net.tolerance
        compare_stores(net, mine, theirs)
        inert = [int(slots[b]) for b in range(batch) if num_rows[b] == 0]
        for was, now in zip(before, mine.tensors(), strict=True):
            axis = 1 if now.dim() == 5 or now.shape[0] == 2 else 0
            for slot in (0, *inert):
                assert same_bits(was.select(axis, slot), now.select(axis, slot)), slot
        for store in (mine, theirs):
            store.pending.num_accepted_rows[slots] = on(device, [b % 3 for b in range(batch)])
        starts = starts + mine.pending.num_accepted_rows[slots].minimum(lengths)


def compare_stores(net: Net, mine: Store, theirs: Store) -> None:
    """The same places are written; the ring holds the same bits, the rest the same values."""
    assert same_bits(mine.ring, theirs.ring)
    pairs = zip(vars(mine.delta).values(), vars(theirs.delta).values(), strict=True)
    for value, expected in pairs:
        written = ~expected.isnan()
        assert torch.equal(written, ~value.isnan())
        if written.any():
            assert relative_error(value[written], expected[written]) < net.tolerance


@interpreted
@pytest.mark.parametrize("net", TINY, ids=str)
@pytest.mark.parametrize(("num_rows", "width"), [([1], 1), ([3, 0, 1, 2], 3), ([2, 1], 4)], ids=str)
def test_a_round_equals_the_reference_in_the_interpreter(
    net: Net, num_rows: list[int], width: int
) -> None:
    check_a_round(net, "cpu", num_rows, width)


RAGGED = [
    ([1], 1),
    ([4], 4),
    ([3, 0, 1, 2], 3),
    ([9, 9, 1, 0, 4, 8, 7, 5], 9),
    ([1, 2, 2, 0, 1, 2], 6),
]


@pytest.mark.gpu
@pytest.mark.parametrize("net", GPU_NETS, ids=str)
@pytest.mark.parametrize(("num_rows", "width"), RAGGED, ids=str)
def test_a_round_equals_the_reference(net: Net, num_rows: list[int], width: int) -> None:
    check_a_round(net, "cuda", num_rows, width)


# Any acceptance leaves the bits of one-token decoding


def check_acceptance(
    net: Net, device: str, batch: int, width: int, num_rounds: int, seed: int = 0
) -> None:
    """Rounds of `width` rows with random acceptance beside decoding one token at a time."""
    rng = random.Random(f"{net} {batch} {width} {seed}")
    text = net.projections(batch, num_rounds * width + 1, seed=seed + 1, device=device)
    store = Store(net, batch + 1, device)
    store.start()
    plain = store.copy()
    order = list(range(1, batch + 1))
    rng.shuffle(order)
    slots, positions = on(device, order), [0] * batch
    found: list[list[Tensor]] = [[] for _ in range(batch)]
    for turn in range(num_rounds):
        num_rows = [rng.choice([width, width, rng.randint(0, width)]) for _ in range(batch)]
        accepted = [rng.randint(0, count) for count in num_rows]
        projected = net.projections(batch, width, seed=seed + 100 + turn, device=device)
        for b, count in enumerate(accepted):
            projected[b, :count] = text[b, positions[b] : positions[b] + count]
        output = store.round(projected, slots, on(device, positions), on(device, num_rows))
        for b, count in enumerate(accepted):
            found[b].append(output[b, :count])
            positions[b] += count
        counts = store.pending.num_accepted_rows[slots].tolist()
        for b, (count, rows) in enumerate(zip(accepted, num_rows, strict=True)):
            if rows:
                counts[b], wild = count, rng.choice([0, 0, 1000, 2**40])
                if count in (0, rows):  # beyond either end it is clamped to that end
                    counts[b] = count + (wild if count else -wild)
        store.pending.num_accepted_rows[slots] = on(device, counts)

    expected: list[list[Tensor]] = [[] for _ in range(batch)]
    for position in range(max(positions)):
        live = [int(position < end) for end in positions]
        at = on(device, [position] * batch)
        output = plain.round(text[:, position : position + 1], slots, at, on(device, live))
        plain.pending.num_accepted_rows[slots] = on(device, [1] * batch)
        for b in range(batch):
            if live[b]:
                expected[b].append(output[b])
    for b in range(batch):
        assert len(torch.cat(found[b])) == positions[b]
        if positions[b]:
            assert same_bits(torch.cat(found[b]), torch.cat(expected[b])), b
    assert same_bits(store.replay(slots), plain.replay(slots))
    assert store.delta.state[slots].isfinite().all() and store.delta.state[0].isfinite().all()


@interpreted
@pytest.mark.parametrize("net", [Net(1, 2, 16, 16), Net(2, 2, 8, 24, "fp16", "fp16")], ids=str)
@pytest.mark.parametrize("width", [2, 5])
def test_any_acceptance_leaves_the_bits_of_decoding_in_the_interpreter(
    net: Net, width: int
) -> None:
    check_acceptance(net, "cpu", batch=2, width=width, num_rounds=5)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("width", range(1, 10))
def test_any_acceptance_leaves_the_bits_of_decoding(batch: int, width: int) -> None:
    check_acceptance(Net(16, 32, 128, 128, "bf16"), "cuda", batch, width, num_rounds=20)


@pytest.mark.gpu
@pytest.mark.parametrize("net", GPU_NETS, ids=str)
@pytest.mark.parametrize(("batch", "width"), [(3, 4), (33, 2)])
def test_any_acceptance_leaves_the_bits_of_decoding_in_every_shape_and_type(
    net: Net, batch: int, width: int
) -> None:
    check_acceptance(net, "cuda", batch, width, num_rounds=20)


@pytest.mark.gpu
@pytest.mark.parametrize("state", ["fp32", "bf16"])
@pytest.mark.parametrize("width", [1, 4, 9])
def test_the_tile_changes_no_bit(state: str, width: int) -> None:
    from outrider.ops.gated_delta_net.triton import round_inputs
    from outrider.ops.gated_delta_rule.hopper import launch_rows

    net, batch = Net(16, 32, 128, 128, "fp32", state), 3
    first = Store(net, batch + 1, "cuda")
    first.start()
    slots, starts = on("cuda", [2, 1, 3]), on("cuda", [0, 1, 7])
    num_rows = on("cuda", [width, width, max(width - 1, 1)])
    first.ring.fill_(0.5)
    projected = net.projections(batch, width, seed=1, device="cuda")
    first.round(projected, slots, starts, num_rows)
    first.pending.num_accepted_rows[slots] = num_rows
    results: list[list[Tensor]] = []
    for shape in ((16, 1), (32, 1), (32, 2), (32, 4), (64, 1), (16, 4)):
        for overlap in (False, True):
            store = first.copy()
            rows = net.views(projected.flatten(0, 1))
            inputs = round_inputs(
                rows, store.weights, store.ring, store.delta, store.pending, slots, starts,
                num_rows, overlap=overlap,
            )  # fmt: skip
            output = torch.zeros_like(inputs.values)
            launch_rows(
                inputs, output, store.delta, store.pending, slots, num_rows,
                overlap=overlap, shape=shape,
            )  # fmt: skip
            live = output.unflatten(0, (batch, width))[:, : max(width - 1, 1)]
            results.append([live.clone(), *store.tensors()])
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            assert same_bits(x, y)


@pytest.mark.gpu
def test_a_captured_round_gives_the_bits_of_an_eager_one() -> None:
    net, width = Net(16, 32, 128, 128, "bf16"), 3
    eager = Store(net, 5, "cuda")
    eager.start()
    eager.ring.fill_(0.25)
    # Two places of padding, both in the null slot.
    slots, num_rows = on("cuda", [4, 2, 0, 0, 3]), on("cuda", [3, 2, 0, 0, 1])
    starts, projected = on("cuda", [5, 6, 0, 0, 11]), net.projections(5, 3, seed=3, device="cuda")
    eager.round(projected, slots, starts, num_rows)
    eager.pending.num_accepted_rows[slots] = on("cuda", [2, 1, 0, 0, 1])
    captured, rows = eager.copy(), net.views(projected.flatten(0, 1))
    scratch = eager.copy()

    def run(store: Store) -> Tensor:
        return delta_net_round(
            rows, store.weights, store.ring, store.delta, store.pending, slots, starts, num_rows
        )

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(scratch)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run(captured)
    graph.replay()
    expected = run(eager)
    for b, count in enumerate(num_rows.tolist()):
        own = slice(b * width, b * width + count)
        assert same_bits(output[own], expected[own])
    for x, y in zip(captured.tensors(), eager.tensors(), strict=True):
        assert same_bits(x, y)


# Replay alone


def check_replay(net: Net, device: str) -> None:
    counts = [-(2**62), -1, 0, 1, 2, 3, 4, 2**62]
    store = Store(net, len(counts) + 2, device)
    store.start()
    slots = on(device, list(range(1, len(counts) + 1)))
    projected = net.projections(len(counts), 3, seed=2, device=device)
    zeros, full = torch.zeros_like(slots), torch.full_like(slots, 3)
    store.round(projected, slots, zeros, full)
    store.pending.num_accepted_rows[slots] = on(device, counts)
    named = slots[1:].flip(0)
    expected = store.copy()
    delta_replay_reference(expected.delta, expected.pending, named)
    before = store.delta.state.clone()
    kernel_replay(store.delta, store.pending, named)
    assert relative_error(store.delta.state, expected.delta.state) < TOLERANCE[net.state_dtype]
    for slot in (0, 1, 2, 3, len(counts) + 1):  # not named, or nothing accepted
        assert same_bits(store.delta.state[slot], before[slot]), slot
    for one, other in ((6, 7), (6, 8)):  # clamped to the round's 3 rows
        own = store.copy()
        own.delta.state.copy_(before)
        own.delta.state[other] = before[one]
        for records in (own.delta.record_keys, own.delta.record_updates, own.delta.record_decays):
            records[:, other] = records[:, one]
        kernel_replay(own.delta, own.pending, on(device, [one, other]))
        assert same_bits(own.delta.state[one], own.delta.state[other])


@interpreted
@pytest.mark.parametrize("net", [Net(1, 2, 16, 16), Net(1, 2, 8, 24, "fp16", "fp16")], ids=str)
def test_replay_clamps_any_count_in_the_interpreter(net: Net) -> None:
    check_replay(net, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("net", GPU_NETS, ids=str)
def test_replay_clamps_any_count(net: Net) -> None:
    check_replay(net, "cuda")


# The ring


def check_ring_edges(net: Net, device: str) -> None:
    """Tokens 0 .. 15 in rounds of every size have the outputs of decoding one by one."""
    length = 16
    text = net.projections(1, length, seed=9, device=device)
    slots = on(device, [1])
    reference: list[Tensor] = []
    for size in (1, 2, 3, 4, 5, 9):
        store = Store(net, 3, device)
        store.start()
        outputs: list[Tensor] = []
        for begin in range(0, length, size):
            count = min(size, length - begin)
            projected = text[:, begin : begin + count]
            output = store.round(projected, slots, on(device, [begin]), on(device, [count]))
            store.pending.num_accepted_rows[slots] = count
            outputs.append(output[0])
        if not reference:
            reference = outputs
        assert same_bits(torch.cat(outputs), torch.cat(reference)), size
        for position in range(length - WIDTH + 1, length):
            kept = store.ring[1, position % store.ring.shape[1]]
            assert same_bits(kept, text[0, position, : net.channels])
        assert store.ring[[0, 2]].isnan().all()


@interpreted
def test_rounds_wrap_around_the_ring_in_the_interpreter() -> None:
    check_ring_edges(Net(1, 1, 16, 16, "fp16"), "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("net", GPU_NETS, ids=str)
def test_rounds_wrap_around_the_ring(net: Net) -> None:
    check_ring_edges(net, "cuda")


# Float64

ROUNDING = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}


@pytest.mark.gpu
@pytest.mark.parametrize("net", [n for n in GPU_NETS if n.state == "fp32"], ids=str)
@pytest.mark.parametrize("width", [1, 4])
def test_a_long_decode_stays_close_to_float64(net: Net, width: int) -> None:
    length, slots = 120, on("cuda", [1])
    text = net.projections(1, length, seed=4, device="cuda")
    store = Store(net, 2, "cuda")
    store.start()
    initial = store.delta.state[1].clone()
    outputs: list[Tensor] = []
    for begin in range(0, length, width):
        rows = text[:, begin : begin + width]
        outputs.append(store.round(rows, slots, on("cuda", [begin]), on("cuda", [width]))[0])
        store.pending.num_accepted_rows[slots] = width
    expected, state = exact(net, text[0], store.weights, initial)
    assert relative_error(torch.cat(outputs), expected) < ROUNDING[net.dtype]
    # Conv outputs near the middle of two 16-bit values may fall on the other side.
    assert relative_error(store.replay(slots)[0], state) < ROUNDING[net.dtype]
