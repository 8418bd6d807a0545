"""What the routes share: the engine and its restarts, the queue's limit, names, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from outrider.async_llm import AsyncLLM
from outrider.config import EngineConfig
from outrider.engine_messages import Ready
from outrider.errors import OutriderError
from outrider.server.errors import ApiError, bad_field, too_busy, unavailable
from outrider.server.metrics import Metrics
from outrider.server.options import ServerOptions
from outrider.server.token_text import TokenTexts

logger = logging.getLogger("outrider.server")

RESTART_SECONDS = 60.0
"""Least time between two restarts of the engine process; one that dies sooner ends the server."""


class Service:
    """One model and its engine.

    A first engine that cannot be loaded ends the server, and so does one that ends less than
    RESTART_SECONDS after a restart: `on_end` is called then, and `error` says why.
    """

    def __init__(self, config: EngineConfig, options: ServerOptions) -> None:
        self.config = config
        self.options = options
        self.names = tuple(options.served_model_name) or (config.model,)
        self.created = int(time.time())
        self.metrics = Metrics(self.names[0], config.num_speculative_tokens)
        self.llm = AsyncLLM(config, observer=self.metrics)
        self.tokenizer = self.llm.tokenizer
        self.texts = TokenTexts(self.tokenizer)
        self.error: OutriderError | None = None
        self.draining = asyncio.Event()  # the server was told to end
        self._num_sequences = 0
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, on_ready: Callable[[], None], on_end: Callable[[], None]) -> None:
        """Watch the engine, from the running event loop.

        Args:
            on_ready: called each time an engine is loaded.
            on_end: called when the server cannot go on.
        """
        self._tasks = [
            asyncio.create_task(self._keep_alive(on_ready, on_end)),
            asyncio.create_task(self.metrics.log_periodically()),
        ]

    async def stop(self) -> None:
        """End the engine and the watch over it."""
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self.llm.shutdown()

    async def _keep_alive(self, on_ready: Callable[[], None], on_end: Callable[[], None]) -> None:
        restarted_at: float | None = None
        while True:
            try:
                await self.llm.ready()
            except OutriderError as error:
                reason = error
            else:
                self.metrics.engine_is_up(True)
                on_ready()
                reason = await self.llm.dead()
                self.metrics.engine_is_up(False)
            recently = restarted_at is not None and (
                time.monotonic() - restarted_at < RESTART_SECONDS
            )
            if recently or self.llm.facts is None:
                self.error = reason
                on_end()
                return
            logger.error("%s; starting another one", reason)
            self.llm.shutdown()
            restarted_at = time.monotonic()
            self.metrics.engine_restarted()
            self.llm = AsyncLLM(self.config, observer=self.metrics)

    async def facts(self) -> Ready:
        """What the engine says of itself.

        Raises:
            ApiError: it is not loaded, or not any more.
        """
        if not self.llm.is_ready:
            raise unavailable("the engine is not ready: it loads, or is started again")
        return await self.llm.ready()

    def check_model(self, name: str | None) -> str:
        """The name to answer with.

        Raises:
            ApiError: the client wants another model.
        """
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise ApiError(
                404,
                f"model: got {name!r}; allowed: {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )
        return name

    def take_place(self, num_sequences: int, param: str) -> Place:
        """A place in the queue, until it is left.

        Args:
            param: the field that says how many outputs are wanted.

        Raises:
            ApiError: the queue is full, or never holds as many.
        """
        most = self.config.max_num_seqs + self.options.max_waiting
        if num_sequences > most:
            raise bad_field(
                param, f"{param}: asks for {num_sequences} outputs; allowed: {most} in one request"
            )
        if self._num_sequences + num_sequences > most:
            num_waiting = max(self._num_sequences - self.config.max_num_seqs, 0)
            raise too_busy(num_waiting, self.options.max_waiting)
        self._num_sequences += num_sequences
        return Place(self, num_sequences)

    def leave_place(self, num_sequences: int) -> None:
        """For Place."""
        self._num_sequences -= num_sequences


class Place:
    """Room for some sequences in the queue."""

    def __init__(self, service: Service, num_sequences: int) -> None:
        self._service = service
        self._num_sequences = num_sequences

    def leave(self) -> None:
        """Others may have it. May be repeated."""
        self._service.leave_place(self._num_sequences)
        self._num_sequences = 0
