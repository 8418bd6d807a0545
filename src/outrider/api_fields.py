"""Typed reads from the JSON of a server, which may answer anything. Null is as good as absent.

Knows nothing of what the fields mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, cast

from outrider.errors import ServerError


class ApiFields:
    """The fields of one object.

    Every read raises ServerError where a value has another type than clients of OpenAI's API may
    expect; what is not asked for may be anything.

    Args:
        where: the object's place in the answer, as errors name it; "" is the answer itself.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self._values = values
        self._where = where

    def fail(self, name: str, allowed: str) -> NoReturn:
        """A field is not what it has to be."""
        raise ServerError(
            f"the server does not speak OpenAI's API: {self._place(name)}",
            got=self._values.get(name),
            allowed=allowed,
        )

    def _place(self, name: str) -> str:
        return f"{self._where}.{name}" if self._where else name

    def text(self, name: str) -> str:
        """A text; "" where there is none."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, str):
            self.fail(name, "a text")
        return value or ""

    def count(self, name: str) -> int:
        """An integer of at least 0; 0 where there is none."""
        value = self._values.get(name)
        if value is not None and not _is_count(value):
            self.fail(name, "an integer of at least 0")
        return value or 0

    def counts(self, name: str) -> tuple[int, ...]:
        """A list of integers of at least 0; empty where there is none."""
        values = self._list(name, "a list of integers of at least 0")
        if not all(map(_is_count, values)):
            self.fail(name, "a list of integers of at least 0")
        return tuple(values)

    def has(self, name: str) -> bool:
        """There is a value."""
        return self._values.get(name) is not None

    def inner(self, name: str) -> ApiFields:
        """An object; one without fields where there is none."""
        value = self._values.get(name)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            self.fail(name, "an object")
        return ApiFields(cast(dict[str, Any], value), self._place(name))

    def objects(self, name: str) -> list[ApiFields]:
        """A list of objects; empty where there is none."""
        values = self._list(name, "a list of objects")
        if not all(isinstance(value, dict) for value in values):
            self.fail(name, "a list of objects")
        return [
            ApiFields(value, f"{self._place(name)}[{index}]") for index, value in enumerate(values)
        ]

    def _list(self, name: str, allowed: str) -> list[Any]:
        value = self._values.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            self.fail(name, allowed)
        return cast(list[Any], value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
