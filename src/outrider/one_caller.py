"""Keeps the methods of an object to one caller at a time. Knows nothing of what they do."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import Lock
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from outrider.errors import ConcurrentCallError

P = ParamSpec("P")
R = TypeVar("R")


class HasCallLock(Protocol):
    """An object some of whose methods are for one caller at a time."""

    @property
    def call_lock(self) -> Lock:
        """Held while one of them runs."""
        ...


T = TypeVar("T", bound=HasCallLock)


def one_caller(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """A method that is refused, before it changes anything, while such a method runs.

    Raises:
        ConcurrentCallError: another thread is inside, or the same one, as a signal's handler or a
            finalizer may be.
    """

    @wraps(method)
    def guarded(self: T, *args: P.args, **kwargs: P.kwargs) -> R:
        lock = self.call_lock
        if lock.locked():
            raise ConcurrentCallError(
                f"{method.__name__} was called while another call was inside the engine",
                allowed="one thread calls an engine",
                hint="call it from one thread, or use AsyncLLM or outrider serve",
            )
        # Two threads may both come this far, and one waits then. No thread waits for itself, and
        # no interrupt comes between taking a lock and releasing it, as it could with acquire().
        with lock:
            return method(self, *args, **kwargs)

    return guarded
