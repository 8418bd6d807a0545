"""The official client against a running server: every endpoint and option, streamed and not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from outrider import LLM, SamplingParams
from tests.server.serving import MODEL, Server, joined, streamed, wait_until

PROMPT = "def read_lines(path):"
MESSAGES: Any = [{"role": "user", "content": "import os"}]
GREEDY: Any = {"model": "tiny", "temperature": 0, "max_tokens": 16}
UNREPEATED: Any = GREEDY | {"max_tokens": 60, "frequency_penalty": 2}
"""Out of the endless white space that a small model finds in grammars of JSON."""
WARM: Any = {"model": "tiny", "temperature": 1, "seed": 7, "max_tokens": 16}

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
OK_SCHEMA: Any = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def reference() -> LLM:
    """The model in this process, without speculation and without a server."""
    return LLM(str(MODEL), dtype="float32", max_num_seqs=4, kv_cache_memory_gib=0.02)


def exactly(text: str) -> dict[str, Any]:
    """Makes the model write this and nothing else."""
    grammar = f"root ::= {json.dumps(text, ensure_ascii=False)}"
    return {"structured_output": {"kind": "ebnf", "text": grammar}}


def chunks_of(client: openai.OpenAI, **options: Any) -> list[Any]:
    return list(client.chat.completions.create(messages=MESSAGES, stream=True, **options))


def chat_text(chunks: list[Any], field: str = "content", index: int = 0) -> str:
    return "".join(
        getattr(choice.delta, field, None) or ""
        for chunk in chunks
        for choice in chunk.choices
        if choice.index == index
    )


def test_a_greedy_completion_is_the_text_of_the_model_alone(
    client: openai.OpenAI, reference: LLM
) -> None:
    wanted = reference.generate(PROMPT, SamplingParams(temperature=0, max_tokens=16))
    completion = client.completions.create(prompt=PROMPT, **GREEDY)
    assert completion.choices[0].text == wanted.text
    assert completion.choices[0].finish_reason == "length"
    assert completion.model == "tiny" and completion.object == "text_completion"
    usage = completion.usage
    assert usage is not None
    num_prompt = len(reference.tokenizer.encode(PROMPT))
    assert (usage.prompt_tokens, usage.completion_tokens) == (num_prompt, 16)
    assert usage.total_tokens == num_prompt + 16


OPTIONS: list[dict[str, Any]] = [
    {},
    {"stop": ["lines", "zzz"]},
    {"stop": "\n"},
    {"logit_bias": {"388": 5, "972": -100}},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"top_p": 0.8, "extra_body": {"top_k": 20, "min_p": 0.01}},
    {"extra_body": {"repetition_penalty": 1.3, "min_tokens": 4, "ignore_eos": True}},
    {"extra_body": {"top_k": -1, "bad_words": ["path"], "stop_token_ids": [5]}},
    {"extra_body": {"speculation": {"enabled": False}}},
    {"extra_body": {"speculation": {"max_draft_tokens": 1, "draft_sampling": "coupled"}}},
    {"n": 2, "user": "somebody"},
]


@pytest.mark.parametrize(
    ("base", "options"),
    [(WARM, options) for options in OPTIONS] + [(GREEDY, options) for options in OPTIONS[:3]],
    ids=json.dumps,
)
def test_streamed_text_equals_text_that_is_not_streamed(
    client: openai.OpenAI, base: dict[str, Any], options: dict[str, Any]
) -> None:
    whole = client.completions.create(prompt=PROMPT, **base, **options)
    chunks = list(client.completions.create(prompt=PROMPT, stream=True, **base, **options))
    for choice in whole.choices:
        mine = [c.choices[0] for c in chunks if c.choices[0].index == choice.index]
        assert "".join(chunk.text for chunk in mine) == choice.text
        assert [chunk.finish_reason for chunk in mine][-1] == choice.finish_reason
    chat = client.chat.completions.create(messages=MESSAGES, **base, **options)
    chat_chunks = chunks_of(client, **base, **options)
    for choice in chat.choices:
        assert chat_text(chat_chunks, index=choice.index) == choice.message.content


def test_several_prompts_and_outputs_are_choices_in_order(
    client: openai.OpenAI, reference: LLM
) -> None:
    ids = reference.tokenizer.encode(PROMPT)
    one = client.completions.create(prompt=ids, **WARM, n=2)
    other = client.completions.create(prompt="import os", **WARM, n=2)
    both = client.completions.create(prompt=[PROMPT, "import os"], **WARM, n=2)
    as_ids = client.completions.create(
        prompt=[ids, reference.tokenizer.encode("import os")], **WARM, n=2
    )
    wanted = [choice.text for choice in (*one.choices, *other.choices)]
    assert [choice.text for choice in both.choices] == wanted
    assert [choice.text for choice in as_ids.choices] == wanted
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert wanted[0] != wanted[1]


def test_completion_logprobs_with_echo(client: openai.OpenAI, reference: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=2)
    wanted = reference.generate(PROMPT, params)
    base = GREEDY | {"max_tokens": 4}
    whole = client.completions.create(prompt=PROMPT, **base, echo=True, logprobs=2).choices[0]
    assert whole.text == PROMPT + wanted.text
    found = whole.logprobs
    assert found is not None and found.tokens is not None and found.token_logprobs is not None
    assert "".join(found.tokens) == whole.text
    assert wanted.prompt_logprobs is not None and wanted.logprobs is not None
    values = [entry.logprob for entry in (*wanted.prompt_logprobs, *wanted.logprobs)]
    assert found.token_logprobs[0] is None
    assert found.token_logprobs[1:] == pytest.approx(values, abs=1e-4)
    assert found.text_offset is not None and found.top_logprobs is not None
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        assert whole.text[offset:].startswith(token)
    assert all(len(top) in (2, 3) for top in found.top_logprobs[1:])
    chunks = list(
        client.completions.create(prompt=PROMPT, **base, echo=True, logprobs=2, stream=True)
    )
    pieces = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        together = [entry for piece in pieces for entry in getattr(piece, name)]
        assert together == getattr(found, name)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text


def test_chat_logprobs(client: openai.OpenAI) -> None:
    options = GREEDY | {"max_tokens": 5, "logprobs": True, "top_logprobs": 3}
    choice = client.chat.completions.create(messages=MESSAGES, **options).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    content = choice.logprobs.content
    assert "".join(entry.token for entry in content) == choice.message.content
    for entry in content:  # a greedy token is the first of the alternatives
        assert len(entry.top_logprobs) == 3
        assert (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob) == (
            entry.token,
            entry.logprob,
        )
        assert bytes(entry.bytes or []).decode() == entry.token
    streamed_entries = [
        entry
        for chunk in chunks_of(client, **options)
        for entry in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]
    assert streamed_entries == content


def test_what_speculation_did_is_in_every_response(server: Server) -> None:
    body = GREEDY | {"prompt": PROMPT, "max_tokens": 24, "outrider_trace": True}
    answer = server.post("/v1/completions", body).json()
    block, usage = answer["outrider"], answer["usage"]
    details = usage["completion_tokens_details"]
    assert block["passes"] < 24 and block["rounds"] <= block["passes"]
    assert block["acceptance_length"] == pytest.approx(1 + block["accepted"] / block["rounds"])
    assert sum(block["accepted_per_position"]) == block["accepted"]
    assert len(block["accepted_per_position"]) == 3
    drafted = [entry for entry in block["tokens"] if entry["origin"].startswith("drafted:")]
    assert details["accepted_prediction_tokens"] == len(drafted)
    assert sum(details.values()) == block["drafted"]
    assert len(block["tokens"]) == 24
    assert "".join(entry["text"] for entry in block["tokens"]) == answer["choices"][0]["text"]
    corrected = [entry for entry in block["tokens"] if entry["origin"] == "corrected"]
    assert corrected and all(entry["rejected"] for entry in corrected)
    rounds = [_counts(entry) for entry in block["round_traces"]]
    assert rounds[0] == (0, 0, 1, True) and not any(prompt for *_, prompt in rounds[1:])
    assert sum(emitted for _, _, emitted, _ in rounds) == 24
    assert (len(rounds), sum(drafted for drafted, *_ in rounds)) == (
        block["passes"],
        block["drafted"],
    )
    assert all(entry["seconds"] > 0 for entry in block["round_traces"])

    chunks = streamed(server, "/v1/completions", body | {"stream_options": {"include_usage": True}})
    entries = [entry for c in chunks for entry in c.get("outrider", {}).get("tokens", [])]
    assert entries == block["tokens"]
    traces = [entry for c in chunks for entry in c.get("outrider", {}).get("round_traces", [])]
    assert [_counts(entry) for entry in traces] == rounds
    last, lists = chunks[-2]["outrider"], {"tokens", "round_traces"}
    assert {name: last[name] for name in last.keys() - lists} == {
        name: block[name] for name in block.keys() - lists
    }
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"]) == ([], 24)
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert joined(chunks) == answer["choices"][0]["text"]


def _counts(entry: dict[str, Any]) -> tuple[int, int, int, bool]:
    """A round's trace without its time, which is another one every time."""
    return entry["drafted"], entry["accepted"], entry["emitted"], entry["prompt_pass"]


