"""Which logits of a row top-k and top-p keep, found by counting: nothing is sorted.

    _collect   the few logits that the threshold can lie among, each chunk's side by side
    _select    the threshold, by bisection on ordered bits: a key and the last id of its tie

Top-k and top-p both keep a prefix of the row ordered by (logit down, id up), so one pair says what
they kept. A logit's key is an int32 of the same order. Weights are
exp((x - largest) / temperature), at most 1.

Tiles depend on the vocabulary's size alone and every sum has one order, so that a row's bits are
its own whatever stands beside it.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

CHUNK = tl.constexpr(4096)
"""Logits of one program; an offset in a chunk fits into 16 bits."""
GROUP = tl.constexpr(128)
"""Logits whose largest key _chunk_stats notes, for a first guess at a top-k threshold."""
CAPACITY = tl.constexpr(512)
"""Found logits that a chunk keeps a copy of; where one has more, the row is read again instead."""
TILE = tl.constexpr(2048)
"""Logits that _select looks at in one step."""
LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-(2**31))
"""Below every key."""
LAST_ID = tl.constexpr(2**31 - 1)
NO_LEADER = tl.constexpr(2**63 - 1)


@triton.jit
def key_of(b_x):
    """int32 in the order of float32; NaN as -inf, -0 as 0. A chunk's keys start above LOWEST."""
    b_x = tl.where(b_x == b_x, b_x, -float("inf"))
    b_bits = tl.where(b_x == 0.0, 0.0, b_x).to(tl.int32, bitcast=True)
    return b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(b_key):
    """The float32 of a key."""
    return (b_key ^ ((b_key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def full_key(short, SHIFT: tl.constexpr):
    """The key of a logit from its key >> SHIFT: the bits dropped are all 1 in negative ones."""
    return (short << SHIFT) | ((short >> 31) & ((1 << SHIFT) - 1))


@triton.jit
def weight_of(b_x, top, scale):
    """exp((x - top) / temperature), scale = log2(e) / temperature; 0 for -inf and NaN."""
    return tl.where(b_x > -float("inf"), tl.exp2((b_x - top) * scale), 0.0)


@triton.jit
def scale_of(p_temperature, i_row):
    temperature = tl.load(p_temperature + i_row)
    return LOG2_E / tl.where(temperature > 0.0, temperature, 1.0)


@triton.jit
def leader(key, b_ids):
    """int64 that is smallest for the largest key and then the lowest id."""
    return ((~key).to(tl.int64) << 32) | b_ids.to(tl.int64)


@triton.jit
def leading_key(b_leader):
    return (~(b_leader >> 32)).to(tl.int32)


@triton.jit
def row_leader(p_leaders, i_row, num_chunks, CHUNKS: tl.constexpr):
    """(each chunk's largest key [CHUNKS], LOWEST past the end; the row's leader)."""
    o_chunk = tl.arange(0, CHUNKS)
    p_row = p_leaders + i_row * num_chunks + o_chunk
    b_leader = tl.load(p_row, mask=o_chunk < num_chunks, other=NO_LEADER)
    return leading_key(b_leader), tl.min(b_leader, axis=0)


@triton.jit
def row_total(p_sums, i_row, num_chunks, b_keys, top, scale, CHUNKS: tl.constexpr):
    """Sum of a row's weights, from its chunks' sums."""
    o_chunk = tl.arange(0, CHUNKS)
    b_sum = tl.load(p_sums + i_row * num_chunks + o_chunk, mask=o_chunk < num_chunks, other=0.0)
    return tl.sum(b_sum * weight_of(value_of(b_keys), top, scale), axis=0)


@triton.jit
def filters_of(p_parameters, i_row, num_tokens, WITH_MIN_P: tl.constexpr):
    """(top_k, top_p, min_p, whether a threshold must be found) of a row."""
    k = tl.minimum(tl.load(p_parameters[1] + i_row), num_tokens).to(tl.int32)
    p, floor = tl.load(p_parameters[2] + i_row), tl.load(p_parameters[3] + i_row)
    filtered = (k < num_tokens) | (p < 1.0)
    if WITH_MIN_P:  # the sum of what is kept is wanted
        filtered = filtered | (floor > 0.0)
    else:  # greedy rows are not drawn
        filtered = filtered & (tl.load(p_parameters[0] + i_row) > 0.0)
    return k, p, floor, filtered


@triton.jit
def group_bound(p_groups, i_row, num_groups, k, high, GROUPS: tl.constexpr):
    """A key that k logits reach, and not many more.

    k groups whose maxima reach a key hold k logits that do. The search stops early: any such key is
    right, and a tighter one only leaves less to look at. high: the row's largest key.
    """
    o_group = tl.arange(0, GROUPS)
    p_row = p_groups + i_row * num_groups + o_group
    b_group = tl.load(p_row, mask=o_group < num_groups, other=LOWEST)
    low = tl.cast(LOWEST, tl.int64)
    high = high.to(tl.int64)
    count = tl.cast(LAST_ID, tl.int32)
    while (low < high) & (count > 2 * k):
        middle = low + (high - low + 1) // 2
        reached = tl.sum((b_group >= middle.to(tl.int32)).to(tl.int32), axis=0)
        enough = reached >= k
        count = tl.where(enough, reached, count)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low.to(tl.int32)


@triton.jit(do_not_specialize=["most", "chunks_per_program"])
def _collect(
    p_logits,  # [R, num_tokens], rows stride apart
    stride,
    num_tokens,
    most,
    p_parameters,  # temperature, top_k, top_p, min_p [R] where LAW; else k is `most` in every row
    p_leaders,
    p_sums,
    p_groups,
    p_counts,  # [R, chunks] int32: logits found, also those past CAPACITY
    p_found,  # [R, chunks, CAPACITY] of logits' dtype
    p_offsets,  # [R, chunks, CAPACITY] int16: place in the chunk, ascending
    num_chunks,
    chunks_per_program,
    LAW: tl.constexpr,
    WITH_MIN_P: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find every logit that may be kept; a row that keeps everything is left alone.

    With top-k those are the logits that reach a key which at least k of them do. With top-p alone,
    logits of a weight under (1 - p) * total / num_tokens weigh less than (1 - p) * total together,
    so the nucleus ends before them. With min-p alone, it is the threshold.
    """
    i_row = tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    b_keys, best = row_leader(p_leaders, i_row, num_chunks, CHUNKS)
    high = leading_key(best)
    top, k, scale, floor = value_of(high), most, 1.0, 0.0
    if LAW:
        k, p, min_p, filtered = filters_of(p_parameters, i_row, num_tokens, WITH_MIN_P)
        if not filtered:
            return
        scale = scale_of(p_parameters[0], i_row)
        total = row_total(p_sums, i_row, num_chunks, b_keys, top, scale, CHUNKS)
        # Half of the bound, so that rounding cannot matter.
        nucleus_floor = 0.5 * (1.0 - p) * total / num_tokens
        floor = tl.where(p < 1.0, nucleus_floor, min_p)
        floor = tl.where(k < num_tokens, 0.0, floor)
    bound = tl.cast(LOWEST, tl.int32)
    if k < num_tokens:
        PER_CHUNK: tl.constexpr = CHUNK // GROUP
        num_groups = num_chunks * PER_CHUNK
        bound = group_bound(p_groups, i_row, num_groups, k, high, CHUNKS * PER_CHUNK)
    o_token = tl.arange(0, CHUNK)
    for i in range(chunks_per_program):
        i_chunk = tl.program_id(0) * chunks_per_program + i
        if i_chunk < num_chunks:
            i_entry = i_row * num_chunks + i_chunk
            key = leading_key(tl.load(p_leaders + i_entry))
            count = tl.cast(0, tl.int32)
            if key >= bound:
                o_id = i_chunk * CHUNK + o_token
                inside = o_id < num_tokens
                p_x = p_logits + i_row * stride + o_id
                b_raw = tl.load(p_x, mask=inside, other=-float("inf"))
                b_x = b_raw.to(tl.float32)
                b_keep = inside & (key_of(b_x) >= bound)
                if LAW:
                    b_keep = b_keep & (weight_of(b_x, top, scale) >= floor)
                b_place = tl.cumsum(b_keep.to(tl.int32), axis=0) - 1
                b_keep_here = b_keep & (b_place < CAPACITY)
                o_found = i_entry * CAPACITY + b_place
                tl.store(p_found + o_found, b_raw, mask=b_keep_here)
                tl.store(p_offsets + o_found, o_token.to(tl.int16), mask=b_keep_here)
                count = tl.sum(b_keep.to(tl.int32), axis=0)
            tl.store(p_counts + i_entry, count)


@triton.jit
def source_of(
    p_logits, stride, num_tokens, p_counts, p_found, p_offsets, i_row, num_chunks,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """Where _select reads a row's candidates, and how many columns of each chunk."""
    o_chunk = tl.arange(0, CHUNKS)
    p_row = p_counts + i_row * num_chunks + o_chunk
    b_count = tl.load(p_row, mask=o_chunk < num_chunks, other=0)
    longest = tl.max(b_count, axis=0)
    dense = longest > CAPACITY
    columns = tl.where(dense, tl.minimum(CHUNK, num_tokens), longest)
    i_first = i_row * num_chunks * CAPACITY
    return (
        p_logits + i_row * stride, p_found + i_first, p_offsets + i_first,
        b_count, dense, columns, num_tokens,
    )  # fmt: skip


@triton.jit
def candidates(source, i_column, SHIFT: tl.constexpr, CHUNKS: tl.constexpr):
    """Tile [CHUNKS, TILE / CHUNKS]: logits float32, keys >> SHIFT (lowest where none), ids.

    SHIFT drops bits of a key that the logits' dtype never sets apart.
    """
    p_logits, p_found, p_offsets, b_count, dense, _columns, num_tokens = source
    o_chunk = tl.arange(0, CHUNKS)[:, None]
    o_column = i_column + tl.arange(0, TILE // CHUNKS)[None, :]
    b_offset = o_column + tl.zeros_like(o_chunk)
    if dense:
        b_inside = (o_column < CHUNK) & (o_chunk * CHUNK + o_column < num_tokens)
        b_x = tl.load(p_logits + o_chunk * CHUNK + o_column, mask=b_inside, other=0.0)
    else:
        b_inside = o_column < b_count[:, None]
        o_found = o_chunk * CAPACITY + o_column
        b_x = tl.load(p_found + o_found, mask=b_inside, other=0.0)
        b_offset = tl.load(p_offsets + o_found, mask=b_inside, other=0).to(tl.int32)
    b_x = b_x.to(tl.float32)
    b_key = tl.where(b_inside, key_of(b_x) >> SHIFT, LOWEST >> SHIFT)
    return b_x, b_key, o_chunk * CHUNK + b_offset


@triton.jit
def count_from(source, low, last_tie, SHIFT: tl.constexpr, CHUNKS: tl.constexpr):
    """How many keys are above `low`, or are `low` with an id up to last_tie."""
    b_sum = tl.zeros((CHUNKS, TILE // CHUNKS), tl.int32)
    for i_column in range(0, source[5], TILE // CHUNKS):
        _x, b_key, b_id = candidates(source, i_column, SHIFT, CHUNKS)
        b_sum += ((b_key > low) | ((b_key == low) & (b_id <= last_tie))).to(tl.int32)
    return tl.sum(b_sum)


@triton.jit
def mass_from(source, low, last_tie, least, top, scale, SHIFT: tl.constexpr, CHUNKS: tl.constexpr):
    """Sum of the weights of count_from's logits, of those that weigh `least` or more."""
    b_sum = tl.zeros((CHUNKS, TILE // CHUNKS), tl.float32)
    for i_column in range(0, source[5], TILE // CHUNKS):
        b_x, b_key, b_id = candidates(source, i_column, SHIFT, CHUNKS)
        b_weight = weight_of(b_x, top, scale)
        b_kept = (b_key > low) | ((b_key == low) & (b_id <= last_tie))
        b_sum += tl.where(b_kept & (b_weight >= least), b_weight, 0.0)
    return tl.sum(b_sum)


@triton.jit
def lowest_candidate(source, SHIFT: tl.constexpr, CHUNKS: tl.constexpr):
    b_lowest = tl.full((CHUNKS, TILE // CHUNKS), LAST_ID, tl.int32)
    for i_column in range(0, source[5], TILE // CHUNKS):
        _x, b_key, _id = candidates(source, i_column, SHIFT, CHUNKS)
        b_lowest = tl.minimum(b_lowest, tl.where(b_key > (LOWEST >> SHIFT), b_key, LAST_ID))
    return tl.min(b_lowest)


@triton.jit
def kth_key(source, k, low, high, SHIFT: tl.constexpr, CHUNKS: tl.constexpr):
    """A key in low .. high (int64) that k candidates reach: the largest, or one that just k do."""
    count = tl.cast(LAST_ID, tl.int32)
    while (low < high) & (count != k):
        middle = low + (high - low + 1) // 2
        reached = count_from(source, middle.to(tl.int32), LAST_ID, SHIFT, CHUNKS)
        enough = reached >= k
        count = tl.where(enough, reached, count)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit
def nucleus_key(source, mass, low, high, top, scale, SHIFT: tl.constexpr, CHUNKS: tl.constexpr):
    """The smallest key in low .. high (int64) with less than `mass` above it."""
    while low < high:
        middle = low + (high - low) // 2
        inside = mass_from(source, middle.to(tl.int32), -1, 0.0, top, scale, SHIFT, CHUNKS) < mass
        low = tl.where(inside, low, middle + 1)
        high = tl.where(inside, middle, high)
    return high


@triton.jit
def tie_end(source, key, num_kept, SHIFT: tl.constexpr, CHUNKS: tl.constexpr):
    """Id of the last logit kept of those at the threshold, where num_kept are kept in all."""
    low, high = tl.cast(0, tl.int32), tl.cast(LAST_ID, tl.int32)
    if count_from(source, key, LAST_ID, SHIFT, CHUNKS) > num_kept:
        high = tl.cast(CHUNKS * CHUNK - 1, tl.int32)
        while low < high:
            middle = low + (high - low) // 2
            enough = count_from(source, key, middle, SHIFT, CHUNKS) >= num_kept
            low = tl.where(enough, low, middle + 1)
            high = tl.where(enough, middle, high)
    return high


@triton.jit
def _select(
    p_logits,
    stride,
    num_tokens,
    p_parameters,  # temperature, top_k, top_p, min_p [R]
    p_leaders,
    p_sums,
    p_counts,
    p_found,
    p_offsets,
    p_cuts,  # [R, 3] int32: key and last id of the threshold, key of the largest logit
    p_totals,  # [R] float32: sum of the weights that are kept, where WITH_MIN_P
    num_chunks,
    WITH_MIN_P: tl.constexpr,
    SHIFT: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Top-k, then top-p of what it left.

    Above a key v lies the mass A(v). The j-th logit of that key, from 0, has A(v) + j w(v) before
    it and is kept while that is less than p * total, the first of the row always.
    """
    i_row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    b_keys, best = row_leader(p_leaders, i_row, num_chunks, CHUNKS)
    key_top = leading_key(best)
    top, scale = value_of(key_top), scale_of(p_parameters[0], i_row)
    total = row_total(p_sums, i_row, num_chunks, b_keys, top, scale, CHUNKS)
    k, p, min_p, filtered = filters_of(p_parameters, i_row, num_tokens, WITH_MIN_P)
    key, last_tie = tl.cast(LOWEST, tl.int32), tl.cast(LAST_ID, tl.int32)
    if filtered:
        source = source_of(
            p_logits, stride, num_tokens, p_counts, p_found, p_offsets, i_row, num_chunks, CHUNKS
        )
        high = (key_top >> SHIFT).to(tl.int64)
        low = tl.minimum(lowest_candidate(source, SHIFT, CHUNKS).to(tl.int64), high)
        short = low.to(tl.int32)
        num_kept = tl.cast(LAST_ID, tl.int32)
        if k < num_tokens:
            low = kth_key(source, k, low, high, SHIFT, CHUNKS)
            short, num_kept = low.to(tl.int32), k
            last_tie = tie_end(source, short, k, SHIFT, CHUNKS)
            total = mass_from(source, short, last_tie, 0.0, top, scale, SHIFT, CHUNKS)
        if p < 1.0:
            short = nucleus_key(source, p * total, low, high, top, scale, SHIFT, CHUNKS).to(
                tl.int32
            )
            before = mass_from(source, short, -1, 0.0, top, scale, SHIFT, CHUNKS)
            at_key = weight_of(value_of(full_key(short, SHIFT)), top, scale)
            ties = tl.ceil((p * total - before) / at_key)
            ties = tl.minimum(tl.maximum(ties, 1.0), num_tokens).to(tl.int32)
            above = count_from(source, short, -1, SHIFT, CHUNKS)
            num_kept = tl.minimum(num_kept, above + ties)
            last_tie = tie_end(source, short, num_kept, SHIFT, CHUNKS)
        key = full_key(short, SHIFT)
        if WITH_MIN_P:
            total = mass_from(source, short, last_tie, min_p, top, scale, SHIFT, CHUNKS)
    tl.store(p_cuts + i_row * 3, key)
    tl.store(p_cuts + i_row * 3 + 1, last_tie)
    tl.store(p_cuts + i_row * 3 + 2, key_top)
    if WITH_MIN_P:
        tl.store(p_totals + i_row, total)
