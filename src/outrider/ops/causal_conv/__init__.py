"""Short causal depthwise convolution with SiLU, over a ring of raw inputs."""

import torch
from torch import Tensor

from outrider.ops.causal_conv.reference import causal_conv_reference

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def causal_conv(
    x: Tensor, weight: Tensor, ring: Tensor, slots: Tensor, starts: Tensor, num_rows: Tensor
) -> Tensor:
    """silu(sum_j weight[:, j] * input[position - (W - 1) + j]); inputs before position 0 are zero.

    The raw input at position p lives in ring entry p mod ring_size. Committing a prefix of the
    rows therefore needs no work: later rows overwrite what was refused.

    Args:
        x: [B, T, C] raw inputs of rows starts[b] .. starts[b] + T - 1.
        weight: [C, W].
        ring: [slots, ring_size, C], updated in place for the first num_rows[b] rows.
            ring_size is at least W - 1 plus the most rows that may be refused at once.
        slots: [B] int64, distinct where num_rows is positive.
        starts: [B] int64, position of row 0.
        num_rows: [B] int64, at most T; rows past it are padding.

    Returns:
        [B, T, C] in x's dtype.
    """
    assert x.dtype in SUPPORTED_DTYPES and x.dtype == ring.dtype, (x.dtype, ring.dtype)
    assert ring.shape[2] == x.shape[2] == weight.shape[0], (ring.shape, x.shape, weight.shape)
    return causal_conv_reference(x, weight, ring, slots, starts, num_rows)
