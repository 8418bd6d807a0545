"""How one request is sampled and when it ends. Validated once, when the object is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from outrider.checks import as_tuple, check_choice, check_int, check_real, check_text, check_type
from outrider.errors import RequestError
from outrider.spec.names import DraftSampling

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: the softmax would be one-hot up to rounding."""

MAX_TEMPERATURE = 1000
MAX_BIAS = 10_000  # far past what any logit outweighs, and far from where float32 overflows
MAX_LOGPROBS = 64

GRAMMAR_KINDS = ("json_schema", "json_object", "regex", "ebnf")


@dataclass(frozen=True)
class StructuredOutput:
    """A grammar that the output follows.

    Args:
        kind: "json_schema", "json_object" (any JSON object), "regex" or "ebnf".
        text: the schema as JSON, the regular expression, or the EBNF grammar; "" for json_object.

    Raises:
        RequestError: the kind is not known or the text is missing.
    """

    kind: str
    text: str = ""

    def __post_init__(self) -> None:
        check_choice(RequestError, "structured output kind", self.kind, GRAMMAR_KINDS)
        if self.kind == "json_object":
            if self.text:
                raise RequestError("structured output text", got=self.text, allowed="none")
        else:
            check_text(RequestError, f"structured output text for {self.kind}", self.text)


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    Rules apply in this order: structured_output, logit_bias, repetition_penalty,
    frequency_penalty, presence_penalty, min_tokens, bad_words, temperature, top_k, top_p, min_p.

    Args:
        max_tokens: most output tokens.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; None keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
        min_p: drop tokens less likely than this share of the most likely one, in [0, 1].
        seed: the request's own seed; None takes one from the engine's.
        stop: strings that end the output, kept as a tuple.
        stop_token_ids: token ids that end the output, besides the end-of-sequence ids.
        ignore_eos: go on past end-of-sequence ids.
        min_tokens: output tokens before the output may end by a stop id or a stop string.
        n: outputs for the same prompt, each with random numbers of its own.
        repetition_penalty: divides positive and multiplies negative logits of tokens that the
            prompt or the output holds; 1 changes nothing.
        presence_penalty: subtracted from the logits of tokens that the output holds, in [-2, 2].
        frequency_penalty: subtracted for each time the output holds a token, in [-2, 2].
        logit_bias: token id -> value added to its logit.
        bad_words: texts that the output will not hold as the tokenizer spells them, at the
            beginning of a word or inside one.
        logprobs: report log probabilities of output tokens, with this many alternatives.
        prompt_logprobs: the same for prompt tokens.
        logprobs_mode: "raw", of the model's own distribution, or "processed", of the one that is
            drawn from (a greedy request counts as temperature 1; prompt tokens see temperature,
            top_k, top_p and min_p).
        structured_output: a grammar that the output follows, or a mapping with its kind and text.
        priority: larger ones go first, and give way last when memory is short.
        speculation: False switches drafting off for this request.
        max_draft_tokens: cap on the drafts of a round for this request; None is the engine's K.
        draft_sampling: how this request's drafts are drawn, "argmax", "coupled" (with a seed, the
            text is the same with and without speculation) or "sampled"; None is the engine's way.

    Raises:
        RequestError: a value is not allowed.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    n: int = 1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: str = "raw"
    structured_output: StructuredOutput | Mapping[str, str] | None = None
    priority: int = 0
    speculation: bool = True
    max_draft_tokens: int | None = None
    draft_sampling: str | None = None

    def __post_init__(self) -> None:
        error = RequestError
        check_int(error, "max_tokens", self.max_tokens, 1)
        check_int(error, "n", self.n, 1, 128)
        self._check_distribution()
        self._check_rules()
        if self.seed is not None:
            check_int(error, "seed", self.seed, 0, 2**63 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(error, name, getattr(self, name), 0, MAX_LOGPROBS)
        check_choice(error, "logprobs_mode", self.logprobs_mode, ("raw", "processed"))
        self._normalise_grammar()
        if self.max_draft_tokens is not None:
            check_int(
                error, "max_draft_tokens", self.max_draft_tokens, 0, hint="None is the engine's K"
            )
        if self.draft_sampling is not None:
            check_choice(error, "draft_sampling", self.draft_sampling, list(DraftSampling))
        check_type(error, "ignore_eos", self.ignore_eos, bool)
        check_int(error, "priority", self.priority, -(2**31), 2**31)
        check_type(error, "speculation", self.speculation, bool)
        self._normalise_stops()

    def _check_distribution(self) -> None:
        error = RequestError
        check_real(error, "temperature", self.temperature)
        if not 0 <= self.temperature <= MAX_TEMPERATURE:
            raise RequestError(
                "temperature",
                got=self.temperature,
                allowed=f"[0, {MAX_TEMPERATURE}]",
                hint="0 is greedy",
            )
        if self.top_k is not None:
            check_int(error, "top_k", self.top_k, 1, hint="None keeps all tokens")
        check_real(error, "top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise RequestError("top_p", got=self.top_p, allowed="(0, 1]", hint="1 keeps all tokens")
        check_real(error, "min_p", self.min_p)
        if not 0 <= self.min_p <= 1:
            raise RequestError("min_p", got=self.min_p, allowed="[0, 1]", hint="0 keeps all tokens")

    def _check_rules(self) -> None:
        error = RequestError
        check_int(error, "min_tokens", self.min_tokens, 0, self.max_tokens)
        check_real(error, "repetition_penalty", self.repetition_penalty)
        if not 0.01 <= self.repetition_penalty <= 100:
            raise RequestError(
                "repetition_penalty",
                got=self.repetition_penalty,
                allowed="[0.01, 100]",
                hint="1 changes nothing",
            )
        for name in ("presence_penalty", "frequency_penalty"):
            value: float = getattr(self, name)
            check_real(error, name, value)
            if not -2 <= value <= 2:
                raise RequestError(name, got=value, allowed="[-2, 2]", hint="0 changes nothing")
        self._normalise_bias()
        bad_words = as_tuple(error, "bad_words", self.bad_words)
        for word in bad_words:
            check_text(error, "bad word", word)
        object.__setattr__(self, "bad_words", bad_words)

    def _normalise_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RequestError("logit_bias", got=self.logit_bias, allowed="token id -> number")
        bias = dict(cast(Mapping[Any, Any], self.logit_bias))
        for token_id, value in bias.items():
            check_int(RequestError, "logit_bias token id", token_id, 0)
            what = f"logit_bias of token {token_id}"
            check_real(RequestError, what, value)
            if not -MAX_BIAS <= value <= MAX_BIAS:
                raise RequestError(what, got=value, allowed=f"[-{MAX_BIAS}, {MAX_BIAS}]")
        object.__setattr__(self, "logit_bias", bias or None)

    def _normalise_grammar(self) -> None:
        grammar = self.structured_output
        if isinstance(grammar, Mapping):
            if not {"kind"} <= set(grammar) <= {"kind", "text"}:
                raise RequestError(
                    "structured_output",
                    got=grammar,
                    allowed=f"kind (one of {', '.join(GRAMMAR_KINDS)}) and text",
                )
            object.__setattr__(self, "structured_output", StructuredOutput(**grammar))
        else:
            check_type(RequestError, "structured_output", grammar, StructuredOutput, True)

    @property
    def grammar(self) -> StructuredOutput | None:
        """`structured_output` as it is after normalisation."""
        return cast(StructuredOutput | None, self.structured_output)

    def _normalise_stops(self) -> None:
        stop = (
            (self.stop,)
            if isinstance(self.stop, str)
            else as_tuple(RequestError, "stop", self.stop)
        )
        for text in stop:
            check_text(RequestError, "stop string", text)
        stop_token_ids = as_tuple(RequestError, "stop_token_ids", self.stop_token_ids)
        for token_id in stop_token_ids:
            check_int(RequestError, "stop token id", token_id, 0)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", stop_token_ids)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as it is after normalisation."""
        return cast(tuple[str, ...], self.stop)

    @property
    def has_rules(self) -> bool:
        """Whether anything changes the logits before temperature."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.logit_bias is not None
            or bool(self.bad_words)
            or self.min_tokens > 0
            or self.structured_output is not None
        )
