"""Rows of an embedding table, one program per row."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.ops.rms_norm.triton import row_tile


@triton.jit
def table_row(p_token_ids, i_row, vocab_size):
    """Row of the table that token i_row names, int64, kept inside the table."""
    i_token = tl.load(p_token_ids + i_row)
    return tl.minimum(tl.maximum(i_token, 0), vocab_size - 1)


@triton.jit(do_not_specialize_on_alignment=["p_token_ids"])  # one number for a row
def _embed(
    p_table,  # [vocab_size, SIZE]
    p_token_ids,  # [R] int64
    p_output,  # [R, SIZE]
    vocab_size,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """output[r] = table[token_ids[r]]."""
    i_row = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, COLUMNS)
    inside = o_d < SIZE
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i_token = table_row(p_token_ids, i_row, vocab_size)
    b_row = tl.load(p_table + i_token * SIZE + o_d, mask=inside)
    tl.store(p_output + i_row * SIZE + o_d, b_row, mask=inside)


def embed_kernel(table: Tensor, token_ids: Tensor, *, pdl: bool) -> Tensor:
    """table [V, H], token_ids [R] -> [R, H]; see the public function."""
    num_rows, (vocab_size, size) = token_ids.shape[0], table.shape
    assert table.is_contiguous() and token_ids.is_contiguous()
    output = torch.empty((num_rows, size), dtype=table.dtype, device=table.device)
    columns, num_warps = row_tile(size)
    _embed[(num_rows,)](
        table,
        token_ids,
        output,
        vocab_size,
        size,
        columns,
        pdl,
        num_warps=num_warps,
        launch_pdl=pdl,
    )
    return output
