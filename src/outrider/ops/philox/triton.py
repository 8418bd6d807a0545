"""Philox in kernels: device functions that every kernel with noise shares, and kernels of numbers.

The words are those of the reference, bit for bit, and so are the uniforms. An exponential time may
differ from the reference's in its last places, but never between two kernels: all of them make it
with `exponential`, compiled without contraction (enable_fp_fusion=False).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LN2 = tl.constexpr(0.6931471805599453)
NUM_WARPS = 4
UNIFORMS_BLOCK = 128


@triton.jit
def philox_words(seed, key, last, o_block):
    """The four words of each token block, uint32; see `_counter` of the reference.

    seed, key, last: int64, scalars or of o_block's shape; last = 256 * index + purpose.
    o_block: token id // 4.
    """
    b_block = o_block.to(tl.uint32)
    b_zero = b_block * 0
    b_low = b_zero + (key & 0xFFFFFFFF).to(tl.uint32)
    b_high = b_zero + ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    b_last = b_zero + last.to(tl.uint32)
    k0, k1 = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(10):
        # One wide multiplication gives both halves; umulhi and a product would be two.
        b_first = b_block.to(tl.uint64) * 0xD2511F53
        b_second = b_high.to(tl.uint64) * 0xCD9E8D57
        b_block = (b_second >> 32).to(tl.uint32) ^ b_low ^ k0
        b_high = (b_first >> 32).to(tl.uint32) ^ b_last ^ k1
        b_low, b_last = b_second.to(tl.uint32), b_first.to(tl.uint32)
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return b_block, b_low, b_high, b_last


@triton.jit
def uniform(b_word):
    """(word + 1/2) / 2^32, below 1."""
    return tl.minimum((b_word.to(tl.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)


@triton.jit
def exponential(b_word):
    """-log(1 - u) of u = uniform(word), to two roundings wherever u lies.

    With 1 - u = 2^-e (1 - v) and 0 <= v <= 1/2, it is e ln 2 + v g(v), where g(v) = -log(1 - v) / v
    is interpolated at the ten Chebyshev nodes of [0, 1/2] (relative error 4e-9). A hardware
    logarithm has no digits left near 1, where the winners of a race come from.
    """
    b_u = uniform(b_word)
    # 1 - u is exact for u >= 1/2, and its exponent and mantissa give e and v; below, v is u.
    b_bits = (1.0 - b_u).to(tl.int32, bitcast=True)
    b_mantissa = ((b_bits & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    b_small = b_u < 0.5
    b_v = tl.where(b_small, b_u, 1.0 - b_mantissa)
    b_e = tl.where(b_small, 0, 126 - (b_bits >> 23)).to(tl.float32)
    b_g = tl.fma(b_v, 1.7336119413375854, -2.4589619636535645)
    b_g = tl.fma(b_v, b_g, 1.9598705768585205)
    b_g = tl.fma(b_v, b_g, -0.5900887250900269)
    b_g = tl.fma(b_v, b_g, 0.3407464623451233)
    b_g = tl.fma(b_v, b_g, 0.17544077336788177)
    b_g = tl.fma(b_v, b_g, 0.2519567906856537)
    b_g = tl.fma(b_v, b_g, 0.33325517177581787)
    b_g = tl.fma(b_v, b_g, 0.5000011920928955)
    b_g = tl.fma(b_v, b_g, 1.0)
    return tl.fma(b_e, LN2, b_v * b_g)


@triton.jit
def word_of(b_words, b_ids):
    """Of each counter's four words, the one that belongs to the id."""
    b_rest = b_ids & 3
    b_low = tl.where(b_rest == 0, b_words[0], b_words[1])
    b_high = tl.where(b_rest == 2, b_words[2], b_words[3])
    return tl.where(b_rest < 2, b_low, b_high)


@triton.jit
def stream(p_index, i_row, index, purpose, PER_ROW: tl.constexpr):
    """Last counter word, int64: the index is one for all rows, or loaded for the row."""
    if PER_ROW:
        index = tl.load(p_index + i_row)
    return tl.cast(index, tl.int64) * 256 + purpose


@triton.jit(do_not_specialize=["size", "count", "purpose"])
def _uniforms(
    p_seeds,  # [R] int64
    p_keys,  # [R] int64
    p_uniforms,  # [R, count] float32
    size,
    count,
    purpose,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """uniforms[r, i] = uniform(first word of (seed, key, index i, purpose)); size = R * count."""
    o_flat = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = o_flat < size
    o_row, b_index = o_flat // count, o_flat % count
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    b_seed = tl.load(p_seeds + o_row, mask=inside, other=0)
    b_key = tl.load(p_keys + o_row, mask=inside, other=0)
    b_last = b_index.to(tl.int64) * 256 + purpose
    b_words = philox_words(b_seed, b_key, b_last, o_flat * 0)
    tl.store(p_uniforms + o_flat, uniform(b_words[0]), mask=inside)


def uniforms_kernel(seeds: Tensor, keys: Tensor, count: int, purpose: int, *, pdl: bool) -> Tensor:
    """[R] seeds and keys -> [R, count] float32."""
    uniforms = torch.empty((seeds.shape[0], count), dtype=torch.float32, device=seeds.device)
    size = uniforms.numel()
    if size == 0:
        return uniforms
    _uniforms[(triton.cdiv(size, UNIFORMS_BLOCK),)](
        seeds.contiguous(),
        keys.contiguous(),
        uniforms,
        size,
        count,
        int(purpose),
        UNIFORMS_BLOCK,
        pdl,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )
    return uniforms
