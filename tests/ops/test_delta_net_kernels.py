"""Kernels of the gated delta net against the reference, against float64, and against themselves.

Without a GPU the portable kernels run under Triton's interpreter, called directly. With one, the
public functions run, whichever kernels they choose. Whatever nobody wrote is NaN.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from outrider.ops.gated_delta_net import (
    DeltaNetRows,
    DeltaNetWeights,
    delta_net_prefill,
    delta_net_round,
)
from outrider.ops.gated_delta_net.prefill import calls
from outrider.ops.gated_delta_net.reference import (
    delta_net_prefill_reference,
    delta_net_round_reference,
)
from outrider.ops.gated_delta_rule import DeltaState, PendingRecords, delta_replay
from outrider.ops.gated_delta_rule.reference import delta_replay_reference

pytest.importorskip("triton")

WIDTH = 4
MAX_ROWS = 9
FLOATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Relative Frobenius error against the reference. A conv output that lies between two values of 16
# bits may be rounded either way, and everything behind it then differs by that.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@dataclass(frozen=True)
class Net:
    """Shape of a delta net, and the types of its rows and of its stored state."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    rows: str = "fp32"
    state: str = "fp32"

    @property
    def dtype(self) -> torch.dtype:
        return FLOATS[self.rows]

    @property
    def state_dtype(self) -> torch.dtype:
        return FLOATS[self.state]

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def __str__(self) -> str:
        sizes = f"{self.key_heads}-{self.value_heads}-{self.key_dim}-{self.value_dim}"
        return f"{sizes}-{self.rows}-{self.state}"

    def weights(self, device: str) -> DeltaNetWeights:
        rng = torch.Generator().manual_seed(11)
        conv = torch.randn(self.channels, WIDTH, generator=rng) * 0.5
        # Memories of about 3 to 50 tokens.
        a_log = torch.linspace(0.02, 0.3, self.value_heads).log()
        dt_bias = torch.rand(self.value_heads, generator=rng) + 0.5
        return DeltaNetWeights(conv.to(self.dtype).to(device), a_log.to(device), dt_bias.to(device))

    def projections(self, *shape: int, seed: int, device: str) -> Tensor:
        """[*shape, width]: qkv, something that is not ours, b, a, as one projection gives them."""
        rng = torch.Generator(device=device).manual_seed(seed)
        width = self.channels + 16 + 2 * self.value_heads
        return torch.randn(*shape, width, generator=rng, device=device).to(self.dtype)

    def views(self, projected: Tensor) -> DeltaNetRows:
        """projected [R, width]."""
        first = self.channels + 16
        b, a = projected[:, first:].split(self.value_heads, dim=1)
        return DeltaNetRows(projected[:, : self.channels], a, b)


