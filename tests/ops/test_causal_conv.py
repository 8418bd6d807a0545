"""The convolution over a ring equals the convolution over the whole text."""

import pytest
import torch
from torch import Tensor

from outrider.ops.causal_conv.reference import causal_conv_reference as causal_conv

WIDTH = 4
ABSOLUTE_ERROR = {torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def random_text(length: int, channels: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(length, channels, generator=rng).to(dtype)


def random_weight(channels: int, dtype: torch.dtype) -> Tensor:
    rng = torch.Generator().manual_seed(1)
    return (torch.randn(channels, WIDTH, generator=rng) * 0.5).to(dtype)


def expected(text: Tensor, weight: Tensor) -> Tensor:
    """[L, C] float64: silu of the four newest inputs times the four taps."""
    padded = torch.cat((torch.zeros(WIDTH - 1, text.shape[1]).double(), text.double()))
    taps = [padded[j : j + len(text)] * weight[:, j].double() for j in range(WIDTH)]
    total = torch.stack(taps).sum(0)
    return total / (1 + (-total).exp())


class Ring:
    """Ring storage for a few slots, poisoned, and calls on one rectangle of rows."""

    def __init__(self, weight: Tensor, num_slots: int = 4, max_rows: int = 9) -> None:
        self.weight = weight
        shape = (num_slots, WIDTH - 1 + max_rows, weight.shape[0])
        self.data = torch.full(shape, float("nan"), dtype=weight.dtype)

    def run(self, parts: list[tuple[int, int, Tensor]], width: int | None = None) -> list[Tensor]:
        """parts: (slot, start, rows [n, C]); returns the valid rows of each."""
        width = width or max(len(rows) for _, _, rows in parts)
        x = torch.full((len(parts), width, self.weight.shape[0]), 9.0, dtype=self.weight.dtype)
        for index, (_, _, rows) in enumerate(parts):
            x[index, : len(rows)] = rows
        slots, starts, num_rows = (
            torch.tensor(values)
            for values in zip(
                *((slot, start, len(rows)) for slot, start, rows in parts), strict=True
            )
        )
        output = causal_conv(x, self.weight, self.data, slots, starts, num_rows)
        return [output[i, : len(rows)] for i, (_, _, rows) in enumerate(parts)]


@pytest.mark.parametrize("dtype", list(ABSOLUTE_ERROR), ids=str)
@pytest.mark.parametrize("channels", [1, 30, 96])
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 9, 40])
def test_chunks_of_any_size_give_the_convolution_of_the_whole_text(
    dtype: torch.dtype, channels: int, chunk: int
) -> None:
    text, weight = random_text(40, channels, dtype), random_weight(channels, dtype)
    ring = Ring(weight)
    outputs = [ring.run([(2, s, text[s : s + chunk])])[0] for s in range(0, 40, chunk)]
    error = torch.cat(outputs).double() - expected(text, weight)
    assert error.abs().max() <= ABSOLUTE_ERROR[dtype]


@pytest.mark.parametrize("num_accepted", range(1, 10))
def test_refused_rows_leave_no_trace(num_accepted: int) -> None:
    text, weight = random_text(30, 16, torch.float32), random_weight(16, torch.float32)
    garbage = random_text(9, 16, torch.float32, seed=5)
    ring, plain = Ring(weight), Ring(weight)
    ring.run([(1, 0, text[:7])])
    plain.run([(1, 0, text[:7])])
    start = 7
    while start + num_accepted <= 30:
        block = torch.cat((text[start : start + num_accepted], garbage))[:9]
        [output] = ring.run([(1, start, block)])
        for row in range(num_accepted):
            position = start + row
            [alone] = plain.run([(1, position, text[position : position + 1])])
            assert torch.equal(output[row], alone[0])
        start += num_accepted


@pytest.mark.parametrize("channels", [5, 16, 30, 48, 96])
def test_a_rows_bits_do_not_depend_on_rows_or_neighbours(channels: int) -> None:
    text, weight = random_text(20, channels, torch.float32), random_weight(channels, torch.float32)
    other = random_text(20, channels, torch.float32, seed=3)
    plain = Ring(weight)
    alone = torch.cat([plain.run([(0, p, text[p : p + 1])])[0] for p in range(20)])
    for num_rows in range(1, 10):
        ring = Ring(weight)
        ring.run([(3, 0, other[:6])])
        ring.run([(1, 0, other[:9])])
        ring.run([(0, 0, text[:4])])
        outputs = ring.run(
            [(3, 6, other[6:7]), (0, 4, text[4 : 4 + num_rows]), (1, 9, other[9:11])], width=9
        )
        assert torch.equal(outputs[1], alone[4 : 4 + num_rows]), num_rows
        [only] = Ring(weight).run([(0, 0, text[:num_rows])])
        assert torch.equal(only, alone[:num_rows]), num_rows


def test_a_sequence_without_rows_keeps_its_ring() -> None:
    weight = random_weight(8, torch.float32)
    ring = Ring(weight)
    ring.data[:] = 5.0
    none = torch.empty(0, 8)
    ring.run([(1, 4, none), (2, 0, random_text(3, 8, torch.float32)), (0, 0, none)], width=3)
    assert (ring.data[[0, 1, 3]] == 5.0).all()
    assert (ring.data[2, 3:] == 5.0).all()


@pytest.mark.parametrize("length", [3, 11, 12, 13, 50])
def test_the_ring_holds_the_newest_raw_inputs_by_position(length: int) -> None:
    text, weight = random_text(length, 8, torch.float32), random_weight(8, torch.float32)
    ring = Ring(weight)
    ring.run([(1, 0, text)])
    for position in range(max(0, length - 3), length):
        assert torch.equal(ring.data[1, position % ring.data.shape[1]], text[position])
