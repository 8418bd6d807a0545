"""y = x W^T is right, and a row's bits depend on the row alone."""

import pytest
import torch
from torch import Tensor

from outrider.ops.linear import SUPPORTED_DTYPES, linear

RELATIVE_ERROR = {
    torch.float32: 1e-6,
    # Only the result is rounded to the type; the sum is float32.
    torch.float16: 2**-11,
    torch.bfloat16: 2**-8,
}
SIZES = [(64, 64), (37, 53), (48, 1), (1, 5), (256, 193), (704, 256), (512, 256)]
"""Inner and outer sizes."""

ROW_COUNTS = [*range(1, 20), 31, 32, 33, 48, 63, 64, 65, 96, 129, 576]


def random_pair(num_rows: int, inner: int, outer: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(num_rows + inner * 1000 + outer)
    x = torch.randn(num_rows, inner, generator=rng).to(dtype)
    return x, torch.randn(outer, inner, generator=rng).to(dtype)


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 7, 16, 33])
def test_a_projection_is_the_exact_product_up_to_the_types_rounding(
    dtype: torch.dtype, size: tuple[int, int], num_rows: int
) -> None:
    x, weight = random_pair(num_rows, *size, dtype)
    exact = x.double() @ weight.double().T
    scale = x.double().abs() @ weight.double().abs().T
    result = linear(x, weight)
    assert result.dtype == dtype and result.shape == exact.shape
    limit = RELATIVE_ERROR[dtype] * scale + 2**-25  # half the smallest float16
    assert ((result.double() - exact).abs() <= limit).all()


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_rows_bits_do_not_depend_on_how_many_rows_there_are_or_where_it_stands(
    dtype: torch.dtype, size: tuple[int, int], num_threads: int
) -> None:
    x, weight = random_pair(max(ROW_COUNTS), *size, dtype)
    alone = linear(x[:1], weight)[0]
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for num_rows in ROW_COUNTS:
            assert torch.equal(linear(x[:num_rows], weight)[0], alone), f"first of {num_rows}"
            moved = linear(x[:num_rows].flip(0), weight)
            assert torch.equal(moved[-1], alone), f"last of {num_rows}"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
def test_a_row_of_nan_reaches_no_other_row(dtype: torch.dtype) -> None:
    x, weight = random_pair(5, 40, 24, dtype)
    clean = linear(x, weight)
    x[3] = float("nan")
    spoilt = linear(x, weight)
    assert spoilt[3].isnan().all()
    assert torch.equal(spoilt[[0, 1, 2, 4]], clean[[0, 1, 2, 4]])
