"""How many tokens to propose, decided before any of them is drawn.

The number may depend on the request, on load and on what is left of its length. It never depends on
the value of a token that would be dropped: for sampled drafts that would bias the text.
"""


def num_drafts_to_verify(num_proposed: int, num_committed: int, length_limit: int) -> int:
    """Drafts of the coming round: a round emits one more token than it accepts drafts."""
    return max(min(num_proposed, length_limit - num_committed - 1), 0)


def num_drafts_to_propose(wanted: int, num_committed: int, length_limit: int) -> int:
    """Drafts worth proposing in a round that starts from num_committed tokens.

    The round commits at least one token; the next one emits a token of its own besides the drafts.
    """
    return max(min(wanted, length_limit - num_committed - 2), 0)
