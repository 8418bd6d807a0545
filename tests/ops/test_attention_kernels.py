"""Attention kernels are right, and a row's bits depend on its own context alone.

Without a GPU the portable kernels run in Triton's interpreter, on small shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from outrider.ops.attention import paged_attention, plan, prefill_attention

RELATIVE_ERROR = {
    torch.float32: 5e-6,
    # One rounding of the weights and one of the result; the result's alone is 2e-4 and 1.6e-3.
    torch.float16: 6e-4,
    torch.bfloat16: 5e-3,
}
"""Frobenius, against float64. A gate adds two roundings: twice as much."""


@dataclass(frozen=True)
class Heads:
    """num query heads, num key and value heads, head size."""

    queries: int
    keys: int
    size: int

    def __str__(self) -> str:
        return f"{self.queries}-{self.keys}-{self.size}"


MODEL_HEADS = [
    Heads(32, 8, 128),
    Heads(16, 4, 256),
    Heads(24, 4, 256),
    Heads(16, 8, 64),
    Heads(16, 1, 128),
    Heads(64, 4, 128),
]
EDGES = [
    *(0, 1, 56, 62, 63, 64, 119, 126, 127, 128, 248, 254, 255, 256, 499, 510, 511, 512, 999, 1016),
    *(1022, 1023, 1024, 2040, 2046, 2047, 2048, 2999, 4089, 4095, 4999, 6148),
]
"""Positions of row 0 on and beside the edges of tiles, blocks, leaves and groups."""


@dataclass(frozen=True)
class Case:
    """Arguments of an attention function; NaN wherever nobody wrote, the null block too."""

    queries: Tensor
    kv_pool: Tensor
    block_tables: Tensor
    starts: Tensor
    num_rows: Tensor
    gate: Tensor | None

    @property
    def args(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        return (
            self.queries,
            self.kv_pool,
            self.block_tables,
            self.starts,
            self.num_rows,
            self.gate,
        )

    @property
    def used(self) -> Tensor:
        """[B, T], the rows that are no padding."""
        rows = torch.arange(self.queries.shape[1], device=self.queries.device)
        return rows < self.num_rows[:, None]

    def rows(self, begin: int, end: int) -> Case:
        """Rows begin .. end - 1 of every sequence, as a round of their own."""
        return Case(
            self.queries[:, begin:end].contiguous(),
            self.kv_pool,
            self.block_tables,
            self.starts + begin,
            (self.num_rows - begin).clamp(0, end - begin),
            None if self.gate is None else self.gate[:, begin:end],
        )

    def sequences(self, index: Tensor | list[int]) -> Case:
        """Other neighbours, in another order."""
        index = torch.as_tensor(index, device=self.queries.device)
        gate = None if self.gate is None else self.gate[index]
        return Case(
            self.queries[index],
            self.kv_pool,
            self.block_tables[index],
            self.starts[index],
            self.num_rows[index],
            gate,
        )


def make_case(
    heads: Heads,
    dtype: torch.dtype,
    starts: list[int],
    num_rows: list[int],
    *,
    num_tokens: int | None = None,
    block_size: int = 64,
    gated: bool = False,
    device: str = "cpu",
) -> Case:
    """Sequences with their blocks in random order and random contents below starts + num_rows."""
    rng = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, device=device).to(dtype)

    batch, num_tokens = len(starts), num_tokens or max(num_rows)
    ends = [start + rows for start, rows in zip(starts, num_rows, strict=True)]
    needed = [-(-end // block_size) for end in ends]
    shape = (2, sum(needed) + 3, heads.keys, block_size, heads.size)
    pool = torch.full(shape, float("nan"), dtype=dtype, device=device)
    free = torch.randperm(shape[1] - 1, generator=rng, device=device) + 1
    # A view into something wider, as a round's numbers are.
    tables = torch.zeros((batch, 3 + max(needed) + 1), dtype=torch.int64, device=device)[:, 3:]
    for row, (end, count) in enumerate(zip(ends, needed, strict=True)):
        block_ids, free = free[:count], free[count:]
        tables[row, :count] = block_ids
        contents = random(2, count * block_size, heads.keys, heads.size)
        contents[:, end:] = float("nan")
        contents = contents.unflatten(1, (count, block_size)).transpose(2, 3)
        pool[:, block_ids] = contents
    queries = random(batch, num_tokens, heads.queries, heads.size)
    wide = random(batch, num_tokens, heads.queries, 2 * heads.size)
    return Case(
        queries * 2,
        pool,
        tables,
        torch.tensor(starts, device=device),
        torch.tensor(num_rows, device=device),
        wide[..., heads.size :] if gated else None,
    )


def expected(case: Case) -> Tensor:
    """[B, T, Hq, D] float64 from the definition; padding rows are zero."""
    batch, _, num_heads, size = case.queries.shape
    num_kv_heads, block_size = case.kv_pool.shape[2:4]
    result = torch.zeros(case.queries.shape, dtype=torch.float64, device=case.queries.device)
    for row in range(batch):
        start, count = int(case.starts[row]), int(case.num_rows[row])
        if count == 0:
            continue
        blocks = case.block_tables[row, : -(-(start + count) // block_size)]
        kept = case.kv_pool[:, blocks].transpose(1, 2).reshape(2, num_kv_heads, -1, size)
        keys, values = kept[:, :, : start + count].double()
        queries = case.queries[row, :count].double()
        queries = queries.view(count, num_kv_heads, -1, size).permute(1, 2, 0, 3)
        scores = queries @ keys[:, None].transpose(2, 3) / size**0.5  # [Hkv, G, T, L]
        positions = torch.arange(start + count, device=scores.device)
        unseen = positions > (start + torch.arange(count, device=scores.device))[:, None]
        weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
        output = (weights @ values[:, None]).permute(2, 0, 1, 3)
        result[row, :count] = output.reshape(count, num_heads, size)
    return result if case.gate is None else result * torch.sigmoid(case.gate.double())


def assert_right(result: Tensor, case: Case) -> None:
    exact, used = expected(case), case.used
    limit = RELATIVE_ERROR[case.queries.dtype] * (1 if case.gate is None else 2)
    assert result.dtype == case.queries.dtype
    for row in range(len(exact)):  # one by one: a short context must not hide behind long ones
        if used[row].any():
            error = (result[row][used[row]].double() - exact[row][used[row]]).norm()
            assert error <= limit * exact[row][used[row]].norm(), row


def assert_same(result: Tensor, other: Tensor, used: Tensor) -> None:
    """Equal bits in rows that are used."""
    assert result[used].isfinite().all()
    assert torch.equal(result[used], other[used]), int((result[used] != other[used]).sum())


# In the interpreter. Also what a portable kernel must do on a GPU.

SMALL_HEADS = [Heads(4, 2, 32), Heads(6, 2, 24), Heads(3, 1, 16)]
INTERPRETED = [torch.float32, torch.float16]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def portable(case: Case) -> Tensor:
    pytest.importorskip("triton")
    from outrider.ops.attention.triton import paged_attention_kernel

    return paged_attention_kernel(*case.args)


def portable_prefill(case: Case) -> Tensor:
    pytest.importorskip("triton")
    from outrider.ops.attention.triton_prefill import prefill_attention_kernel

    return prefill_attention_kernel(*case.args)


@pytest.mark.parametrize("dtype", INTERPRETED, ids=str)
@pytest.mark.parametrize("heads", SMALL_HEADS, ids=str)
@pytest.mark.parametrize(("block_size", "gated"), [(16, False), (48, True), (64, True)])
def test_portable_rounds_are_the_softmax_of_the_definition(
    heads: Heads, dtype: torch.dtype, block_size: int, gated: bool
) -> None:
    case = make_case(
        heads,
        dtype,
        [0, 13, 62, 250, 300],
        [5, 3, 4, 5, 1],
        block_size=block_size,
        gated=gated,
        device=DEVICE,
    )
    assert_right(portable(case), case)


def test_portable_rounds_of_many_groups_of_leaves() -> None:
    case = make_case(Heads(2, 1, 16), torch.float32, [1020, 2100, 255], [9, 2, 1], device=DEVICE)
    assert_right(portable(case), case)


def test_sequences_without_rows_give_zeros_and_disturb_nobody() -> None:
    case = make_case(SMALL_HEADS[0], torch.float32, [30, 70, 5], [2, 2, 1], device=DEVICE)
    inert = replace(case, num_rows=torch.tensor([2, 0, 1], device=DEVICE))
    result = portable(inert)
    assert (result[1] == 0).all()
    assert_same(result, portable(case), inert.used)


def test_padding_rows_are_finite() -> None:
    case = make_case(
        SMALL_HEADS[0], torch.float32, [3, 290, 0], [1, 2, 0], num_tokens=4, device=DEVICE
    )
    assert portable(case).isfinite().all()


@pytest.mark.parametrize("dtype", INTERPRETED, ids=str)
def test_a_portable_row_has_the_same_bits_for_every_number_of_rows(dtype: torch.dtype) -> None:
    case = make_case(SMALL_HEADS[0], dtype, [0, 60, 251], [9, 9, 9], device=DEVICE)
    whole = portable(case)
    for num_rows in (1, 2, 4, 7):
        part = case.rows(0, num_rows)
        assert_same(portable(part), whole[:, :num_rows], part.used)


def partial_sums(launches: list[plan.Launch]) -> int:
    """Run a round's launches; how many rows of partial sums its items left in memory."""
    items = launches[0]
    scalars = [
        a for a in items.args if isinstance(a, Tensor) and a.dim() == 1 and a.is_floating_point()
    ]
    for scalar in scalars:
        scalar.fill_(float("nan"))
    for launch in launches:
        launch.run()
    return int(scalars[-1].isfinite().sum())


