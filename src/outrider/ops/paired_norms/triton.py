"""Embedding, two RMS norms and their concatenation: a program norms one half of a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.ops.embedding.triton import table_row
from outrider.ops.rms_norm.triton import inverse_rms, row_tile, weighted


@triton.jit(do_not_specialize_on_alignment=["p_token_ids"])  # one number for a row
def _paired_norms(
    p_table,  # [vocab_size, SIZE]
    p_token_ids,  # [R] int64
    p_hidden,  # [R, SIZE], rows stride_hidden apart
    p_embedding_weight,  # [SIZE]
    p_hidden_weight,  # [SIZE]
    p_output,  # [R, 2, SIZE]
    vocab_size,
    stride_hidden,
    eps,
    SIZE: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """output[r, 0] = norm(table[token_ids[r]]), output[r, 1] = norm(hidden[r])."""
    i_half = tl.program_id(0).to(tl.int64)
    i_row = i_half // 2
    is_embedding = i_half % 2 == 0
    o_d = tl.arange(0, COLUMNS)
    inside = o_d < SIZE
    if PDL:
        gdc_launch_dependents()
    p_weight = tl.where(is_embedding, p_embedding_weight, p_hidden_weight)
    b_weight = tl.load(p_weight + o_d, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    if is_embedding:
        p_x = p_table + table_row(p_token_ids, i_row, vocab_size) * SIZE
    else:
        p_x = p_hidden + i_row * stride_hidden
    b_x = tl.load(p_x + o_d, mask=inside, other=0.0).to(tl.float32)
    b_normed = b_x * inverse_rms(b_x, eps, SIZE, 0)
    DTYPE: tl.constexpr = p_output.dtype.element_ty
    b_output = weighted(b_normed, b_weight, DTYPE, ZERO_CENTRED)
    tl.store(p_output + i_half * SIZE + o_d, b_output.to(DTYPE), mask=inside)


def paired_norms_kernel(
    table: Tensor,
    token_ids: Tensor,
    hidden: Tensor,
    embedding_weight: Tensor,
    hidden_weight: Tensor,
    eps: float,
    zero_centred: bool,
    *,
    pdl: bool,
) -> Tensor:
    """table [V, H], token_ids [R], hidden [R, H] -> [R, 2H]; see the public function."""
    num_rows, (vocab_size, size) = token_ids.shape[0], table.shape
    assert table.is_contiguous() and token_ids.is_contiguous() and hidden.stride(1) == 1
    assert embedding_weight.is_contiguous() and hidden_weight.is_contiguous()
    output = torch.empty((num_rows, 2 * size), dtype=table.dtype, device=table.device)
    columns, num_warps = row_tile(size)
    _paired_norms[(2 * num_rows,)](
        table,
        token_ids,
        hidden,
        embedding_weight,
        hidden_weight,
        output,
        vocab_size,
        hidden.stride(0),
        eps,
        size,
        zero_centred,
        columns,
        pdl,
        num_warps=num_warps,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )
    return output
