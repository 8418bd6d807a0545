"""Checks that every option passes once. A leaf: knows errors and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

from outrider.errors import OutriderError

LARGEST_INT = 2**63 - 1


def check_type(
    error: type[OutriderError], name: str, value: object, kind: type, optional: bool = False
) -> None:
    """The value is of a type, or None where that is allowed."""
    if not (isinstance(value, kind) or (optional and value is None)):
        raise error(name, got=value, allowed=kind.__name__ + (" or None" if optional else ""))


def check_text(error: type[OutriderError], name: str, value: object) -> None:
    """A string that is not empty and can be written as UTF-8: half a surrogate pair cannot."""
    if not isinstance(value, str) or not value:
        raise error(name, got=value, allowed="a string that is not empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as fault:
        raise error(
            f"{name} is not valid Unicode at character {fault.start}",
            got=value[fault.start : fault.end],
            allowed="text that can be written as UTF-8",
        ) from fault


def check_host(error: type[OutriderError], name: str, value: object) -> None:
    """An address, or a name that the resolver can be asked for (RFC 5890's length of a label)."""
    check_text(error, name, value)
    host = cast(str, value)
    try:
        host.encode("idna")
    except UnicodeError as fault:
        raise error(f"{name} is no name of a host ({fault})", got=host) from fault
    if not host.isprintable():
        raise error(name, got=host, allowed="printable characters")


def check_choice(
    error: type[OutriderError], name: str, value: object, allowed: Sequence[str]
) -> None:
    """One of some words."""
    if not isinstance(value, str) or value not in allowed:
        raise error(name, got=value, allowed=allowed)


def check_int(
    error: type[OutriderError],
    name: str,
    value: object,
    low: int,
    high: int | None = None,
    hint: str | None = None,
) -> None:
    """An integer (True is none) within bounds, and within 64 bits: more fits no tensor and no
    message."""
    allowed = f"an integer, {low} or more" if high is None else f"an integer from {low} to {high}"
    most = LARGEST_INT if high is None else high
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= most:
        if high is None and isinstance(value, int) and value > most:
            allowed = f"an integer from {low} to {most}"
        raise error(name, got=value, allowed=allowed, hint=hint)


def check_real(error: type[OutriderError], name: str, value: object) -> None:
    """A finite number (True is none)."""
    limit = sys.float_info.max
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not -limit <= value <= limit
    ):
        raise error(name, got=value, allowed="a finite number")


def as_tuple(error: type[OutriderError], name: str, value: object) -> tuple[object, ...]:
    """The items of a list or a tuple."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise error(name, got=value, allowed="a list or a tuple")
    return tuple(cast(Sequence[object], value))


def check_writable(error: type[OutriderError], name: str, path: Path) -> None:
    """A file that can be written. What is there stays as it is, and nothing is left where none was.

    Args:
        name: what would be written, for "cannot write ...".
    """
    try:
        is_new = not path.exists()
        path.open("a", encoding="utf-8").close()
        if is_new:
            path.resolve().unlink()  # the file, where the path is a link to none
    except OSError as fault:
        raise error(
            f"cannot write {name} ({fault.strerror})",
            got=str(path),
            hint="name a file in a folder that exists",
        ) from fault


def check_overwrites_none(
    error: type[OutriderError], flag: str, out: Path, sources: Iterable[Path]
) -> None:
    """A file that is not one of those that are read."""
    for source in sources:
        if out.exists() and source.exists() and out.samefile(source):
            raise error(
                f"{flag} would overwrite what is read", got=str(out), hint="name another file"
            )