def test_speculation_can_be_switched_off_and_capped_by_request(server: Server) -> None:
    body = GREEDY | {"prompt": PROMPT}
    off = server.post("/v1/completions", body | {"speculation": {"enabled": False}}).json()
    assert (off["outrider"]["rounds"], off["outrider"]["acceptance_length"]) == (0, None)
    assert off["outrider"]["passes"] == 16
    capped = server.post("/v1/completions", body | {"speculation": {"max_draft_tokens": 1}}).json()
    assert len(capped["outrider"]["accepted_per_position"]) == 1


ANSWERS = {
    "reasoning": "<think>\nbecause é\n</think>\n\nyes",
    "text and calls": 'so \n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n'
    '<tool_call>{"name": "end"}</tool_call>',
}


def split(message: Any) -> tuple[Any, ...]:
    """Reasoning, content and calls without their random ids."""
    calls = [
        (call.function.name, json.loads(call.function.arguments))
        for call in message.tool_calls or []
    ]
    return getattr(message, "reasoning_content", None), message.content, calls


WANTED: dict[str, tuple[Any, ...]] = {
    "reasoning": ("because é", "yes", []),
    "text and calls": (None, "so", [("add", {"a": 1}), ("end", {})]),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_reasoning_and_calls_split_alike_with_and_without_speculation(
    name: str, server: Server, plain_server: Server
) -> None:
    options: Any = {"tools": [TOOL], "temperature": 0, "max_tokens": 120, "model": "tiny"}
    for one in (server, plain_server):
        client = openai.OpenAI(base_url=f"{one.url}/v1", api_key="none", max_retries=0)
        body = exactly(ANSWERS[name])
        choice = client.chat.completions.create(
            messages=MESSAGES, extra_body=body, **options
        ).choices[0]
        assert split(choice.message) == WANTED[name]
        has_calls = bool(choice.message.tool_calls)
        assert choice.finish_reason == ("tool_calls" if has_calls else "stop")
        chunks = chunks_of(client, extra_body=body, **options)
        deltas = [call for c in chunks for call in c.choices[0].delta.tool_calls or []]
        calls = [(d.function.name, json.loads(d.function.arguments)) for d in deltas]
        assert [delta.index for delta in deltas] == list(range(len(deltas)))
        assert len({delta.id for delta in deltas}) == len(deltas)
        found = (
            chat_text(chunks, "reasoning_content") or None,
            chat_text(chunks) or None,
            calls,
        )
        assert found == WANTED[name]
        assert chunks[-1].choices[0].finish_reason == choice.finish_reason


def test_a_template_variable_may_open_the_reasoning(client: openai.OpenAI) -> None:
    extra = {"chat_template_kwargs": {"enable_thinking": True}}
    message = (
        client.chat.completions.create(messages=MESSAGES, extra_body=extra, **GREEDY)
        .choices[0]
        .message
    )
    assert getattr(message, "reasoning_content", "") and message.content == ""


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_call_can_be_demanded(client: openai.OpenAI, choice: Any) -> None:
    answer = client.chat.completions.create(
        messages=MESSAGES, tools=[TOOL], tool_choice=choice, **UNREPEATED
    ).choices[0]
    (call,) = answer.message.tool_calls or []
    assert call.type == "function" and call.function.name == "add"
    assert 0 <= json.loads(call.function.arguments)["a"] <= 9
    assert answer.finish_reason == "tool_calls"


def test_calls_and_their_results_can_be_sent_back(client: openai.OpenAI) -> None:
    call: Any = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 1}'},
    }
    messages: Any = [
        {"role": "developer", "content": [{"type": "text", "text": "Add."}]},
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    ]
    answer = client.chat.completions.create(messages=messages, tools=[TOOL], **GREEDY)
    assert answer.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_can_be_bound_to_a_schema(client: openai.OpenAI, stream: bool) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": OK_SCHEMA}}
    options: Any = UNREPEATED | {"response_format": schema}
    if stream:
        text = chat_text(chunks_of(client, **options))
    else:
        answer = client.chat.completions.create(messages=MESSAGES, **options)
        text = answer.choices[0].message.content or ""
    assert isinstance(json.loads(text)["ok"], bool)


