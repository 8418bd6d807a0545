"""Method `ngram`: prompt lookup. What followed the same words last time is proposed again."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.config import SpeculativeConfig
from outrider.models.base import CausalLM
from outrider.models.build import Checkpoint
from outrider.models.config import ModelConfig
from outrider.spec.base import Drafter, Frontier
from outrider.spec.choose import Proposal

LONGEST_SUFFIX = 4
SHORTEST_SUFFIX = 2


class NgramDrafter(Drafter):
    """Finds the longest suffix (up to LONGEST_SUFFIX tokens) that occurred earlier in the text.

    Among equally long matches the most recent one is continued. Where nothing of at least
    SHORTEST_SUFFIX tokens matches, nothing is proposed.
    """

    samples = False
    reads_history = True

    def propose(self, hidden: Tensor, frontier: Frontier) -> Proposal:
        return lookup(
            frontier.history(), frontier.num_committed, frontier.num_wanted, frontier.max_drafts
        )


def lookup(history: Tensor, num_committed: Tensor, num_wanted: Tensor, max_drafts: int) -> Proposal:
    """Continuations of each sequence's own suffix.

    Args:
        history: [B, L] int64, tokens; entries past num_committed are ignored.
        num_committed, num_wanted: [B] int64.

    Returns:
        A point mass of up to num_wanted drafts for each sequence, fewer where the match is closer
        than that to the end of the text.
    """
    length = history.shape[1]
    place = torch.arange(length, device=history.device)
    # matched[b, e]: how many tokens before place e equal those before the end of the text.
    matched = torch.zeros_like(history)
    running = place < num_committed[:, None]
    for back in range(1, LONGEST_SUFFIX + 1):
        own = history.gather(1, (num_committed - back).clamp(min=0)[:, None])
        earlier = history[:, (place - back).clamp(min=0)]
        running = running & (place >= back) & (earlier == own)
        matched += running.long()
    # The longest match wins, and of those the one whose continuation begins last.
    score = torch.where(matched >= SHORTEST_SUFFIX, matched * length + place, -1)
    best, begin = score.max(dim=1)
    offsets = torch.arange(max_drafts, device=history.device)
    token_ids = history.gather(1, (begin[:, None] + offsets).clamp(max=length - 1))
    num_drafts = torch.minimum(num_wanted, num_committed - begin)
    return Proposal(token_ids, torch.where(best >= 0, num_drafts, 0), None)


def refusal(_config: ModelConfig) -> str | None:
    """Every target can host a lookup."""
    return None


def set_up(_checkpoint: Checkpoint, _target: CausalLM, _config: SpeculativeConfig) -> Drafter:
    """Nothing to load."""
    return NgramDrafter()
