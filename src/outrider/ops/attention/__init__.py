"""Causal attention over paged keys and values: the rows of rounds, and prompt chunks.

Two public functions of one meaning, because they run as different kernels: a round's rows always
take the one and a prompt's rows always the other, whatever their number, so that a row's bits do
not depend on how a step was cut.
"""

import torch
from torch import Tensor

from outrider.ops.attention.reference import paged_attention_reference
from outrider.ops.dispatch import is_hopper, uses_kernels

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def paged_attention(
    queries: Tensor,
    kv_pool: Tensor,
    block_tables: Tensor,
    starts: Tensor,
    num_rows: Tensor,
    gate: Tensor | None = None,
) -> Tensor:
    """softmax(q K^T / sqrt(D)) V; row t of sequence b sees positions 0 .. starts[b] + t.

    Args:
        queries: [B, T, Hq, D]; their own keys and values are in the pool already.
        kv_pool: [2, num_blocks, Hkv, block_size, D]; Hq is a multiple of Hkv.
        block_tables: [B, M] int64, block ids in order of position; entries past the last needed
            block may name any block.
        starts: [B] int64, position of row 0.
        num_rows: [B] int64 at most T; rows past it are padding and come out unspecified.
        gate: [B, T, Hq, D] of any strides over B * T, or None; the output is multiplied by its
            sigmoid.

    Returns:
        [B, T, Hq, D] in the queries' dtype. A row's bits depend on its query, its position and
        the keys and values up to it, not on B, T, M or the block size.
    """
    assert queries.dtype in SUPPORTED_DTYPES and queries.dtype == kv_pool.dtype, queries.dtype
    assert queries.shape[2] % kv_pool.shape[2] == 0, (queries.shape, kv_pool.shape)
    assert gate is None or gate.shape == queries.shape, queries.shape
    args = (queries, kv_pool, block_tables, starts, num_rows, gate)
    if not uses_kernels(queries):
        return paged_attention_reference(*args)
    if is_hopper(queries) and _fits_hopper(queries, kv_pool):
        from outrider.ops.attention.hopper import paged_attention_kernel
    else:
        from outrider.ops.attention.triton import paged_attention_kernel
    return paged_attention_kernel(*args)


def _fits_hopper(queries: Tensor, kv_pool: Tensor) -> bool:
    """Whether the SM90 kernel is made for such tensors; the portable one takes all others."""
    is_16_bit = queries.dtype in (torch.float16, torch.bfloat16)
    return is_16_bit and queries.shape[3] in (64, 128, 256) and kv_pool.shape[3] % 64 == 0


def prefill_attention(
    queries: Tensor,
    kv_pool: Tensor,
    block_tables: Tensor,
    starts: Tensor,
    num_rows: Tensor,
    gate: Tensor | None = None,
) -> Tensor:
    """The same for a prompt chunk: B is 1 and T any number of rows, all of them in use.

    A row's bits do not depend on where its chunk begins or ends.
    """
    assert queries.dtype in SUPPORTED_DTYPES and queries.dtype == kv_pool.dtype, queries.dtype
    assert queries.shape[0] == 1 and queries.shape[2] % kv_pool.shape[2] == 0, queries.shape
    assert gate is None or gate.shape == queries.shape, queries.shape
    args = (queries, kv_pool, block_tables, starts, num_rows, gate)
    if not uses_kernels(queries):
        return paged_attention_reference(*args)
    from outrider.ops.attention.triton_prefill import prefill_attention_kernel

    return prefill_attention_kernel(*args)
