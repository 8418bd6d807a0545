"""Delta nets for kernel tests: shapes, storage that is NaN where nobody wrote, a float64 golden.

On a GPU the public functions run, whichever kernels they choose. On a CPU the portable kernels are
called directly, for Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from outrider.ops.gated_delta_net import DeltaNetRows, DeltaNetWeights, delta_net_round
from outrider.ops.gated_delta_net.reference import delta_net_round_reference
from outrider.ops.gated_delta_rule import DeltaState, PendingRecords, delta_replay

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled, not interpreted"
)

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
    def tolerance(self) -> float:
        """A state of 16 bits may be rounded either way, too."""
        narrow = TOLERANCE[self.state_dtype] if self.state != "fp32" else 0.0
        return max(TOLERANCE[self.dtype], narrow)

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


def exact(net: Net, text: Tensor, weights: DeltaNetWeights, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [L, HV, V] and S [HV, V, K] of the layer's own recurrence over text [L, width]."""
    length, (first, ratio) = len(text), (net.channels + 16, net.value_heads // net.key_heads)
    qkv = torch.cat((text.new_zeros(WIDTH - 1, net.channels), text[:, : net.channels]))
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


TINY = [
    Net(1, 1, 16, 16),
    Net(2, 4, 16, 16, "fp16"),
    Net(2, 6, 32, 16),
    Net(1, 3, 8, 24, "fp16", "fp16"),
    Net(5, 5, 16, 48, "fp32", "fp16"),
]


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
