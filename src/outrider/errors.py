"""What a user can get wrong, as types. Knows nothing of the rest of the package."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

_LONGEST_GOT = 200


class _Absent(Enum):
    """Stands for "no value was got", since None may well be the value that was got."""

    ABSENT = "absent"


class OutriderError(Exception):
    """Something that a user can put right; every error of Outrider's boundary is one.

    The parts are attributes and together make one message, "what: got X; allowed: Y; hint".

    Args:
        what: the thing that is wrong, named as the user knows it.
        got: the value that was met; shown by its repr, cut at 200 characters.
        allowed: what would do, as a phrase or as the values themselves.
        hint: what to do about it, as an imperative.
    """

    def __init__(
        self,
        what: str,
        *,
        got: object = _Absent.ABSENT,
        allowed: str | Iterable[object] | None = None,
        hint: str | None = None,
    ) -> None:
        self.what = what
        self.has_got = got is not _Absent.ABSENT
        self.got: object = got if self.has_got else None
        self.allowed = _phrase(allowed)
        self.hint = hint
        super().__init__(self._message())

    def _message(self) -> str:
        parts: list[str] = []
        if self.has_got:
            shown = _shown(self.got)
            if len(shown) > _LONGEST_GOT:
                shown = shown[:_LONGEST_GOT] + "..."
            parts.append(f"got {shown}")
        if self.allowed is not None:
            parts.append(f"allowed: {self.allowed}")
        if self.hint is not None:
            parts.append(self.hint)
        if not parts:
            return self.what
        return f"{self.what}: {'; '.join(parts)}"

    def __reduce__(self) -> tuple[Callable[..., OutriderError], tuple[Any, ...]]:
        got = self.got if self.has_got else _Absent.ABSENT
        return _rebuild, (type(self), self.what, got, self.allowed, self.hint)


class ConfigError(OutriderError, ValueError):
    """An engine or speculation setting that cannot be served."""


class CheckpointError(OutriderError, ValueError):
    """A model folder or a file in it that is missing, broken or foreign."""


class RequestError(OutriderError, ValueError):
    """One request that cannot be served; its neighbours in the batch are not affected."""


class CapacityError(OutriderError, RuntimeError):
    """Memory that does not hold what it has to: one sequence of an engine, or one request.

    A request that can never be served is refused with a RequestError; this is the engine's lack.
    """


class DrainingError(OutriderError, RuntimeError):
    """An engine that finishes what it has and takes nothing new."""


class EngineFaultError(OutriderError, RuntimeError):
    """A fault of the engine that cost one request its text; the request itself was in order."""


class ConcurrentCallError(OutriderError, RuntimeError):
    """An engine was called while another call was inside it; nothing of the call was done."""


class StuckRoundError(OutriderError, RuntimeError):
    """A round whose results did not come; the message has the state of its sequences."""


class EngineDeadError(OutriderError, RuntimeError):
    """The engine process has ended: what was in flight is lost, and nothing new can be served."""


class ServerError(OutriderError, RuntimeError):
    """What a server said in place of an answer, or that it cannot be reached."""


def _shown(got: object) -> str:
    try:
        return repr(got)
    except ValueError:  # Python does not spell integers of thousands of digits
        return f"a value of type {type(got).__name__} that is too large to be shown"


def _phrase(allowed: str | Iterable[object] | None) -> str | None:
    if allowed is None or isinstance(allowed, str):
        return allowed
    return ", ".join(str(value) for value in allowed)


def _rebuild(
    kind: type[OutriderError], what: str, got: object, allowed: str | None, hint: str | None
) -> OutriderError:
    return kind(what, got=got, allowed=allowed, hint=hint)
