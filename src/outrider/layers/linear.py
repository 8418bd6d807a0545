"""Linear layers without bias. Projections that read the same input are stored as one matrix."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from outrider.ops.linear import gated_linear, linear


class Linear(nn.Module):
    """y = x W^T; the rows of W are those of one or more named parts.

    Args:
        in_features: K.
        part_sizes: output rows of each part, in the order in which a checkpoint's separate
            matrices are packed.
        interleaved: the parts' rows take turns, instead of standing one part behind another.
    """

    def __init__(self, in_features: int, *part_sizes: int, interleaved: bool = False) -> None:
        super().__init__()
        assert not interleaved or len(set(part_sizes)) == 1, part_sizes
        self.part_sizes: tuple[int, ...] = part_sizes
        self.interleaved = interleaved
        self.weight = nn.Parameter(torch.empty(sum(part_sizes), in_features), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [R, K] -> [R, sum of parts]."""
        return linear(x, self.weight)

    def forward_parts(self, x: Tensor) -> Sequence[Tensor]:
        """x [R, K] -> one [R, size] view per part, if they are not interleaved."""
        assert not self.interleaved
        return self.forward(x).split(self.part_sizes, dim=-1)

    def forward_gated(self, x: Tensor) -> Tensor:
        """x [R, K] -> silu(first part) * second part [R, size] of two interleaved parts."""
        assert self.interleaved and len(self.part_sizes) == 2, self.part_sizes
        return gated_linear(x, self.weight)
