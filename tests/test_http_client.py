"""The client that `outrider chat` talks to servers with, against servers that misbehave."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from outrider.chat_sources import ServerModel, Span, Turn
from outrider.errors import ConfigError, ServerError
from outrider.http_client import ApiClient
from outrider.trace import SpeculationStats

Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def serving(answer: Answer) -> Generator[str]:
    """A server that gives one answer to everything; yields its base URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            answer(self)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def reply(status: int, content: bytes) -> Answer:
    def send(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.end_headers()
        handler.wfile.write(content)

    return send


REFUSED = json.dumps({"error": {"message": "top_k: no such field"}}).encode()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (reply(400, REFUSED), "the server answers 400 Bad Request: top_k: no such field"),
        (reply(401, REFUSED), "give --api-key KEY, or set OUTRIDER_API_KEY"),
        (reply(404, b"{}"), "as a rule the URL ends with /v1"),
        (reply(502, b"<html>bad gateway"), "502 Bad Gateway: <html>bad gateway"),
        (reply(200, b"data: <html>\n\n"), "does not speak OpenAI's API: got ' <html>"),
        (reply(200, b'data: {"a": 1}\n\n'), "the server broke off its answer"),
        (
            reply(200, b'data: {"error": {"message": "too slow", "status": 408}}\n\n'),
            "the server ends the answer: too slow",
        ),
        (lambda handler: handler.connection.close(), "no answer ("),
    ],
    ids=["400", "401", "404", "502", "html", "broken off", "error event", "closed"],
)
def test_what_a_server_says_is_said_plainly(answer: Answer, message: str) -> None:
    with serving(answer) as url, pytest.raises(ServerError) as caught:
        list(ApiClient(url).stream("/chat/completions", {}))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (["id"], ": data: got ['id']; allowed: a list of objects"),
        (5, ": data: got 5; allowed: a list of objects"),
        ([{"id": 5}], ": data[0].id: got 5; allowed: a text"),
        ([{"id": "m", "owned_by": []}], ": data[0].owned_by: got []; allowed: a text"),
    ],
    ids=str,
)
def test_a_list_of_models_of_another_shape_is_said_plainly(models: Any, message: str) -> None:
    with (
        serving(reply(200, json.dumps({"data": models}).encode())) as url,
        pytest.raises(ServerError) as caught,
    ):
        ServerModel(ApiClient(url), None, {}, color=True)
    assert str(caught.value) == f"the server does not speak OpenAI's API{message}"


@pytest.mark.parametrize("models", [None, [], [{}], [{"id": None}]], ids=str)
def test_a_server_without_models_is_told(models: Any) -> None:
    with (
        serving(reply(200, json.dumps({"data": models}).encode())) as url,
        pytest.raises(ServerError, match="the server lists no model: got 'http"),
    ):
        ServerModel(ApiClient(url), None, {}, color=True)


MODELS = json.dumps({"data": [{"id": "m", "owned_by": "outrider"}]}).encode()


def answered(*events: Any) -> tuple[list[Span], Turn]:
    """What becomes of the events of one answer."""
    lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"

    def tell(handler: BaseHTTPRequestHandler) -> None:
        is_list = handler.path.endswith("/models")
        reply(200, MODELS if is_list else lines.encode())(handler)

    spans: list[Span] = []
    with serving(tell) as url:
        answer = ServerModel(ApiClient(url), None, {}, color=True).answer([])
        while True:
            try:
                spans.append(next(answer))
            except StopIteration as end:
                return spans, end.value


def delta(content: Any, **block: Any) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": content}}], "outrider": block}


def token(text: str, origin: str) -> dict[str, Any]:
    return {"text": text, "origin": origin}


