"""From a prompt and its parameters to validated requests, one for each output wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from outrider.batch import LogitRules, Tier
from outrider.checks import check_type
from outrider.errors import RequestError
from outrider.params import SamplingParams
from outrider.request import Request
from outrider.spec.names import DraftSampling
from outrider.tokenizer import Tokenizer

SAMPLED_FROM = 0.3
"""Temperature from which a request samples its drafts unless somebody says otherwise: below it the
draft's argmax is accepted as often, and needs no second distribution."""


@dataclass(frozen=True)
class AdmissionRules:
    """What requests are checked against.

    Attributes:
        eos_token_ids: the checkpoint's end-of-sequence ids.
        engine_seed: seeds of requests that bring none derive from it.
        draft_sampling: the engine's way of drawing drafts, None for the default.
        drafter_samples: whether the draft method has a distribution to sample from; None without
            a draft.
        synthetic_acceptance: drafts are accepted at random, whatever they are.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    engine_seed: int
    draft_sampling: str | None
    drafter_samples: bool | None
    tokenizer: Tokenizer | None
    synthetic_acceptance: bool = False

    def requests(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams, index: int
    ) -> list[Request]:
        """The n requests that a prompt asks for; index is the number of requests before it.

        Raises:
            RequestError: the prompt or a parameter cannot be served.
        """
        check_type(RequestError, "params", params, SamplingParams)
        check_prompt(prompt, self.max_model_len, self.vocab_size)
        self._check_params(params)
        stops = () if params.ignore_eos else self.eos_token_ids
        seed = params.seed
        if seed is None:
            # Counted down from -1, engine seeds meet no request's own.
            seed = _derive(-1 - self.engine_seed, index)
        return [
            Request(
                request_id=request_id,
                prompt_token_ids=tuple(prompt),
                params=params,
                stop_token_ids=tuple(dict.fromkeys((*stops, *params.stop_token_ids))),
                length_limit=min(len(prompt) + params.max_tokens, self.max_model_len),
                seed=seed if output == 0 else _derive(seed, output),
                rules=self._rules(len(prompt), params),
                draft_sampling=self._draft_sampling(params),
                tier=_tier(params),
                output_index=output,
            )
            for output in range(params.n)
        ]

    def _draft_sampling(self, params: SamplingParams) -> DraftSampling:
        wanted = params.draft_sampling
        if self.drafter_samples is False:
            if wanted == DraftSampling.SAMPLED:
                raise RequestError(
                    "draft_sampling: the draft method looks tokens up and has no distribution",
                    got="sampled",
                    allowed=("argmax", "coupled"),
                )
            # A point mass is verified by `match`, which keeps what coupled drafts promise.
            return DraftSampling.ARGMAX
        if params.greedy:
            # All ways agree: a greedy target accepts its own argmax and nothing else.
            return DraftSampling.ARGMAX
        if wanted is None:
            wanted = self.draft_sampling
        if wanted is None:
            cool = params.temperature < SAMPLED_FROM
            wanted = DraftSampling.ARGMAX if cool else DraftSampling.SAMPLED
        return DraftSampling(wanted)

    def _check_params(self, params: SamplingParams) -> None:
        reports = params.logprobs is not None or params.prompt_logprobs is not None
        if params.logprobs_mode != "raw" and not reports:
            raise RequestError(
                "logprobs_mode has no effect: no log probabilities are reported",
                got=params.logprobs_mode,
                hint="ask for logprobs or prompt_logprobs, or leave it out",
            )
        for token_id in params.stop_token_ids:
            _check_id("stop token id", token_id, self.vocab_size)
        for token_id in params.logit_bias or ():
            _check_id("logit_bias token id", token_id, self.vocab_size)
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids)}
        if params.min_tokens and len(stops) == self.vocab_size:
            raise RequestError(
                "min_tokens with every token a stop token leaves nothing to draw",
                got=params.min_tokens,
                allowed="0",
            )
        needs_text = {
            "stop": params.stop_strings,
            "bad_words": params.bad_words,
            "structured_output": params.grammar,
        }
        for name, value in needs_text.items():
            if value and self.tokenizer is None:
                raise RequestError(f"{name} needs a tokenizer", got=value, hint="leave it out")
        if params.grammar is not None:
            if params.ignore_eos or not self.eos_token_ids:
                raise RequestError(
                    "structured_output ends with an end-of-sequence token",
                    got=f"ignore_eos={params.ignore_eos}, ids {self.eos_token_ids}",
                    allowed="ignore_eos=False on a checkpoint with eos_token_id",
                )
            for name in ("min_tokens", "bad_words"):
                value = getattr(params, name)
                if value:
                    raise RequestError(
                        f"{name} with structured_output could forbid the only legal token",
                        got=value,
                        hint="leave one of the two out",
                    )
            if self.synthetic_acceptance:
                raise RequestError(
                    "structured_output with synthetic acceptance, which keeps illegal drafts",
                    got=params.grammar,
                    hint="leave one of the two out",
                )

    def _rules(self, num_prompt: int, params: SamplingParams) -> LogitRules:
        return LogitRules(
            num_prompt=num_prompt,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            min_tokens=params.min_tokens,
            logit_bias=tuple((params.logit_bias or {}).items()),
            bad_words=self._spellings(params.bad_words),
        )

    def _spellings(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as the tokenizer spells it inside a word and after a space."""
        if not words:
            return ()
        assert self.tokenizer is not None
        spelled: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word, " " + word.lstrip()):
                ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
                if ids:
                    spelled[ids] = None
        return tuple(spelled)


def check_prompt(prompt: object, max_model_len: int, vocab_size: int) -> tuple[int, ...]:
    """The prompt as token ids that the model can continue.

    Raises:
        RequestError: they are none, too many, or not all of the vocabulary.
    """
    if not isinstance(prompt, list | tuple):
        raise RequestError("prompt", got=prompt, allowed="a string or a list of token ids")
    token_ids = cast(Sequence[object], prompt)
    if len(token_ids) == 0:
        raise RequestError("prompt is empty", got=0, allowed="at least one token")
    if len(token_ids) >= max_model_len:
        raise RequestError(
            "prompt is too long",
            got=f"{len(token_ids)} tokens",
            allowed=f"at most {max_model_len - 1}, one less than max_model_len",
            hint="shorten the prompt or raise max_model_len",
        )
    for index, token_id in enumerate(token_ids):
        _check_id(f"prompt token {index}", token_id, vocab_size)
    return tuple(cast(Sequence[int], token_ids))


def _check_id(what: str, token_id: object, vocab_size: int) -> None:
    if type(token_id) is not int or not 0 <= token_id < vocab_size:
        raise RequestError(what, got=token_id, allowed=f"an integer from 0 to {vocab_size - 1}")


def _tier(params: SamplingParams) -> Tier:
    if params.has_rules:
        return Tier.FULL
    return Tier.GREEDY if params.greedy else Tier.SAMPLED


def _derive(seed: int, index: int) -> int:
    """The index-th seed that comes from another one; mixed twice, since users count seeds up and
    output 2 of seed 5 must not be output 1 of seed 6."""
    return _mix(_mix(seed) + index)


def _mix(value: int) -> int:
    """63 well-mixed bits of an integer: one step of the SplitMix64 generator."""
    mask = (1 << 64) - 1
    z = (value + 1) * 0x9E3779B97F4A7C15 & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1
