"""What stands before the application: the key, the size of a body, and a line in the log."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Collection, Sequence

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.server.errors import ApiError

logger = logging.getLogger("outrider.server")

MAX_BODY_BYTES = 32 * 2**20


class ApiKeys:
    """Lets a request pass that brings one of the keys, or goes to a path that needs none."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: Collection[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys and scope["path"] not in self._open_paths:
            given = Headers(scope=scope).get("authorization", "")
            scheme, _, token = given.partition(" ")
            if scheme.lower() != "bearer" or not self._is_known(token.strip().encode()):
                error = ApiError(
                    401,
                    "no valid API key: send the header 'Authorization: Bearer KEY'",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_known(self, token: bytes) -> bool:
        # Every key is compared, so that the time does not tell which one was nearly right.
        return any([hmac.compare_digest(token, key) for key in self._keys])


class BodyLimit:
    """Refuses bodies of more than MAX_BODY_BYTES, and those that are not whole when a drain
    begins: the rest of one may never come.

    Args:
        draining: is set when the server is told to end.
    """

    def __init__(self, app: ASGIApp, draining: asyncio.Event, limit: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._draining = draining
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        message = f"the body is too large; allowed: {self._limit} bytes"
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length) > self._limit:
            await ApiError(413, message).response()(scope, receive, send)
            return
        num_received, is_whole = 0, False

        async def counted() -> Message:
            nonlocal num_received, is_whole
            received = await (receive() if is_whole else self._before_drain(receive))
            is_whole = not received.get("more_body", False)
            num_received += len(received.get("body", b""))
            if num_received > self._limit:
                raise HTTPException(413, message)
            return received

        await self._app(scope, counted, send)

    async def _before_drain(self, receive: Receive) -> Message:
        receiving = asyncio.ensure_future(receive())
        draining = asyncio.ensure_future(self._draining.wait())
        try:
            await asyncio.wait((receiving, draining), return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                raise HTTPException(503, "the server ends, and the body has not come")
            return receiving.result()
        finally:
            receiving.cancel()
            draining.cancel()


class RequestLog:
    """One line for each request: method, path, status, time. No header, no query, no text."""

    def __init__(self, app: ASGIApp, quiet_paths: Collection[str] = ()) -> None:
        self._app = app
        self._quiet_paths = frozenset(quiet_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._quiet_paths:
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status = "no answer"

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            seconds = time.perf_counter() - started
            logger.info("%s %r %s %.3fs", scope["method"], scope["path"], status, seconds)
