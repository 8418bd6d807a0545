"""What a client can get wrong: each answer is a 4xx that names the field, and nothing breaks."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server.serving import Server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
PROMPT: dict[str, Any] = {"prompt": "def f", "max_tokens": 1, "temperature": 0}
HELLO = {"role": "user", "content": "hi"}
TALK: dict[str, Any] = {"messages": [HELLO], "max_tokens": 2}
TOOL = {"type": "function", "function": {"name": "f"}}

Case = tuple[str, dict[str, Any], str]
"""Path, body, and the field that the answer names."""


def _deep(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


def field_cases() -> list[Case]:
    """Fields that both endpoints have, with values of the wrong type or outside their range."""
    wrong: dict[str, list[Any]] = {
        "model": [3, "other"],
        "stream": ["yes", 1],
        "n": [0, -1, 1.5, "2", True, 129, 10**30],
        "max_tokens": [0, -5, "many", 2.5, 2**63, 10**30],
        "temperature": [-0.1, "hot", 1e6, [1]],
        "top_p": [0, 1.5, -1, "x"],
        "top_k": [-2, 1.5, "x", 2**63, 2**64],
        "min_p": [-0.1, 1.1],
        "seed": [-1, 2**63, 1.5, "x"],
        "stop": [5, [1], {}, [""], ["x"] * 65, "\ud800", ["a", "\udfff"]],
        "stop_token_ids": [[-1], [4096], ["x"], 5, [2**63], [2**64]],
        "ignore_eos": ["no"],
        "min_tokens": [-1, 3],
        "presence_penalty": [2.5, -2.5, "x"],
        "frequency_penalty": [2.5, -2.5],
        "repetition_penalty": [0, -1, 101],
        "logit_bias": [{"x": 1}, {"1": "x"}, {"99999": 1}, {"1": 1e9}, [1], {"-1": 1}],
        "bad_words": [[""], "x", [3], ["\ud800"]],
        "structured_output": [
            "json",
            {"kind": "nothing"},
            {"kind": "\ud800"},
            {"kind": "ebnf", "text": "root ::="},
            {"kind": "regex", "text": "\ud800"},
            {"kind": "json_object", "text": "\ud800"},
            {"kind": "json_schema", "text": '{"const": "' + "x" * 100_000 + '"}'},
        ],
        "outrider_trace": ["yes"],
        "metadata": ["x"],
        "user": [3],
        "priority": [1.5, 2**40],
    }
    return [
        (path, body | {name: value}, name)
        for path, body in ((COMPLETIONS, PROMPT), (CHAT, TALK))
        for name, values in wrong.items()
        for value in values
    ]


COMPLETION_CASES: list[Case] = [
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, PROMPT | {"prompt": ""}, "prompt"),
    (COMPLETIONS, PROMPT | {"prompt": []}, "prompt"),
    (COMPLETIONS, PROMPT | {"prompt": [[]]}, "prompt"),
    (COMPLETIONS, PROMPT | {"prompt": ["a", ""]}, "prompt"),
    (COMPLETIONS, PROMPT | {"prompt": [1, "a"]}, "prompt"),
    (COMPLETIONS, PROMPT | {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, PROMPT | {"prompt": [4096]}, "prompt"),
    (COMPLETIONS, PROMPT | {"prompt": [1.5]}, "prompt"),
    (COMPLETIONS, PROMPT | {"prompt": None}, "prompt"),
    (COMPLETIONS, PROMPT | {"prompt": {"text": "a"}}, "prompt"),
    (COMPLETIONS, PROMPT | {"prompt": "word " * 2000}, "prompt"),
    (COMPLETIONS, PROMPT | {"prompt": [1] * 512}, "prompt"),
    (COMPLETIONS, PROMPT | {"prompt": "\ud800"}, "prompt"),
    (COMPLETIONS, PROMPT | {"prompt": ["a"] * 1000}, "prompt"),
    (COMPLETIONS, PROMPT | {"suffix": "b"}, "suffix"),
    (COMPLETIONS, PROMPT | {"echo": "yes"}, "echo"),
    (COMPLETIONS, PROMPT | {"logprobs": -1}, "logprobs"),
    (COMPLETIONS, PROMPT | {"logprobs": 65}, "logprobs"),
    (COMPLETIONS, PROMPT | {"logprobs": True}, "logprobs"),
    (COMPLETIONS, PROMPT | {"best_of": 3}, "best_of"),
    (COMPLETIONS, PROMPT | {"messages": [HELLO]}, "messages"),
    (COMPLETIONS, PROMPT | {"response_format": {"type": "json_object"}}, "response_format"),
    (COMPLETIONS, PROMPT | {"temprature": 1}, "temprature"),
    (COMPLETIONS, PROMPT | {"stream_options": {"include_usage": True}}, "stream_options"),
    (
        COMPLETIONS,
        PROMPT | {"stream": True, "stream_options": {"usage": True}},
        "stream_options.usage",
    ),
    (COMPLETIONS, PROMPT | {"speculation": True}, "speculation"),
    (COMPLETIONS, PROMPT | {"speculation": {"enabled": "no"}}, "speculation.enabled"),
    (COMPLETIONS, PROMPT | {"speculation": {"k": 3}}, "speculation.k"),
    (COMPLETIONS, PROMPT | {"speculation": {"max_draft_tokens": -1}}, "max_draft_tokens"),
    (COMPLETIONS, PROMPT | {"speculation": {"max_draft_tokens": 2**64}}, "max_draft_tokens"),
    (COMPLETIONS, PROMPT | {"speculation": {"draft_sampling": "x"}}, "draft_sampling"),
    (COMPLETIONS, PROMPT | {"speculation": {"draft_sampling": "\ud800"}}, "draft_sampling"),
    (
        COMPLETIONS,
        PROMPT | {"speculation": {"enabled": False, "max_draft_tokens": 2}},
        "speculation.max_draft_tokens",
    ),
    (
        COMPLETIONS,
        PROMPT | {"speculation": {"enabled": False, "draft_sampling": "coupled"}},
        "speculation.draft_sampling",
    ),
    (COMPLETIONS, PROMPT | {"outrider_trace": True, "n": 2}, "outrider_trace"),
    (COMPLETIONS, PROMPT | {"outrider_trace": True, "prompt": ["a", "b"]}, "outrider_trace"),
    (COMPLETIONS, PROMPT | {"metadata": _deep(60)}, "metadata"),
    (COMPLETIONS, PROMPT | {"min_tokens": 1, "structured_output": {"kind": "json_object"}}, "min_"),
]


def _message(**fields: Any) -> dict[str, Any]:
    return TALK | {"messages": [fields]}


def _schema(schema: Any) -> dict[str, Any]:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return TALK | {"response_format": wanted}


def _call(arguments: Any) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return _message(role="assistant", content=None, tool_calls=[call])


CHAT_CASES: list[Case] = [
    (CHAT, {}, "messages"),
    (CHAT, TALK | {"messages": []}, "messages"),
    (CHAT, TALK | {"messages": "hi"}, "messages"),
    (CHAT, TALK | {"messages": [3]}, "messages[0]"),
    (CHAT, TALK | {"messages": [HELLO, {}]}, "messages[1].role"),
    (CHAT, TALK | {"messages": [{"role": "user", "content": "word " * 2000}]}, "messages"),
    (CHAT, _message(role="robot", content="x"), "messages[0].role"),
    (CHAT, _message(role="user"), "messages[0].content"),
    (CHAT, _message(role="user", content=5), "messages[0].content"),
    (CHAT, _message(role="user", content="\udfff"), "messages"),
    (CHAT, _message(role="user", content="x", mood="good"), "messages[0].mood"),
    (
        CHAT,
        _message(role="user", content=[{"type": "image_url", "image_url": {"url": "x"}}]),
        "messages[0].content[0].type",
    ),
    (CHAT, _message(role="user", content=[{"type": "text"}]), "messages[0].content[0].text"),
    (CHAT, _message(role="user", content="x", tool_calls=[]), "messages[0].tool_calls"),
    (CHAT, _call("{"), "messages[0].tool_calls[0].function.arguments"),
    (CHAT, _call("[1]"), "messages[0].tool_calls[0].function.arguments"),
    (CHAT, _call({}), "messages[0].tool_calls[0].function.arguments"),
    (CHAT, _call("[" * 10000), "messages[0].tool_calls[0].function.arguments"),
    (CHAT, TALK | {"max_completion_tokens": 3}, "max_tokens"),
    (CHAT, {"messages": [HELLO], "max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, TALK | {"logprobs": 3}, "logprobs"),
    (CHAT, TALK | {"top_logprobs": 3}, "top_logprobs"),
    (CHAT, TALK | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, TALK | {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    (CHAT, TALK | {"prompt": "x"}, "prompt"),
    (CHAT, TALK | {"echo": True}, "echo"),
    (CHAT, TALK | {"functions": []}, "functions"),
    (CHAT, TALK | {"reasoning_effort": "high"}, "reasoning_effort"),
    (CHAT, TALK | {"parallel_tool_calls": False}, "parallel_tool_calls"),
    (CHAT, TALK | {"response_format": "json"}, "response_format"),
    (CHAT, TALK | {"response_format": {"type": "xml"}}, "response_format.type"),
    (CHAT, TALK | {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        CHAT,
        TALK | {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
    ),
    (
        CHAT,
        TALK | {"response_format": {"type": "json_object", "json_schema": {"name": "x"}}},
        "response_format.json_schema",
    ),
    (CHAT, _schema("x"), "response_format.json_schema.schema"),
    (CHAT, _schema({"type": "thing"}), "response_format"),
    (CHAT, _schema({"$ref": "#/nowhere"}), "response_format"),
    (CHAT, _schema(_deep(60)), "response_format.json_schema.schema"),
    (CHAT, _schema({"enum": ["x" * 101_000]}), "response_format"),
    (CHAT, _schema({"const": "\ud800"}), "response_format"),
    (CHAT, _schema({"properties": {"\ud800": {"type": "string"}}}), "response_format"),
    (CHAT, {"messages": [HELLO], "max_completion_tokens": 2**64}, "max_completion_tokens"),
    (
        CHAT,
        _schema({"type": "object"}) | {"structured_output": {"kind": "json_object"}},
        "response_format",
    ),
    (CHAT, TALK | {"tools": [{}]}, "tools[0].type"),
    (CHAT, TALK | {"tools": [{"type": "function"}]}, "tools[0].function"),
    (CHAT, TALK | {"tools": [{"type": "web", "function": {"name": "f"}}]}, "tools[0].type"),
    (
        CHAT,
        TALK | {"tools": [{"type": "function", "function": {"name": ""}}]},
        "tools[0].function.name",
    ),
    (CHAT, TALK | {"tools": [TOOL] * 129}, "tools"),
    (CHAT, TALK | {"tool_choice": "required"}, "tool_choice"),
    (CHAT, TALK | {"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
    (
        CHAT,
        TALK | {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice.function.name",
    ),
    (
        CHAT,
        TALK
        | {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
        "tool_choice",
    ),
    (CHAT, TALK | {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    (CHAT, TALK | {"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    (CHAT, TALK | {"chat_template_kwargs": []}, "chat_template_kwargs"),
    (CHAT, TALK | {"chat_template_kwargs": _deep(60)}, "chat_template_kwargs"),
    (CHAT, TALK | {"add_generation_prompt": "no"}, "add_generation_prompt"),
    (CHAT, TALK | {"n": 128, "stream": True, "max_waiting": 1}, "max_waiting"),
]

TOKEN_CASES: list[Case] = [
    (TOKENIZE, {}, "prompt"),
    (TOKENIZE, {"prompt": 5}, "prompt"),
    (TOKENIZE, {"prompt": "a", "messages": [HELLO]}, "prompt"),
    (TOKENIZE, {"prompt": "a", "tools": [TOOL]}, "tools"),
    (TOKENIZE, {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
    (TOKENIZE, {"messages": [HELLO], "add_special_tokens": False}, "add_special_tokens"),
    (TOKENIZE, {"prompt": "a", "model": "other"}, "model"),
    (TOKENIZE, {"messages": []}, "messages"),
    (TOKENIZE, {"messages": [HELLO], "chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    (DETOKENIZE, {}, "tokens"),
    (DETOKENIZE, {"tokens": [4096]}, "tokens[0]"),
    (DETOKENIZE, {"tokens": [1, -1]}, "tokens[1]"),
    (DETOKENIZE, {"tokens": "abc"}, "tokens"),
    (DETOKENIZE, {"tokens": ["a"]}, "tokens[0]"),
]

NOT_BODIES: list[tuple[bytes, str]] = [
    (b"", "application/json"),
    (b"{", "application/json"),
    (b"[1]", "application/json"),
    (b"null", "application/json"),
    (b"\xff\xfe", "application/json"),
    (b'{"prompt": "a", "\\udc80": 1}', "application/json"),
    (b'{"prompt": NaN}', "application/json"),
    (b'{"prompt": "a", "temperature": NaN}', "application/json"),
    (b'{"prompt": "a", "temperature": 1e999}', "application/json"),
    (b"[" * 100_000, "application/json"),
    (b'{"prompt": "a"}', "text/plain"),
    (b"prompt=a", "application/x-www-form-urlencoded"),
]


def wanted_text(client: httpx.Client) -> str:
    answer = client.post(COMPLETIONS, json=PROMPT)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def check(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of an answer in OpenAI's form."""
    assert answer.status_code == status, (answer.status_code, answer.text)
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"] == "invalid_request_error"
    return error


