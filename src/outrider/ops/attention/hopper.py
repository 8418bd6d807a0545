"""A round's attention on SM90, 16-bit: the order of sums of triton.py, at the speed of the memory.

Tokens, and for the second product head_dim, are the 64-row operand of wgmma straight from shared
memory; the packed rows of a sequence and key/value head are its other operand, R = 8 to 64 of them.
So no row pays for padding, and the sums over tokens lie in registers the same way for every R:
which rows are packed together does not reach their bits.

A program takes every num_programs-th item and runs a ring of bulk copies that is STAGES tiles of 64
tokens ahead, over the ends of items. With PDL the first copies start before the wait: starts,
num_rows, block tables and keys and values below `starts` are read then, and must not be written by
the kernels between here and the last full barrier. Queries, and tiles that hold positions from
`starts` on, are read after it.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.ops.attention import plan
from outrider.ops.attention.plan import Attending, Card, Launch, batch_parts, cut_batch
from outrider.ops.attention.triton import combine_launch, launch_options

LEAF = gl.constexpr(plan.LEAF)
GROUP = gl.constexpr(plan.GROUP)
WHOLE = gl.constexpr(plan.WHOLE)
TILE = gl.constexpr(64)
"""Tokens of a tile; a block holds one or several."""
MAX_PACKED_ROWS = 64
MAX_SUMS_OF_WHOLES = 32
"""Sums of values that a thread may have three of: of a leaf, of its group and of the row."""
DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _cut_batch(p_starts, p_num_rows, batch, units, max_leaf_items, programs, LANES: gl.constexpr,
               NUM_WARPS: gl.constexpr):  # fmt: skip
    """(lanes, starts, ends, items, items up to and with a sequence), tokens of a cut, all items.

    The same cuts as triton.py's function of this name.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([LANES // 32], [32], [NUM_WARPS], [0])
    o_b = gl.arange(0, LANES, layout=LAYOUT)
    b_starts = gl.load(p_starts + o_b, mask=o_b < batch, other=0).to(gl.int32)
    b_rows = gl.load(p_num_rows + o_b, mask=o_b < batch, other=0).to(gl.int32)
    b_ends = gl.where(b_rows > 0, b_starts + b_rows, 0)
    num_leaves = gl.sum((b_ends + LEAF - 1) // LEAF, 0)
    num_groups = gl.sum((b_ends + LEAF * GROUP - 1) // (LEAF * GROUP), 0)
    num_sequences = gl.sum((b_ends > 0).to(gl.int32), 0)
    cut = LEAF
    if num_leaves * units > max_leaf_items:
        cut = LEAF * GROUP
        if programs > 0:
            turns = gl.cdiv(num_sequences * units, programs)
            if turns * gl.max(b_ends, 0) <= gl.cdiv(num_groups * units, programs) * cut:
                cut = WHOLE
    b_items = (b_ends + cut - 1) // cut * units
    b_after = gl.associative_scan(b_items, 0, _add)
    return (o_b, b_starts, b_ends, b_items, b_after), cut, gl.sum(b_items, 0)


@gluon.jit
def _item(item, work, cut, units):
    """Sequence, unit (head and tile of rows), first and last + 1 token, start and end.

    Past the last item there is no sequence, and no token.
    """
    o_b, b_starts, b_ends, b_items, b_after = work
    i_b = gl.sum((b_after <= item).to(gl.int32), 0)
    this = o_b == i_b
    own = gl.sum(gl.where(this, item - (b_after - b_items), 0), 0)
    start = gl.sum(gl.where(this, b_starts, 0), 0)
    written = gl.sum(gl.where(this, b_ends, 0), 0)
    begin = own // units * cut
    return i_b, own % units, begin, gl.minimum(begin + cut, written), start, written


@gluon.jit
def _pool_row(cursor, p_tables, stride_table, row_tiles, NUM_HEADS: gl.constexpr,
              BLOCK: gl.constexpr):  # fmt: skip
    """Row of the pool, seen as [blocks * heads * BLOCK, D], where the cursor's tile begins."""
    _, i_b, unit, token, end, _ = cursor
    p_block = p_tables + i_b.to(gl.int64) * stride_table + token // BLOCK
    block = gl.load(p_block, mask=token < end, other=0).to(gl.int32)
    return (block * NUM_HEADS + unit // row_tiles) * BLOCK + token % BLOCK


@gluon.jit
def _advance(cursor, work, cut, units, total):
    """(item, sequence, unit, token, end, start) of the next tile that this program computes.

    After the last one token is not below end.
    """
    item, i_b, unit, token, end, start = cursor
    token += TILE
    if token >= end:
        item += gl.num_programs(0)
        if item < total:
            i_b, unit, token, end, start, _ = _item(item, work, cut, units)
    return item, i_b, unit, token, end, start


@gluon.jit
def _fetch(descriptor, pool_row, barrier, buffer, wanted):
    BYTES: gl.constexpr = TILE * buffer.shape[1] * 2
    mbarrier.expect(barrier, BYTES, pred=wanted)
    tma.async_copy_global_to_shared(descriptor, [pool_row, 0], barrier, buffer, pred=wanted)


@gluon.jit
def _fill_rings(
    descriptors, rings, ready, work, cut, units, total, p_tables, stride_table, row_tiles,
    NUM_HEADS: gl.constexpr, BLOCK: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Start to fetch a program's first tiles; returns its cursor behind them, see `_advance`.

    Waits for the kernel in front as soon as a tile may be in the making, or none is left.
    """
    keys, values = descriptors
    k_ring, v_ring = rings
    k_ready, v_ready = ready
    first_item = gl.program_id(0)
    i_b, unit, token, end, start, _ = _item(first_item, work, cut, units)
    cursor = (first_item, i_b, unit, token, end, start)
    STAGES: gl.constexpr = k_ring.shape[0]
    for stage in gl.static_range(STAGES):
        if PDL:
            blocked = (cursor[3] + TILE > cursor[5]) | (cursor[3] >= cursor[4])
            if blocked:
                gdc_wait()
        wanted = cursor[3] < cursor[4]
        pool_row = _pool_row(cursor, p_tables, stride_table, row_tiles, NUM_HEADS, BLOCK)
        _fetch(keys, pool_row, k_ready.index(stage), k_ring.index(stage), wanted)
        _fetch(values, pool_row, v_ready.index(stage), v_ring.index(stage), wanted)
        cursor = _advance(cursor, work, cut, units, total)
    if PDL:
        gdc_wait()
    return cursor


@gluon.jit
def _zero_from(buffer, num_kept, NUM_WARPS: gl.constexpr):
    """Zero the rows of a tile from num_kept on: they may hold anything, and 0 * NaN is NaN."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [NUM_WARPS, 1], [1, 0])
    D: gl.constexpr = buffer.shape[1]
    o_t = gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT))
    b_zero = gl.full([TILE, 64], 0.0, buffer.dtype, layout=LAYOUT)
    for column in gl.static_range(0, D, 64):
        part = buffer.slice(column, 64, dim=1)
        part.store(gl.where((o_t < num_kept)[:, None], part.load(LAYOUT), b_zero))
    fence_async_shared()


@gluon.jit
def _weights(b_scores, o_token, b_seen, b_max, scale):
    """exp2 of scaled scores against the running maximum: (weights, new maximum, factor of the
    sums so far). Rows see the first b_seen positions."""
    b_scores = gl.where(o_token[:, None] < b_seen[None, :], b_scores * scale, float("-inf"))
    b_new = gl.maximum(b_max, gl.max(b_scores, 0))
    b_safe = gl.where(b_new == float("-inf"), 0.0, b_new)
    return gl.exp2(b_scores - b_safe[None, :]), b_new, gl.exp2(b_max - b_safe)


@gluon.jit
def _no_sums(R: gl.constexpr, D: gl.constexpr, ACC: gl.constexpr):
    """(reference, sum of weights, sums of values) of no token."""
    ROWS: gl.constexpr = gl.SliceLayout(0, ACC)
    b_max = gl.full([R], float("-inf"), gl.float32, layout=ROWS)
    b_sum = gl.zeros([R], gl.float32, layout=ROWS)
    return b_max, b_sum, gl.zeros([D, R], gl.float32, layout=ACC)


@gluon.jit
def _close_leaf(b_max, b_sums, b_acc):
    """A leaf's sums, to an integer reference from where on all rescaling is exact.

    b_sums [TILE, R] are sums of weights that are yet to be added over tokens.
    """
    b_top = gl.ceil(b_max)
    b_scale = gl.exp2(b_max - gl.where(b_max == float("-inf"), 0.0, b_top))
    return b_top, gl.sum(b_sums, 0) * b_scale, b_acc * b_scale[None, :]


@gluon.jit
def _fold(b_max, b_sum, b_acc, b_max2, b_sum2, b_acc2):
    """Sums to integer references, added: a leaf to its group, a group to its row."""
    b_new = gl.maximum(b_max, b_max2)
    b_safe = gl.where(b_new == float("-inf"), 0.0, b_new)
    b_scale = gl.exp2(b_max - b_safe)
    b_scale2 = gl.exp2(b_max2 - b_safe)
    b_acc = b_acc * b_scale[None, :] + b_acc2 * b_scale2[None, :]
    return b_new, b_sum * b_scale + b_sum2 * b_scale2, b_acc


@gluon.jit
def _gated(b_output, b_gate):
    """output * sigmoid(gate), rounded where the reference rounds: both factors, then (by the
    caller) the product."""
    DTYPE: gl.constexpr = b_gate.dtype
    b_open = (1.0 / (1.0 + gl.exp(-b_gate.to(gl.float32)))).to(DTYPE)
    return b_output.to(DTYPE).to(gl.float32) * b_open.to(gl.float32)


@gluon.jit
def _load_queries(p_queries, q_shared, i_b, head, first_row, num_tokens, NUM_HEADS: gl.constexpr,
                  SHARE: gl.constexpr, NUM_WARPS: gl.constexpr):  # fmt: skip
    """Packed rows from first_row on into shared memory [R, D], zeros past the last."""
    R: gl.constexpr = q_shared.shape[0]
    D: gl.constexpr = q_shared.shape[1]
    ACROSS: gl.constexpr = D // 8 if D < 256 else 32
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [NUM_WARPS, 1], [1, 0])
    o_r = first_row + gl.arange(0, R, layout=gl.SliceLayout(1, LAYOUT))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
    o_query = (i_b * num_tokens + o_r // SHARE) * (NUM_HEADS * SHARE) + head * SHARE + o_r % SHARE
    p_rows = p_queries + o_query[:, None] * D + o_d[None, :]
    q_shared.store(gl.load(p_rows, mask=(o_r < num_tokens * SHARE)[:, None], other=0.0))
    fence_async_shared()


@gluon.jit
def _store_output(b_sum, b_acc, p_output, p_gate, gate_strides, i_b, head, o_r, num_tokens,
                  NUM_HEADS: gl.constexpr, SHARE: gl.constexpr, GATED: gl.constexpr):  # fmt: skip
    """Rows o_r [R] of a sequence that was one item; b_acc [D, R]."""
    D: gl.constexpr = b_acc.shape[0]
    o_d = gl.arange(0, D, layout=gl.SliceLayout(1, b_acc.type.layout))
    used = (o_r < num_tokens * SHARE)[None, :]
    o_head = head * SHARE + o_r % SHARE
    b_output = b_acc / b_sum[None, :]
    if GATED:
        stride_b, stride_t, stride_h = gate_strides
        o_gate = i_b.to(gl.int64) * stride_b + (o_r // SHARE) * stride_t + o_head * stride_h
        b_gate = gl.load(p_gate + o_gate[None, :] + o_d[:, None], mask=used, other=0.0)
        b_output = _gated(b_output, b_gate)
    o_out = (i_b * num_tokens + o_r // SHARE) * (NUM_HEADS * SHARE) + o_head
    p_out = p_output + o_out[None, :] * D + o_d[:, None]
    gl.store(p_out, b_output.to(p_output.dtype.element_ty), mask=used)


@gluon.jit
def _store_partials(b_max, b_sum, b_acc, p_values, p_max, p_sum, first, o_r, num_packed):
    """Rows o_r [R] of an item whose head's rows are at first .. first + num_packed - 1."""
    D: gl.constexpr = b_acc.shape[0]
    o_d = gl.arange(0, D, layout=gl.SliceLayout(1, b_acc.type.layout))
    used = o_r < num_packed
    o_part = first + o_r
    p_own = p_values + o_part.to(gl.int64)[None, :] * D + o_d[:, None]
    gl.store(p_own, b_acc, mask=used[None, :])
    gl.store(p_max + o_part, b_max, mask=used)
    gl.store(p_sum + o_part, b_sum, mask=used)


@gluon.jit(
    do_not_specialize=[
        *("batch", "num_tokens", "stride_table", "row_tiles", "max_leaf_items", "programs")
    ]
)
def _paged_attention(
    p_queries,  # [B, T, NUM_HEADS * SHARE, D]
    keys, values,  # descriptors of tiles [TILE, D] of [blocks, NUM_HEADS, BLOCK, D]
    p_tables,  # [B, M], rows stride_table apart
    p_starts, p_num_rows,  # [B]
    p_output,  # as p_queries
    p_gate, stride_gate_b, stride_gate_t, stride_gate_h,  # [B, T, NUM_HEADS * SHARE, D]
    p_part_values,  # [P, D]
    p_part_max, p_part_sum,  # [P]
    scale, batch, num_tokens, stride_table, row_tiles, max_leaf_items, programs,
    NUM_HEADS: gl.constexpr, SHARE: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr,
    LANES: gl.constexpr, R: gl.constexpr, STAGES: gl.constexpr, WHOLES: gl.constexpr,
    GATED: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Items of a round, see triton.py: scores [TILE, R] = K q^T, sums [D, R] = V^T weights."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[4, num_warps // 4],
        instr_shape=[16, R // (num_warps // 4), 16],
    )
    TYPE: gl.constexpr = keys.dtype
    Q_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([R, D], TYPE)
    P_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([R, TILE], TYPE)
    k_ring = gl.allocate_shared_memory(TYPE, [STAGES, TILE, D], keys.layout)
    v_ring = gl.allocate_shared_memory(TYPE, [STAGES, TILE, D], values.layout)
    q_shared = gl.allocate_shared_memory(TYPE, [R, D], Q_SHARED)
    p_shared = gl.allocate_shared_memory(TYPE, [R, TILE], P_SHARED)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(v_ready.index(stage), count=1)
    if PDL:
        gdc_launch_dependents()
    units = NUM_HEADS * row_tiles
    work, cut, total = _cut_batch(
        p_starts, p_num_rows, batch, units, max_leaf_items, programs, LANES, num_warps
    )

    # The cursor is at the next tile to be fetched, STAGES tiles ahead of the one computed.
    cursor = _fill_rings(
        (keys, values), (k_ring, v_ring), (k_ready, v_ready), work, cut, units, total,
        p_tables, stride_table, row_tiles, NUM_HEADS, BLOCK, PDL,
    )  # fmt: skip
    pool_row = _pool_row(cursor, p_tables, stride_table, row_tiles, NUM_HEADS, BLOCK)

    o_t = gl.arange(0, TILE, layout=gl.SliceLayout(1, ACC))
    stage = 0
    phase = 0
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        i_b, unit, begin, end, start, written = _item(item, work, cut, units)
        head = unit // row_tiles
        first_row = unit % row_tiles * R
        _load_queries(
            p_queries, q_shared, i_b, head, first_row, num_tokens, NUM_HEADS, SHARE, num_warps
        )
        o_r = first_row + gl.arange(0, R, layout=gl.SliceLayout(0, ACC))
        b_seen = gl.minimum(start + 1 + o_r // SHARE, written)
        b_max, b_sum, b_acc = _no_sums(R, D, ACC)
        b_max1, b_sum1, b_acc1 = b_max, b_sum, b_acc
        for leaf in range(begin, end, LEAF):
            b_max2, b_sum2, b_acc2 = _no_sums(R, D, ACC)
            b_sums2 = gl.zeros([TILE, R], gl.float32, layout=ACC)
            for tile in range(leaf, gl.minimum(leaf + LEAF, end), TILE):
                mbarrier.wait(k_ready.index(stage), phase)
                b_scores = gl.zeros([TILE, R], gl.float32, layout=ACC)
                b_scores = warpgroup_mma(
                    k_ring.index(stage), q_shared.permute((1, 0)), b_scores, use_acc=False
                )
                wanted = cursor[3] < cursor[4]
                gl.thread_barrier()  # every warp has read the keys
                _fetch(keys, pool_row, k_ready.index(stage), k_ring.index(stage), wanted)
                b_p, b_max2, b_scale = _weights(b_scores, tile + o_t, b_seen, b_max2, scale)
                b_sums2 = b_sums2 * b_scale[None, :] + b_p
                b_acc2 = b_acc2 * b_scale[None, :]
                p_shared.store(gl.permute(b_p.to(TYPE), (1, 0)))
                fence_async_shared()
                mbarrier.wait(v_ready.index(stage), phase)
                if tile + TILE > written:
                    _zero_from(v_ring.index(stage), written - tile, num_warps)
                b_acc2 = warpgroup_mma(
                    v_ring.index(stage).permute((1, 0)), p_shared.permute((1, 0)), b_acc2
                )
                gl.thread_barrier()
                _fetch(values, pool_row, v_ready.index(stage), v_ring.index(stage), wanted)
                cursor = _advance(cursor, work, cut, units, total)
                pool_row = _pool_row(cursor, p_tables, stride_table, row_tiles, NUM_HEADS, BLOCK)
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1
            b_max2, b_sum2, b_acc2 = _close_leaf(b_max2, b_sums2, b_acc2)
            b_max1, b_sum1, b_acc1 = _fold(b_max1, b_sum1, b_acc1, b_max2, b_sum2, b_acc2)
            if WHOLES:  # noqa: SIM102 (decided when compiling)
                if (leaf + LEAF) % (LEAF * GROUP) == 0 or leaf + LEAF >= end:
                    b_max, b_sum, b_acc = _fold(b_max, b_sum, b_acc, b_max1, b_sum1, b_acc1)
                    b_max1, b_sum1, b_acc1 = _no_sums(R, D, ACC)
        if not WHOLES:
            b_max, b_sum, b_acc = b_max1, b_sum1, b_acc1
        if written <= cut:
            _store_output(
                b_sum, b_acc, p_output, p_gate, (stride_gate_b, stride_gate_t, stride_gate_h),
                i_b, head, o_r, num_tokens, NUM_HEADS, SHARE, GATED,
            )  # fmt: skip
        else:
            first = item // row_tiles * (num_tokens * SHARE)
            _store_partials(
                b_max, b_sum, b_acc, p_part_values, p_part_max, p_part_sum,
                first, o_r, num_tokens * SHARE,
            )  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """How a program is built.

    Attributes:
        rows: packed rows of an item, 8 to MAX_PACKED_ROWS.
        num_stages: tiles of keys, and of values, under way.
        programs_per_sm: programs that fit on a multiprocessor at once.
    """

    rows: int
    num_warps: int
    num_stages: int
    programs_per_sm: int

    @staticmethod
    def of(head_dim: int, num_packed: int) -> "Shape":
        """About 200 KB of tiles on each multiprocessor. 4 warps are faster than 8 wherever the sums
        fit into their registers, which those of 64 rows do not from head_dim 128 on."""
        rows = min(MAX_PACKED_ROWS, max(8, triton.next_power_of_2(num_packed)))
        if head_dim == 256:
            return Shape(rows, 8, 2, 1) if rows == 64 else Shape(rows, 4, 3, 1)
        if head_dim == 128:
            return Shape(rows, 8, 6, 1) if rows == 64 else Shape(rows, 4, 3, 2)
        return Shape(rows, 4, 6, 2)

    def takes_wholes(self, head_dim: int) -> bool:
        """Whether a thread has registers for the sums of a leaf, a group and a row."""
        return head_dim * self.rows <= 32 * self.num_warps * MAX_SUMS_OF_WHOLES


def round_launches(attending: Attending, card: Card) -> list[Launch]:
    """Items, then their sum; for a batch that `batch_parts` gave."""
    shape = Shape.of(attending.head_dim, attending.num_packed)
    programs = shape.programs_per_sm * card.num_multiprocessors
    wholes = shape.takes_wholes(attending.head_dim)
    limit = 3 * card.num_multiprocessors
    cut = cut_batch(attending, shape.rows, limit, programs if wholes else 0)
    pdl = card.overlaps_launches
    workspace = cut.workspace(attending)
    batch, num_tokens = attending.queries.shape[:2]
    keys, values = (_descriptor(attending.kv_pool[i]) for i in (0, 1))
    args = (
        *(attending.queries, keys, values, attending.block_tables, attending.starts),
        *(attending.num_rows, attending.output, *attending.gate_args, *workspace),
        *(attending.scale, batch, num_tokens, attending.block_tables.stride(0)),
        *(cut.row_tiles, cut.max_leaf_items, cut.programs, attending.num_kv_heads),
        *(attending.share, attending.head_dim, attending.block_size, cut.lanes, shape.rows),
        *(shape.num_stages, wholes, attending.gate is not None, pdl),
    )
    options = {"num_warps": shape.num_warps, **launch_options(pdl)}
    items = Launch(_paged_attention, (programs,), args, options)
    return [items, combine_launch(attending, cut, workspace, pdl)]


def _descriptor(pool: Tensor) -> TensorDescriptor:
    """Tiles of a pool [blocks, Hkv, block_size, D] seen as rows."""
    rows = pool.view(-1, pool.shape[3])
    assert len(rows) < 2**31, "a descriptor counts rows in 32 bits"
    box = [TILE.value, pool.shape[3]]
    layout = gl.NVMMASharedLayout.get_default_for(box, DTYPES[pool.dtype])
    return TensorDescriptor.from_tensor(rows, box, layout)


def paged_attention_kernel(
    queries: Tensor,
    kv_pool: Tensor,
    block_tables: Tensor,
    starts: Tensor,
    num_rows: Tensor,
    gate: Tensor | None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """See paged_attention. Output of float32 shows sums before they are rounded, for tests."""
    output = torch.empty_like(queries, dtype=output_dtype)
    whole = Attending(queries, kv_pool, block_tables, starts, num_rows, gate, output)
    for part in batch_parts(whole):
        for launch in round_launches(part, Card.of(queries)):
            launch.run()
    return output
