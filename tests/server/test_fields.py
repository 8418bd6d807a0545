"""Every field of the protocol by the official client, streamed and not; what guards the server."""

from __future__ import annotations

import asyncio
import hmac
import inspect
import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from outrider.engine_messages import Stats
from outrider.server.metrics import Metrics
from outrider.server.middleware import ApiKeys
from outrider.server.protocol import ChatRequest, CompletionRequest, SamplingRequest, WithoutEffect
from outrider.tokenizer import Tokenizer
from tests.server.serving import MODEL, Server

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

TOKENIZER = Tokenizer.from_pretrained(MODEL)
(X,) = TOKENIZER.encode("x")
ALWAYS_X = {str(X): 100}
ENDS: list[int] = json.loads((MODEL / "config.json").read_text())["eos_token_id"]
AT_ONCE_THE_END = {str(token_id): 100 for token_id in ENDS}

SHARED: dict[str, Any] = {
    **{"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
    **{"safety_identifier": "s", "prompt_cache_key": "k", "model": "tiny", "stream": None},
    **{"stream_options": {"include_usage": True}, "n": 2, "max_tokens": 2, "min_tokens": 2},
    **{"temperature": 0, "top_p": 1e-6, "top_k": 1, "min_p": 1.0, "seed": 3},
    **{"stop": ["a", "e", "i", "r"], "stop_token_ids": [X], "ignore_eos": True},
    **{"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 2.0},
    **{
        "logit_bias": ALWAYS_X,
        "bad_words": ["x"],
        "structured_output": {"kind": "regex", "text": "[ab]{2}"},
    },
    **{"priority": 2, "speculation": {"enabled": False}, "outrider_trace": True},
}
COMPLETION: dict[str, Any] = SHARED | {
    **{"prompt": ["def f", "import"], "echo": True, "logprobs": 1, "best_of": 1},
}
CHAT: dict[str, Any] = SHARED | {
    **{"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
    **{"max_completion_tokens": 2, "logprobs": True, "top_logprobs": 1, "tools": [TOOL]},
    **{"response_format": {"type": "json_object"}, "tool_choice": "none"},
    **{"parallel_tool_calls": True, "chat_template_kwargs": {"enable_thinking": True}},
    **{"add_generation_prompt": False},
}
NEEDS: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "min_tokens": {"logit_bias": AT_ONCE_THE_END},
    "ignore_eos": {"logit_bias": AT_ONCE_THE_END},
    "stop_token_ids": {"logit_bias": ALWAYS_X},
    "bad_words": {"logit_bias": ALWAYS_X},
    "presence_penalty": {"max_tokens": 32},
    "frequency_penalty": {"max_tokens": 32},
    "repetition_penalty": {"max_tokens": 32},
}
"""Without which a field has nothing to do."""
WITHOUT_EFFECT = set(WithoutEffect.model_fields)
ELSEWHERE = {
    *("model", "stream", "priority", "best_of", "logprobs", "top_logprobs", "outrider_trace"),
    *("tool_choice", "parallel_tool_calls"),
}
"""With an effect, here none, on something else than the text."""
GREEDY = {"temperature", "top_p", "top_k", "min_p"}
"""As the table sets them, each of them leaves the likeliest token alone."""


def test_the_tables_of_this_file_know_every_field() -> None:
    assert set(COMPLETION) == set(CompletionRequest.model_fields)
    assert set(CHAT) == set(ChatRequest.model_fields)
    assert set(SHARED) == set(SamplingRequest.model_fields)


def sent(create: Callable[..., Any], fields: dict[str, Any]) -> Any:
    """A request by the client's own arguments where it has them, else beside them."""
    known = set(inspect.signature(create).parameters)
    own = {name: value for name, value in fields.items() if name in known}
    return create(**own, extra_body={k: v for k, v in fields.items() if k not in known})


def said(choices: list[Any]) -> dict[int, str]:
    """Reasoning and content by choice."""
    texts: dict[int, str] = {}
    for choice in choices:
        message = getattr(choice, "message", None) or getattr(choice, "delta", None)
        text = choice.text if message is None else message.content or ""
        reasoning = getattr(message, "reasoning_content", None) or ""
        texts[choice.index] = texts.get(choice.index, "") + reasoning + text
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_every_field_is_taken_by_both_ways_of_answering(client: openai.OpenAI, kind: str) -> None:
    is_chat = kind == "chat"
    create = client.chat.completions.create if is_chat else client.completions.create
    prompt = {"messages": [{"role": "user", "content": "x"}]} if is_chat else {"prompt": "def f"}
    base: dict[str, Any] = {"model": "tiny", "temperature": 1, "seed": 1, "max_tokens": 4, **prompt}
    first = sent(create, base)
    usual = said(first.choices)
    found: dict[str, dict[int, str]] = {}
    for name, value in (CHAT if is_chat else COMPLETION).items():
        without = base | NEEDS.get(name, {})
        fields = without | {name: value}
        if name == "max_completion_tokens":
            del fields["max_tokens"]
        if name != "stream_options":  # which is refused where nothing is streamed
            whole = sent(create, fields)
            before = sent(create, without) if name in NEEDS else first
            is_same = _told(whole) == _told(before)
            assert is_same == (name in WITHOUT_EFFECT | ELSEWHERE), name
            found[name] = said(whole.choices)
        chunks = list(sent(create, fields | {"stream": True}))
        streamed = said([choice for chunk in chunks for choice in chunk.choices])
        wanted = usual if name == "stream_options" else said(whole.choices)
        assert streamed == wanted, name
        assert (chunks[-1].usage is not None) == (name == "stream_options"), name
    assert [found[name] for name in GREEDY] == [found["temperature"]] * len(GREEDY)
    assert found["logit_bias"] == {0: "xxxx"}
    assert found["stop_token_ids"] == {0: ""} and "xx" not in found["bad_words"][0]


def _told(answer: Any) -> tuple[dict[int, str], int]:
    """Texts, and how many tokens they took: the end's own token has none."""
    return said(answer.choices), answer.usage.completion_tokens


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    async def app(*_: Any) -> None:
        passed.append(True)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    monkeypatch.setattr(hmac, "compare_digest", compare)
    passed: list[bool] = []
    statuses: list[int] = []
    guard = ApiKeys(app, ["first", "second"], ())  # pyright: ignore[reportArgumentType]
    for key in (b"first", b"second", b"neither"):
        scope = {"type": "http", "path": "/x", "headers": [(b"authorization", b"Bearer " + key)]}
        asyncio.run(guard(scope, None, send))  # pyright: ignore[reportArgumentType]
        # The time does not tell which key was right: all are compared, whichever is.
        assert compared == [(key, b"first"), (key, b"second")]
        compared.clear()
    assert (len(passed), statuses) == (2, [401])


def test_neither_process_listens_on_the_network_but_for_the_one_address(server: Server) -> None:
    owned = {
        os.readlink(entry)
        for pid in (server.process.pid, server.engine_pid())
        for entry in Path(f"/proc/{pid}/fd").iterdir()
    }
    listening = [
        fields[1]
        for table in ("tcp", "tcp6", "udp", "udp6")
        for fields in map(str.split, Path(f"/proc/net/{table}").read_text().splitlines()[1:])
        if f"socket:[{fields[9]}]" in owned and (fields[3] == "0A" or table.startswith("udp"))
    ]
    port = int(server.url.rpartition(":")[2])
    assert listening == [f"0100007F:{port:04X}"]


def test_a_line_in_the_log_says_now_and_then_what_the_engine_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics = Metrics("tiny", 3)

    async def run() -> None:
        task = asyncio.create_task(metrics.log_periodically(0.01))
        await asyncio.sleep(0.05)
        assert not caplog.records, "there was nothing to say"
        stats = Stats(num_running=2, num_waiting=1, kv_usage=0.25, num_preemptions=0)
        metrics.engine_reported(stats)
        await asyncio.sleep(0.05)
        task.cancel()

    with caplog.at_level(logging.INFO, "outrider.server"):
        asyncio.run(run())
    words = dict(re.findall(r"(\w+)=(\S+)", caplog.records[0].getMessage()))
    assert (words["running"], words["waiting"], words["kv"]) == ("2", "1", "25.0%")
    assert {"prompt_tokens_per_s", "output_tokens_per_s", "acceptance_length"} <= set(words)