def nan(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


class Store:
    """Ring, state and records of a few slots, and rounds over them."""

    def __init__(self, net: Net, num_slots: int, device: str) -> None:
        self.net, self.device, self.weights = net, device, net.weights(device)
        records = (2, num_slots, MAX_ROWS)
        ring = (num_slots, WIDTH - 1 + MAX_ROWS, net.channels)
        self.ring = nan(*ring, dtype=net.dtype, device=device)
        shapes = ((net.key_heads, net.key_dim), (net.value_heads, net.value_dim))
        state = (num_slots, net.value_heads, net.value_dim, net.key_dim)
        self.delta = DeltaState(
            nan(*state, dtype=net.state_dtype, device=device),
            *(nan(*records, *s, dtype=torch.float32, device=device) for s in shapes),
            nan(*records, net.value_heads, dtype=torch.float32, device=device),
        )
        counters = (torch.zeros(num_slots, dtype=torch.int64, device=device) for _ in range(3))
        self.pending = PendingRecords(*counters)

    def start(self, seed: int = 5) -> None:
        """Every slot begins at a state of its own."""
        rng = torch.Generator(device=self.device).manual_seed(seed)
        state = torch.randn(self.delta.state.shape, generator=rng, device=self.device)
        self.delta.state.copy_(state * 0.3)

    def round(
        self,
        projected: Tensor,
        slots: Tensor,
        starts: Tensor,
        num_rows: Tensor,
        *,
        reference: bool = False,
    ) -> Tensor:
        """projected [B, T, width] -> [B, T, HV, V]; parity and last_num_rows move on."""
        rows = self.net.views(projected.flatten(0, 1))
        arguments = (rows, self.weights, self.ring, self.delta, self.pending)
        run = delta_net_round_reference if reference else kernel_round
        output = run(*arguments, slots, starts, num_rows)
        live = num_rows > 0
        self.pending.parity[slots[live]] ^= 1
        self.pending.last_num_rows[slots[live]] = num_rows[live]
        return output.unflatten(0, projected.shape[:2])

    def replay(self, slots: Tensor) -> Tensor:
        """State of `slots` with everything accepted, which counts as consumed from then on."""
        kernel_replay(self.delta, self.pending, slots)
        self.pending.num_accepted_rows[slots] = 0
        return self.delta.state[slots]

    def tensors(self) -> list[Tensor]:
        return [self.ring, *vars(self.delta).values()]

    def copy(self) -> Store:
        other = Store(self.net, self.ring.shape[0], self.device)
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            theirs.copy_(mine)
        for mine, theirs in zip(
            vars(self.pending).values(), vars(other.pending).values(), strict=True
        ):
            theirs.copy_(mine)
        return other


def kernel_round(
    rows: DeltaNetRows,
    weights: DeltaNetWeights,
    ring: Tensor,
    delta: DeltaState,
    pending: PendingRecords,
    slots: Tensor,
    starts: Tensor,
    num_rows: Tensor,
) -> Tensor:
    if rows.qkv.is_cuda:
        return delta_net_round(rows, weights, ring, delta, pending, slots, starts, num_rows)
    from outrider.ops.gated_delta_net.triton import round_inputs
    from outrider.ops.gated_delta_rule.triton import delta_rows

    inputs = round_inputs(
        rows, weights, ring, delta, pending, slots, starts, num_rows, overlap=False
    )
    return delta_rows(inputs, delta, pending, slots, num_rows, overlap=False)


def kernel_replay(delta: DeltaState, pending: PendingRecords, slots: Tensor) -> None:
    if slots.is_cuda:
        return delta_replay(delta, pending, slots)
    from outrider.ops.gated_delta_rule.triton import delta_replay_kernel

    return delta_replay_kernel(delta, pending, slots)


def bits(x: Tensor) -> Tensor:
    """Comparable also where NaN."""
    return x.contiguous().view(INTEGERS[x.element_size()])


def same_bits(x: Tensor, y: Tensor) -> bool:
    return torch.equal(bits(x), bits(y))


def relative_error(x: Tensor, expected: Tensor) -> float:
    x, expected = x.double(), expected.double()
    return float((x - expected).norm() / expected.norm())


def on(device: str, values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


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
        tolerance = TOLERANCE[net.dtype]
        for b, count in enumerate(num_rows):
            if count:
                assert relative_error(output[b, :count], expected[b, :count]) < tolerance
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
    tolerance = TOLERANCE[net.dtype]
    if net.state_dtype != torch.float32:
        tolerance = max(tolerance, TOLERANCE[net.state_dtype])
    pairs = zip(vars(mine.delta).values(), vars(theirs.delta).values(), strict=True)
    for value, expected in pairs:
        written = ~expected.isnan()
        assert torch.equal(written, ~value.isnan())
        if written.any():
            assert relative_error(value[written], expected[written]) < tolerance


TINY = [
    Net(1, 1, 16, 16),
    Net(2, 4, 16, 16, "fp16"),
    Net(2, 6, 32, 16),
    Net(1, 3, 8, 24, "fp16", "fp16"),
    Net(5, 5, 16, 48, "fp32", "fp16"),
]


@pytest.mark.parametrize("net", TINY, ids=str)
@pytest.mark.parametrize(("num_rows", "width"), [([1], 1), ([3, 0, 1, 2], 3), ([2, 1], 4)], ids=str)
def test_a_round_equals_the_reference_in_the_interpreter(
    net: Net, num_rows: list[int], width: int
) -> None:
    check_a_round(net, "cpu", num_rows, width)


GPU_NETS = [
    Net(16, 32, 128, 128, rows, state)
    for rows in ("fp32", "fp16", "bf16")
    for state in ("fp32", "fp16", "bf16")
] + [
    Net(16, 48, 128, 128, "bf16"),
    Net(16, 16, 128, 128, "fp16"),
    Net(2, 4, 64, 64, "bf16"),
    Net(2, 4, 32, 32, "fp16", "bf16"),
    Net(1, 3, 8, 24, "bf16"),
    Net(2, 2, 128, 64, "fp32"),
    Net(2, 6, 16, 16, "fp32", "fp16"),
]
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
                wild = rng.choice([0, 0, 1000, 2**40])
                counts[b] = count + wild if count == rows else count - wild if not count else count
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
    net, batch, width = Net(16, 32, 128, 128, "bf16"), 4, 3
    eager = Store(net, batch + 1, "cuda")
    eager.start()
    eager.ring.fill_(0.25)
    slots, num_rows = on("cuda", [4, 2, 0, 3]), on("cuda", [3, 2, 0, 1])
    starts, projected = on("cuda", [5, 6, 0, 11]), net.projections(4, 3, seed=3, device="cuda")
    eager.round(projected, slots, starts, num_rows)
    eager.pending.num_accepted_rows[slots] = on("cuda", [2, 1, 0, 1])
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


def test_rounds_wrap_around_the_ring_in_the_interpreter() -> None:
    check_ring_edges(Net(1, 1, 16, 16, "fp16"), "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("net", GPU_NETS, ids=str)
def test_rounds_wrap_around_the_ring(net: Net) -> None:
    check_ring_edges(net, "cuda")


# Float64


def exact(net: Net, text: Tensor, weights: DeltaNetWeights, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [L, HV, V] and S [HV, V, K] of the layer's own recurrence over text [L, width]."""
    length, (first, ratio) = len(text), (net.channels + 16, net.value_heads // net.key_heads)
    qkv = torch.cat((torch.zeros_like(text[: WIDTH - 1, : net.channels]), text[:, : net.channels]))
    taps = (qkv[j : j + length].double() * weights.conv[:, j].double() for j in range(WIDTH))
    mixed = sum(taps, torch.zeros((), dtype=torch.float64, device=text.device))
    mixed = (mixed / (1 + (-mixed).exp())).to(net.dtype).double()
    b, a = text[:, first:].double().split(net.value_heads, dim=1)
    decay = (-weights.a_log.double().exp() * (1 + (a + weights.dt_bias.double()).exp()).log()).exp()
    beta = 1 / (1 + (-b).exp())
    key_size = net.key_heads * net.key_dim
    q, k, v = mixed.split((key_size, key_size, net.value_heads * net.value_dim), dim=1)
    q, k = (
        x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        for x in (y.unflatten(1, (net.key_heads, -1)) for y in (q, k))
    )
    q, k = (x.repeat_interleave(ratio, dim=1) for x in (q * net.key_dim**-0.5, k))
    v = v.unflatten(1, (net.value_heads, -1))
    s, outputs = state.double(), []
    for t in range(length):
        s = s * decay[t, :, None, None]
        u = beta[t, :, None] * (v[t] - (s * k[t, :, None, :]).sum(-1))
        s = s + u[..., None] * k[t, :, None, :]
        outputs.append((s * q[t, :, None, :]).sum(-1))
    return torch.stack(outputs), s


ROUNDING = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}


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


# Prompt chunks


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
CHUNK_ERROR = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


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
