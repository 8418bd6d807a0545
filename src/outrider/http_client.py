"""A small client for servers of OpenAI's API: JSON over HTTP, and streams of server-sent events.

Made of the standard library alone, so that `outrider chat` needs no package that the engine does
not need. Knows nothing of conversations.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast
from urllib.parse import urlsplit

from outrider.errors import ConfigError, ServerError

_CONNECT_SECONDS = 10.0
_SILENT_SECONDS = 600.0
"""How long a server may say nothing; a long prompt takes a while before its first token."""

_MOST_SHOWN = 300


class ApiClient:
    """Talks to one server; every request has a connection of its own.

    Args:
        url: base of the API, such as http://127.0.0.1:8000/v1.
        api_key: sent as a bearer token; None sends none.

    Raises:
        ConfigError: the URL or the key cannot be used. What may hold a password is not quoted.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname, parts.port
        except ValueError as error:
            raise _bad_url(url, f" ({error})") from error
        if parts.username is not None or parts.password is not None:
            raise ConfigError(
                "url: no user or password can be sent", hint="leave them out, or give --api-key KEY"
            )
        if parts.scheme not in ("http", "https") or not self._host or parts.query or parts.fragment:
            raise _bad_url(url)
        if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key):
            raise ConfigError("api_key", allowed="printable ASCII text")  # not shown
        self.url = url.rstrip("/")
        self._is_secure = parts.scheme == "https"
        self._path = parts.path.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object at a path below the base.

        Raises:
            ServerError: the server cannot be reached, or says that something is wrong.
        """
        with self._response("GET", path, None) as response:
            return _object(response.read())

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any]]:
        """The events of a streamed answer. Closing the generator closes the connection.

        Raises:
            ServerError: the server cannot be reached, says that something is wrong, or breaks off.
        """
        with self._response("POST", path, body) as response:
            for line in response:
                field, _, value = line.decode("utf-8", "replace").partition(":")
                if field != "data":  # comments keep a connection alive; names are not used
                    continue
                if value.strip() == "[DONE]":
                    return
                event = _object(value.encode())
                if event.get("error") is not None:
                    raise ServerError(f"the server ends the answer: {_message(event)}")
                yield event
        raise ServerError("the server broke off its answer")

    @contextmanager
    def _response(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> Generator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        assert self._host is not None
        connection = kind(self._host, self._port, timeout=_CONNECT_SECONDS)
        content = None if body is None else json.dumps(body).encode()
        try:
            connection.connect()
            connection.sock.settimeout(_SILENT_SECONDS)
            connection.request(method, self._path + path, content, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise self._refusal(response)
            yield response
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            reason = str(error) or type(error).__name__
            raise ServerError(
                f"no answer ({reason})", got=self.url, hint="is the server running there?"
            ) from error
        finally:
            connection.close()

    def _refusal(self, response: http.client.HTTPResponse) -> ServerError:
        content = response.read(1 << 16)
        try:
            said = _message(_object(content))
        except ServerError:
            said = content.decode("utf-8", "replace")[:_MOST_SHOWN]
        hints = {
            401: "give --api-key KEY, or set OUTRIDER_API_KEY",
            404: "as a rule the URL ends with /v1",
        }
        return ServerError(
            f"the server answers {response.status} {response.reason}: {said}",
            hint=hints.get(response.status),
        )


def _bad_url(url: str, why: str = "") -> ConfigError:
    allowed = "http://HOST:PORT/v1, or https"
    if "@" in url or "?" in url:  # a password or a key may stand there, or in the reason
        return ConfigError("url", allowed=allowed)
    return ConfigError(f"url{why}", got=url, allowed=allowed)


def _object(content: bytes) -> dict[str, Any]:
    try:
        value: object = json.loads(content)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        shown = content[:_MOST_SHOWN].decode("utf-8", "replace")
        raise ServerError("the server does not speak OpenAI's API", got=shown)
    return cast(dict[str, Any], value)


def _message(content: dict[str, Any]) -> str:
    match content.get("error"):
        case {"message": str(message)} | str(message):
            return message
        case other:
            return json.dumps(other)[:_MOST_SHOWN]
