"""y = x W^T by the matrix library, always with 64 rows: float16 on SM75.

Triton multiplies float16 there without tensor cores. The library chooses its kernel by the shape,
so every call has the same one: 64 rows, padded with zeros, more rows in pieces. A row's bits are
then the same as long as the library treats the rows of one product alike, which it does not
promise.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 64


def linear_library(x: Tensor, weight: Tensor) -> Tensor:
    """x [R, K], weight [N, K] -> [R, N]."""
    num_rows = x.shape[0]
    y = x.new_empty(num_rows, weight.shape[0])
    for begin in range(0, num_rows, ROWS):
        piece = x[begin : begin + ROWS]
        missing = ROWS - len(piece)
        # Always a copy: the library also looks at strides and alignment.
        rows = (
            F.pad(piece, (0, 0, 0, missing))
            if missing
            else piece.clone(memory_format=torch.contiguous_format)
        )
        y[begin : begin + ROWS] = F.linear(rows, weight)[: len(piece)]
    return y
