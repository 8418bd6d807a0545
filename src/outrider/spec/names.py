"""Names of draft methods and of ways to draw drafts. A leaf: names, not what they do.

Aliases end here: everything past the configuration sees only canonical names.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from outrider.errors import ConfigError

METHODS: tuple[str, ...] = ("mtp", "eagle3", "ngram")
"""Canonical names, one for each way to draft."""

SIDECAR_METHODS: frozenset[str] = frozenset({"eagle3"})
"""Methods whose draft weights are a checkpoint of their own, named by SpeculativeConfig.model."""

ALIASES: Mapping[str, str] = {
    "qwen3_5_mtp": "mtp",
    "qwen3_next_mtp": "mtp",
    "hy3_mtp": "mtp",
    "deepseek_mtp": "mtp",
    "prompt_lookup": "ngram",
}
"""Names that other engines use, in lower case with underscores, and the method they mean."""


class DraftSampling(StrEnum):
    """How a draft picks a token from its own distribution, and with it the verification rule.

    ARGMAX takes the most likely token; COUPLED draws with the noise that the target will use at
    that position; both are verified by `match`. SAMPLED draws from a truncated, renormalised q of
    its own and is verified by `block`.
    """

    ARGMAX = "argmax"
    COUPLED = "coupled"
    SAMPLED = "sampled"


def canonical_method(name: str) -> str:
    """The method that `name` means: case does not matter, and '-' is '_'.

    Raises:
        ConfigError: the name is not known; the error lists those that are.
    """
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError("speculative method", got=name, allowed="a string")
    key = name.strip().lower().replace("-", "_")
    method = ALIASES.get(key, key)
    if method not in METHODS:
        known = [*METHODS, *sorted(ALIASES)]
        raise ConfigError(
            "speculative method is not known", got=name, allowed=known, hint="choose one of these"
        )
    return method