def test_an_answer_can_be_bound_to_json(client: openai.OpenAI) -> None:
    options: Any = GREEDY | {"response_format": {"type": "json_object"}}
    answer = client.chat.completions.create(messages=MESSAGES, **options).choices[0]
    assert (answer.message.content or "").lstrip().startswith("{")


def test_max_completion_tokens_is_the_new_name(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, max_completion_tokens=3
    )
    assert answer.usage is not None and answer.usage.completion_tokens == 3
    assert answer.choices[0].finish_reason == "length"


def test_models_and_small_endpoints(client: openai.OpenAI, server: Server) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object) == ("tiny", "model")
    assert client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"
    assert server.get("/health").json() == {"status": "live"}
    assert server.get("/health/ready").json() == {"status": "ready"}
    assert set(server.get("/version").json()) == {"version"}
    paths = server.get("/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize"} <= set(paths)


def test_tokenize_and_detokenize_are_inverse(server: Server, reference: LLM) -> None:
    text = "def é(x):\n\treturn '<|im_end|>'"
    found = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert found["tokens"] == reference.tokenizer.encode(text)
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 512)
    assert len(found["token_strs"]) == found["count"]
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": text}
    chat = server.post("/tokenize", {"messages": MESSAGES}).json()
    rendered = server.post("/detokenize", {"tokens": chat["tokens"]}).json()["prompt"]
    assert rendered == "<|im_start|>user\nimport os<|im_end|>\n<|im_start|>assistant\n"


def test_the_prefix_cache_shows_in_the_usage(server: Server) -> None:
    body = GREEDY | {"prompt": [17] * 200, "max_tokens": 1}
    server.post("/v1/completions", body)
    usage = server.post("/v1/completions", body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 64


@pytest.fixture(scope="module", autouse=True)
def pools_are_empty_afterwards(server: Server) -> Iterator[None]:
    yield
    wait_until(server.is_idle, "an idle engine")
