"""Requests whose grammars compile, in threads beside the engine's: no round waits for a grammar.

Knows how to check a request and nothing of the engine. Used by one thread, which asks it now and
then for what is done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from outrider.engine_messages import Add
from outrider.errors import EngineFaultError, OutriderError
from outrider.params import SamplingParams

logger = logging.getLogger("outrider.engine_process")

NUM_THREADS = 2  # so that a quick grammar need not wait for a slow one

Check = Callable[[Sequence[int], SamplingParams], None]


@dataclass(frozen=True)
class Checked:
    """A request that need not wait for its grammar any more.

    Attributes:
        error: why it cannot be served; None where its grammar has compiled.
    """

    message: Add
    params: SamplingParams
    error: OutriderError | None


class GrammarQueue:
    """Where requests with a grammar stand before the engine has them.

    Args:
        check: compiles the grammar of a request and keeps it, or raises an OutriderError. Called
            in other threads.
    """

    def __init__(self, check: Check) -> None:
        self._check = check
        self._threads = ThreadPoolExecutor(NUM_THREADS, "grammars")
        self._waiting: dict[str, tuple[Add, SamplingParams, Future[OutriderError | None]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_sequences(self) -> int:
        """Outputs that the waiting requests ask for."""
        return sum(params.n for _, params, _ in self._waiting.values())

    def add(self, message: Add, params: SamplingParams) -> None:
        """Begin to compile. Never waits."""
        future = self._threads.submit(self._error, message, params)
        self._waiting[message.request_id] = message, params, future

    def drop(self, request_id: str) -> None:
        """The request is of no use any more, if it waits here. What compiles already goes on."""
        if request_id in self._waiting:
            _, _, future = self._waiting.pop(request_id)
            future.cancel()

    def take_checked(self) -> list[Checked]:
        """The requests that wait no longer. Never waits."""
        done = [one for one, (_, _, future) in self._waiting.items() if future.done()]
        taken = [self._waiting.pop(request_id) for request_id in done]
        return [Checked(message, params, future.result()) for message, params, future in taken]

    def close(self) -> None:
        """Begin nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _error(self, message: Add, params: SamplingParams) -> OutriderError | None:
        try:
            self._check(message.token_ids, params)
        except OutriderError as error:
            return error
        except Exception as error:  # one grammar that cannot be handled is not the others' fault
            logger.exception("the grammar of request %s failed", message.request_id)
            return EngineFaultError(f"a fault while its grammar was compiled ({error!r})")
        return None
