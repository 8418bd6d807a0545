"""Typed reads from one JSON object of a file, each failing with the place and the field."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NoReturn, TypeGuard, cast

from outrider.errors import OutriderError

MOST_SECONDS = 1e7
"""Four months; an axis of more would have no use for its fractions of a second."""


class TraceFileError(OutriderError):
    """A recorded run cannot be read or written."""


class Fields:
    """The fields of one object; every one has to be read.

    Args:
        where: file, line and place in it, as errors name it.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = dict(values)
        self._where = where

    def wrong(self, name: str, got: object, allowed: str) -> TraceFileError:
        """The error of a field whose value makes no sense."""
        return TraceFileError(f"{self._where}: {name}", got=got, allowed=allowed)

    def _fail(self, name: str, got: object, allowed: str) -> NoReturn:
        raise self.wrong(name, got, allowed)

    def _take(self, name: str) -> Any:
        if name not in self._values:
            raise TraceFileError(f"{self._where}: {name} is missing")
        return self._values.pop(name)

    def end(self) -> None:
        """Nothing else is there."""
        if self._values:
            raise TraceFileError(f"{self._where}: no such field", got=next(iter(self._values)))

    def text(self, name: str) -> str:
        value = self._take(name)
        return value if _is_text(value) else self._fail(name, value, "a text")

    def optional_text(self, name: str) -> str | None:
        value = self._take(name)
        if value is None or _is_text(value):
            return value
        return self._fail(name, value, "a text or null")

    def choice(self, name: str, allowed: Collection[str]) -> str:
        value = self._take(name)
        return value if value in allowed else self._fail(name, value, ", ".join(allowed))

    def flag(self, name: str) -> bool:
        value = self._take(name)
        return value if isinstance(value, bool) else self._fail(name, value, "true or false")

    def integer(self, name: str, most: int | None = None, because: str = "") -> int:
        """A count or an id: no less than 0."""
        value = self._take(name)
        if _is_count(value) and (most is None or value <= most):
            return value
        bound = "of at least 0" if most is None else f"from 0 to {most}, {because}"
        return self._fail(name, value, f"an integer {bound}")

    def integers(self, name: str) -> list[int]:
        value = self._take(name)
        if isinstance(value, list) and all(map(_is_count, cast(list[Any], value))):
            return cast(list[int], value)
        return self._fail(name, value, "a list of integers of at least 0")

    def texts(self, name: str) -> list[str]:
        value = self._take(name)
        if isinstance(value, list) and all(map(_is_text, cast(list[Any], value))):
            return cast(list[str], value)
        return self._fail(name, value, "a list of texts")

    def seconds(self, name: str) -> float:
        """A time or a duration."""
        value = self._take(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and 0 <= value <= MOST_SECONDS:  # which NaN is not
            return float(value)
        return self._fail(name, value, f"a number of seconds from 0 to {MOST_SECONDS:.0f}")

    def objects(self, name: str) -> Iterator[Fields]:
        """A list of objects, each read to its end."""
        value = self._take(name)
        if not isinstance(value, list):
            self._fail(name, value, "a list of objects")
        for index, one in enumerate(cast(list[Any], value)):
            inner = self._inner(f"{name}[{index}]", one)
            yield inner
            inner.end()

    def optional_object(self, name: str) -> Fields | None:
        value = self._take(name)
        return None if value is None else self._inner(name, value)

    def _inner(self, name: str, value: object) -> Fields:
        if not isinstance(value, dict):
            self._fail(name, value, "an object")
        return Fields(cast(dict[str, Any], value), f"{self._where}: {name}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_text(value: object) -> TypeGuard[str]:
    """A string of characters: JSON can also spell halves of surrogate pairs, which are none."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)
