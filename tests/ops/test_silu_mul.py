"""silu(gate) * up equals its formula, and a row's bits depend on the row alone."""

import pytest
import torch

from outrider.ops.silu_mul import silu_mul

RELATIVE_ERROR = {torch.float32: 1e-6, torch.float16: 2 * 2**-11, torch.bfloat16: 2 * 2**-8}


@pytest.mark.parametrize("dtype", list(RELATIVE_ERROR), ids=str)
@pytest.mark.parametrize("size", [1, 7, 64])
def test_every_even_column_gates_the_odd_one_after_it(dtype: torch.dtype, size: int) -> None:
    x = torch.randn(5, 2 * size, generator=torch.Generator().manual_seed(size)).to(dtype)
    gate, up = x[:, ::2].double(), x[:, 1::2].double()
    exact = gate / (1 + (-gate).exp()) * up
    result = silu_mul(x)
    assert result.dtype == dtype
    limit = RELATIVE_ERROR[dtype] * exact.abs() + 1e-7
    assert ((result.double() - exact).abs() <= limit).all()


@pytest.mark.parametrize("dtype", list(RELATIVE_ERROR), ids=str)
@pytest.mark.parametrize("size", [1, 7, 24, 64, 100])
def test_a_rows_bits_do_not_depend_on_how_many_rows_there_are(
    dtype: torch.dtype, size: int
) -> None:
    x = 3 * torch.randn(81, 2 * size, generator=torch.Generator().manual_seed(size))
    x = x.to(dtype)
    alone = torch.cat([silu_mul(x[row : row + 1]) for row in range(81)])
    for count in (2, 3, 4, 5, 7, 8, 9, 16, 27, 81):
        assert torch.equal(silu_mul(x[:count]), alone[:count]), count
