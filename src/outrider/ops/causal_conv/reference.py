"""Reference convolution: four multiply-adds per element in a fixed order."""

import torch
from torch import Tensor

from outrider.ops.elementwise import silu


def causal_conv_reference(
    x: Tensor, weight: Tensor, ring: Tensor, slots: Tensor, starts: Tensor, num_rows: Tensor
) -> Tensor:
    """x [B, T, C] -> [B, T, C]; see the public function for the contract."""
    rows, ring_size, history = x.shape[1], ring.shape[1], weight.shape[1] - 1
    earlier = starts[:, None] - history + torch.arange(history, device=x.device)  # [B, W - 1]
    kept = ring[slots[:, None], earlier % ring_size]
    kept = torch.where((earlier >= 0)[..., None], kept, 0.0)
    window = torch.cat((kept, x), dim=1).float()  # [B, W - 1 + T, C]
    taps = weight.float()
    total = window[:, :rows] * taps[:, 0]
    for tap in range(1, history + 1):
        total = total + window[:, tap : tap + rows] * taps[:, tap]

    # Only the newest entries can be needed again; a long chunk would wrap onto itself.
    row = torch.arange(rows, device=x.device)
    stored = (row < num_rows[:, None]) & (row >= num_rows[:, None] - ring_size)
    sequence, kept_row = stored.nonzero(as_tuple=True)
    entry = (starts[sequence] + kept_row) % ring_size
    ring[slots[sequence], entry] = x[sequence, kept_row]
    return silu(total).to(x.dtype)
