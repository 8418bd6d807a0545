"""Words of printed lines. A leaf: knows nothing of the rest of the package."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number and what it counts: 1 pass, 2 passes.

    Args:
        plural: where it is not the noun and an s.
    """
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
