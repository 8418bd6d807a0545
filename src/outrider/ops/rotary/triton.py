"""cos and sin of rotary angles, one program per row."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize_on_alignment=["p_positions"])  # one number for a row
def _rotary_angles(
    p_positions,  # [R] int64
    p_frequencies,  # [HALF] float32
    p_cos,  # [R, 2 * HALF] float32
    p_sin,  # [R, 2 * HALF] float32
    scale,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """cos[i] = cos[i + HALF] = scale * cos(position * frequency[i]), and so for sin."""
    i_row = tl.program_id(0).to(tl.int64)
    o_i = tl.arange(0, COLUMNS)
    inside = o_i < HALF
    if PDL:
        gdc_launch_dependents()
    b_frequency = tl.load(p_frequencies + o_i, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
    b_angle = tl.load(p_positions + i_row).to(tl.float32) * b_frequency
    b_cos, b_sin = tl.cos(b_angle) * scale, tl.sin(b_angle) * scale
    o_first = i_row * (2 * HALF) + o_i
    tl.store(p_cos + o_first, b_cos, mask=inside)
    tl.store(p_cos + o_first + HALF, b_cos, mask=inside)
    tl.store(p_sin + o_first, b_sin, mask=inside)
    tl.store(p_sin + o_first + HALF, b_sin, mask=inside)


def rotary_angles_kernel(
    positions: Tensor, inverse_frequencies: Tensor, scale: float, *, pdl: bool
) -> tuple[Tensor, Tensor]:
    """positions [R], inverse_frequencies [P / 2] -> cos, sin [R, P]; see the public function."""
    num_rows, half = positions.shape[0], inverse_frequencies.shape[0]
    assert positions.is_contiguous() and inverse_frequencies.is_contiguous()
    cos, sin = (
        torch.empty((num_rows, 2 * half), dtype=torch.float32, device=positions.device)
        for _ in range(2)
    )
    _rotary_angles[(num_rows,)](
        positions,
        inverse_frequencies,
        cos,
        sin,
        scale,
        half,
        triton.next_power_of_2(half),
        pdl,
        num_warps=1,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )
    return cos, sin
