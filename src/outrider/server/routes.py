"""The endpoints: what a client sent becomes a job, and a job an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from outrider.engine_messages import Ready
from outrider.errors import RequestError
from outrider.server.chat import ChatPrompt, chat_prompt
from outrider.server.choices import ChatChoice, CompletionChoice
from outrider.server.errors import bad_field, from_outrider
from outrider.server.jobs import Job, answer
from outrider.server.parsing import CallParser, ChatParser, tool_schemas
from outrider.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingRequest,
    TokenizeRequest,
)
from outrider.server.responses import Heading
from outrider.server.sampling import chat_params, completion_params, forced_tools
from outrider.server.service import Service

router = APIRouter()


def _service(request: Request) -> Service:
    return request.app.state.service


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue one prompt or several."""
    service = _service(request)
    model = service.check_model(body.model)
    facts = await service.facts()
    params = completion_params(body, facts.sampling_defaults)
    texts = _prompts(body.prompt)
    if body.outrider_trace and len(texts) > 1:
        raise bad_field("outrider_trace", "outrider_trace: allowed with one prompt only")
    prompts = [await _token_ids(service, facts, prompt) for prompt in texts]
    echoes = [_echo(service, body, prompt) for prompt in texts]
    choices = [
        CompletionChoice(
            index * params.n + output,
            service.tokenizer,
            service.texts,
            traces=bool(body.outrider_trace),
            echo=echoes[index],
        )
        for index in range(len(prompts))
        for output in range(params.n)
    ]
    job = Job(
        heading=Heading(is_chat=False, model=model),
        prompts=prompts,
        params=params,
        choices=choices,
        include_usage=_wants_usage(body),
        traces=bool(body.outrider_trace),
        names={},
    )
    return await answer(request, job, service, bool(body.stream))


