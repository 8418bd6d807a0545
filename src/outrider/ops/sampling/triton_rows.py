"""Passes over rows of logits, cut into chunks that programs share.

A row is drawn from without dividing its weights by their sum. Rows without top-k and top-p meet no
threshold (its key is LOWEST), so that they are read twice and searched never.

Chunks depend on the vocabulary's size alone, sums have one order, and no contraction
(enable_fp_fusion=False) makes two kernels round differently. A row's bits are its own; as in every
kernel here, rows that begin off a 16-byte boundary may be summed in another order.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.ops.philox.triton import exponential, philox_words, stream, word_of
from outrider.ops.sampling.triton_threshold import (
    CHUNK,
    GROUP,
    LAST_ID,
    LOWEST,
    NO_LEADER,
    TILE,
    candidates,
    full_key,
    key_of,
    kth_key,
    leader,
    leading_key,
    lowest_candidate,
    row_leader,
    scale_of,
    source_of,
    tie_end,
    value_of,
    weight_of,
)

RACE_BLOCK = tl.constexpr(2048)
"""Tokens that one program draws times for; divides CHUNK."""


@triton.jit
def _chunk_stats(
    p_logits,  # [R, num_tokens], rows stride apart
    stride,
    num_tokens,
    p_temperature,  # [R] where SUMS
    p_leaders,  # [R, chunks] int64
    p_sums,  # [R, chunks] float32: weights relative to the chunk's own largest logit
    p_groups,  # [R, chunks * CHUNK / GROUP] int32: largest key of each group
    SUMS: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    i_chunk, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    PER_CHUNK: tl.constexpr = CHUNK // GROUP
    i_entry = i_row * tl.num_programs(0) + i_chunk
    o_group = tl.arange(0, PER_CHUNK)
    o_id = i_chunk * CHUNK + o_group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    p_x = p_logits + i_row * stride + o_id
    b_x = tl.load(p_x, mask=o_id < num_tokens, other=-float("inf")).to(tl.float32)
    b_key = key_of(b_x)
    b_group = tl.max(b_key, axis=1)
    key = tl.max(b_group, axis=0)
    # Lanes past the end hold -inf too, but higher ids.
    first = tl.min(tl.min(tl.where(b_key == key, o_id, LAST_ID), axis=1), axis=0)
    tl.store(p_leaders + i_entry, leader(key, first))
    if GROUPS:
        tl.store(p_groups + i_entry * PER_CHUNK + o_group, b_group)
    if SUMS:
        b_weight = weight_of(b_x, value_of(key), scale_of(p_temperature, i_row))
        tl.store(p_sums + i_entry, tl.sum(tl.sum(b_weight, axis=1), axis=0))


@triton.jit
def cut_of(p_cuts, i_row):
    """(key and last id of a row's threshold, its largest logit)."""
    p_cut = p_cuts + i_row * 3
    return tl.load(p_cut), tl.load(p_cut + 1), value_of(tl.load(p_cut + 2))


@triton.jit
def is_kept(b_x, b_id, cut, scale, min_p):
    """Whether a row's filters keep a logit; -inf and NaN never stay."""
    key, last_tie, top = cut
    b_kept = b_x > -float("inf")
    if key > LOWEST:
        b_key = key_of(b_x)
        b_kept = b_kept & ((b_key > key) | ((b_key == key) & (b_id <= last_tie)))
    if min_p > 0.0:
        b_kept = b_kept & (weight_of(b_x, top, scale) >= min_p)
    return b_kept


@triton.jit
def arrival(b_time, p_row, o_id, num_tokens, cut, scale, min_p, LAW: tl.constexpr):
    """int64 that is smallest for the smallest time / weight and then the lowest id.

    Where LAW, 1 / weight is exp((top - x) / temperature), which saves the division. No ratio is
    NaN, as those of a row with a logit of +inf would be: lanes past the row's end could win.
    """
    b_x = tl.load(p_row + o_id, mask=o_id < num_tokens, other=-float("inf")).to(tl.float32)
    if LAW:
        b_ratio = b_time * tl.exp2((cut[2] - b_x) * scale)
        b_runs = is_kept(b_x, o_id, cut, scale, min_p) & (b_ratio == b_ratio)
        b_ratio = tl.where(b_runs, b_ratio, float("inf"))
    else:
        b_ratio = tl.where(b_x > 0.0, b_time / b_x, float("inf"))
    return ranked(b_ratio, o_id)


@triton.jit
def ranked(b_ratio, b_id):
    """int64 in the order of (ratio, id); ratios are not negative."""
    return (b_ratio.to(tl.int32, bitcast=True).to(tl.int64) << 32) | b_id.to(tl.int64)


@triton.jit(do_not_specialize=["index", "purpose"])
def _race(
    p_rows,  # [R, num_tokens], rows stride apart: logits where LAW, else weights float32
    stride,
    num_tokens,
    p_seeds,  # [R] int64
    p_keys,  # [R] int64
    p_index,  # [R] int64 where PER_ROW
    index,
    purpose,
    p_token_ids,  # [num_tokens] int64 where MAPPED
    p_parameters,  # temperature, top_k, top_p, min_p [R] where LAW
    p_leaders,  # [R, chunks] int64 where LAW
    p_cuts,  # [R, 3] int32 where LAW
    p_winners,  # [R, blocks] int64
    num_chunks,
    LAW: tl.constexpr,
    MAPPED: tl.constexpr,
    PER_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The token with the smallest exponential(word) / weight of a block of tokens."""
    i_block, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_entry = i_row * tl.num_programs(0) + i_block
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    cut, scale, min_p = (0, 0, 0.0), 1.0, 0.0
    if LAW:
        if tl.load(p_parameters[0] + i_row) <= 0.0:
            return  # a greedy row: its leader is its token
        i_chunk = i_block // (CHUNK // BLOCK)
        largest = leading_key(tl.load(p_leaders + i_row * num_chunks + i_chunk))
        cut = cut_of(p_cuts, i_row)
        if largest < cut[0]:
            tl.store(p_winners + i_entry, NO_LEADER)
            return
        scale, min_p = scale_of(p_parameters[0], i_row), tl.load(p_parameters[3] + i_row)
    seed, key = tl.load(p_seeds + i_row), tl.load(p_keys + i_row)
    last = stream(p_index, i_row, index, purpose, PER_ROW)
    p_row = p_rows + i_row * stride
    if MAPPED:
        o_id = i_block * BLOCK + tl.arange(0, BLOCK)
        b_token = tl.load(p_token_ids + o_id, mask=o_id < num_tokens, other=0)
        b_time = exponential(word_of(philox_words(seed, key, last, b_token >> 2), b_token))
        b_best = arrival(b_time, p_row, o_id, num_tokens, cut, scale, min_p, LAW)
    else:
        # Four ids share a counter: each of the four words goes with every fourth token.
        o_quad = i_block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
        b_words = philox_words(seed, key, last, o_quad)
        b_best = tl.full((BLOCK // 4,), NO_LEADER, tl.int64)
        for j in tl.static_range(4):
            o_id = o_quad * 4 + j
            b_time = exponential(b_words[j])
            b_new = arrival(b_time, p_row, o_id, num_tokens, cut, scale, min_p, LAW)
            b_best = tl.minimum(b_best, b_new)
    tl.store(p_winners + i_entry, tl.min(b_best, axis=0))


@triton.jit
def _finish(
    p_winners,  # [R, num_winners] int64; not read where not SAMPLED
    num_winners,
    p_leaders,  # [R, num_leaders] int64
    num_leaders,
    p_temperature,  # [R] where SAMPLED and GREEDY
    p_token_ids,  # [V] int64 where MAPPED
    p_output,  # [R] int64
    SAMPLED: tl.constexpr,
    GREEDY: tl.constexpr,
    MAPPED: tl.constexpr,
    WINNERS: tl.constexpr,
    LEADERS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The row's token: its best winner, or its leader where the row (or every row) is greedy."""
    i_row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    best = tl.cast(NO_LEADER, tl.int64)
    if SAMPLED:
        o_w = tl.arange(0, WINNERS)
        p_row = p_winners + i_row * num_winners + o_w
        best = tl.min(tl.load(p_row, mask=o_w < num_winners, other=NO_LEADER), axis=0)
    if GREEDY:
        _keys, first = row_leader(p_leaders, i_row, num_leaders, LEADERS)
        if SAMPLED:
            best = tl.where(tl.load(p_temperature + i_row) > 0.0, best, first)
        else:
            best = first
    token = best & 0xFFFFFFFF
    if MAPPED:
        token = tl.load(p_token_ids + token)
    tl.store(p_output + i_row, token)


@triton.jit
def _probs(
    p_logits,  # [R, num_tokens], rows stride apart
    stride,
    num_tokens,
    p_parameters,
    p_cuts,  # [R, 3] int32
    p_totals,  # [R] float32
    p_output,  # [R, num_tokens] float32
    PDL: tl.constexpr,
):
    """probs = weight / total where kept."""
    i_row = tl.program_id(1).to(tl.int64)
    o_id = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = o_id < num_tokens
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    p_x = p_logits + i_row * stride + o_id
    b_x = tl.load(p_x, mask=inside, other=-float("inf")).to(tl.float32)
    scale, min_p = scale_of(p_parameters[0], i_row), tl.load(p_parameters[3] + i_row)
    cut = cut_of(p_cuts, i_row)
    b_probs = weight_of(b_x, cut[2], scale) / tl.load(p_totals + i_row)
    b_probs = tl.where(is_kept(b_x, o_id, cut, scale, min_p), b_probs, 0.0)
    tl.store(p_output + i_row * num_tokens + o_id, b_probs, mask=inside)


@triton.jit(do_not_specialize=["most"])
def _emit_top(
    p_logits,
    stride,
    num_tokens,
    most,
    p_leaders,
    p_counts,
    p_found,
    p_offsets,
    p_kept,  # [R, MOST] int64, room for what is kept, unordered
    p_scores,  # [R, most] of logits' dtype
    p_ids,  # [R, most] int64
    num_chunks,
    SHIFT: tl.constexpr,
    CHUNKS: tl.constexpr,
    MOST: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """The `most` best logits in order: find the last one, gather, rank by comparing all pairs."""
    i_row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    source = source_of(
        p_logits, stride, num_tokens, p_counts, p_found, p_offsets, i_row, num_chunks, CHUNKS
    )
    _keys, best = row_leader(p_leaders, i_row, num_chunks, CHUNKS)
    high = (leading_key(best) >> SHIFT).to(tl.int64)
    low = tl.minimum(lowest_candidate(source, SHIFT, CHUNKS).to(tl.int64), high)
    short = kth_key(source, most, low, high, SHIFT, CHUNKS).to(tl.int32)
    last_tie = tie_end(source, short, most, SHIFT, CHUNKS)

    p_kept += i_row * MOST
    num_kept = tl.cast(0, tl.int32)
    for i_column in range(0, source[5], TILE // CHUNKS):
        _x, b_key, b_id = candidates(source, i_column, SHIFT, CHUNKS)
        b_keep = (b_key > short) | ((b_key == short) & (b_id <= last_tie))
        b_flat = tl.reshape(b_keep.to(tl.int32), (TILE,))
        o_kept = num_kept + tl.cumsum(b_flat, axis=0) - 1
        b_leader = tl.reshape(leader(full_key(b_key, SHIFT), b_id), (TILE,))
        tl.store(p_kept + o_kept, b_leader, mask=b_flat > 0)
        num_kept += tl.sum(b_flat, axis=0)
    tl.debug_barrier()  # what one thread stored, others load

    o_mine = tl.arange(0, MOST)
    b_mine = tl.load(p_kept + o_mine, mask=o_mine < most, other=NO_LEADER)
    b_rank = tl.zeros((MOST,), tl.int32)
    for i_other in range(0, most, STEP):
        o_other = i_other + tl.arange(0, STEP)
        b_other = tl.load(p_kept + o_other, mask=o_other < most, other=NO_LEADER)
        b_rank += tl.sum((b_other[None, :] < b_mine[:, None]).to(tl.int32), axis=1)
    o_out = i_row * most + b_rank
    b_score = value_of(leading_key(b_mine)).to(p_scores.dtype.element_ty)
    tl.store(p_scores + o_out, b_score, mask=o_mine < most)
    tl.store(p_ids + o_out, b_mine & 0xFFFFFFFF, mask=o_mine < most)


@triton.jit(do_not_specialize=["num_listed", "index", "purpose"])
def _draw_listed(
    p_scores,  # [R, num_listed], descending
    p_token_ids,  # [R, num_listed] int64
    num_listed,
    p_parameters,  # temperature, top_k, top_p, min_p [R]
    p_seeds,  # [R] int64
    p_keys,  # [R] int64
    index,
    purpose,
    p_tokens,  # [R] int64
    p_output,  # [R, num_listed] float32
    LISTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """In an ordered list, top-k and top-p are a rank and a running sum; then the race."""
    i_row = tl.program_id(0).to(tl.int64)
    o_rank = tl.arange(0, LISTED)
    inside = o_rank < num_listed
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    o_entry = i_row * num_listed + o_rank
    b_x = tl.load(p_scores + o_entry, mask=inside, other=-float("inf")).to(tl.float32)
    b_token = tl.load(p_token_ids + o_entry, mask=inside, other=0)
    k, p = tl.load(p_parameters[1] + i_row), tl.load(p_parameters[2] + i_row)
    min_p = tl.load(p_parameters[3] + i_row)
    top = value_of(tl.max(key_of(b_x), axis=0))
    b_weight = weight_of(b_x, top, scale_of(p_parameters[0], i_row))
    b_weight = tl.where(o_rank < k, b_weight, 0.0)
    b_before = tl.cumsum(b_weight, axis=0) - b_weight
    mass = tl.where(p < 1.0, p * tl.sum(b_weight, axis=0), float("inf"))
    b_open = (b_before < mass) | (o_rank == 0)
    b_weight = tl.where(b_open & (b_weight >= min_p), b_weight, 0.0)
    tl.store(p_output + o_entry, b_weight / tl.sum(b_weight, axis=0), mask=inside)

    seed, key = tl.load(p_seeds + i_row), tl.load(p_keys + i_row)
    last = stream(p_seeds, i_row, index, purpose, False)
    b_time = exponential(word_of(philox_words(seed, key, last, b_token >> 2), b_token))
    b_ratio = tl.where(b_weight > 0.0, b_time / b_weight, float("inf"))
    best = tl.min(ranked(b_ratio, o_rank), axis=0) & 0xFFFFFFFF
    tl.store(p_tokens + i_row, tl.load(p_token_ids + i_row * num_listed + best))


@triton.jit(do_not_specialize=["num_listed"])
def _block_terms(
    p_probs,  # [B, K + 1, num_tokens] float32, contiguous
    num_tokens,
    p_drafts,  # [B, K] int64
    p_num_drafts,  # [B] int64
    p_ids,  # [B, K, num_listed] int64, rows of a block stride apart
    p_q,  # [B, K, num_listed] float32, likewise
    stride_ids,
    stride_q,
    num_listed,
    p_reach,  # [B, K + 1] float32
    p_accept,  # [B, K + 1] float32
    K: tl.constexpr,
    ROWS: tl.constexpr,
    LISTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """P_{i+1} = min(1, P_i p(x) / q(x)), S_i = P_i - sum of min(P_i p, q) over q's ids.

    h_0 = 1, h_i = S_i / (S_i + 1 - P_i) with 0 / 0 = 1, h_i = P_i at the block's end and 0 past it.
    """
    i_block = tl.program_id(0).to(tl.int64)
    o_row, o_listed = tl.arange(0, ROWS), tl.arange(0, LISTED)
    b_inside = (o_row[:, None] < K) & (o_listed[None, :] < num_listed)
    o_entry = o_row[:, None] * num_listed + o_listed[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    p_row = p_probs + (i_block * (K + 1) + o_row) * num_tokens
    b_draft = tl.load(p_drafts + i_block * K + o_row, mask=o_row < K, other=0)
    b_id = tl.load(p_ids + i_block * stride_ids + o_entry, mask=b_inside, other=0)
    b_q = tl.load(p_q + i_block * stride_q + o_entry, mask=b_inside, other=0.0)
    b_p = tl.load(p_row[:, None] + b_id, mask=b_inside, other=0.0)
    b_p_drafted = tl.load(p_row + b_draft, mask=o_row < K, other=0.0)
    b_q_drafted = tl.sum(tl.where(b_id == b_draft[:, None], b_q, 0.0), axis=1)
    b_ratio = tl.where(b_p_drafted > 0.0, b_p_drafted / b_q_drafted, 0.0)
    b_ratio = tl.minimum(b_ratio, 3.4e38)  # so that P_i = 0 stays 0 where q is 0
    num_drafts = tl.load(p_num_drafts + i_block)
    p_reach += i_block * (K + 1)
    p_accept += i_block * (K + 1)
    reach = 1.0
    for i in tl.static_range(K + 1):
        accept = reach
        if i > 0:
            b_common = tl.where(o_row[:, None] == i, tl.minimum(reach * b_p, b_q), 0.0)
            excess = tl.maximum(reach - tl.sum(tl.sum(b_common, axis=1), axis=0), 0.0)
            total = excess + 1.0 - reach
            inner = tl.where(total > 0.0, excess / total, 1.0)
            accept = tl.where(i < num_drafts, inner, tl.where(i == num_drafts, reach, 0.0))
        tl.store(p_reach + i, reach)
        tl.store(p_accept + i, accept)
        reach = tl.minimum(reach * tl.sum(tl.where(o_row == i, b_ratio, 0.0), axis=0), 1.0)
