"""Typed reads from parsed JSON, which fail naming the file and the key. Knows no model."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import cast

from outrider.errors import CheckpointError


class Section:
    """One JSON object of a checkpoint's file, under the name that errors give it.

    A key whose value is null counts as absent. Without a default an absent key is an error.
    """

    def __init__(self, name: str, values: Mapping[str, object]) -> None:
        self.name = name
        self._values = values

    def get(self, key: str, default: object = None) -> object:
        """The raw value, for keys with more than one form."""
        value = self._values.get(key)
        return default if value is None else value

    def section(self, key: str) -> Section | None:
        """The nested object under `key`, or None where there is none."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return Section(f"{self.name}, {key}", cast(dict[str, object], value))

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._required(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def boolean(self, key: str, default: bool | None = None) -> bool:
        """true or false."""
        value = self._required(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def positive_int(self, key: str, default: int | None = None) -> int:
        """An integer of 1 or more; the default is not checked."""
        return self._int(key, default, 1)

    def natural_int(self, key: str, default: int | None = None) -> int:
        """An integer of 0 or more; the default is not checked."""
        return self._int(key, default, 0)

    def positive_float(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.natural_float(key, default)
        if value == 0:
            raise self._wrong(key, value, "a number above 0")
        return value

    def natural_float(self, key: str, default: float | None = None) -> float:
        """A finite number of 0 or more."""
        value = self._required(key, default)
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not 0 <= value <= sys.float_info.max
        ):
            raise self._wrong(key, value, "a number of 0 or more")
        return float(value)

    def _int(self, key: str, default: int | None, low: int) -> int:
        value = self._required(key, default)
        if self.get(key) is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise self._wrong(key, value, f"an integer, {low} or more")
        return value

    def _required(self, key: str, default: object) -> object:
        value = self.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.name}: {key} is missing")
        return value

    def _wrong(self, key: str, value: object, allowed: str) -> CheckpointError:
        return CheckpointError(f"{self.name}: {key}", got=value, allowed=allowed)
