"""Token embedding, which may double as the output head."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embedding(nn.Module):
    """A table of one vector per token id."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[R] int64 -> [R, H]."""
        return F.embedding(token_ids, self.weight)
