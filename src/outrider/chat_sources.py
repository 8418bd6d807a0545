"""Who answers in `outrider chat`: a model in this process, or a server of OpenAI's API.

Both turn a conversation into pieces of text as they come. Knows neither terminals nor commands.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Protocol

from outrider import render
from outrider.errors import ConfigError, ServerError
from outrider.http_client import ApiClient
from outrider.llm import LLM
from outrider.output import RequestOutput
from outrider.server.parsing import THINK_OPEN, ChatParser, Piece, Reasoning, ToolCall
from outrider.trace import Origin, SpeculationStats, TokenOrigin

Message = dict[str, str]
"""Role and content."""


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

    def so_far(self) -> Turn:
        """What the last answer took, for one that was stopped."""
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
        self._started = 0.0
        self._output: RequestOutput | None = None

    def so_far(self) -> Turn:
        """See Source."""
        stats = SpeculationStats() if self._output is None else self._output.speculation
        return Turn(stats, time.perf_counter() - self._started)

    def answer(self, messages: Sequence[Message]) -> Generator[Span, None, Turn]:
        """See Source."""
        started = self._started = time.perf_counter()
        self._output = None
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
                self._output = output
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
        ServerError: the server cannot be reached, or lists no model.
        ConfigError: it has no model of this name.
    """

    def __init__(
        self, client: ApiClient, model: str | None, fields: Mapping[str, Any], color: bool
    ) -> None:
        listed = client.get("/models").get("data")
        models = {str(entry["id"]): entry for entry in listed or () if "id" in entry}
        if not models:
            raise ServerError("the server lists no model", got=client.url)
        if model is not None and model not in models:
            raise ConfigError("the server has no such model", got=model, allowed=models)
        self.name = next(iter(models)) if model is None else model
        self._client = client
        self._fields = dict(fields)
        if color and models[self.name].get("owned_by") == "outrider":
            self._fields["outrider_trace"] = True
        self._started = 0.0

    def so_far(self) -> Turn:
        """See Source. A server counts tokens at the end only: none are known here."""
        return Turn(SpeculationStats(), time.perf_counter() - self._started)

    def answer(self, messages: Sequence[Message]) -> Generator[Span, None, Turn]:
        """See Source."""
        started = self._started = time.perf_counter()
        body = {
            "model": self.name,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        usage: dict[str, Any] = {}
        block: dict[str, Any] = {}
        reason = None
        with closing(self._client.stream("/chat/completions", body | self._fields)) as events:
            for event in events:
                usage = event.get("usage") or usage
                block = event.get("outrider") or block
                for choice in event.get("choices", ()):
                    reason = choice.get("finish_reason") or reason
                    yield from _delta_spans(choice.get("delta") or {}, event.get("outrider") or {})
        seconds = time.perf_counter() - started
        return Turn(_stats(usage, block), seconds, reason == "length")


def _delta_spans(delta: Mapping[str, Any], block: Mapping[str, Any]) -> Iterator[Span]:
    if delta.get("reasoning_content"):
        yield Span(str(delta["reasoning_content"]), is_reasoning=True)
    content = str(delta.get("content") or "")
    tokens: list[dict[str, Any]] = block.get("tokens", [])
    if content and content == "".join(token["text"] for token in tokens):
        yield from (Span(token["text"], _code(token["origin"])) for token in tokens)
    elif content:  # parts of it wait for what comes, or came before
        yield Span(content)


def _code(origin: str) -> str:
    """Of an origin as the server writes it, such as drafted:2."""
    name, _, position = origin.partition(":")
    return render.origin_code(TokenOrigin(Origin(name), int(position) if position else None))


def _stats(usage: Mapping[str, Any], block: Mapping[str, Any]) -> SpeculationStats:
    return SpeculationStats(
        num_passes=block.get("passes", 0),
        num_rounds=block.get("rounds", 0),
        num_drafted=block.get("drafted", 0),
        num_accepted=block.get("accepted", 0),
        accepted_per_position=tuple(block.get("accepted_per_position", ())),
        num_tokens=usage.get("completion_tokens", 0),
    )
