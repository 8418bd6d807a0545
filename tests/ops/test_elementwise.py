"""Activations: the right value, and the same bits wherever an element lies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from outrider.ops.elementwise import sigmoid, silu, softplus

EXACT: dict[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] = {
    sigmoid: lambda x: 1 / (1 + (-x).exp()),
    silu: lambda x: x / (1 + (-x).exp()),
    softplus: lambda x: torch.where(x > 0, x + (-x).exp().log1p(), x.exp().log1p()),
}


@pytest.mark.parametrize("function", EXACT, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_are_exact_to_the_types_rounding(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    x = torch.linspace(-60, 60, 4001).to(dtype)
    exact = EXACT[function](x.double())
    result = function(x)
    assert result.dtype == dtype and result.isfinite().all()
    spacing = torch.finfo(dtype).eps * exact.abs() + torch.finfo(dtype).tiny
    assert ((result.double() - exact).abs() <= 2 * spacing + 1e-7).all()


@pytest.mark.parametrize("function", EXACT, ids=lambda f: f.__name__)
def test_an_element_has_the_same_bits_wherever_it_lies(
    function: Callable[[Tensor], Tensor],
) -> None:
    x = torch.randn(70_001, generator=torch.Generator().manual_seed(0)) * 5
    whole = function(x)
    for begin, length in ((0, 1), (3, 7), (17, 33), (5, 40_000), (69_990, 11)):
        part = x[begin : begin + length].clone()
        assert torch.equal(function(part), whole[begin : begin + length])


@pytest.mark.parametrize("function", EXACT, ids=lambda f: f.__name__)
def test_extreme_values_do_not_overflow(function: Callable[[Tensor], Tensor]) -> None:
    result = function(torch.tensor([-1e30, -200.0, 200.0, 1e30]))
    low, high = (0.0, 1.0) if function is sigmoid else (0.0, 1e30)
    assert result[0].abs() == low and result[3] == high
    assert not result.isnan().any()
