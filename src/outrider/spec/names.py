"""Names of draft methods and their aliases. A leaf: knows names, not what the methods do.

Aliases end here: everything past the configuration sees only the names in METHODS.
"""

from __future__ import annotations

from collections.abc import Mapping

from outrider.errors import ConfigError

METHODS: tuple[str, ...] = ("mtp",)
"""Canonical names, one for each way to draft."""

SIDECAR_METHODS: frozenset[str] = frozenset()
"""Methods whose draft weights are a checkpoint of their own, named by SpeculativeConfig.model."""

ALIASES: Mapping[str, str] = {
    "qwen3_5_mtp": "mtp",
    "qwen3_next_mtp": "mtp",
    "hy3_mtp": "mtp",
    "deepseek_mtp": "mtp",
}
"""Names that other engines use, in lower case with underscores, and the method they mean."""


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
