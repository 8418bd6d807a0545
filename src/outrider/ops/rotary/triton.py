"""cos and sin of rotary angles, one program per row."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(  # a few numbers for a row
    do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["p_positions"]
)
def _rotary_angles(
    p_positions,  # [R] int64, [3, R] where SECTIONED
    p_frequencies,  # [HALF] float32
    p_cos,  # [R, 2 * HALF] float32
    p_sin,  # [R, 2 * HALF] float32
    scale,
    num_rows,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
    SECTIONED: tl.constexpr,
    HEIGHT: tl.constexpr,  # frequencies that turn with the height
    WIDTH: tl.constexpr,  # and with the width
    PDL: tl.constexpr,
):
    """cos[i] = cos[i + HALF] = scale * cos(position * frequency[i]), and so for sin.

    SECTIONED: frequencies 1, 4, 7, ... take the height and 2, 5, 8, ... the width, as many as there
    are of them; the rest take the time.
    """
    i_row = tl.program_id(0).to(tl.int64)
    o_i = tl.arange(0, COLUMNS)
    inside = o_i < HALF
    if PDL:
        gdc_launch_dependents()
    b_frequency = tl.load(p_frequencies + o_i, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
    if SECTIONED:
        is_height = (o_i % 3 == 1) & (o_i < 3 * HEIGHT)
        is_width = (o_i % 3 == 2) & (o_i < 3 * WIDTH)
        o_axis = tl.where(is_height, 1, tl.where(is_width, 2, 0)).to(tl.int64)
        b_position = tl.load(p_positions + o_axis * num_rows + i_row).to(tl.float32)
    else:
        b_position = tl.load(p_positions + i_row).to(tl.float32)
    b_angle = b_position * b_frequency
    b_cos, b_sin = tl.cos(b_angle) * scale, tl.sin(b_angle) * scale
    o_first = i_row * (2 * HALF) + o_i
    tl.store(p_cos + o_first, b_cos, mask=inside)
    tl.store(p_cos + o_first + HALF, b_cos, mask=inside)
    tl.store(p_sin + o_first, b_sin, mask=inside)
    tl.store(p_sin + o_first + HALF, b_sin, mask=inside)


def rotary_angles_kernel(
    positions: Tensor,
    inverse_frequencies: Tensor,
    scale: float,
    sections: tuple[int, int, int] | None = None,
    *,
    pdl: bool,
) -> tuple[Tensor, Tensor]:
    """positions [R] or [3, R], frequencies [P / 2] -> cos, sin [R, P]; see the public function."""
    num_rows, half = positions.shape[-1], inverse_frequencies.shape[0]
    sectioned = positions.dim() == 2
    _, height, width = sections if sectioned and sections is not None else (0, 0, 0)
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
        num_rows,
        half,
        triton.next_power_of_2(half),
        sectioned,
        height,
        width,
        pdl,
        num_warps=1,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )
    return cos, sin
