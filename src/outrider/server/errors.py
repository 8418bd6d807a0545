"""Every error as a response in OpenAI's format, naming the field that is wrong."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from outrider.errors import (
    CapacityError,
    DrainingError,
    EngineDeadError,
    OutriderError,
    RequestError,
    StuckRoundError,
)

logger = logging.getLogger("outrider.server")

INVALID, SERVER = "invalid_request_error", "server_error"
RETRY_SECONDS = 1


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: HTTP status code.
        param: field of the request that is to blame, as a path such as "messages[0].content".
        code: word that programs can compare.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The object that is sent."""
        kind = SERVER if self.status >= 500 else INVALID
        if self.status == 429:
            kind = "rate_limit_error"
        elif self.status == 401:
            kind = "authentication_error"
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        # Escaped, since a name that the client sent may be no valid Unicode.
        content = json.dumps(self.body(), ensure_ascii=True)
        return Response(content, self.status, self.headers, media_type="application/json")


class DeadlineError(OutriderError):
    """A request took longer than the server allows."""


def bad_field(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A field of the request has a value that cannot be served."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, retry_seconds: int = RETRY_SECONDS) -> ApiError:
    """The engine cannot be reached now."""
    headers = {"Retry-After": str(retry_seconds)}
    return ApiError(503, message, code="engine_unavailable", headers=headers)


def too_busy(num_waiting: int, max_waiting: int) -> ApiError:
    """The queue is full."""
    return ApiError(
        429,
        f"too many requests: {num_waiting} sequences wait; allowed: {max_waiting}; try again later",
        code="too_many_requests",
        headers={"Retry-After": str(RETRY_SECONDS)},
    )


_FIELDS_OF_PARAMS = {
    "stop string": "stop",
    "stop token id": "stop_token_ids",
    "bad word": "bad_words",
    "structured": "structured_output",
    "chat messages": "messages",
    "the chat template refuses": "messages",
    "the tokenizer has no chat template": "messages",
    "chat template variable": "chat_template_kwargs",
    "text is not valid": "prompt",
}


def from_outrider(error: OutriderError, names: Mapping[str, str] | None = None) -> ApiError:
    """The answer for an error of the engine's boundary.

    Args:
        names: the request's own names of fields that the engine calls otherwise.
    """
    if isinstance(error, EngineDeadError | DrainingError | StuckRoundError):
        return unavailable(str(error))
    if isinstance(error, DeadlineError):
        # Clients would send the request again, to be too late again.
        return ApiError(408, str(error), code="timeout", headers={"x-should-retry": "false"})
    if isinstance(error, CapacityError):
        # Requests that no engine of this size can serve are refused before they are queued.
        headers = {"x-should-retry": "false"}  # it was tried again already
        return ApiError(500, str(error), code="out_of_memory", headers=headers)
    if not isinstance(error, RequestError):  # the client has done nothing wrong
        return ApiError(500, str(error), code="engine_fault")
    field = next(
        (name for start, name in _FIELDS_OF_PARAMS.items() if error.what.startswith(start)),
        error.what.split(maxsplit=1)[0].rstrip(":"),
    )
    named = (names or {}).get(field, field)
    message = str(error) if named in str(error) else f"{named}: {error}"
    return bad_field(named, message)


def from_validation(error: RequestValidationError) -> ApiError:
    """The answer for a body that does not fit its model. One wrong field is named: the innermost,
    since a value that may be of several types is wrong for those that were not meant, too."""
    first = max(error.errors(), key=lambda one: _existing_path(_path(one), error.body, True)[1])
    path, kind = _path(first), str(first["type"])
    if kind == "json_invalid":
        return bad_field(None, f"the body is not JSON ({first['ctx']['error']})", "json_invalid")
    if not path:
        message = f"the body: {first['msg']}; send a JSON object as application/json"
        return bad_field(None, message)
    param, _ = _existing_path(path, error.body, kind in ("missing", "extra_forbidden"))
    if kind == "missing":
        return bad_field(param, f"{param} is missing", "missing")
    if kind == "extra_forbidden":
        return bad_field(param, f"{param}: no such field; leave it out", "unknown_field")
    # A field that may be of several types has an error for each of them.
    reasons = dict.fromkeys(
        str(other["msg"]).removeprefix("Value error, ")
        for other in error.errors()
        if _existing_path(_path(other), error.body, False)[0] == param
    )
    shown = repr(first["input"])
    shown = shown if len(shown) <= 200 else shown[:200] + "..."
    return bad_field(param, f"{param}: got {shown}; {', or '.join(reasons)}")


def _path(error: Mapping[str, Any]) -> tuple[int | str, ...]:
    return tuple(error["loc"])[1:]  # "body" comes first


def _existing_path(path: Sequence[int | str], body: object, includes_last: bool) -> tuple[str, int]:
    """The part of a path that leads somewhere in the body, and its length: the rest are names of
    types."""
    shown, length = "", 0
    for index, step in enumerate(path):
        is_last = includes_last and index == len(path) - 1
        before = shown
        if isinstance(body, dict) and (step in body or is_last):
            body = cast(dict[Any, Any], body).get(step)
            shown += f".{step}" if shown else str(step)
        elif isinstance(body, list) and isinstance(step, int) and step < len(cast(Any, body)):
            body = cast(list[Any], body)[step]
            shown += f"[{step}]"
        length += shown != before
    return shown, length


def _unreadable_body(cause: BaseException) -> ApiError:
    """The answer for a body that is not even wrong JSON, by what the reader of JSON met."""
    if isinstance(cause, UnicodeDecodeError):
        reason = f"it is not UTF-8 from byte {cause.start} on; send JSON in UTF-8"
    elif isinstance(cause, RecursionError):
        reason = "it is nested too deeply; send fewer levels"
    elif isinstance(cause, ValueError) and "integer string conversion" in str(cause):
        reason = "a number in it has too many digits; send numbers that fit 64 bits"
    else:
        reason = f"{type(cause).__name__}: {cause}"
    return bad_field(None, f"the body cannot be read: {reason}", "json_invalid")


def add_handlers(app: FastAPI) -> None:
    """Let every error that reaches the application become a response."""

    async def on_api(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response()

    async def on_outrider(_: Request, error: Exception) -> Response:
        assert isinstance(error, OutriderError)
        return from_outrider(error).response()

    async def on_validation(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return from_validation(error).response()

    async def on_http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 400 and error.__cause__ is not None:
            return _unreadable_body(error.__cause__).response()
        return ApiError(error.status_code, str(error.detail), headers=error.headers).response()

    async def on_any(_: Request, error: Exception) -> Response:
        logger.error("a request failed: %s", type(error).__name__, exc_info=error)
        return ApiError(500, "internal error; the server's log says more").response()

    app.add_exception_handler(ApiError, on_api)
    app.add_exception_handler(OutriderError, on_outrider)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Exception, on_any)
