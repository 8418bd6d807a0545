"""Rotary embedding turns pairs of dimensions by the position's angles."""

import cmath

import pytest
import torch

from outrider.layers.rotary import RotaryEmbedding
from outrider.ops.rotary.reference import rotary_reference as apply_rotary


@pytest.mark.parametrize("rotary_dim", [2, 8, 16])
def test_pairs_turn_like_complex_numbers_and_the_rest_passes_through(rotary_dim: int) -> None:
    theta, positions = 10000.0, [0, 1, 5, 1000]
    x = torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(0))
    cos, sin = RotaryEmbedding(rotary_dim, theta)(torch.tensor(positions))
    result = apply_rotary(x, cos, sin)
    half = rotary_dim // 2
    for row, position in enumerate(positions):
        for head in range(3):
            for i in range(half):
                number = complex(x[row, head, i], x[row, head, i + half])
                turned = number * cmath.exp(1j * position * theta ** (-2 * i / rotary_dim))
                got = complex(result[row, head, i], result[row, head, i + half])
                # Angles are float32: at position 1000 their own rounding is about 1e-4.
                assert abs(got - turned) < 3e-4
    assert torch.equal(result[..., rotary_dim:], x[..., rotary_dim:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_position_zero_changes_nothing_in_any_type(dtype: torch.dtype) -> None:
    x = torch.randn(1, 2, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    cos, sin = RotaryEmbedding(4, 1e7)(torch.tensor([0]))
    result = apply_rotary(x, cos, sin)
    assert result.dtype == dtype and torch.equal(result, x)


@pytest.mark.parametrize("rotary_dim", [2, 6, 8, 16])
def test_a_rows_bits_do_not_depend_on_its_neighbours(rotary_dim: int) -> None:
    rotary = RotaryEmbedding(rotary_dim, 1e7)
    positions = torch.arange(40) * 7
    x = torch.randn(40, 3, 16, generator=torch.Generator().manual_seed(0))
    together = apply_rotary(x, *rotary(positions))
    for row in range(40):
        alone = apply_rotary(x[row : row + 1], *rotary(positions[row : row + 1]))
        assert torch.equal(alone[0], together[row]), row
