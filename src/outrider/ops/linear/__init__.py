"""y = x W^T, with a row's bits independent of how many rows there are."""

import torch
from torch import Tensor

from outrider.ops.linear.reference import linear_reference

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Project rows.

    Args:
        x: [R, K], any of SUPPORTED_DTYPES.
        weight: [N, K], dtype of x.

    Returns:
        [R, N], dtype of x. Row r depends on x[r] and weight alone, bit for bit.
    """
    assert x.dim() == 2 and x.shape[1] == weight.shape[1], (x.shape, weight.shape)
    assert x.dtype == weight.dtype and x.dtype in SUPPORTED_DTYPES, (x.dtype, weight.dtype)
    return linear_reference(x, weight)
