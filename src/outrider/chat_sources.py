"""Who answers in `outrider chat`: a model in this process, or a server of OpenAI's API.

Both turn a conversation into pieces of text as they come. Knows neither terminals nor commands.
"""

from __future__ import annotations

import re
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Protocol

from outrider import render
from outrider.api_fields import ApiFields
from outrider.errors import ConfigError, ServerError
from outrider.http_client import ApiClient
from outrider.llm import LLM
from outrider.server.parsing import THINK_OPEN, ChatParser, Piece, Reasoning, ToolCall
from outrider.trace import Origin, SpeculationStats, TokenOrigin

Message = dict[str, str]
"""Role and content."""

_OWN_ORIGINS = tuple(origin.value for origin in Origin if origin is not Origin.DRAFTED)
"""Of the target's own tokens."""


@dataclass(frozen=True)
class Span:
    """A piece of an answer.

    Attributes:
        code: SGR code of who chose it; "" where that is not known.
        is_reasoning: it belongs to what the model thinks before it answers.
    """

    text: str
    code: str = ""
    is_reasoning: bool = False


@dataclass(frozen=True)
class Turn:
    """What an answer took.

    Attributes:
        stats: only num_tokens is counted where a server says nothing of speculation.
        seconds: from the question to the last token.
        is_cut: the answer ended at its limit of tokens.
    """

    stats: SpeculationStats
    seconds: float
    is_cut: bool = False


class Source(Protocol):
    """Answers conversations."""

    @property
    def name(self) -> str:
        """Of the model."""
        ...

    def answer(self, messages: Sequence[Message]) -> Generator[Span, None, Turn]:
        """The next answer, piece by piece. Closing the generator ends the request.

        Raises:
            OutriderError: there is none, and why.
        """
        ...


class LocalModel:
    """A model in this process.

    Args:
        sampling: fields of SamplingParams; what is missing is the checkpoint's recommendation.
            Without max_tokens an answer may fill the context.
        template: variables of the chat template.
        color: ask who chose each token.
    """

    def __init__(
        self,
        llm: LLM,
        name: str,
        sampling: Mapping[str, Any],
        template: Mapping[str, Any],
        color: bool,
    ) -> None:
        self.name = name
        self._llm = llm
        self._sampling = dict(sampling)
        self._template = dict(template)
        self._color = color

    def answer(self, messages: Sequence[Message]) -> Generator[Span, None, Turn]:
        """See Source."""
        started = time.perf_counter()
        tokenizer = self._llm.tokenizer
        prompt = tokenizer.apply_chat_template(messages, **self._template)
        token_ids = tokenizer.encode(prompt, add_special_tokens=False)
        room = max(self._llm.engine.max_model_len - len(token_ids), 1)
        sampling = {"max_tokens": room} | self._sampling
        params = replace(self._llm.default_params(), **sampling)
        parser = ChatParser(starts_in_reasoning=prompt.rstrip().endswith(THINK_OPEN))
        painter = render.TextPainter(tokenizer, self._color)
        output, code = None, ""
        with closing(self._llm.stream(token_ids, params)) as stream:
            for output in stream:
                for text, code in painter.spans(output.completions[0]):
                    if code != render.REJECTED:
                        yield from _spans(parser.push(text), code)
        yield from _spans(parser.flush(), code)
        assert output is not None  # a request that was accepted emits at least one token
        reason = output.finish_reason
        seconds = time.perf_counter() - started
        return Turn(output.speculation, seconds, reason is not None and reason.value == "length")


def _spans(pieces: Sequence[Piece], code: str) -> Iterator[Span]:
    """What became certain has the colour of the token that made it so."""
    for piece in pieces:
        assert not isinstance(piece, ToolCall), "no tools were offered"
        yield Span(piece.text, code, isinstance(piece, Reasoning))


class ServerModel:
    """A model behind a server of OpenAI's API.

    Args:
        model: its name there; None takes the first that the server lists.
        fields: what else each request says.
        color: ask an Outrider server who chose each token.

    Raises:
        ServerError: the server cannot be reached, lists no model, or speaks something else.
        ConfigError: it has no model of this name.
    """

    def __init__(
        self, client: ApiClient, model: str | None, fields: Mapping[str, Any], color: bool
    ) -> None:
        listed = ApiFields(client.get("/models")).objects("data")
        models = {name: entry for entry in listed if (name := entry.text("id"))}
        if not models:
            raise ServerError("the server lists no model", got=client.url)
        if model is not None and model not in models:
            raise ConfigError("the server has no such model", got=model, allowed=models)
        self.name = next(iter(models)) if model is None else model
        self._client = client
        self._fields = dict(fields)
        if color and models[self.name].text("owned_by") == "outrider":
            self._fields["outrider_trace"] = True

    def answer(self, messages: Sequence[Message]) -> Generator[Span, None, Turn]:
        """See Source."""
        started = time.perf_counter()
        body = {
            "model": self.name,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        usage = block = ApiFields({})
        reason = ""
        with closing(self._client.stream("/chat/completions", body | self._fields)) as events:
            for event in map(ApiFields, events):
                usage = event.inner("usage") if event.has("usage") else usage
                block = event.inner("outrider") if event.has("outrider") else block
                for choice in event.objects("choices"):
                    reason = choice.text("finish_reason") or reason
                    yield from _delta_spans(choice.inner("delta"), event.inner("outrider"))
        seconds = time.perf_counter() - started
        return Turn(_stats(usage, block), seconds, reason == "length")


def _delta_spans(delta: ApiFields, block: ApiFields) -> Iterator[Span]:
    if reasoning := delta.text("reasoning_content"):
        yield Span(reasoning, is_reasoning=True)
    content = delta.text("content")
    tokens = block.objects("tokens")
    if content and content == "".join(token.text("text") for token in tokens):
        yield from (Span(token.text("text"), _code(token)) for token in tokens)
    elif content:  # parts of it wait for what comes, or came before
        yield Span(content)


def _code(token: ApiFields) -> str:
    """Of a token's origin as the server writes it, such as drafted:2."""
    name, _, position = token.text("origin").partition(":")
    is_position = re.fullmatch("[1-9][0-9]{0,5}", position) is not None
    if name == Origin.DRAFTED.value and is_position:
        return render.origin_code(TokenOrigin(Origin.DRAFTED, int(position)))
    if position or name not in _OWN_ORIGINS:
        token.fail("origin", f"{', '.join(_OWN_ORIGINS)} or drafted:POSITION")
    return render.origin_code(TokenOrigin(Origin(name)))


def _stats(usage: ApiFields, block: ApiFields) -> SpeculationStats:
    return SpeculationStats(
        num_passes=block.count("passes"),
        num_rounds=block.count("rounds"),
        num_drafted=block.count("drafted"),
        num_accepted=block.count("accepted"),
        accepted_per_position=block.counts("accepted_per_position"),
        num_tokens=usage.count("completion_tokens"),
    )
