"""Token embedding, which may double as the output head."""

import torch
from torch import Tensor, nn

from outrider.layers.norm import RMSNorm
from outrider.ops.embedding import embed
from outrider.ops.paired_norms import paired_norms


class Embedding(nn.Module):
    """A table of one vector per token id."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[R] int64 -> [R, H]."""
        return embed(self.weight, token_ids)

    def beside(
        self, token_ids: Tensor, hidden: Tensor, own_norm: RMSNorm, hidden_norm: RMSNorm
    ) -> Tensor:
        """[own_norm(embedding) | hidden_norm(hidden)]: what a draft's first projection reads.

        token_ids [R] int64, hidden [R, H] -> [R, 2H]; the norms are of one kind.
        """
        config = own_norm.config
        assert config == hidden_norm.config, hidden_norm.config
        return paired_norms(
            self.weight,
            token_ids,
            hidden,
            own_norm.weight,
            hidden_norm.weight,
            config.eps,
            zero_centred=config.zero_centred,
        )
