"""`outrider serve`: binds the address, starts the engine, serves, drains.

Exit codes: 0 after a drain, 1 where the engine could not be kept alive, 2 for what the user got
wrong, a model that cannot be loaded included.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Generator
from types import FrameType

import uvicorn

from outrider.config import EngineConfig
from outrider.errors import ConfigError, EngineDeadError
from outrider.server.app import api_keys, build_app
from outrider.server.options import ServerOptions
from outrider.server.service import Service

logger = logging.getLogger("outrider.server")

_OK, _ENGINE_LOST = 0, 1
_LOCAL = ("127.0.0.1", "::1", "localhost")


def serve(config: EngineConfig, options: ServerOptions) -> int:
    """Serve until told to end; returns the exit code.

    Raises:
        OutriderError: the address cannot be had, or the model cannot be loaded.
    """
    with _bind(options) as listener:
        return asyncio.run(_serve(config, options, listener))


async def _serve(config: EngineConfig, options: ServerOptions, listener: socket.socket) -> int:
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    service = Service(config, options)
    address = _address(options, listener)
    server = _Server(
        uvicorn.Config(
            build_app(service),
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=max(round(options.drain_timeout), 1),
        ),
        service.draining,
    )
    if options.host not in _LOCAL and not api_keys(options):
        logger.warning("listening beyond this machine without --api-key")

    def on_ready() -> None:
        print(f"outrider: ready at {address}", file=sys.stderr, flush=True)

    def on_end() -> None:
        server.should_exit = server.force_exit = True

    service.start(on_ready, on_end)
    print(f"outrider: loading {config.model}, listening at {address}", file=sys.stderr, flush=True)
    try:
        await server.serve([listener])
    finally:
        await service.stop()
    if service.error is not None:
        if not isinstance(service.error, EngineDeadError):
            raise service.error
        logger.error("%s; giving up", service.error)
        return _ENGINE_LOST
    return _OK


def _bind(options: ServerOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((options.host, options.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen ({error.strerror})",
            got=f"{options.host}:{options.port}",
            hint="choose another --port or --host",
        ) from error
    return listener


def _address(options: ServerOptions, listener: socket.socket) -> str:
    host = f"[{options.host}]" if ":" in options.host else options.host
    return f"http://{host}:{listener.getsockname()[1]}"


class _Server(uvicorn.Server):
    """Ends with an exit code and not by the signal, once what runs has been answered."""

    def __init__(self, config: uvicorn.Config, draining: asyncio.Event) -> None:
        super().__init__(config)
        self._draining = draining

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._draining.set()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        handled = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, self._on_signal) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first one drains, a second one does not wait."""
        self.force_exit = self.should_exit
        self.should_exit = True
