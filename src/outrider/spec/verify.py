"""Which drafts survive, and what a round commits.

Rule `match`, for drafts that are a point mass (an argmax, a lookup): the target draws its own token
y_i ~ p(. | x_<i) at every row, drafts are accepted while y_i == x_i, and the first y_i that differs
(or the one after the last draft) is emitted too. Every emitted token is the target's own draw, so
the law of the text is the target's, whatever was proposed. At temperature 0 the draw is the argmax.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def accept_matching(sampled: Tensor, draft_token_ids: Tensor, num_drafts: Tensor) -> Tensor:
    """Length of the leading run of drafts that equal the target's own tokens.

    Args:
        sampled: [B, T] int64, the target's token after each row.
        draft_token_ids: [B, T - 1] int64.
        num_drafts: [B] int64, valid drafts, at most T - 1.

    Returns:
        num_accepted [B] int64, in 0 .. num_drafts.
    """
    index = torch.arange(draft_token_ids.shape[1], device=sampled.device)
    same = (sampled[:, :-1] == draft_token_ids) & (index < num_drafts[:, None])
    return same.long().cumprod(-1).sum(-1)


@dataclass(frozen=True)
class RoundOutcome:
    """What a round commits, trimmed at stop ids and the length limit.

    Attributes:
        token_ids: [B, T] int64, valid up to num_emitted.
        num_emitted: [B] int64, in 1 .. num_accepted + 1.
        stopped: [B] bool, the last emitted token is a stop id.
        at_limit: [B] bool, the sequence holds length_limit tokens.
    """

    token_ids: Tensor
    num_emitted: Tensor
    stopped: Tensor
    at_limit: Tensor


def trim_round(
    sampled: Tensor,
    num_accepted: Tensor,
    num_committed: Tensor,
    length_limits: Tensor,
    stop_token_ids: Tensor,
) -> RoundOutcome:
    """Cut the emitted tokens at the earliest stop id or the length limit.

    The rule `match` makes an accepted draft equal to the target's token of its row, so the first
    num_accepted + 1 sampled tokens are what the round emits.

    Args:
        sampled: [B, T] int64.
        num_accepted: [B] int64.
        num_committed: [B] int64, tokens before the round.
        length_limits: [B] int64.
        stop_token_ids: [B, M] int64, unused entries hold no token's id.
    """
    index = torch.arange(sampled.shape[1], device=sampled.device)
    room = length_limits - num_committed
    num_emitted = torch.minimum(num_accepted + 1, room)
    is_stop = (sampled[:, :, None] == stop_token_ids[:, None, :]).any(-1)
    is_stop &= index < num_emitted[:, None]
    stopped = is_stop.any(-1)
    first_stop = is_stop.long().argmax(-1)
    num_emitted = torch.where(stopped, first_stop + 1, num_emitted)
    return RoundOutcome(sampled, num_emitted, stopped, num_emitted == room)