def _prompts(given: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """One entry for each prompt."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise bad_field("prompt", "prompt is empty")
    if isinstance(given[0], int):
        return [cast(list[int], given)]
    return list(cast(list[Any], given))


async def _token_ids(service: Service, facts: Ready, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        prompt = await asyncio.to_thread(_encode, service, prompt)
    _check_length(len(prompt), facts, "prompt")
    for index, token_id in enumerate(prompt):
        if not 0 <= token_id < facts.vocab_size:
            raise bad_field(
                "prompt",
                f"prompt: token {index} is {token_id}; allowed: 0 to {facts.vocab_size - 1}",
            )
    return prompt


def _encode(service: Service, text: str) -> list[int]:
    try:
        return service.tokenizer.encode(text)
    except RequestError as error:
        raise from_outrider(error) from error


def _check_length(num_tokens: int, facts: Ready, param: str) -> None:
    if num_tokens == 0:
        raise bad_field(param, f"{param} is empty; allowed: at least one token")
    if num_tokens >= facts.max_model_len:
        raise bad_field(
            param,
            f"{param} is too long: got {num_tokens} tokens; "
            f"allowed: {facts.max_model_len - 1}, one less than max_model_len",
            "context_length_exceeded",
        )


def _echo(service: Service, body: CompletionRequest, prompt: str | list[int]) -> str | None:
    if not body.echo:
        return None
    return prompt if isinstance(prompt, str) else service.tokenizer.decode(prompt)


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    service = _service(request)
    model = service.check_model(body.model)
    facts = await service.facts()
    # Checked before the template runs, which takes longer.
    params = chat_params(body, facts.sampling_defaults, facts.max_model_len)
    prompt = await _chat_prompt(service, body)
    num_prompt = len(prompt.token_ids)
    _check_length(num_prompt, facts, "messages")
    params = chat_params(body, facts.sampling_defaults, facts.max_model_len - num_prompt)
    choices = [
        ChatChoice(
            output,
            service.tokenizer,
            service.texts,
            traces=bool(body.outrider_trace),
            parser=_parser(body, prompt, has_grammar=params.grammar is not None),
        )
        for output in range(params.n)
    ]
    renamed = "response_format" if body.response_format else "tool_choice"
    job = Job(
        heading=Heading(is_chat=True, model=model),
        prompts=[prompt.token_ids],
        params=params,
        choices=choices,
        include_usage=_wants_usage(body),
        traces=bool(body.outrider_trace),
        names={} if body.structured_output else {"structured_output": renamed},
    )
    return await answer(request, job, service, bool(body.stream))


async def _chat_prompt(service: Service, body: ChatRequest | TokenizeRequest) -> ChatPrompt:
    tools = body.tools or []
    if isinstance(body, ChatRequest) and body.tool_choice == "none":
        tools = []
    assert body.messages is not None
    return await asyncio.to_thread(
        chat_prompt,
        service.tokenizer,
        body.messages,
        tools,
        body.chat_template_kwargs or {},
        body.add_generation_prompt is not False,
    )


def _parser(body: ChatRequest, prompt: ChatPrompt, *, has_grammar: bool) -> ChatParser | CallParser:
    if forced_tools(body):
        return CallParser()
    tools = None
    if body.tools and body.tool_choice != "none":
        functions = (tool.function for tool in body.tools)
        tools = tool_schemas([(function.name, function.parameters) for function in functions])
    # A grammar holds from the first token on, and leaves no room for reasoning that it does not
    # spell out itself.
    return ChatParser(
        starts_in_reasoning=prompt.starts_in_reasoning and not has_grammar,
        tools=tools,
    )


def _wants_usage(body: SamplingRequest) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Token ids of a prompt or a conversation."""
    service = _service(request)
    service.check_model(body.model)
    facts = await service.facts()
    if (body.prompt is None) == (body.messages is None):
        raise bad_field("prompt", "prompt: give this or messages")
    if body.prompt is None:
        if body.add_special_tokens is not None:
            raise bad_field("add_special_tokens", "add_special_tokens: allowed with prompt only")
        token_ids = (await _chat_prompt(service, body)).token_ids
    else:
        for name in ("tools", "chat_template_kwargs", "add_generation_prompt"):
            if getattr(body, name) is not None:
                raise bad_field(name, f"{name}: allowed with messages only")
        try:
            token_ids = await asyncio.to_thread(
                service.tokenizer.encode, body.prompt, body.add_special_tokens is not False
            )
        except RequestError as error:
            raise from_outrider(error) from error
    content: dict[str, Any] = {
        "count": len(token_ids),
        "max_model_len": facts.max_model_len,
        "tokens": token_ids,
    }
    if body.return_token_strs:
        content["token_strs"] = [service.texts.text(token_id) for token_id in token_ids]
    return JSONResponse(content)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Text of token ids, special tokens shown."""
    service = _service(request)
    service.check_model(body.model)
    facts = await service.facts()
    _check_ids(body.tokens, facts.vocab_size)
    text = await asyncio.to_thread(service.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return JSONResponse({"prompt": text})


def _check_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            param = f"tokens[{index}]"
            raise bad_field(param, f"{param}: got {token_id}; allowed: 0 to {vocab_size - 1}")


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The model, under each of its names."""
    service = _service(request)
    return JSONResponse({"object": "list", "data": [_model(service, n) for n in service.names]})


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> Response:
    """One of them."""
    service = _service(request)
    return JSONResponse(_model(service, service.check_model(name)))


def _model(service: Service, name: str) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "outrider",
    }
    if service.llm.facts is not None:
        entry["max_model_len"] = service.llm.facts.max_model_len
    return entry


@router.get("/health")
async def health() -> Response:
    """The server answers, whatever the engine does."""
    return JSONResponse({"status": "live"})


@router.get("/health/ready")
async def ready(request: Request) -> Response:
    """The model is loaded and the engine lives; else 503."""
    await _service(request).facts()
    return JSONResponse({"status": "ready"})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    text = _service(request).metrics.text()
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/version")
async def version(request: Request) -> Response:
    return JSONResponse({"version": request.app.version})
