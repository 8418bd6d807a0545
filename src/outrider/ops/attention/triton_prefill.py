"""Paged attention of prompt chunks in Triton, on any card, over bulk copies where there are any.

The tokens of a chunk are programs of many packed rows, which walk over the context in tiles counted
from position 0: a row's bits do not depend on its chunk. Kernels are compiled without contraction
of products and sums, as those of rounds are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from outrider.ops.attention.plan import Attending, Card, Launch, PrefillTile
from outrider.ops.attention.triton import gated_output, launch_options, pool_rows


@triton.jit
def _prefill_tile(
    b_q, keys, values, p_table, tile, written, o_position, head, scale, b_max, b_sum, b_acc,
    NUM_HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    DESCRIPTORS: tl.constexpr, MASKED: tl.constexpr, UNWRITTEN: tl.constexpr,
):  # fmt: skip
    """Online softmax over one tile of tokens, the tile-th by absolute position.

    Row r of b_q [R, COLUMNS] is at position o_position[r]. MASKED may be left out where every row
    sees the whole tile, UNWRITTEN where the whole tile is written; the bits are the same. b_max is
    in units of the raw products.
    """
    o_token = tile * TOKENS + tl.arange(0, TOKENS)
    if DESCRIPTORS:
        block = tl.load(p_table + tile * TOKENS // BLOCK)
        pool_row = (block.to(tl.int32) * NUM_HEADS + head) * BLOCK + tile * TOKENS % BLOCK
        b_k = keys.load([pool_row, 0])
        b_v = values.load([pool_row, 0])
        if UNWRITTEN:
            # Through registers, which is slow; what nobody wrote may be NaN, and 0 * NaN is NaN.
            b_v = tl.where((o_token < written)[:, None], b_v, 0.0)
    else:
        o_d = tl.arange(0, b_q.shape[1])
        o_pool = pool_rows(p_table, o_token, written, head, NUM_HEADS, BLOCK)
        o_kv = o_pool[:, None] * D + o_d[None, :]
        kept = (o_token < written)[:, None] & (o_d < D)[None, :]
        b_k = tl.load(keys + o_kv, mask=kept, other=0.0)
        b_v = tl.load(values + o_kv, mask=kept, other=0.0)
    b_scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    if MASKED:
        b_scores = tl.where(o_token[None, :] <= o_position[:, None], b_scores, float("-inf"))
    b_new = tl.maximum(b_max, tl.max(b_scores, 1))
    b_p = tl.exp2(tl.fma(b_scores, scale, -(b_new * scale)[:, None]))
    b_scale = tl.exp2((b_max - b_new) * scale)
    b_sum = b_sum * b_scale + tl.sum(b_p, 1)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_scale[:, None], input_precision="ieee")
    return b_new, b_sum, b_acc


@triton.jit(do_not_specialize=["num_tokens"])
def _prefill_attention(
    p_queries,  # [T, NUM_HEADS * SHARE, D]
    keys, values,  # [blocks, NUM_HEADS, BLOCK, D] each, or descriptors of tiles [TOKENS, D]
    p_table,  # [M]
    p_start, p_num_rows,  # [1]
    p_output,  # as p_queries
    p_gate, stride_gate_t, stride_gate_h,  # [T, NUM_HEADS * SHARE, D]
    scale, num_tokens,
    NUM_HEADS: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, R: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr,
    DESCRIPTORS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """softmax(q K^T / sqrt(D)) V for R packed rows of one key/value head.

    Row r of a program is its token r // SHARE and query head head * SHARE + r % SHARE. Tiles of
    tokens are counted from position 0, and those past a row's own position leave its sums alone,
    so its bits do not depend on the rows it is packed with.
    """
    QUERIES: tl.constexpr = R // SHARE
    head = tl.program_id(0)
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * QUERIES  # the longest ones begin first
    start = tl.load(p_start).to(tl.int32)
    written = start + tl.load(p_num_rows).to(tl.int32)
    o_r = tl.arange(0, R)
    o_d = tl.arange(0, COLUMNS)
    o_t = first + o_r // SHARE
    o_head = head * SHARE + o_r % SHARE
    used = (o_r < QUERIES * SHARE) & (o_t < num_tokens)
    inside = used[:, None] & (o_d < D)[None, :]
    o_out = (o_t * (NUM_HEADS * SHARE) + o_head).to(tl.int64)[:, None] * D + o_d[None, :]
    b_q = tl.load(p_queries + o_out, mask=inside, other=0.0)
    o_position = tl.minimum(start + o_t, written - 1)

    b_max = tl.full([R], float("-inf"), tl.float32)
    b_sum = tl.zeros([R], tl.float32)
    b_acc = tl.zeros([R, COLUMNS], tl.float32)
    num_whole = (start + first + 1) // TOKENS
    last = tl.minimum(start + first + QUERIES, written) - 1
    num_tiles = last // TOKENS + 1
    num_written = tl.minimum(written // TOKENS, num_tiles) if DESCRIPTORS else num_tiles
    for tile in tl.range(0, num_whole, num_stages=STAGES):
        b_max, b_sum, b_acc = _prefill_tile(
            b_q, keys, values, p_table, tile, written, o_position, head, scale,
            b_max, b_sum, b_acc, NUM_HEADS, D, BLOCK, TOKENS, DESCRIPTORS, False, False,
        )  # fmt: skip
    for tile in tl.range(num_whole, num_written, num_stages=1):
        b_max, b_sum, b_acc = _prefill_tile(
            b_q, keys, values, p_table, tile, written, o_position, head, scale,
            b_max, b_sum, b_acc, NUM_HEADS, D, BLOCK, TOKENS, DESCRIPTORS, True, False,
        )  # fmt: skip
    for tile in tl.range(tl.maximum(num_whole, num_written), num_tiles, num_stages=1):
        b_max, b_sum, b_acc = _prefill_tile(
            b_q, keys, values, p_table, tile, written, o_position, head, scale,
            b_max, b_sum, b_acc, NUM_HEADS, D, BLOCK, TOKENS, DESCRIPTORS, True, True,
        )  # fmt: skip

    b_output = b_acc / b_sum[:, None]
    if GATED:
        o_gate = (o_t.to(tl.int64) * stride_gate_t + o_head * stride_gate_h)[:, None] + o_d[None, :]
        b_output = gated_output(b_output, tl.load(p_gate + o_gate, mask=inside, other=0.0))
    tl.store(p_output + o_out, b_output.to(p_output.dtype.element_ty), mask=inside)


def prefill_launch(attending: Attending, tile: PrefillTile) -> Launch:
    """One chunk of a prompt, B = 1."""
    num_tokens, head_dim = attending.queries.shape[1], attending.head_dim
    keys, values = attending.kv_pool[0], attending.kv_pool[1]
    if tile.descriptors:
        keys, values = (pool_descriptor(pool, tile.tokens) for pool in (keys, values))
    pointer, _, *gate_strides = attending.gate_args
    args = (
        *(attending.queries, keys, values, attending.block_tables, attending.starts),
        *(attending.num_rows, attending.output, pointer, *gate_strides),
        *(attending.scale, num_tokens, attending.num_kv_heads, attending.share),
        *(head_dim, max(16, triton.next_power_of_2(head_dim)), attending.block_size),
        *(tile.rows, tile.tokens, tile.num_stages, tile.descriptors),
        attending.gate is not None,
    )
    grid = (attending.num_kv_heads, triton.cdiv(num_tokens, tile.rows // attending.share))
    options = {"num_warps": tile.num_warps, **launch_options(pdl=False)}
    return Launch(_prefill_attention, grid, args, options)


def pool_descriptor(pool: Tensor, tokens: int) -> TensorDescriptor:
    """Tiles [tokens, D] of a pool [blocks, Hkv, block_size, D] seen as rows."""
    rows = pool.view(-1, pool.shape[3])
    assert len(rows) < 2**31, "a descriptor counts rows in 32 bits"
    return TensorDescriptor.from_tensor(rows, [tokens, pool.shape[3]])


def prefill_attention_kernel(
    queries: Tensor,
    kv_pool: Tensor,
    block_tables: Tensor,
    starts: Tensor,
    num_rows: Tensor,
    gate: Tensor | None,
) -> Tensor:
    """See prefill_attention."""
    output = torch.empty_like(queries)
    chunk = Attending(queries, kv_pool, block_tables, starts, num_rows, gate, output)
    prefill_launch(chunk, PrefillTile.of(chunk, Card.of(queries))).run()
    return output