@pytest.fixture
def http(server: Server) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=30)


GROUPS = {
    "fields of both endpoints": field_cases(),
    "completions": COMPLETION_CASES,
    "chat": CHAT_CASES,
    "tokens": TOKEN_CASES,
}


def test_the_corpus_is_large() -> None:
    assert sum(len(cases) for cases in GROUPS.values()) + len(NOT_BODIES) >= 200


@pytest.mark.parametrize(
    "valid_every", [8, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "each"]
)
@pytest.mark.parametrize("group", GROUPS)
def test_a_wrong_field_is_named_and_the_next_request_is_right(
    http: httpx.Client, group: str, valid_every: int
) -> None:
    text = wanted_text(http)
    problems: list[str] = []
    for index, (path, body, name) in enumerate(GROUPS[group], start=1):
        # Escaped: half a surrogate pair can be sent in no other way.
        answer = http.post(
            path, content=json.dumps(body), headers={"Content-Type": "application/json"}
        )
        status = 404 if name == "model" and body["model"] == "other" else 400
        shown = json.dumps(body)[:150]
        if answer.status_code != status:
            problems.append(f"{path} {shown}: {answer.status_code} {answer.text[:200]}")
            continue
        error = check(answer, status)
        if not str(error["param"]).startswith(name) or name not in error["message"]:
            problems.append(f"{path} {shown}: {error}")
        if index % valid_every == 0 and wanted_text(http) != text:
            problems.append(f"{path} {shown}: the next text is wrong")
    assert wanted_text(http) == text
    assert not problems, "\n".join(problems)


def test_what_is_no_body_is_refused(http: httpx.Client) -> None:
    text = wanted_text(http)
    for content, kind in NOT_BODIES:
        check(http.post(COMPLETIONS, content=content, headers={"Content-Type": kind}))
    assert wanted_text(http) == text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"prompt": "a\xff"}', "not UTF-8"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"prompt": "a", "seed": ' + b"1" * 5000 + b"}", "too many digits"),
    ],
    ids=["not UTF-8", "nested", "digits"],
)
def test_a_body_that_cannot_be_read_is_told_why(
    http: httpx.Client, content: bytes, reason: str
) -> None:
    headers = {"Content-Type": "application/json"}
    answer = check(http.post(COMPLETIONS, content=content, headers=headers))
    assert answer["message"].startswith("the body cannot be read: ")
    assert reason in answer["message"]


def test_a_body_that_is_too_large_is_refused(http: httpx.Client) -> None:
    check(http.post(COMPLETIONS, content=b"x" * (32 * 2**20 + 1)), 413)


def test_other_paths_and_methods_are_refused(http: httpx.Client) -> None:
    check(http.get("/v1/nothing"), 404)
    check(http.get(COMPLETIONS), 405)
    check(http.get("/v1/models/other"), 404)
