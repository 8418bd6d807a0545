"""The small kernels agree with their references: interpreted on a CPU, and on a GPU as they are.

Every test goes through the public function. Outputs are allocated full of NaN, and strided inputs
are windows into NaN, so that an element left out or read from outside shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module

import pytest
import torch
from torch import Tensor

from outrider.ops.attention_inputs import HeadLayout, HeadNorms, attention_inputs
from outrider.ops.attention_inputs.reference import attention_inputs_reference
from outrider.ops.embedding import embed
from outrider.ops.embedding.reference import embed_reference
from outrider.ops.paired_norms import paired_norms
from outrider.ops.paired_norms.reference import paired_norms_reference
from outrider.ops.rms_norm import add_rms_norm, gated_rms_norm, rms_norm
from outrider.ops.rms_norm.reference import (
    add_rms_norm_reference,
    gated_rms_norm_reference,
    rms_norm_reference,
)
from outrider.ops.rotary import rotary_angles
from outrider.ops.rotary.reference import rotary_angles_reference
from outrider.ops.silu_mul import silu_mul
from outrider.ops.silu_mul.reference import silu_mul_reference

EPS = 1e-6
OPS = ("rms_norm", "silu_mul", "attention_inputs", "rotary", "embedding", "paired_norms")

FLOAT32_ERROR = 2e-6
"""Relative Frobenius error: sums in another order, exp and 1 / sqrt of another library."""
FLIPPED_SHARE, ONE_FLIP = 0.02, {torch.float16: 2**-9, torch.bfloat16: 2**-6}
"""In 16 bits such an error moves few elements, by a unit or two in the last place of a factor."""

on_gpu = pytest.mark.gpu
INTERPRETED = [("cpu", torch.float32), ("cpu", torch.float16)]
ON_GPU = [("cuda", dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
PLACES = [
    *(pytest.param(place, id=f"interpreted-{place[1]}") for place in INTERPRETED),
    *(pytest.param(place, id=f"cuda-{place[1]}", marks=on_gpu) for place in ON_GPU),
]
GPU_PLACES = PLACES[len(INTERPRETED) :]
SIZES = [pytest.param(size) for size in (8, 33, 256, 1000)] + [
    pytest.param(size, marks=on_gpu) for size in (2560, 4096, 5120, 12288)
]
COUNTS = (1, 2, 3, 5, 8, 16, 17, 64, 100, 576)


class Place:
    """Random tensors of one dtype on one device."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator().manual_seed(0)

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.randn(shape, generator=self._generator)
        return values.to(dtype or self.dtype).to(self.device)

    def window(self, *shape: int, margin: int = 16) -> Tensor:
        """Random, with `margin` columns of NaN on either side of every row."""
        wide = torch.full((*shape[:-1], shape[-1] + 2 * margin), float("nan"))
        wide = wide.to(self.dtype).to(self.device)
        window = wide[..., margin : margin + shape[-1]]
        window.copy_(self.randn(*shape))
        return window

    def ids(self, *values: int) -> Tensor:
        return torch.tensor(values, device=self.device)


@pytest.fixture
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    device, dtype = request.param
    if device == "cpu":
        if torch.cuda.is_available():
            pytest.skip("kernels are compiled here, not interpreted")
        for op in OPS:
            module = import_module(f"outrider.ops.{op}")
            monkeypatch.setattr(module, "uses_kernels", lambda _tensor: True)
            monkeypatch.setattr(module, "overlaps_launches", lambda _tensor: False, raising=False)
    allocate = torch.empty

    def poisoned(*args: object, **options: object) -> Tensor:
        tensor = allocate(*args, **options)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)
    yield Place(device, dtype)


def assert_agrees(result: Tensor, expected: Tensor) -> None:
    """Equal up to what another order of the sum does."""
    assert result.shape == expected.shape and result.dtype == expected.dtype
    result, expected = result.cpu(), expected.cpu()
    assert result.isfinite().all()
    difference = (result.double() - expected.double()).abs()
    if result.dtype == torch.float32:
        assert difference.norm() <= FLOAT32_ERROR * expected.double().norm()
        return
    flipped = int((difference > 0).sum())
    assert flipped <= max(FLIPPED_SHARE * result.numel(), 2), (flipped, result.numel())
    largest = expected.double().abs().amax(-1, keepdim=True)
    assert (difference <= ONE_FLIP[result.dtype] * largest).all()