BAD_EVENTS: list[tuple[Any, str]] = [
    ({"choices": 3}, "choices: got 3; allowed: a list of objects"),
    ({"choices": ["x"]}, "choices: got ['x']; allowed: a list of objects"),
    ({"choices": [{"delta": "x"}]}, "choices[0].delta: got 'x'; allowed: an object"),
    (delta(["a"]), "choices[0].delta.content: got ['a']; allowed: a text"),
    ({"choices": [{"finish_reason": 1}]}, "choices[0].finish_reason: got 1; allowed: a text"),
    ({"usage": 7}, "usage: got 7; allowed: an object"),
    (
        {"usage": {"completion_tokens": 1.5}},
        "usage.completion_tokens: got 1.5; allowed: an",
    ),
    ({"outrider": []}, "outrider: got []; allowed: an object"),
    ({"outrider": {"rounds": -1}}, "outrider.rounds: got -1; allowed: an integer of at least 0"),
    (
        {"outrider": {"accepted_per_position": [True]}},
        "outrider.accepted_per_position: got [True]; allowed: a list of integers",
    ),
    (delta("a", tokens="a"), "outrider.tokens: got 'a'; allowed: a list of objects"),
    (delta("a", tokens=[{"text": 1}]), "outrider.tokens[0].text: got 1; allowed: a text"),
    *(
        (
            delta("a", tokens=[{"text": "a", "origin": origin}]),
            f"outrider.tokens[0].origin: got {origin!r}; allowed: ",
        )
        for origin in ("guessed", "drafted", "drafted:0", "drafted:-9", "plain:1", "", 3)
    ),
]


@pytest.mark.parametrize(("event", "message"), BAD_EVENTS, ids=str)
def test_an_answer_of_another_shape_is_said_plainly(event: Any, message: str) -> None:
    with pytest.raises(ServerError) as caught:
        answered(event)
    assert str(caught.value).startswith(f"the server does not speak OpenAI's API: {message}")


def test_null_and_what_is_not_asked_for_are_nothing() -> None:
    nothing = {"error": None, "choices": None, "usage": None, "outrider": None, "x": [3]}
    spans, turn = answered(
        nothing,
        {"choices": [{"delta": None, "finish_reason": None}]},
        {"choices": [{"delta": {"content": None, "role": 3}}], "outrider": {"tokens": None}},
        delta(
            "ab", tokens=[{"text": "a", "origin": "drafted:2"}, {"text": "b", "origin": "bonus"}]
        ),
        delta("c", tokens=[{"text": "another"}]),
        {"choices": [{"finish_reason": "length"}], "usage": {"completion_tokens": 3}},
        nothing,
    )
    assert spans == [Span("a", "38;5;34"), Span("b", "38;5;33"), Span("c")]
    assert turn.is_cut and turn.stats == SpeculationStats(num_tokens=3)


@pytest.mark.parametrize("host", ["é" * 70, "a" * 64 + "é"])
def test_a_host_that_no_name_can_be_is_one_line(host: str) -> None:
    with pytest.raises(ServerError, match="no answer"):
        ApiClient(f"http://{host}/v1").get("/models")


def test_events_are_read_and_comments_and_names_are_not() -> None:
    lines = b': alive\n\nevent: x\ndata: {"a": 1}\n\ndata:{"a": 2}\r\n\r\ndata: [DONE]\n\n'
    with serving(reply(200, lines)) as url:
        assert list(ApiClient(url).stream("/x", {})) == [{"a": 1}, {"a": 2}]


def test_the_key_is_sent_as_a_bearer_token_and_a_server_that_is_not_there_is_named() -> None:
    def tell(handler: BaseHTTPRequestHandler) -> None:
        path = json.dumps({"path": handler.path, "key": handler.headers["Authorization"]})
        reply(200, path.encode())(handler)

    with serving(tell) as url:
        assert ApiClient(url + "/", "k").get("/models") == {"path": "/v1/models", "key": "Bearer k"}
        assert ApiClient(url).get("/models")["key"] is None
    with pytest.raises(ServerError, match=r"no answer \(.*refused\): got 'http"):
        ApiClient(url).get("/models")
    with pytest.raises(ConfigError, match="url"):
        ApiClient("127.0.0.1:8000/v1")
