"""Reference: the separate operations, one after the other."""

import torch
from torch import Tensor

from outrider.ops.embedding.reference import embed_reference
from outrider.ops.rms_norm.reference import rms_norm_reference


def paired_norms_reference(
    table: Tensor,
    token_ids: Tensor,
    hidden: Tensor,
    embedding_weight: Tensor,
    hidden_weight: Tensor,
    eps: float,
    zero_centred: bool,
) -> Tensor:
    """table [V, H], token_ids [R], hidden [R, H] -> [R, 2H]."""
    embedded = embed_reference(table, token_ids)
    halves = (
        rms_norm_reference(embedded, embedding_weight, eps, zero_centred),
        rms_norm_reference(hidden, hidden_weight, eps, zero_centred),
    )
    return torch.cat(halves, dim=-1)
