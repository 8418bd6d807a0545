"""Reference convolution: four multiply-adds per element in a fixed order."""

import torch
from torch import Tensor

from outrider.ops.elementwise import silu


def causal_conv_reference(
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
