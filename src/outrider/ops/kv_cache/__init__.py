"""Writing rows of keys and values into paged storage."""

import torch
from torch import Tensor

from outrider.ops.kv_cache.reference import write_kv_reference

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def write_kv(keys: Tensor, values: Tensor, kv_pool: Tensor, flat_index: Tensor) -> None:
    """Store one row of keys and values for each entry of flat_index, in place.

    Args:
        keys, values: [R, heads, D].
        kv_pool: [2, num_blocks, heads, block_size, D]; keys first, then values.
        flat_index: [R] int64, block * block_size + offset. Rows that must not be kept point into
            the null block, whose content is never read.
    """
    assert keys.dtype in SUPPORTED_DTYPES and keys.dtype == kv_pool.dtype, keys.dtype
    assert keys.shape == values.shape and (kv_pool.shape[2], kv_pool.shape[4]) == keys.shape[1:], (
        kv_pool.shape
    )
    write_kv_reference(keys, values, kv_pool, flat_index)