def on_cpu(*tensors: Tensor) -> list[Tensor]:
    return [tensor.cpu() for tensor in tensors]


@pytest.mark.parametrize("zero_centred", [False, True], ids=["plain", "zero-centred"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_a_norm_agrees_with_its_reference(place: Place, size: int, zero_centred: bool) -> None:
    x, weight = place.randn(5, size), place.randn(size)
    expected = rms_norm_reference(*on_cpu(x, weight), EPS, zero_centred)
    assert_agrees(rms_norm(x, weight, EPS, zero_centred=zero_centred), expected)


@pytest.mark.parametrize("zero_centred", [False, True], ids=["plain", "zero-centred"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_add_and_norm_agree_with_their_reference(
    place: Place, size: int, zero_centred: bool
) -> None:
    x, residual, weight = place.window(4, size), place.window(4, size), place.randn(size)
    result, total = add_rms_norm(x, residual, weight, EPS, zero_centred=zero_centred)
    expected, exact = add_rms_norm_reference(*on_cpu(x, residual, weight), EPS, zero_centred)
    assert_agrees(result, expected)
    assert torch.equal(total.cpu(), exact)
    assert result.is_contiguous() and total.is_contiguous()


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_a_norm_takes_rows_any_distance_apart_and_in_any_dimensions(place: Place) -> None:
    x, weight = place.window(3, 4, 40, margin=24), place.randn(40)
    result = rms_norm(x, weight, EPS, zero_centred=True)
    assert_agrees(result, rms_norm_reference(*on_cpu(x, weight), EPS, True))
    middle = place.randn(6, 3 * 40).chunk(3, dim=-1)[1]
    result = rms_norm(middle, weight, EPS, zero_centred=False)
    assert_agrees(result, rms_norm_reference(*on_cpu(middle, weight), EPS, False))


@pytest.mark.parametrize("wide_x", [False, True], ids=["x as the gate", "x float32"])
@pytest.mark.parametrize(
    ("heads", "size"), [(1, 16), (3, 24), (5, 64), (9, 128), (32, 128), (48, 128), (3, 256)]
)
@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_the_gated_norm_agrees_with_its_reference(
    place: Place, heads: int, size: int, wide_x: bool
) -> None:
    x = place.randn(3, heads, size, dtype=torch.float32 if wide_x else None)
    gate = place.window(3, heads * size).unflatten(1, (heads, size))
    weight = place.randn(size)
    result = gated_rms_norm(x, gate, weight, EPS)
    assert result.is_contiguous()
    assert_agrees(result, gated_rms_norm_reference(*on_cpu(x, gate, weight), EPS))


@pytest.mark.parametrize("size", [1, 7, 100, 1024, 1500])
@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_silu_mul_agrees_with_its_reference(place: Place, size: int) -> None:
    gate_up = 3 * place.window(4, 2 * size)
    assert_agrees(silu_mul(gate_up), silu_mul_reference(gate_up.cpu()))


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_silu_of_large_gates_neither_overflows_nor_vanishes(place: Place) -> None:
    gates = torch.tensor([-1e4, -100.0, -89.0, -20.0, 0.0, 20.0, 89.0, 1e4])
    pairs = torch.stack((gates, torch.full((8,), 0.5)), 1)
    gate_up = pairs.flatten()[None].to(place.dtype).to(place.device)
    result = silu_mul(gate_up)[0].cpu().float()
    # silu(-20) = -20 / (1 + e^20) = -4.1223e-08; below -88 it is under every type's smallest.
    assert result[:3].abs().max() < 1e-30
    smallest = torch.finfo(place.dtype).smallest_normal * torch.finfo(place.dtype).eps
    assert abs(result[3] + 2.06115e-08) < 2e-10 + smallest
    wide = torch.tensor([0.0, 10.0, 44.5, 5e3])
    assert torch.equal(result[4:], wide.to(place.dtype).float())


@pytest.mark.parametrize("half", [1, 6, 8, 32, 64])
@pytest.mark.parametrize("place", [PLACES[0], GPU_PLACES[0]], indirect=True)
def test_angles_agree_with_their_reference_at_any_position(place: Place, half: int) -> None:
    positions = place.ids(0, 1, 17, 1000, 40960, 262143, 1 << 20)
    frequencies = 1e7 ** (-torch.arange(half).float() / half)
    scale = 1.138
    results = rotary_angles(positions, frequencies.to(place.device), scale)
    expected = rotary_angles_reference(positions.cpu(), frequencies, scale)
    for result, right in zip(results, expected, strict=True):
        assert result.shape == right.shape and result.dtype == torch.float32
        assert (result.cpu() - right).abs().max() < 5e-7
        assert torch.equal(result[:, :half], result[:, half:])


@pytest.mark.parametrize(
    ("half", "sections"),
    [(1, (1, 0, 0)), (3, (1, 1, 1)), (4, (1, 2, 1)), (32, (11, 11, 10)), (64, (24, 20, 20))],
)
@pytest.mark.parametrize("num_rows", [1, 7, 33])
@pytest.mark.parametrize("place", [PLACES[0], GPU_PLACES[0]], indirect=True)
def test_angles_of_three_positions_agree_with_their_reference(
    place: Place, num_rows: int, half: int, sections: tuple[int, int, int]
) -> None:
    rng = torch.Generator().manual_seed(num_rows)
    positions = torch.randint(0, 1 << 20, (3, num_rows), generator=rng)
    frequencies = 1e7 ** (-torch.arange(half).float() / half)
    there = frequencies.to(place.device)
    results = rotary_angles(positions.to(place.device), there, 1.138, sections)
    expected = rotary_angles_reference(positions, frequencies, 1.138, sections)
    for result, right in zip(results, expected, strict=True):
        assert result.shape == right.shape == (num_rows, 2 * half)
        assert (result.cpu() - right).abs().max() < 5e-7
    # Text: three equal positions have the bits of one.
    one = positions[1].to(place.device)
    text = rotary_angles(one.expand(3, -1).contiguous(), there, 1.138, sections)
    for result, plain in zip(text, rotary_angles(one, there, 1.138), strict=True):
        assert torch.equal(result, plain)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_embedding_takes_rows_and_never_reads_outside_the_table(place: Place, size: int) -> None:
    table = place.randn(11, size)
    ids = place.ids(3, 0, 10, 3, -1, 11, 1 << 40, -(1 << 40))
    result = embed(table, ids)
    assert torch.equal(result, table[[3, 0, 10, 3, 0, 10, 10, 0]])
    assert torch.equal(result.cpu(), embed_reference(*on_cpu(table, ids)))


@pytest.mark.parametrize("zero_centred", [False, True], ids=["plain", "zero-centred"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_paired_norms_agree_with_their_reference(
    place: Place, size: int, zero_centred: bool
) -> None:
    table, hidden = place.randn(9, size), place.window(4, size)
    weights = place.randn(size), place.randn(size)
    ids = place.ids(8, 0, -3, 500)
    result = paired_norms(table, ids, hidden, *weights, EPS, zero_centred=zero_centred)
    expected = paired_norms_reference(
        *on_cpu(table, ids, hidden, *weights), EPS, zero_centred=zero_centred
    )
    assert_agrees(result, expected)


LAYOUTS = [
    pytest.param((6, 2, 24, 12, False, 3), id="odd head"),
    pytest.param((3, 1, 24, 20, True, 16), id="odd head with a gate"),
    pytest.param((4, 2, 16, 16, True, 4), id="small"),
    pytest.param((5, 5, 64, 2, False, 5), id="one pair"),
    pytest.param((2, 1, 256, 64, True, 16), id="wide head"),
    pytest.param((32, 8, 128, 128, False, 16), id="8B", marks=on_gpu),
    pytest.param((16, 4, 256, 64, True, 16), id="9B", marks=on_gpu),
    pytest.param((24, 4, 256, 64, True, 32), id="27B", marks=on_gpu),
    pytest.param((9, 3, 80, 80, False, 16), id="head of 80", marks=on_gpu),
]
NUM_BLOCKS = 7


class AttentionCase:
    """Inputs of attention_inputs for R rows; the last two of more than four are padding."""

    def __init__(
        self, place: Place, shape: tuple[int, int, int, int, bool, int], norms: str, num_rows: int
    ) -> None:
        num_heads, num_kv_heads, size, rotary_dim, gated, block_size = shape
        self.layout = HeadLayout(num_heads, num_kv_heads, size, gated)
        self.projected = place.window(num_rows, self.layout.width)
        query_weight, key_weight = place.randn(size), place.randn(size)
        self.norms = (
            HeadNorms(query_weight, key_weight, EPS, norms == "zero-centred")
            if norms != "none"
            else None
        )
        frequencies = 1e4 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
        positions = torch.arange(num_rows) * 37
        angles = rotary_angles_reference(positions, frequencies, 1.0)
        self.angles = angles[0].to(place.device), angles[1].to(place.device)
        usable = torch.randperm((NUM_BLOCKS - 1) * block_size, generator=torch.manual_seed(1))
        self.kv_index = (block_size + usable[torch.arange(num_rows) % len(usable)]).to(place.device)
        self.num_real = num_rows
        if num_rows > 4:
            self.num_real = num_rows - 2
            self.kv_index[-2:] = place.ids(0, block_size - 1)
        # One layer's part of a pool that several layers share.
        shared = torch.full((2, NUM_BLOCKS, 3, num_kv_heads, block_size, size), float("nan"))
        self.shared = shared.to(place.dtype).to(place.device)

    def run(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """Queries, gate and the pool of all layers."""
        shared = self.shared.clone()
        queries, gate = attention_inputs(
            self.projected,
            self.layout,
            self.norms,
            self.angles,
            shared[:, :, 1],
            self.kv_index,
        )
        return queries, gate, shared

    def expected(self) -> tuple[Tensor, Tensor | None, Tensor]:
        shared, norms = self.shared.cpu(), self.norms
        if norms is not None:
            weights = on_cpu(norms.query_weight, norms.key_weight)
            norms = HeadNorms(*weights, norms.eps, norms.zero_centred)
        cos, sin = on_cpu(*self.angles)
        queries, gate = attention_inputs_reference(
            self.projected.cpu(),
            self.layout,
            norms,
            (cos, sin),
            shared[:, :, 1],
            self.kv_index.cpu(),
        )
        return queries, gate, shared


@pytest.mark.parametrize("norms", ["none", "plain", "zero-centred"])
@pytest.mark.parametrize("shape", LAYOUTS)
@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_attention_inputs_agree_with_their_reference(
    place: Place, shape: tuple[int, int, int, int, bool, int], norms: str
) -> None:
    case = AttentionCase(place, shape, norms, num_rows=6)
    queries, gate, shared = case.run()
    expected_queries, expected_gate, expected_shared = case.expected()
    assert queries.is_contiguous()
    assert (gate is None) == (expected_gate is None)
    if gate is not None and expected_gate is not None:
        assert torch.equal(gate.cpu(), expected_gate)
    # The same places are written, the null block aside; values as they are.
    written, expected_written = shared[:, 1:].cpu(), expected_shared[:, 1:]
    assert torch.equal(written.isnan(), expected_written.isnan())
    written, expected_written = written.nan_to_num(0.0), expected_written.nan_to_num(0.0)
    assert torch.equal(written[1], expected_written[1])
    if norms == "none":
        assert torch.equal(queries.cpu(), expected_queries)
        assert torch.equal(written[0], expected_written[0])
    else:
        assert_agrees(queries, expected_queries)
        assert_agrees(written[0], expected_written[0])


@pytest.mark.gpu
def test_a_pool_of_more_than_two_to_the_31_elements_is_written_where_it_should_be() -> None:
    num_blocks, layout = (1 << 31) // (8 * 16 * 128) + 2, HeadLayout(8, 8, 128, gated=False)
    if torch.cuda.mem_get_info()[0] < 10 << 30:
        pytest.skip("needs 10 GiB")
    pool = torch.zeros((2, num_blocks, 8, 16, 128), dtype=torch.float16, device="cuda")
    place = Place("cuda", torch.float16)
    projected = place.randn(2, layout.width)
    still = torch.ones((2, 128), device="cuda"), torch.zeros((2, 128), device="cuda")
    index = place.ids(16 * num_blocks - 1, 16 * (num_blocks - 2) + 3)
    attention_inputs(projected, layout, None, still, pool, index)
    keys, values = projected[:, 1024:].view(2, 2, 8, 128).unbind(1)
    for row, (block, offset) in enumerate([(num_blocks - 1, 15), (num_blocks - 2, 3)]):
        assert torch.equal(pool[0, block, :, offset], keys[row])
        assert torch.equal(pool[1, block, :, offset], values[row])


def row_functions(place: Place, num_rows: int) -> dict[str, Callable[[slice], tuple[Tensor, ...]]]:
    """Every operation, as a function of which of `num_rows` rows it is given."""
    size, heads = 2560, 32
    x, residual = place.randn(num_rows, size), place.randn(num_rows, size)
    odd, weight = place.randn(num_rows, 1000), place.randn(size)
    table, ids = place.randn(50, size), torch.arange(num_rows, device=place.device) % 50
    inner, gate = place.randn(num_rows, heads, 128), place.randn(num_rows, heads, 128)
    frequencies = torch.linspace(1, 1e-4, 32).to(place.device)
    cases = {
        name: AttentionCase(place, shape, "zero-centred", num_rows)
        for name, shape in {
            "9B": (16, 4, 256, 64, True, 16),
            "8B": (32, 8, 128, 128, False, 16),
        }.items()
    }

    def heads_of(name: str) -> Callable[[slice], tuple[Tensor, ...]]:
        case = cases[name]

        def run(rows: slice) -> tuple[Tensor, ...]:
            pool = case.shared[:, :, 1].contiguous()
            cos, sin = case.angles
            index = case.kv_index[rows]
            queries, _ = attention_inputs(
                case.projected[rows], case.layout, case.norms, (cos[rows], sin[rows]), pool, index
            )
            return queries, pool[:, index // 16, :, index % 16]  # [R, 2, heads, D]

        return run

    return {
        "rms_norm": lambda rows: (rms_norm(x[rows], weight, EPS, zero_centred=True),),
        "rms_norm 1000": lambda rows: (
            rms_norm(odd[rows], weight[:1000], EPS, zero_centred=False),
        ),
        "add_rms_norm": lambda rows: add_rms_norm(
            x[rows], residual[rows], weight, EPS, zero_centred=False
        ),
        "gated_rms_norm": lambda rows: (
            gated_rms_norm(inner[rows], gate[rows], weight[:128], EPS),
        ),
        "silu_mul": lambda rows: (silu_mul(x[rows]),),
        "embed": lambda rows: (embed(table, ids[rows]),),
        "paired_norms": lambda rows: (
            paired_norms(table, ids[rows], x[rows], weight, weight, EPS, zero_centred=True),
        ),
        "rotary_angles": lambda rows: rotary_angles(ids[rows] * 7919, frequencies, 1.0),
        "rotary_angles of three": lambda rows: rotary_angles(
            torch.stack([ids[rows] * n for n in (7919, 31, 1)]), frequencies, 1.0, (11, 11, 10)
        ),
        "attention_inputs 9B": heads_of("9B"),
        "attention_inputs 8B": heads_of("8B"),
    }


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(row_functions(Place("cpu", torch.float32), 8)))
@pytest.mark.parametrize("place", GPU_PLACES, indirect=True)
def test_a_rows_bits_do_not_depend_on_how_many_rows_there_are(place: Place, name: str) -> None:
    # Attention: 96 places in the pool, so that no two rows share one.
    most = 96 if name.startswith("attention") else max(COUNTS)
    function = row_functions(place, most)[name]
    together = function(slice(0, most))
    for count in COUNTS:
        for first in (0, most - count):
            if not 0 <= first <= most - count:
                continue
            part = function(slice(first, first + count))
            for result, whole in zip(part, together, strict=True):
                assert torch.equal(result, whole[first : first + count]), (count, first)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2560, 4096, 5120])
@pytest.mark.parametrize("place", GPU_PLACES, indirect=True)
def test_fused_norms_give_the_bits_of_the_separate_ones(place: Place, size: int) -> None:
    table, hidden, weight = place.randn(50, size), place.randn(20, size), place.randn(size)
    ids = torch.arange(20, device=place.device)
    pair = paired_norms(table, ids, hidden, weight, weight, EPS, zero_centred=True)
    embedded = rms_norm(embed(table, ids), weight, EPS, zero_centred=True)
    assert torch.equal(pair[:, :size], embedded)
    normed = rms_norm(hidden, weight, EPS, zero_centred=True)
    assert torch.equal(pair[:, size:], normed)
    summed, total = add_rms_norm(hidden, table[:20], weight, EPS, zero_centred=True)
    assert torch.equal(summed, rms_norm(total, weight, EPS, zero_centred=True))
    # The right half of a pair is a residual stream as it stands.
    strided = add_rms_norm(hidden, pair[:, size:], weight, EPS, zero_centred=True)
    packed = add_rms_norm(hidden, normed, weight, EPS, zero_centred=True)
    assert all(torch.equal(one, other) for one, other in zip(strided, packed, strict=True))


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_a_row_of_nan_leaves_its_neighbours_alone(place: Place) -> None:
    size = 128
    x, weight, table = place.randn(4, size), place.randn(size), place.randn(4, size)
    gate, ids = place.randn(4, size), place.ids(0, 1, 2, 3)
    broken, broken_table = x.clone(), table.clone()
    broken[1] = broken_table[1] = float("nan")
    others = [0, 2, 3]

    def outputs(x: Tensor, table: Tensor) -> list[Tensor]:
        pair = paired_norms(table, ids, x, weight, weight, EPS, zero_centred=False)
        one_head = gated_rms_norm(x[:, None], gate[:, None], weight, EPS)
        by_head = gated_rms_norm(x[None], gate[None], weight, EPS)[0]
        sums = add_rms_norm(x, gate, weight, EPS, zero_centred=True)
        return [pair, one_head, by_head, *sums, silu_mul(x), embed(table, ids)]

    for clean, dirty in zip(outputs(x, table), outputs(broken, broken_table), strict=True):
        assert torch.equal(clean[others], dirty[others]) and dirty[1].isnan().all()


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_a_padded_row_of_nan_leaves_other_rows_and_their_places_alone(place: Place) -> None:
    case = AttentionCase(place, (4, 2, 16, 8, True, 4), "zero-centred", num_rows=6)
    queries, _, shared = case.run()
    case.projected[case.num_real :] = float("nan")
    queries_beside_nan, _, shared_beside_nan = case.run()
    assert torch.equal(queries[: case.num_real], queries_beside_nan[: case.num_real])
    kept, kept_beside_nan = shared[:, 1:], shared_beside_nan[:, 1:]
    assert torch.equal(kept.isnan(), kept_beside_nan.isnan())
    assert torch.equal(kept.nan_to_num(0.0), kept_beside_nan.nan_to_num(0.0))


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_no_rows_give_no_rows(place: Place) -> None:
    x, weight, ids = place.randn(0, 16), place.randn(16), place.ids().long()
    assert rms_norm(x, weight, EPS, zero_centred=True).shape == (0, 16)
    assert silu_mul(x).shape == (0, 8)
    assert embed(weight[None], ids).shape == (0, 16)
    assert paired_norms(weight[None], ids, x, weight, weight, EPS, zero_centred=True).shape == (
        0,
        32,
    )


def decode_chain(x: Tensor, gate: Tensor, weight: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """Operations that read what the one before wrote, x and gate [R, 128] -> [R, 128]."""
    embedded = embed(table, ids)
    normed, total = add_rms_norm(x, embedded, weight, EPS, zero_centred=True)
    pair = paired_norms(table, ids, normed, weight, weight, EPS, zero_centred=False)
    mixed = silu_mul(pair)
    gated = gated_rms_norm(mixed[:, None], gate[:, None], weight, EPS)[:, 0]
    return rms_norm(gated + total, weight, EPS, zero_centred=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [dtype for _, dtype in ON_GPU], ids=str)
def test_a_graph_with_overlapped_launches_gives_the_bits_of_separate_ones(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without poison: filling memory would stand between the launches that are to overlap.
    place, num_rows, size = Place("cuda", dtype), 40, 128
    x, gate, weight = place.randn(num_rows, size), place.randn(num_rows, size), place.randn(size)
    table, ids = place.randn(30, size), torch.arange(num_rows, device="cuda") % 30
    inputs = (x, gate, weight, table, ids)
    decode_chain(*inputs)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = x
        for _ in range(20):
            captured = decode_chain(captured, gate, weight, table, ids)
    ids.copy_(ids.flip(0))
    x.copy_(place.randn(num_rows, size))
    for op in OPS:
        module = import_module(f"outrider.ops.{op}")
        monkeypatch.setattr(module, "overlaps_launches", lambda _tensor: False, raising=False)
    expected = x
    for _ in range(20):
        expected = decode_chain(expected, gate, weight, table, ids)
    for _ in range(5):
        graph.replay()
        assert torch.equal(captured, expected)