@pytest.mark.parametrize("many_rows", [0, 1000])
@pytest.mark.parametrize("dtype", INTERPRETED, ids=str)
def test_leaves_groups_and_whole_sequences_have_the_same_bits(
    dtype: torch.dtype, many_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from outrider.ops.attention import triton as kernels

    monkeypatch.setattr(kernels, "MANY_ROWS", many_rows)
    case = make_case(SMALL_HEADS[0], dtype, [700, 1100], [2, 1], gated=True, device=DEVICE)
    card = plan.Card.of(case.queries)
    results: list[Tensor] = []
    counts: list[int] = []
    # Items: 8 leaves or 3 groups for each of two heads. Up to three leaves a multiprocessor they
    # are leaves; else one turn of 6 programs is 1024 tokens with groups and 1101 without, three
    # turns of 2 programs are 3072, and two without 2202.
    for count in (20, 3, 1):
        output = torch.full_like(case.queries, float("nan"))
        launches = kernels.round_launches(
            plan.Attending(*case.args, output), replace(card, num_multiprocessors=count)
        )
        counts.append(partial_sums(launches))
        results.append(output)
    num_packed = 4
    assert counts == [8 * 2 * num_packed, 2 * 2 * num_packed, 0]  # 702 tokens are one group
    assert_same(results[0], results[1], case.used)
    assert_same(results[0], results[2], case.used)


@pytest.mark.parametrize("dtype", INTERPRETED, ids=str)
@pytest.mark.parametrize("heads", SMALL_HEADS, ids=str)
@pytest.mark.parametrize(
    ("start", "num_rows", "block_size"), [(0, 1, 16), (0, 37, 64), (61, 40, 48), (128, 64, 64)]
)
def test_portable_prefill_is_the_softmax_of_the_definition(
    heads: Heads, dtype: torch.dtype, start: int, num_rows: int, block_size: int
) -> None:
    case = make_case(
        heads,
        dtype,
        [start],
        [num_rows],
        block_size=block_size,
        gated=heads.queries != 4,
        device=DEVICE,
    )
    assert_right(portable_prefill(case), case)


def test_prefill_by_descriptors_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    from outrider.ops.attention.triton_prefill import prefill_launch

    case = make_case(Heads(4, 2, 64), torch.float16, [70], [100], gated=True, device=DEVICE)
    output = torch.full_like(case.queries, float("nan"))
    tile = plan.PrefillTile(64, 64, 4, 2, descriptors=True)
    if DEVICE == "cuda" and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs bulk tensor copies")
    prefill_launch(plan.Attending(*case.args, output), tile).run()
    assert_right(output, case)


def test_large_batches_are_launched_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(
        SMALL_HEADS[0], torch.float32, [5, 70, 300, 20, 64], [2, 1, 2, 2, 1], gated=True,
        device=DEVICE,
    )  # fmt: skip
    whole = portable(case)
    monkeypatch.setattr(plan, "MAX_SEQUENCES", 2)
    assert_same(portable(case), whole, case.used)
    monkeypatch.setattr(plan, "MAX_WORKSPACE_BYTES", 1)
    parts = list(plan.batch_parts(plan.Attending(*case.args, torch.empty_like(case.queries))))
    assert [len(part.starts) for part in parts] == [1] * 5
    assert_same(portable(case), whole, case.used)


def test_a_large_rounds_workspace_is_bounded() -> None:
    """Batch 64, tables of 256k tokens, T = 9: a part's partial sums stay below the limit."""
    queries = torch.empty((64, 9, 24, 256), dtype=torch.bfloat16, device="meta")
    pool = torch.empty((2, 100, 4, 64, 256), dtype=torch.bfloat16, device="meta")
    tables = torch.empty((64, 4096), dtype=torch.int64, device="meta")
    numbers = torch.empty(64, dtype=torch.int64, device="meta")
    whole = plan.Attending(queries, pool, tables, numbers, numbers, None, queries)
    parts = list(plan.batch_parts(whole))
    assert sum(len(part.starts) for part in parts) == 64
    for part in parts:
        cut = plan.cut_batch(part, 64, 396, 132)
        assert cut.num_partials * 258 * 4 <= plan.MAX_WORKSPACE_BYTES


# On a GPU, through the public functions.

gpu = pytest.mark.gpu
KERNEL_DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def unrounded(case: Case) -> Tensor:
    """Sums of the SM90 kernel before they are rounded: rounding hides most changes of order."""
    from outrider.ops.attention.hopper import paged_attention_kernel

    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs SM90")
    return paged_attention_kernel(*case.args, output_dtype=torch.float32)


def edges(heads: Heads, dtype: torch.dtype, num_tokens: int = 9, gated: bool = False) -> Case:
    return make_case(heads, dtype, EDGES, [num_tokens] * len(EDGES), gated=gated, device="cuda")


def mixed(case: Case) -> Case:
    """0 to T rows in use; what comes after a sequence's last position is made NaN."""
    num_tokens, block_size = case.queries.shape[1], case.kv_pool.shape[3]
    counts = torch.arange(len(case.starts), device="cuda") % (num_tokens + 1)
    pool = case.kv_pool.clone()
    for table, start, count in zip(
        case.block_tables.tolist(), case.starts.tolist(), counts.tolist(), strict=True
    ):
        for position in range(start + count, start + num_tokens):
            pool[:, table[position // block_size], :, position % block_size] = float("nan")
    return replace(case, kv_pool=pool, num_rows=counts)


@gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("heads", MODEL_HEADS, ids=str)
def test_rounds_are_the_softmax_of_the_definition(
    heads: Heads, dtype: torch.dtype, gated: bool
) -> None:
    case = edges(heads, dtype, 4, gated)
    assert_right(paged_attention(*case.args), case)


@gpu
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("heads", MODEL_HEADS, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 6, 9])
def test_what_nobody_wrote_does_not_leak_into_rounds(
    heads: Heads, dtype: torch.dtype, num_tokens: int
) -> None:
    case = mixed(edges(heads, dtype, num_tokens))
    result = paged_attention(*case.args)
    assert_right(result, case)
    assert (result[case.num_rows == 0] == 0).all() and result.isfinite().all()


@gpu
@pytest.mark.parametrize("dtype", KERNEL_DTYPES[:2], ids=str)
@pytest.mark.parametrize("heads", MODEL_HEADS, ids=str)
def test_the_sums_of_a_row_do_not_depend_on_the_rows_beside_it(
    heads: Heads, dtype: torch.dtype
) -> None:
    case = edges(heads, dtype)
    alone = torch.cat([unrounded(case.rows(t, t + 1)) for t in range(9)], 1)
    for num_tokens in range(1, 10):
        part = case.rows(0, num_tokens)
        assert_same(unrounded(part), alone[:, :num_tokens], part.used)
    partly = mixed(case)
    assert_same(unrounded(partly), alone, partly.used)


@gpu
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("heads", MODEL_HEADS[:2], ids=str)
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(heads: Heads, dtype: torch.dtype) -> None:
    case = edges(heads, dtype, gated=True)
    whole = paged_attention(*case.args)
    for t in range(9):
        part = case.rows(t, t + 1)
        assert_same(paged_attention(*part.args), whole[:, t : t + 1], part.used)


@gpu
@pytest.mark.parametrize("attend", [unrounded, portable])
@pytest.mark.parametrize("heads", MODEL_HEADS, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 4, 9])
def test_a_rows_bits_do_not_depend_on_batch_or_neighbours(
    heads: Heads, num_tokens: int, attend: Callable[[Case], Tensor]
) -> None:
    case = edges(heads, torch.bfloat16, num_tokens)
    whole = attend(case)
    for index in ([0], [13], [22], [31], [5, 30, 12, 1, 27, 9, 20], [*range(31, -1, -1)] * 3):
        part = case.sequences(index)
        assert_same(attend(part), whole[index], part.used)
    inert = case.num_rows.clone()
    inert[3] = 0
    part = replace(case, num_rows=inert)
    assert_same(attend(part), whole, part.used)


@gpu
@pytest.mark.parametrize("heads", MODEL_HEADS, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 4, 9])
def test_a_rows_bits_do_not_depend_on_cut_grid_or_overlap(heads: Heads, num_tokens: int) -> None:
    pytest.importorskip("triton")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs SM90")
    from outrider.ops.attention.hopper import round_launches

    case = edges(heads, torch.bfloat16, num_tokens)
    whole = unrounded(case)
    for count, pdl in [(1, False), (37, True), (132, True), (20_000, False)]:
        output = torch.full(whole.shape, float("nan"), device="cuda")
        for launch in round_launches(
            plan.Attending(*case.args, output), plan.Card((9, 0), count, pdl)
        ):
            launch.run()
        assert_same(output, whole, case.used)


