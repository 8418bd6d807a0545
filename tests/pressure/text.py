"""A language model that needs no tensors: what a text leaves in the caches, and what follows it.

The value of a position stands for its keys and values. It depends on every token up to it, as a
real model's do, so that a block with the wrong content, or in the wrong place, shows at once.
"""

from __future__ import annotations

from collections.abc import Sequence

VOCAB_SIZE = 37
START = 1
"""Value in front of the first position."""

_PRIME = (1 << 61) - 1


def value_after(value: int, token_id: int) -> int:
    """Value of the position that holds `token_id`, behind a position with `value`."""
    return (value * 6364136223846793005 + token_id + 1442695040888963407) % _PRIME


def next_token(value: int) -> int:
    """The model's choice behind a position."""
    return (value >> 19) % VOCAB_SIZE


def draft_value(value: int, next_token_id: int) -> int:
    """What the draft keeps of a position: it sees the target's, and the token behind it."""
    return value_after(value ^ 0x5555, next_token_id)


class Text:
    """A prompt, and plain decoding behind it up to `length` tokens.

    Attributes:
        token_ids: one for each position.
        values: of the target, one for each position.
        draft_values: of the draft, for all positions but the last.
    """

    def __init__(self, prompt: Sequence[int], length: int) -> None:
        self.token_ids: list[int] = []
        self.values: list[int] = []
        value = START
        for position in range(length):
            token_id = prompt[position] if position < len(prompt) else next_token(value)
            value = value_after(value, token_id)
            self.token_ids.append(token_id)
            self.values.append(value)
        pairs = zip(self.values, self.token_ids[1:], strict=False)
        self.draft_values = [draft_value(value, token_id) for value, token_id in pairs]
