"""Rotary embedding turns pairs of dimensions by the position's angles."""

import cmath
import importlib
from typing import Any

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


# Three positions a token: time, height, width.


def test_frequencies_take_turns_among_time_height_and_width() -> None:
    rotary = RotaryEmbedding(20, 1e4, mrope_section=(5, 3, 2))
    # Worked out by hand: 3 heights at 1, 4, 7 and 2 widths at 2, 5; all others are times.
    axes = [0, 1, 2, 0, 1, 2, 0, 1, 0, 0]
    positions = torch.tensor([[7, 0], [100, 3], [31, 900]])
    cos, sin = rotary(positions)
    for row in range(2):
        for i, axis in enumerate(axes):
            alone_cos, alone_sin = rotary(positions[axis, row : row + 1])
            for at in (i, i + 10):
                assert cos[row, at] == alone_cos[0, at] and sin[row, at] == alone_sin[0, at]


@pytest.mark.parametrize(("rotary_dim", "sections"), [(64, (11, 11, 10)), (6, (1, 1, 1))])
def test_three_equal_positions_have_the_bits_of_one(
    rotary_dim: int, sections: tuple[int, int, int]
) -> None:
    rotary = RotaryEmbedding(rotary_dim, 1e7, mrope_section=sections)
    positions = torch.randint(0, 262144, (41,), generator=torch.Generator().manual_seed(0))
    one, three = rotary(positions), rotary(positions.expand(3, -1).contiguous())
    assert torch.equal(one[0], three[0]) and torch.equal(one[1], three[1])


@pytest.mark.parametrize(
    ("family", "rotary_dim", "sections"),
    [
        ("qwen3_5", 64, (11, 11, 10)),
        ("qwen3_5", 16, (3, 3, 2)),
        ("qwen3_5", 8, (1, 2, 1)),  # heights past the last frequency have no place
        ("qwen3_vl", 128, (24, 20, 20)),
    ],
)
def test_angles_are_those_of_transformers(
    family: str, rotary_dim: int, sections: tuple[int, int, int]
) -> None:
    pytest.importorskip("transformers")
    name = {"qwen3_5": "Qwen3_5Text", "qwen3_vl": "Qwen3VLText"}[family]
    package = f"transformers.models.{family}"
    configuration: Any = importlib.import_module(f"{package}.configuration_{family}")
    modeling: Any = importlib.import_module(f"{package}.modeling_{family}")
    head_dim = rotary_dim if family == "qwen3_vl" else 4 * rotary_dim
    config = getattr(configuration, f"{name}Config")(
        head_dim=head_dim,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": rotary_dim / head_dim,
            "mrope_section": list(sections),
        },
    )
    theirs = getattr(modeling, f"{name}RotaryEmbedding")(config)
    rng = torch.Generator().manual_seed(rotary_dim)
    positions = torch.randint(0, 100_000, (3, 50), generator=rng)
    expected = theirs(torch.zeros(1), positions[:, None])
    result = RotaryEmbedding(rotary_dim, 1e7, mrope_section=sections)(positions)
    for got, right in zip(result, expected, strict=True):
        assert (got - right[0]).abs().max() < 2e-7
    plain = RotaryEmbedding(rotary_dim, 1e7)(positions[0])
    assert (plain[0] - expected[0][0]).abs().max() > 0.1  # the sections were looked at
