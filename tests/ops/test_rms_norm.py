"""RMS norms equal their formula, and a row's bits depend on the row alone."""

import pytest
import torch
from torch import Tensor

from outrider.ops.rms_norm import SUPPORTED_DTYPES, gated_rms_norm, rms_norm

EPS = 1e-6
RELATIVE_ERROR = {
    torch.float32: 1e-6,
    # Up to three roundings to the type: normed value, product with the weight, result.
    torch.float16: 3 * 2**-11,
    torch.bfloat16: 3 * 2**-8,
}


def normed(x: Tensor) -> Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt()


def randoms(*shapes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    rng = torch.Generator().manual_seed(sum(sum(shape) for shape in shapes))
    return [torch.randn(shape, generator=rng).to(dtype) for shape in shapes]


def assert_close(result: Tensor, exact: Tensor) -> None:
    assert result.shape == exact.shape
    limit = RELATIVE_ERROR[result.dtype] * exact.abs() + 1e-9
    assert ((result.double() - exact).abs() <= limit).all()


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (3, 5, 16), (7, 33), (2, 1)], ids=str)
def test_a_zero_centred_weight_multiplies_as_one_plus_w(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x, weight = randoms(shape, shape[-1:], dtype=dtype)
    result = rms_norm(x, weight, EPS, zero_centred=True)
    assert_close(result, normed(x) * (1 + weight.double()))


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (3, 5, 16), (7, 33)], ids=str)
def test_a_plain_weight_multiplies_as_it_is(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = randoms(shape, shape[-1:], dtype=dtype)
    assert_close(rms_norm(x, weight, EPS, zero_centred=False), normed(x) * weight.double())


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 2, 16), (5, 3, 32), (2, 2, 9)], ids=str)
def test_the_gated_norm_multiplies_by_silu_of_the_gate(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x, gate, weight = randoms(shape, shape, shape[-1:], dtype=dtype)
    wide = gate.double()
    exact = normed(x) * weight.double() * wide / (1 + (-wide).exp())
    assert_close(gated_rms_norm(x, gate, weight, EPS), exact)


def test_a_row_of_zeros_stays_zero() -> None:
    weight = torch.ones(8)
    assert torch.equal(
        rms_norm(torch.zeros(2, 8), weight, EPS, zero_centred=True), torch.zeros(2, 8)
    )


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 9, 16, 33, 48, 64, 200])
def test_a_rows_bits_do_not_depend_on_how_many_rows_there_are(
    dtype: torch.dtype, size: int
) -> None:
    x, gate, weight = randoms((81, size), (81, size), (size,), dtype=dtype)
    for zero_centred in (True, False):
        alone = torch.cat(
            [rms_norm(x[i : i + 1], weight, EPS, zero_centred=zero_centred) for i in range(81)]
        )
        for count in (2, 3, 5, 7, 9, 16, 81):
            result = rms_norm(x[:count], weight, EPS, zero_centred=zero_centred)
            assert torch.equal(result, alone[:count]), count
    alone = torch.cat(
        [gated_rms_norm(x[i : i + 1], gate[i : i + 1], weight, EPS) for i in range(81)]
    )
    for count in (2, 3, 5, 7, 9, 16, 81):
        assert torch.equal(gated_rms_norm(x[:count], gate[:count], weight, EPS), alone[:count])
