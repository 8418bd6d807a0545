"""silu(gate) * up, elementwise: a program takes a piece of a row's columns."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

COLUMNS, NUM_WARPS = 1024, 4
"""Two vectors of 16 bytes for each thread, in 16 bits."""


@triton.jit
def _silu_mul(
    p_gate_up,  # [R, SIZE, 2], rows stride apart
    p_output,  # [R, SIZE]
    stride,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """output = gate * sigmoid(gate), rounded to the dtype, times up."""
    PIECES: tl.constexpr = (SIZE + COLUMNS - 1) // COLUMNS
    i_row = (tl.program_id(0) // PIECES).to(tl.int64)
    first = (tl.program_id(0) % PIECES) * COLUMNS
    o_pair = 2 * first + tl.arange(0, 2 * COLUMNS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    b_pairs = tl.load(p_gate_up + i_row * stride + o_pair, mask=o_pair < 2 * SIZE, other=0.0)
    b_gate, b_up = tl.split(tl.reshape(b_pairs.to(tl.float32), (COLUMNS, 2)))
    DTYPE: tl.constexpr = p_output.dtype.element_ty
    b_silu = (b_gate / (1.0 + tl.exp(-b_gate))).to(DTYPE).to(tl.float32)
    o_d = first + tl.arange(0, COLUMNS)
    tl.store(p_output + i_row * SIZE + o_d, (b_silu * b_up).to(DTYPE), mask=o_d < SIZE)


def silu_mul_kernel(gate_up: Tensor, *, pdl: bool) -> Tensor:
    """[R, 2M] -> [R, M]; see the public function."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    output = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul[(num_rows * triton.cdiv(size, COLUMNS),)](
        gate_up,
        output,
        gate_up.stride(0),
        size,
        COLUMNS,
        pdl,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )
    return output
