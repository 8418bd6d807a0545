"""Reference linear layer: the library's matrix product, on a padded number of rows."""

import torch
import torch.nn.functional as F
from torch import Tensor

# Matrix libraries choose their kernel by the number of rows, and with it the order of the sum. On
# CPUs, counts that are multiples of 16 were seen to agree for every row; others were not.
ROW_MULTIPLE = 16


def pad_rows(x: Tensor, dim: int = 0) -> Tensor:
    """Append zero rows along `dim` until its size is a multiple of ROW_MULTIPLE."""
    missing = -x.shape[dim] % ROW_MULTIPLE
    if missing == 0:
        return x
    padding = list(x.shape)
    padding[dim] = missing
    return torch.cat((x, x.new_zeros(padding)), dim)


def linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    """x [R, K], weight [N, K] -> [R, N]."""
    rows = pad_rows(x)
    if x.dtype in (torch.float32, torch.float64):
        return F.linear(rows, weight)[: x.shape[0]]
    # In 16 bits not even the padded counts agree on CPUs with matrix units (AMX). Products of such
    # values are exact in float32, so this is the definition and not another one.
    return F.linear(rows.float(), weight.float()).to(x.dtype)[: x.shape[0]]
