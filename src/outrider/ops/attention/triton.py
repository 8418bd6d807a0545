"""Paged attention of rounds in plain Triton, on any card, and how rounds are cut.

The order in which a round's row adds its context is a tree over absolute positions, so it is the
same whoever is computed beside it:

    tile of 64 or 32 tokens -> leaf of 256 (online softmax) -> group of 4 leaves -> row

each step a fold from the left. One item of work is a leaf, a group or all of one sequence, one
key/value head and 16 packed rows (a row is a token of the round and a query head of the group).
Which of them, the device decides from the amount of work, and the bits are the same: softmax
runs in base 2, and the maximum that a leaf's sums refer to is rounded up to an integer at the
leaf's end, so that every later rescaling is an exact power of two. Leaves are for little work,
which is to reach every multiprocessor. Sequences are taken whole where the program with most to do
is then no later. An item leaves partial sums in memory, which `_combine` adds, unless its sequence
has no other item.

Neither the number of rows T nor the batch is known to a compiled kernel. Kernels are compiled
without contraction of products and sums (enable_fp_fusion=False): two of them that share an
arithmetic share its bits.

With PDL, starts, num_rows and block tables are read before the wait: the kernels between here and
the last full barrier must not write them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.ops.attention import plan
from outrider.ops.attention.plan import (
    Attending,
    Card,
    Cut,
    Launch,
    batch_parts,
    cut_batch,
)

LEAF = tl.constexpr(plan.LEAF)
GROUP = tl.constexpr(plan.GROUP)
WHOLE = tl.constexpr(plan.WHOLE)
MANY_ROWS = 1024
"""Packed rows of a round, over which `_combine` takes several at once."""

PACKED_ROWS = 16
"""Rows of an item. One size for all T: the rows of a round are more items, not another kernel."""


@triton.jit
def _cut_batch(p_starts, p_num_rows, batch, units, max_leaf_items, programs, LANES: tl.constexpr):
    """(starts, ends, tokens of a cut, cuts of each sequence); a sequence without rows has none.

    hopper.py has the same for its dialect; both, and `_combine`, must come to the same cuts.
    """
    o_b = tl.arange(0, LANES)
    b_starts = tl.load(p_starts + o_b, mask=o_b < batch, other=0).to(tl.int32)
    b_rows = tl.load(p_num_rows + o_b, mask=o_b < batch, other=0).to(tl.int32)
    b_ends = tl.where(b_rows > 0, b_starts + b_rows, 0)
    num_groups = tl.sum((b_ends + LEAF * GROUP - 1) // (LEAF * GROUP), 0)
    num_sequences = tl.sum((b_ends > 0).to(tl.int32), 0)
    cut = LEAF
    if tl.sum((b_ends + LEAF - 1) // LEAF, 0) * units > max_leaf_items:
        cut = LEAF * GROUP
        if programs > 0:
            turns = tl.cdiv(num_sequences * units, programs)
            if turns * tl.max(b_ends, 0) <= tl.cdiv(num_groups * units, programs) * cut:
                cut = WHOLE
    return b_starts, b_ends, cut, (b_ends + cut - 1) // cut


@triton.jit
def pool_rows(p_table, o_token, end, head, NUM_HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of the pool, seen as [blocks * heads * BLOCK, D], that hold the positions o_token."""
    b_block = tl.load(p_table + o_token // BLOCK, mask=o_token < end, other=0).to(tl.int64)
    return (b_block * NUM_HEADS + head) * BLOCK + o_token % BLOCK


@triton.jit
def _no_sums(R: tl.constexpr, COLUMNS: tl.constexpr):
    """(reference, sum of weights, sums of values) of no token."""
    b_max = tl.full([R], float("-inf"), tl.float32)
    return b_max, tl.zeros([R], tl.float32), tl.zeros([COLUMNS, R], tl.float32)


@triton.jit
def _fold(b_max, b_sum, b_acc, b_max2, b_sum2, b_acc2):
    """Sums with respect to integer references, added; [R], [R] and [D, R].

    The rescaling is by powers of two, hence exact.
    """
    b_new = tl.maximum(b_max, b_max2)
    b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_scale = tl.exp2(b_max - b_safe)
    b_scale2 = tl.exp2(b_max2 - b_safe)
    b_acc = b_acc * b_scale[None, :] + b_acc2 * b_scale2[None, :]
    return b_new, b_sum * b_scale + b_sum2 * b_scale2, b_acc


@triton.jit
def gated_output(b_output, b_gate):
    """output * sigmoid(gate), rounded where the reference rounds: both factors, then (by the
    caller) the product."""
    DTYPE: tl.constexpr = b_gate.dtype
    b_open = (1.0 / (1.0 + tl.exp(-b_gate.to(tl.float32)))).to(DTYPE)
    return b_output.to(DTYPE).to(tl.float32) * b_open.to(tl.float32)


@triton.jit
def _leaf(
    b_q, p_keys, p_values, p_table, begin, end, written, b_seen, head, scale,
    NUM_HEADS: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums over tokens begin .. end - 1 for rows that see the first b_seen [R] positions.

    b_q is [R, COLUMNS]. Positions from `written` on may hold anything, NaN too. Returns the
    reference (an integer or -inf) [R], the sum of weights [R], and of weighted values [COLUMNS, R].
    """
    R: tl.constexpr = b_q.shape[0]
    o_t = tl.arange(0, TOKENS)
    o_d = tl.arange(0, COLUMNS)
    b_max = tl.full([R], float("-inf"), tl.float32)
    b_sums = tl.zeros([TOKENS, R], tl.float32)
    b_acc = tl.zeros([COLUMNS, R], tl.float32)
    for tile in tl.range(begin, end, TOKENS, num_stages=STAGES):
        o_token = tile + o_t
        o_pool = pool_rows(p_table, o_token, written, head, NUM_HEADS, BLOCK)
        o_kv = o_pool[:, None] * D + o_d[None, :]
        kept = (o_token < written)[:, None] & (o_d < D)[None, :]
        b_k = tl.load(p_keys + o_kv, mask=kept, other=0.0)
        b_scores = tl.dot(b_k, tl.trans(b_q), input_precision="ieee") * scale
        b_scores = tl.where(o_token[:, None] < b_seen[None, :], b_scores, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_scores, 0))
        b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp2(b_scores - b_safe[None, :])
        b_scale = tl.exp2(b_max - b_safe)
        b_max = b_new
        b_sums = b_sums * b_scale[None, :] + b_p
        b_acc = b_acc * b_scale[None, :]
        b_v = tl.load(p_values + o_kv, mask=kept, other=0.0)
        b_acc = tl.dot(tl.trans(b_v), b_p.to(b_v.dtype), b_acc, input_precision="ieee")
    b_top = tl.ceil(b_max)
    b_scale = tl.exp2(b_max - tl.where(b_max == float("-inf"), 0.0, b_top))
    return b_top, tl.sum(b_sums, 0) * b_scale, b_acc * b_scale[None, :]


@triton.jit(
    do_not_specialize=[
        *("batch", "num_tokens", "stride_table", "row_tiles", "max_leaf_items", "programs")
    ]
)
def _paged_attention(
    p_queries,  # [B, T, NUM_HEADS * SHARE, D]
    p_keys, p_values,  # [blocks, NUM_HEADS, BLOCK, D] each
    p_tables,  # [B, M], rows stride_table apart
    p_starts, p_num_rows,  # [B]
    p_output,  # as p_queries
    p_gate, stride_gate_b, stride_gate_t, stride_gate_h,  # [B, T, NUM_HEADS * SHARE, D]
    p_part_values,  # [P, D]
    p_part_max, p_part_sum,  # [P]
    scale, batch, num_tokens, stride_table, row_tiles, max_leaf_items, programs,
    NUM_HEADS: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, LANES: tl.constexpr, R: tl.constexpr, TOKENS: tl.constexpr,
    STAGES: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Items of a round, one program after every num_programs-th; see the head of this file.

    Row r of a sequence and key/value head is token r // SHARE and query head
    head * SHARE + r % SHARE. Its partial sums are at (cut * NUM_HEADS + head) * T * SHARE + r,
    counted from the sequence's first.
    """
    if PDL:
        gdc_launch_dependents()
    units = NUM_HEADS * row_tiles
    b_starts, b_ends, cut, b_cuts = _cut_batch(
        p_starts, p_num_rows, batch, units, max_leaf_items, programs, LANES
    )
    o_b = tl.arange(0, LANES)
    o_d = tl.arange(0, COLUMNS)
    b_after = tl.cumsum(b_cuts * units, 0)
    total = tl.sum(b_cuts * units, 0)
    if PDL:
        gdc_wait()
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        i_b = tl.sum((b_after <= item).to(tl.int32), 0)
        this = o_b == i_b
        start = tl.sum(tl.where(this, b_starts, 0), 0)
        written = tl.sum(tl.where(this, b_ends, 0), 0)
        own_item = item - tl.sum(tl.where(this, b_after - b_cuts * units, 0), 0)
        head = own_item % units // row_tiles
        begin = own_item // units * cut
        end = tl.minimum(begin + cut, written)

        o_r = own_item % row_tiles * R + tl.arange(0, R)
        inside = (o_r < num_tokens * SHARE)[:, None] & (o_d < D)[None, :]
        o_head = head * SHARE + o_r % SHARE
        o_query = (i_b * num_tokens + o_r // SHARE) * (NUM_HEADS * SHARE) + o_head
        o_out = o_query.to(tl.int64)[:, None] * D + o_d[None, :]
        b_q = tl.load(p_queries + o_out, mask=inside, other=0.0)
        b_seen = tl.minimum(start + 1 + o_r // SHARE, written)

        b_max, b_sum, b_acc = _no_sums(R, COLUMNS)
        b_max1, b_sum1, b_acc1 = _no_sums(R, COLUMNS)
        for leaf in range(begin, end, LEAF):
            b_max2, b_sum2, b_acc2 = _leaf(
                b_q, p_keys, p_values, p_tables + i_b.to(tl.int64) * stride_table,
                leaf, tl.minimum(leaf + LEAF, end), written, b_seen, head, scale,
                NUM_HEADS, D, COLUMNS, BLOCK, TOKENS, STAGES,
            )  # fmt: skip
            b_max1, b_sum1, b_acc1 = _fold(b_max1, b_sum1, b_acc1, b_max2, b_sum2, b_acc2)
            if (leaf + LEAF) % (LEAF * GROUP) == 0 or leaf + LEAF >= end:
                b_max, b_sum, b_acc = _fold(b_max, b_sum, b_acc, b_max1, b_sum1, b_acc1)
                b_max1, b_sum1, b_acc1 = _no_sums(R, COLUMNS)

        b_acc = tl.trans(b_acc)
        if written <= cut:
            b_output = b_acc / b_sum[:, None]
            if GATED:
                o_gate = i_b.to(tl.int64) * stride_gate_b + (o_r // SHARE) * stride_gate_t
                o_gate = (o_gate + o_head * stride_gate_h)[:, None] + o_d[None, :]
                b_gate = tl.load(p_gate + o_gate, mask=inside, other=0.0)
                b_output = gated_output(b_output, b_gate)
            tl.store(p_output + o_out, b_output.to(p_output.dtype.element_ty), mask=inside)
        else:
            o_part = (item // row_tiles).to(tl.int64) * (num_tokens * SHARE) + o_r
            tl.store(p_part_values + o_part[:, None] * D + o_d[None, :], b_acc, mask=inside)
            tl.store(p_part_max + o_part, b_max, mask=o_r < num_tokens * SHARE)
            tl.store(p_part_sum + o_part, b_sum, mask=o_r < num_tokens * SHARE)


@triton.jit(do_not_specialize=["batch", "num_tokens", "row_tiles", "max_leaf_items", "programs"])
def _combine(
    p_output,  # [B, T, NUM_HEADS * SHARE, D]
    p_starts, p_num_rows,  # [B]
    p_gate, stride_gate_b, stride_gate_t, stride_gate_h,  # [B, T, NUM_HEADS * SHARE, D]
    p_part_values,  # [P, D]
    p_part_max, p_part_sum,  # [P]
    batch, num_tokens, row_tiles, max_leaf_items, programs,
    NUM_HEADS: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr,
    LANES: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, GATED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """output = sum of values 2^reference / sum of weights 2^reference, over a row's partial sums.

    A program takes ROWS packed rows and COLUMNS of head_dim. Sums of leaves are added group by
    group, as an item that took a whole group has added them. A sequence without rows gets zeros.
    """
    if PDL:
        gdc_launch_dependents()
    i_b = tl.program_id(1) // NUM_HEADS
    head = tl.program_id(1) % NUM_HEADS
    _, _, cut, b_cuts = _cut_batch(
        p_starts, p_num_rows, batch, NUM_HEADS * row_tiles, max_leaf_items, programs, LANES
    )
    o_b = tl.arange(0, LANES)
    num_cuts = tl.sum(tl.where(o_b == i_b, b_cuts, 0), 0)
    if PDL:
        gdc_wait()
    if num_cuts == 1:
        return
    first = tl.sum(tl.where(o_b < i_b, b_cuts, 0), 0) * NUM_HEADS + head
    num_packed = (num_tokens * SHARE).to(tl.int64)
    o_r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    o_d = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (o_r < num_packed) & (o_d < D)
    o_head = head * SHARE + o_r % SHARE
    o_out = (i_b * num_tokens + o_r // SHARE) * (NUM_HEADS * SHARE) + o_head
    p_out = p_output + o_out.to(tl.int64) * D + o_d
    if num_cuts == 0:
        b_zero = tl.zeros([ROWS, COLUMNS], tl.float32)
        tl.store(p_out, b_zero.to(p_output.dtype.element_ty), mask=inside)
        return
    o_cut = tl.arange(0, 32)[None, :]
    b_max = tl.full([ROWS, 32], float("-inf"), tl.float32)
    for cuts in range(0, num_cuts, 32):
        o_part = (first + (cuts + o_cut) * NUM_HEADS) * num_packed + o_r
        valid = (cuts + o_cut < num_cuts) & (o_r < num_packed)
        b_part = tl.load(p_part_max + o_part, mask=valid, other=float("-inf"))
        b_max = tl.maximum(b_max, b_part)
    b_reference = tl.max(b_max, 1)[:, None]

    by_leaf = cut == LEAF
    b_total = tl.zeros([ROWS, 1], tl.float32)
    b_acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for cuts in range(0, num_cuts, AT_ONCE * GROUP):
        for group in tl.static_range(AT_ONCE):
            b_group_total = tl.zeros([ROWS, 1], tl.float32)
            b_group = tl.zeros([ROWS, COLUMNS], tl.float32)
            for member in tl.static_range(GROUP):
                i_cut = cuts + group * GROUP + member
                valid = (i_cut < num_cuts) & (o_r < num_packed)
                o_part = (first + i_cut * NUM_HEADS) * num_packed + o_r
                b_own = tl.load(p_part_max + o_part, mask=valid, other=float("-inf"))
                b_weight = tl.exp2(b_own - b_reference)
                b_part = tl.load(p_part_sum + o_part, mask=valid, other=0.0) * b_weight
                p_values = p_part_values + o_part * D + o_d
                b_values = tl.load(p_values, mask=valid & inside, other=0.0) * b_weight
                b_group_total = tl.where(by_leaf, b_group_total + b_part, b_group_total)
                b_group = tl.where(by_leaf, b_group + b_values, b_group)
                b_total = tl.where(by_leaf, b_total, b_total + b_part)
                b_acc = tl.where(by_leaf, b_acc, b_acc + b_values)
            b_total += b_group_total
            b_acc += b_group
    b_output = b_acc / b_total
    if GATED:
        o_gate = i_b.to(tl.int64) * stride_gate_b + (o_r // SHARE) * stride_gate_t
        p_own = p_gate + o_gate + o_head * stride_gate_h + o_d
        b_output = gated_output(b_output, tl.load(p_own, mask=inside, other=0.0))
    tl.store(p_out, b_output.to(p_output.dtype.element_ty), mask=inside)


def combine_launch(
    attending: Attending, cut: Cut, workspace: tuple[Tensor, ...], pdl: bool
) -> Launch:
    """Adds the partial sums of a round whose items were launched just before."""
    columns = min(128, triton.next_power_of_2(attending.head_dim))
    batch, num_tokens = attending.queries.shape[:2]
    heads = batch * attending.num_kv_heads
    # Of much work most is taken whole: then few programs are to find that nothing is left to do.
    rows, at_once = (4, 1) if attending.num_packed * heads > MANY_ROWS else (1, 4)
    parts = triton.cdiv(attending.head_dim, columns)
    grid = (triton.cdiv(attending.num_packed, rows), heads, parts)
    args = (
        *(attending.output, attending.starts, attending.num_rows, *attending.gate_args),
        *(*workspace, batch, num_tokens, cut.row_tiles, cut.max_leaf_items, cut.programs),
        *(attending.num_kv_heads, attending.share, attending.head_dim, columns),
        *(cut.lanes, rows, at_once, attending.gate is not None, pdl),
    )
    return Launch(_combine, grid, args, {"num_warps": 1, **launch_options(pdl)})


def launch_options(pdl: bool) -> dict[str, bool]:
    """Options that all kernels here share."""
    return {"enable_fp_fusion": False, **({"launch_pdl": True} if pdl else {})}


def round_launches(attending: Attending, card: Card) -> list[Launch]:
    """Items, then their sum; for a batch that `batch_parts` gave."""
    programs = 2 * card.num_multiprocessors
    cut = cut_batch(attending, PACKED_ROWS, 3 * card.num_multiprocessors, programs)
    workspace = cut.workspace(attending)
    batch, num_tokens = attending.queries.shape[:2]
    columns = max(16, triton.next_power_of_2(attending.head_dim))
    # Without 16-bit matrix units products are many instructions, and shared memory is scarcer.
    fast = card.capability >= (8, 0) and attending.queries.dtype != torch.float32
    bytes_per_token = columns * attending.queries.element_size()
    pdl = card.overlaps_launches
    args = (
        *(attending.queries, attending.kv_pool[0], attending.kv_pool[1], attending.block_tables),
        *(attending.starts, attending.num_rows, attending.output, *attending.gate_args),
        *(*workspace, attending.scale, batch, num_tokens),
        *(attending.block_tables.stride(0), cut.row_tiles, cut.max_leaf_items, cut.programs),
        *(attending.num_kv_heads, attending.share, attending.head_dim, columns),
        *(attending.block_size, cut.lanes, PACKED_ROWS, 64 if fast else 32),
        *(2 if fast and bytes_per_token <= 256 else 1, attending.gate is not None, pdl),
    )
    options = {"num_warps": 8 if bytes_per_token > 256 else 4, **launch_options(pdl)}
    items = Launch(_paged_attention, (programs,), args, options)
    return [items, combine_launch(attending, cut, workspace, pdl)]


def paged_attention_kernel(
    queries: Tensor,
    kv_pool: Tensor,
    block_tables: Tensor,
    starts: Tensor,
    num_rows: Tensor,
    gate: Tensor | None,
) -> Tensor:
    """See paged_attention."""
    output = torch.empty_like(queries)
    whole = Attending(queries, kv_pool, block_tables, starts, num_rows, gate, output)
    for part in batch_parts(whole):
        for launch in round_launches(part, Card.of(queries)):
            launch.run()
    return output
