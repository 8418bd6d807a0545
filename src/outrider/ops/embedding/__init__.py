"""Rows of an embedding table."""

import torch
from torch import Tensor

from outrider.ops.dispatch import overlaps_launches, uses_kernels
from outrider.ops.embedding.reference import embed_reference

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def embed(table: Tensor, token_ids: Tensor) -> Tensor:
    """table[token_ids].

    Args:
        table: [V, H].
        token_ids: [R] int64. An id outside the table, which only a padding row may hold, takes its
            nearest row: nothing outside is read.

    Returns:
        [R, H] in the table's dtype, contiguous.
    """
    assert table.dim() == 2 and table.dtype in SUPPORTED_DTYPES, (table.shape, table.dtype)
    assert token_ids.dim() == 1 and token_ids.dtype == torch.int64, token_ids.dtype
    if uses_kernels(table):
        from outrider.ops.embedding.triton import embed_kernel

        return embed_kernel(table, token_ids, pdl=overlaps_launches(table))
    return embed_reference(table, token_ids)
