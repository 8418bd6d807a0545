"""A deliberate fault of the scheduler or the cache, put in at a function's boundary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutation:
    """Attributes:
    fault: what goes wrong, as a sentence.
    """

    name: str
    fault: str
    apply: Callable[[Patch], None]


def mutation(
    mutations: list[Mutation], fault: str
) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Add the function, which puts the fault in, to the list."""

    def register(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
        mutations.append(Mutation(apply.__name__.strip("_"), fault, apply))
        return apply

    return register


def wrap(patch: Patch, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function by `around`, whose first argument is the original."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))


def fix(patch: Patch, owner: type, name: str, value: object) -> None:
    """Make an attribute read the same for ever, whether it is computed or kept."""
    patch.setattr(owner, name, property(lambda _: value, lambda *_: None), raising=False)
