"""Per-slot lists of different lengths, as one padded tensor that widens when it must."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

INITIAL_WIDTH = 4


class PaddedLists:
    """One list of numbers for each slot.

    Attributes:
        values: [slots, width].
        lengths: [slots] int64.
        num_widenings: how often `values` was replaced by a wider tensor.
    """

    def __init__(self, num_slots: int, dtype: torch.dtype, device: torch.device, fill: int) -> None:
        """fill: value of unused entries."""
        self._fill = fill
        self.num_widenings = 0
        self.values = torch.full((num_slots, INITIAL_WIDTH), fill, dtype=dtype, device=device)
        self.lengths = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def store(self, slot: int, numbers: Sequence[int] | Sequence[float]) -> None:
        """Replace a slot's list."""
        width = self.values.shape[1]
        if len(numbers) > width:
            self.num_widenings += 1
            missing = max(len(numbers) - width, width)  # doubling, so that it seldom happens
            self.values = torch.nn.functional.pad(self.values, (0, missing), value=self._fill)
        row = [*numbers, *[self._fill] * (self.values.shape[1] - len(numbers))]
        host = torch.tensor(row, dtype=self.values.dtype, pin_memory=self.values.is_cuda)
        self.values[slot].copy_(host, non_blocking=True)
        self.lengths[slot] = len(numbers)

    def rows(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """values [B, width], and which entries are in use [B, width] bool."""
        index = torch.arange(self.values.shape[1], device=self.values.device)
        return self.values[slots], index < self.lengths[slots][:, None]
