"""Linear layers without bias. Projections that read the same input are stored as one matrix."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from outrider.ops.linear import linear


class Linear(nn.Module):
    """y = x W^T; the rows of W are the concatenation of one or more named parts.

    Args:
        in_features: K.
        part_sizes: output rows of each part, in the order in which a checkpoint's separate
            matrices are packed.
    """

    def __init__(self, in_features: int, *part_sizes: int) -> None:
        super().__init__()
        self.part_sizes: tuple[int, ...] = part_sizes
        self.weight = nn.Parameter(torch.empty(sum(part_sizes), in_features), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [R, K] -> [R, sum of parts]."""
        return linear(x, self.weight)

    def forward_parts(self, x: Tensor) -> Sequence[Tensor]:
        """x [R, K] -> one [R, size] view per part."""
        return self.forward(x).split(self.part_sizes, dim=-1)
