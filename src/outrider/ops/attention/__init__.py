"""Causal attention of a few rows per sequence over paged keys and values."""

import torch
from torch import Tensor

from outrider.ops.attention.reference import paged_attention_reference

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def paged_attention(
    queries: Tensor, kv_pool: Tensor, block_tables: Tensor, starts: Tensor, num_rows: Tensor
) -> Tensor:
    """softmax(q K^T / sqrt(D)) V; row t of sequence b sees positions 0 .. starts[b] + t.

    Args:
        queries: [B, T, Hq, D]; their own keys and values are in the pool already.
        kv_pool: [2, num_blocks, block_size, Hkv, D]; Hq is a multiple of Hkv.
        block_tables: [B, M] int64, block ids in order of position; entries past the last needed
            block may name any block.
        starts: [B] int64, position of row 0.
        num_rows: [B] int64 at most T; rows past it are padding and hold unspecified finite values.

    Returns:
        [B, T, Hq, D] in the queries' dtype. A row's bits depend on its query, its position and
        the keys and values up to it, not on B, T, M or the block size.
    """
    assert queries.dtype in SUPPORTED_DTYPES and queries.dtype == kv_pool.dtype, queries.dtype
    assert queries.shape[2] % kv_pool.shape[3] == 0, (queries.shape, kv_pool.shape)
    return paged_attention_reference(queries, kv_pool, block_tables, starts, num_rows)
