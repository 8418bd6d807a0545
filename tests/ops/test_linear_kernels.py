"""The kernels of y = x W^T: right values, and a row's bits whatever else is computed with it.

Without a GPU the portable kernel runs under Triton's interpreter; the rest needs a CUDA device.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from outrider.ops.dispatch import capability
from outrider.ops.linear import gated_linear, is_invariant, linear
from outrider.ops.linear.hopper_tiles import SHARED_MEMORY, Product, Tile, choose_tile
from outrider.ops.linear.segments import (
    MAX_COUNTERS,
    SEGMENT_MULTIPLE,
    arrival_counters,
    num_segments,
)
from outrider.ops.silu_mul import silu_mul

FROBENIUS_ERROR = {
    # A sum in order of k, up to 12288 terms long.
    torch.float32: 1e-5,
    # Only the result is rounded: half a unit in the last place, uniformly spread.
    torch.float16: 3e-4,
    torch.bfloat16: 2.5e-3,
}

MODEL_SHAPES = [
    (4096, 6144),  # Qwen3-8B: q, k, v
    (4096, 4096),
    (4096, 24576),
    (12288, 4096),
    (4096, 12352),  # Qwen3.5-9B: inputs of a delta net, 64 * 193
    (4096, 10240),
    (8192, 4096),
    (8192, 6144),  # EAGLE3's first layer
    (4096, 32000),
    (2560, 6144),  # Qwen3-4B
    (9728, 2560),
    (3072, 1024),  # Qwen3-0.6B
    (1024, 3072),
]
HEADS = [(4096, 151936), (4096, 248320)]
ODD_SHAPES = [(64, 193), (72, 1), (200, 37), (1032, 520), (7, 5), (4097, 130), (2048, 4095)]
"""Inner and outer sizes, K and N."""

ROW_COUNTS = [
    *(1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96),
    *(127, 128, 129, 200, 256, 576, 1024, 2048),
]
HALF_TYPES = [torch.float16, torch.bfloat16]


def random_matrix(rows: int, columns: int, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    rng = torch.Generator(device).manual_seed(seed)
    return torch.randn(rows, columns, generator=rng, device=device).to(dtype)


def random_pair(
    num_rows: int, k: int, n: int, dtype: torch.dtype, device: str = "cuda"
) -> tuple[Tensor, Tensor]:
    x = random_matrix(num_rows, k, dtype, device, seed=k + n)
    weight = random_matrix(n, k, torch.float32, device, seed=k + n + 1)
    return x, (weight / math.sqrt(k)).to(dtype)


def relative_error(result: Tensor, x: Tensor, weight: Tensor) -> float:
    exact = x.double() @ weight.double().T
    return ((result.double() - exact).norm() / exact.norm()).item()


def supported(dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and capability(torch.device("cuda", 0)) < (8, 0):
        pytest.skip("no bfloat16 on this card")


def invariant(dtype: torch.dtype, k: int, n: int) -> None:
    supported(dtype)
    if not is_invariant(dtype, capability(torch.device("cuda", 0))):
        pytest.skip("not promised on this card")


@pytest.mark.parametrize(
    ("n", "k", "segments"),
    [
        (24576, 4096, 1),
        (151936, 4096, 1),
        (12352, 4096, 1),
        (6144, 4096, 1),
        (4096, 4096, 2),
        (4096, 12288, 2),
        (2560, 9728, 4),
        (1024, 3072, 4),
        (1024, 1024, 2),  # segments of at least 512
        (1024, 512, 1),
        (4096, 4096 + 128, 1),  # segments of whole steps
        (64, 100, 1),
    ],
)
def test_the_sum_is_cut_by_the_shape_of_the_weight(n: int, k: int, segments: int) -> None:
    assert num_segments(n, k) == segments
    assert k % segments == 0 and (segments == 1 or k // segments % SEGMENT_MULTIPLE == 0)


@pytest.mark.parametrize("size", [*MODEL_SHAPES, *HEADS, *ODD_SHAPES], ids=str)
def test_every_tile_fits_the_card_and_takes_whole_steps(size: tuple[int, int]) -> None:
    k, n = size
    segments = num_segments(n, k)
    for num_rows in range(1, 4200, 7):
        tile = choose_tile(Product(num_rows, n, k, segments, num_multiprocessors=132))
        ring = tile.stages * (tile.tokens + tile.outputs) * tile.depth * 2
        assert ring + 8 * tile.stages + 1024 <= SHARED_MEMORY
        assert segments == 1 or k % (segments * tile.depth) == 0
        # wgmma's 64-row operand has 64 or 128 rows for every warpgroup, the other one 8 to 256.
        assert tile.rows in (16 * tile.num_warps, 32 * tile.num_warps)
        blocks = [block for block in tile.columns if block]
        assert sum(blocks) == (tile.tokens if tile.weights_first else tile.outputs)
        assert all(block in (8, 16, 32, 64, 128, 256) for block in blocks)
        sets_of_sums = 1 if segments == 1 else 3 if tile.spread else 2
        assert tile.sums * sets_of_sums <= 240
        assert (
            -(-num_rows // tile.tokens) * -(-n // tile.outputs) <= MAX_COUNTERS or not tile.spread
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_gated_projection_on_a_cpu_gates_each_odd_output_by_the_one_before(
    dtype: torch.dtype,
) -> None:
    x, weight = random_pair(5, 24, 14, dtype, "cpu")
    gate, up = (x.double() @ weight[part::2].double().T for part in (0, 1))
    exact = gate / (1 + (-gate).exp()) * up
    result = gated_linear(x, weight)
    assert result.dtype == dtype and result.shape == (5, 7)
    # Gate, up, silu and product are each rounded once.
    limit = 4 * FROBENIUS_ERROR[dtype]
    assert (result.double() - exact).norm() <= limit * exact.norm()


INTERPRETED = [
    (1, 7, 5),
    (3, 64, 33),
    (17, 130, 70),
    (5, 2048, 40),  # four segments, each with its own program
    (40, 1024, 24),  # two segments one after the other
    (70, 96, 100),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("size", INTERPRETED, ids=str)
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled, not interpreted")
def test_the_portable_kernel_is_right_and_reads_nothing_outside_its_operands(
    size: tuple[int, int, int], dtype: torch.dtype
) -> None:
    from outrider.ops.linear.triton import linear_triton

    num_rows, k, n = size
    x, weight = random_pair(num_rows, k, n, dtype, "cpu")
    y = linear_triton(inside_nan(x), inside_nan(weight))
    assert y.dtype == dtype and y.shape == (num_rows, n)
    assert relative_error(y, x, weight) < FROBENIUS_ERROR[dtype]


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled, not interpreted")
def test_a_spread_sum_leaves_its_counters_zero() -> None:
    from outrider.ops.linear.triton import linear_triton

    x, weight = random_pair(3, 1024, 48, torch.float32, "cpu")
    for _ in range(2):
        y = linear_triton(x, weight)
        assert relative_error(y, x, weight) < FROBENIUS_ERROR[torch.float32]
        assert not arrival_counters(weight).any()


def inside_nan(matrix: Tensor) -> Tensor:
    """The matrix as a view of a larger one full of NaN, 16-byte aligned."""
    rows, columns = matrix.shape
    room = matrix.new_full((rows + 3, -(-columns // 8) * 8 + 16), float("nan"))
    view = room[1 : rows + 1, 8 : columns + 8]
    view.copy_(matrix)
    return view


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*HALF_TYPES, torch.float32], ids=str)
@pytest.mark.parametrize("num_rows", [3, 40, 100, 300])
@pytest.mark.parametrize("size", [*MODEL_SHAPES, *ODD_SHAPES], ids=str)
def test_a_projection_is_the_product_up_to_rounding(
    size: tuple[int, int], num_rows: int, dtype: torch.dtype
) -> None:
    supported(dtype)
    x, weight = random_pair(num_rows, *size, dtype)
    assert relative_error(linear(x, weight), x, weight) < FROBENIUS_ERROR[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("size", [*MODEL_SHAPES, *ODD_SHAPES, HEADS[0]], ids=str)
def test_a_rows_bits_do_not_depend_on_how_many_rows_there_are_or_where_it_stands(
    size: tuple[int, int], dtype: torch.dtype
) -> None:
    invariant(dtype, *size)
    x, weight = random_pair(max(ROW_COUNTS), *size, dtype)
    whole = linear(x, weight)
    for num_rows in ROW_COUNTS:
        assert torch.equal(linear(x[:num_rows], weight), whole[:num_rows]), f"first {num_rows}"
        assert torch.equal(linear(x[-num_rows:], weight), whole[-num_rows:]), f"last {num_rows}"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "size", [(64, 193), (200, 37), (1024, 1024), (7, 5), (3072, 1024)], ids=str
)
def test_a_float32_rows_bits_do_not_depend_on_how_many_rows_there_are(
    size: tuple[int, int],
) -> None:
    x, weight = random_pair(300, *size, torch.float32)
    whole = linear(x, weight)
    for num_rows in [count for count in ROW_COUNTS if count <= 300]:
        assert torch.equal(linear(x[:num_rows], weight), whole[:num_rows]), f"first {num_rows}"
        assert torch.equal(linear(x[-num_rows:], weight), whole[-num_rows:]), f"last {num_rows}"


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [4, 576])
@pytest.mark.parametrize("size", HEADS, ids=str)
def test_a_head_over_a_large_vocabulary_is_right_to_its_last_row(
    size: tuple[int, int], num_rows: int
) -> None:
    supported(torch.bfloat16)
    x, weight = random_pair(num_rows, *size, torch.bfloat16)
    logits = linear(x, weight)
    for part in (slice(0, 700), slice(-700, None)):
        error = relative_error(logits[:, part], x, weight[part])
        assert error < FROBENIUS_ERROR[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*HALF_TYPES, torch.float32], ids=str)
@pytest.mark.parametrize("num_rows", [1, 5, 33, 130])
@pytest.mark.parametrize("size", [(4096, 4096), (200, 37), (64, 193), (3072, 1024)], ids=str)
def test_strides_do_not_matter_and_nothing_outside_the_operands_is_read(
    size: tuple[int, int], num_rows: int, dtype: torch.dtype
) -> None:
    supported(dtype)
    x, weight = random_pair(num_rows, *size, dtype)
    plain = linear(x, weight)
    assert torch.equal(linear(inside_nan(x), weight), plain)
    assert torch.equal(linear(x, inside_nan(weight)), plain)
    shifted = x.new_empty(num_rows, size[0] + 5)[:, 1:-4]  # rows that start at odd addresses
    assert torch.equal(linear(shifted.copy_(x), weight), plain)
    moved = x.new_empty(num_rows * size[0] + 1)[1:].view(num_rows, size[0])
    assert torch.equal(linear(moved.copy_(x), weight), plain)
    assert torch.equal(linear(x.T.contiguous().T, weight), plain)
    repeated = linear(x[:1].expand(num_rows, -1), weight)
    assert torch.equal(repeated, plain[:1].expand(num_rows, -1))


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [3, 40, 200])
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_a_row_of_nan_reaches_no_other_row(dtype: torch.dtype, num_rows: int) -> None:
    supported(dtype)
    x, weight = random_pair(num_rows, 4096, 4096, dtype)
    clean = linear(x, weight)
    x[1] = float("nan")
    spoilt = linear(x, weight)
    others = torch.arange(num_rows, device="cuda") != 1
    assert spoilt[1].isnan().all()
    assert torch.equal(spoilt[others], clean[others])


@pytest.mark.gpu
def test_no_rows_give_no_rows() -> None:
    x, weight = random_pair(4, 4096, 128, torch.float16)
    assert linear(x[:0], weight).shape == (0, 128)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 8, 31, 64, 100, 400])
def test_a_captured_chain_replays_the_bits_of_separate_calls(
    num_rows: int, dtype: torch.dtype
) -> None:
    """Each projection reads what the one before, which it may overlap, has just written."""
    invariant(dtype, 4096, 4096)
    shapes = [(4096, 4096), (4096, 24576), (24576, 4096), (4096, 6144), (6144, 4096)] * 3
    weights = [random_pair(1, k, n, dtype)[1] for k, n in shapes]
    x = random_matrix(num_rows, 4096, dtype, "cuda", seed=1)

    def chain(wait: bool) -> Tensor:
        hidden = x
        for weight in weights:
            hidden = linear(hidden, weight)
            if wait:
                torch.cuda.synchronize()
        return hidden

    chain(wait=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain(wait=False)
    for seed in range(5):
        x.copy_(random_matrix(num_rows, 4096, dtype, "cuda", seed))
        result.fill_(float("nan"))
        graph.replay()
        graph.replay()
        assert torch.equal(result, chain(wait=True)) and result.isfinite().all()
    assert not any(arrival_counters(weight).any() for weight in weights)


@pytest.mark.gpu
def test_a_first_call_with_a_weight_may_be_inside_a_capture() -> None:
    x, weight = random_pair(3, 4096, 4096, torch.float16)
    plain = linear(x, weight)
    fresh = weight.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = linear(linear(x, fresh), fresh)
    for _ in range(3):
        result.zero_()
        graph.replay()
        assert torch.equal(result, linear(plain, weight))
        assert torch.equal(linear(x, fresh), plain)


@pytest.mark.gpu
def test_a_weight_at_the_address_of_a_freed_one_is_read_anew() -> None:
    x, weight = random_pair(3, 4096, 4096, torch.float16)
    for seed in range(4):
        weight = random_matrix(4096, 4096, torch.float16, "cuda", seed)
        assert relative_error(linear(x, weight), x, weight) < FROBENIUS_ERROR[torch.float16]
        del weight


TILES = [
    Tile(8, 64, 128, 4, 4, True, False),
    Tile(8, 64, 64, 8, 4, True, True),
    Tile(16, 64, 256, 3, 4, True, True),
    Tile(32, 64, 128, 2, 4, True, False),
    Tile(64, 64, 128, 3, 4, True, True),
    Tile(64, 128, 64, 4, 8, True, False),
    Tile(128, 128, 64, 4, 8, True, True),
    Tile(256, 64, 64, 4, 4, True, False),
    Tile(256, 128, 64, 3, 8, True, True),
    Tile(64, 32, 128, 8, 4, False, False),
    Tile(64, 64, 64, 5, 4, False, True),
    Tile(64, 256, 64, 4, 4, False, True),
    Tile(128, 32, 64, 8, 8, False, False),
    Tile(128, 64, 128, 3, 8, False, True),
    Tile(128, 128, 64, 6, 8, False, False),
    Tile(128, 256, 64, 4, 8, False, True),
    # With few stages two programs share a multiprocessor.
    Tile(128, 128, 64, 3, 8, False, False),
    Tile(128, 128, 64, 2, 8, False, False),
    Tile(64, 64, 64, 2, 4, False, False),
    # Columns in two blocks.
    Tile(64, 48, 128, 8, 4, False, False),
    Tile(64, 96, 64, 10, 4, False, False),
    Tile(128, 80, 64, 8, 8, False, True),
    Tile(128, 192, 64, 5, 8, False, False),
    Tile(256, 192, 64, 4, 8, False, False),
    Tile(48, 64, 128, 6, 4, True, True),
    Tile(96, 256, 64, 5, 8, True, False),
    Tile(160, 128, 64, 3, 8, True, True),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("size", [(4096, 4096), (3072, 1024), (4096, 10240), (1032, 520)], ids=str)
def test_no_tile_changes_a_bit(size: tuple[int, int], dtype: torch.dtype) -> None:
    if capability(torch.device("cuda", 0))[0] != 9:
        pytest.skip("tiles of SM90")
    from outrider.ops.linear.hopper import Launch
    from outrider.ops.linear.triton import linear_triton

    k, n = size
    x, weight = random_pair(200, k, n, dtype)
    expected = linear(x, weight)
    segments = num_segments(n, k)
    for tile in TILES:
        if tile.sums > 128 and segments > 1 and not tile.spread:
            continue  # two sets of sums do not fit in the registers
        launch = Launch(Product(200, n, k, segments, 132), tile)
        for _ in range(3):
            y = torch.full_like(expected, float("nan"))
            launch(x, weight, y)
            assert torch.equal(y, expected), tile
    for num_rows in (5, 50, 200):
        assert torch.equal(linear_triton(x[:num_rows], weight), expected[:num_rows]), num_rows


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*HALF_TYPES, torch.float32], ids=str)
@pytest.mark.parametrize(
    "size", [(4096, 24576), (3072, 1024), (1032, 520), (200, 38), (4097, 130)], ids=str
)
def test_a_gated_projection_has_the_bits_of_one_with_the_gates_behind_it(
    size: tuple[int, int], dtype: torch.dtype
) -> None:
    """Gates of about -30 to 30, where sigmoid is anything between 0 and 1."""
    supported(dtype)
    x, weight = random_pair(1024 if dtype != torch.float32 else 40, *size, dtype)
    weight[::2] *= 10
    for num_rows in (1, 8, 17, 32, 33, 64, 100, 128, 200, 576, 1024):
        some = x[:num_rows]
        result = gated_linear(some, weight)
        assert result.shape == (len(some), size[1] // 2)
        assert torch.equal(result, silu_mul(linear(some, weight))), num_rows


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(4096, 4096), (4096, 24576), (1032, 520)], ids=str)
def test_every_tile_gates(size: tuple[int, int]) -> None:
    if capability(torch.device("cuda", 0))[0] != 9:
        pytest.skip("tiles of SM90")
    from outrider.ops.linear.hopper import Launch

    k, n = size
    x, weight = random_pair(200, k, n, torch.bfloat16)
    expected = silu_mul(linear(x, weight))
    product = Product(200, n, k, num_segments(n, k), 132)
    for tile in TILES:
        if tile.sums > 128 and product.segments > 1 and not tile.spread:
            continue  # two sets of sums do not fit in the registers
        if tile.spread and product.num_programs(tile.tokens, tile.outputs, False) > MAX_COUNTERS:
            continue
        y = torch.full_like(expected, float("nan"))
        Launch(product, tile, gated=True)(x, weight, y)
        assert torch.equal(y, expected), tile


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [129, 300, 1024])
@pytest.mark.parametrize("size", [(4096, 10240), (4096, 12352), (4096, 24576)], ids=str)
def test_programs_that_end_their_ring_at_different_times_do_not_disturb_each_other(
    size: tuple[int, int], num_rows: int
) -> None:
    """The epilogue reuses the ring, which the other warpgroup's last product may still read."""
    if capability(torch.device("cuda", 0))[0] != 9:
        pytest.skip("tiles of SM90")
    from outrider.ops.linear.hopper import Launch

    k, n = size
    x, weight = random_pair(num_rows, k, n, torch.bfloat16)
    expected = torch.cat([linear(x[i : i + 32], weight) for i in range(0, num_rows, 32)])
    for tile in (Tile(128, 128, 64, 3, 8, False, False), Tile(128, 64, 64, 3, 8, False, False)):
        launch = Launch(Product(num_rows, n, k, num_segments(n, k), 132), tile)
        for _ in range(5):
            y = torch.empty_like(expected)
            launch(x, weight, y)
            assert torch.equal(y, expected), tile


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 5, 64, 65, 150])
def test_the_library_path_is_right_and_rows_agree_across_counts(num_rows: int) -> None:
    from outrider.ops.linear.library import linear_library

    x, weight = random_pair(num_rows, 1024, 768, torch.float16)
    y = linear_library(x, weight)
    assert relative_error(y, x, weight) < FROBENIUS_ERROR[torch.float16]
    assert torch.equal(linear_library(x[-1:], weight)[0], y[-1])
