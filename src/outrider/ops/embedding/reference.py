"""Reference embedding."""

import torch.nn.functional as F
from torch import Tensor


def embed_reference(table: Tensor, token_ids: Tensor) -> Tensor:
    """table [V, H], token_ids [R] -> [R, H]."""
    return F.embedding(token_ids.clamp(0, table.shape[0] - 1), table)