@gpu
@pytest.mark.parametrize("batch", [25, 26, 27, 32, 33])
@pytest.mark.parametrize("heads", MODEL_HEADS, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 4, 9])
def test_whole_sequences_have_the_bits_of_their_leaves(
    heads: Heads, num_tokens: int, batch: int
) -> None:
    """Contexts of about one length, at which sequences are not cut; some programs get no item."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs SM90")
    from outrider.ops.attention.hopper import round_launches

    starts = [2300 - 9 * i for i in range(batch)]
    case = make_case(heads, torch.bfloat16, starts, [num_tokens] * batch, device="cuda")
    results: list[Tensor] = []
    for count in (132, 20_000):
        output = torch.full(case.queries.shape, float("nan"), device="cuda")
        launches = round_launches(
            plan.Attending(*case.args, output), plan.Card((9, 0), count, True)
        )
        left = partial_sums(launches)
        assert left > 0 or count == 132
        if count == 132 and heads == MODEL_HEADS[0] and num_tokens <= 4 and batch <= 32:
            assert left == 0
        results.append(output)
    assert_same(*results, case.used)


@gpu
@pytest.mark.parametrize("heads", MODEL_HEADS[:3], ids=str)
@pytest.mark.parametrize("block_size", [128, 192, 256])
def test_a_rows_bits_do_not_depend_on_the_block_size(heads: Heads, block_size: int) -> None:
    case = edges(heads, torch.bfloat16, 4)
    whole = unrounded(case)
    blocks_for = [-(-(start + 4) // block_size) for start in EDGES]
    shape = (2, sum(blocks_for) + 1, heads.keys, block_size, heads.size)
    pool = torch.full(shape, float("nan"), dtype=torch.bfloat16, device="cuda")
    tables = torch.zeros((len(EDGES), max(blocks_for)), dtype=torch.int64, device="cuda")
    block = 1
    for row, (start, count) in enumerate(zip(EDGES, blocks_for, strict=True)):
        tables[row, :count] = torch.arange(block, block + count)
        kept = case.kv_pool[:, case.block_tables[row, : -(-(start + 4) // 64)]]
        kept = kept.transpose(2, 3).flatten(1, 2)  # [2, L, Hkv, D]
        kept = torch.nn.functional.pad(kept, (0, 0, 0, 0, 0, count * block_size - kept.shape[1]))
        pool[:, block : block + count] = kept.unflatten(1, (count, block_size)).transpose(2, 3)
        block += count
    other = replace(case, kv_pool=pool, block_tables=tables)
    assert_same(unrounded(other), whole, case.used)


@gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("heads", MODEL_HEADS[:3], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_a_graph_has_the_bits_of_eager_launches(heads: Heads, num_tokens: int, gated: bool) -> None:
    case = mixed(edges(heads, torch.bfloat16, num_tokens, gated))
    eager = paged_attention(*case.args)
    starts, num_rows = torch.zeros_like(case.starts), torch.zeros_like(case.num_rows)
    static = replace(case, starts=starts, num_rows=num_rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = paged_attention(*static.args)
    for _ in range(3):
        starts.copy_(case.starts)
        num_rows.copy_(case.num_rows)
        result.fill_(float("nan"))
        graph.replay()
        assert_same(result, eager, case.used)


@gpu
@pytest.mark.parametrize("batch", [33, 64, 100, 300])
def test_batches_of_every_size(batch: int) -> None:
    starts = [EDGES[i % len(EDGES)] % 1500 for i in range(batch)]
    case = make_case(
        Heads(8, 2, 128), torch.bfloat16, starts, [1 + i % 4 for i in range(batch)], device="cuda"
    )
    assert_right(paged_attention(*case.args), case)


@gpu
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("heads", [*MODEL_HEADS[:2], Heads(6, 2, 24), Heads(8, 8, 80)], ids=str)
@pytest.mark.parametrize("block_size", [16, 48, 64])
def test_portable_rounds_on_a_gpu(heads: Heads, dtype: torch.dtype, block_size: int) -> None:
    case = make_case(
        heads,
        dtype,
        [start % 1200 for start in EDGES],
        [1 + i % 5 for i in range(len(EDGES))],
        block_size=block_size,
        gated=block_size == 48,
        device="cuda",
    )
    result = portable(case)
    assert_right(result, case)
    for t in range(5):
        part = case.rows(t, t + 1)
        assert_same(portable(part), result[:, t : t + 1], part.used)


@gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("heads", MODEL_HEADS, ids=str)
def test_prefill_is_the_softmax_of_the_definition(
    heads: Heads, dtype: torch.dtype, gated: bool
) -> None:
    for start, num_rows in [(0, 300), (1000, 129), (77, 1)]:
        case = make_case(heads, dtype, [start], [num_rows], gated=gated, device="cuda")
        assert_right(prefill_attention(*case.args), case)


@gpu
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("heads", [*MODEL_HEADS, Heads(6, 2, 24)], ids=str)
def test_a_rows_bits_do_not_depend_on_its_chunk(heads: Heads, dtype: torch.dtype) -> None:
    case = make_case(heads, dtype, [0], [517], gated=True, device="cuda")
    whole = prefill_attention(*case.args)
    for begin, end in [(0, 64), (0, 100), (64, 517), (65, 300), (100, 101), (333, 517), (516, 517)]:
        part = case.rows(begin, end)
        assert_same(prefill_attention(*part.args), whole[:, begin:end], part.used)


@gpu
def test_a_long_prompt_in_chunks() -> None:
    case = make_case(MODEL_HEADS[0], torch.bfloat16, [8000], [1024], device="cuda")
    result = prefill_attention(*case.args)
    assert_right(result, case)
    halves = [prefill_attention(*case.rows(b, b + 512).args) for b in (0, 512)]
    assert_same(torch.cat(halves, 1), result, case.used)
