"""What a draft's first projection reads: a token's embedding and a hidden state, each normed."""

import torch
from torch import Tensor

from outrider.ops.dispatch import overlaps_launches, uses_kernels
from outrider.ops.paired_norms.reference import paired_norms_reference

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def paired_norms(
    table: Tensor,
    token_ids: Tensor,
    hidden: Tensor,
    embedding_weight: Tensor,
    hidden_weight: Tensor,
    eps: float,
    *,
    zero_centred: bool,
) -> Tensor:
    """[rms_norm(table[token_ids]) | rms_norm(hidden)], side by side.

    Args:
        table: [V, H].
        token_ids: [R] int64, kept inside the table as in ops.embedding.
        hidden: [R, H] in the table's dtype.
        embedding_weight, hidden_weight: [H], see ops.rms_norm.

    Returns:
        [R, 2H] in the table's dtype, contiguous; its right half is the normed hidden state.
    """
    size = table.shape[1]
    assert table.dtype in SUPPORTED_DTYPES and table.dtype == hidden.dtype, hidden.dtype
    assert token_ids.dtype == torch.int64 and hidden.shape == (token_ids.shape[0], size)
    assert embedding_weight.shape == hidden_weight.shape == (size,), hidden_weight.shape
    if uses_kernels(table):
        from outrider.ops.paired_norms.triton import paired_norms_kernel

        return paired_norms_kernel(
            table,
            token_ids,
            hidden,
            embedding_weight,
            hidden_weight,
            eps,
            zero_centred,
            pdl=overlaps_launches(table),
        )
    return paired_norms_reference(
        table, token_ids, hidden, embedding_weight, hidden_weight, eps, zero_centred
    )
