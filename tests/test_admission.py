"""What a request may ask for, what it is refused for, and what it becomes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from outrider.admission import SAMPLED_FROM, AdmissionRules
from outrider.batch import LogitRules, Tier
from outrider.errors import RequestError
from outrider.params import SamplingParams
from outrider.request import Request
from outrider.spec.names import DraftSampling
from tests.tiny_tokenizer import tokenizer

VOCAB_SIZE = 272
END, OTHER_END = 1, 7
MAX_MODEL_LEN = 32
TOKENIZER = tokenizer()
RULES = AdmissionRules(
    vocab_size=VOCAB_SIZE,
    max_model_len=MAX_MODEL_LEN,
    eos_token_ids=(END, OTHER_END),
    engine_seed=0,
    draft_sampling=None,
    drafter_samples=True,
    tokenizer=TOKENIZER,
)
PROMPT = (5, 6, 8)
REGEX = {"kind": "regex", "text": "a+"}
ARGMAX, COUPLED, SAMPLED = DraftSampling.ARGMAX, DraftSampling.COUPLED, DraftSampling.SAMPLED


def admit(
    prompt: Any = PROMPT, rules: AdmissionRules = RULES, index: int = 0, **options: Any
) -> list[Request]:
    return rules.requests("r", prompt, SamplingParams(**options), index)


def one(prompt: Any = PROMPT, rules: AdmissionRules = RULES, **options: Any) -> Request:
    [request] = admit(prompt, rules, **options)
    return request


def refused(prompt: Any = PROMPT, rules: AdmissionRules = RULES, **options: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        admit(prompt, rules, **options)
    return caught.value


def test_an_empty_prompt_is_refused() -> None:
    error = refused([])
    assert (error.what, error.allowed) == ("prompt is empty", "at least one token")


@pytest.mark.parametrize("length", [MAX_MODEL_LEN, MAX_MODEL_LEN + 1, 1000])
def test_a_prompt_that_leaves_no_room_for_a_token_is_refused(length: int) -> None:
    error = refused([5] * length)
    assert error.what == "prompt is too long" and error.got == f"{length} tokens"
    assert error.allowed is not None and "at most 31" in error.allowed


def test_the_longest_prompt_leaves_room_for_one_token() -> None:
    request = one([5] * (MAX_MODEL_LEN - 1), max_tokens=100)
    assert request.length_limit == MAX_MODEL_LEN


@pytest.mark.parametrize("wrong", [-1, VOCAB_SIZE, 2**40, True, 1.0, "a", None])
def test_a_prompt_token_that_the_model_does_not_have_is_refused_by_its_place(wrong: Any) -> None:
    error = refused([5, 6, wrong, 8])
    assert error.what == "prompt token 2" and error.got is wrong
    assert error.allowed == "an integer from 0 to 271"


def test_the_first_and_the_last_id_of_the_vocabulary_are_served() -> None:
    ends = [0, VOCAB_SIZE - 1]
    request = one(ends, stop_token_ids=ends, logit_bias=dict.fromkeys(ends, 1.0))
    assert request.prompt_token_ids == (0, 271)
    assert request.rules.logit_bias == ((0, 1.0), (271, 1.0))


@pytest.mark.parametrize("wrong", [VOCAB_SIZE, 2**40])
def test_ids_out_of_range_are_refused_by_the_parameter_that_holds_them(wrong: int) -> None:
    assert refused(stop_token_ids=[3, wrong]).what == "stop token id"
    assert refused(logit_bias={3: 1.0, wrong: 1.0}).what == "logit_bias token id"
    for options in ({"stop_token_ids": [wrong]}, {"logit_bias": {wrong: 0.5}}):
        error = refused(**options)
        assert error.got == wrong and error.allowed == "an integer from 0 to 271"


@pytest.mark.parametrize(
    "options",
    [{"stop": ["a"]}, {"stop": "a"}, {"bad_words": ["a"]}, {"structured_output": REGEX}],
)
def test_parameters_that_are_texts_need_a_tokenizer(options: dict[str, Any]) -> None:
    [name] = options
    error = refused(rules=replace(RULES, tokenizer=None), **options)
    assert error.what == f"{name} needs a tokenizer" and error.hint == "leave it out"
    assert len(admit(**options)) == 1


def test_without_a_tokenizer_everything_else_is_served() -> None:
    request = one(
        rules=replace(RULES, tokenizer=None),
        stop_token_ids=[3],
        logit_bias={4: 1.0},
        repetition_penalty=1.2,
        min_tokens=2,
        logprobs=1,
    )
    assert request.rules.bad_words == ()


def test_a_grammar_needs_an_end_of_sequence_token() -> None:
    assert "end-of-sequence" in refused(structured_output=REGEX, ignore_eos=True).what
    rules = replace(RULES, eos_token_ids=())
    assert "end-of-sequence" in refused(rules=rules, structured_output=REGEX).what
    assert one(structured_output=REGEX).params.grammar is not None


@pytest.mark.parametrize("options", [{"min_tokens": 1}, {"bad_words": ["a"]}])
def test_what_could_forbid_the_only_legal_token_does_not_go_with_a_grammar(
    options: dict[str, Any],
) -> None:
    [name] = options
    error = refused(structured_output=REGEX, **options)
    assert error.what.startswith(f"{name} with structured_output")
    assert len(admit(**options)) == 1


def test_a_grammar_does_not_go_with_drafts_that_are_accepted_whatever_they_are() -> None:
    rules = replace(RULES, synthetic_acceptance=True)
    assert "synthetic acceptance" in refused(rules=rules, structured_output=REGEX).what
    assert len(admit(rules=rules)) == 1


@pytest.mark.parametrize(
    ("options", "stops"),
    [
        ({}, (END, OTHER_END)),
        ({"ignore_eos": True}, ()),
        ({"stop_token_ids": [9, 3]}, (END, OTHER_END, 9, 3)),
        ({"stop_token_ids": [9, OTHER_END, 9]}, (END, OTHER_END, 9)),
        ({"stop_token_ids": [9, END], "ignore_eos": True}, (9, END)),
    ],
)
def test_stop_ids_are_the_ends_of_the_checkpoint_and_the_requests_own(
    options: dict[str, Any], stops: tuple[int, ...]
) -> None:
    assert one(**options).stop_token_ids == stops


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "limit"), [(3, 1, 4), (3, 29, 32), (3, 30, 32), (31, 5, 32)]
)
def test_the_length_limit_is_the_nearer_of_max_tokens_and_the_models_length(
    num_prompt: int, max_tokens: int, limit: int
) -> None:
    assert one([5] * num_prompt, max_tokens=max_tokens).length_limit == limit


def test_rules_are_handed_on_as_they_were_asked_for() -> None:
    request = one(
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        min_tokens=4,
        logit_bias={9: 1.5, 4: -2.0},
    )
    assert request.rules == LogitRules(3, 1.3, 0.5, -0.25, 4, ((9, 1.5), (4, -2.0)))
    assert one().rules == LogitRules(num_prompt=3)


@pytest.mark.parametrize(
    ("word", "texts"),
    [
        ("an", ["an", " an"]),
        ("return", ["return", " return"]),
        (" of", [" of"]),  # asked for after a space only
        ("é!", ["é!", " é!"]),
    ],
)
def test_a_bad_word_is_banned_as_it_is_spelled_alone_and_after_a_space(
    word: str, texts: list[str]
) -> None:
    wanted = {tuple(TOKENIZER.encode(text)) for text in texts}
    assert set(one(bad_words=[word]).rules.bad_words) == wanted


def test_bad_words_that_are_spelled_alike_count_once() -> None:
    spelled = one(bad_words=["an", " an", "an"]).rules.bad_words
    assert sorted(spelled) == sorted({tuple(TOKENIZER.encode(text)) for text in ("an", " an")})


@pytest.mark.parametrize(
    ("options", "tier"),
    [
        ({"temperature": 0}, Tier.GREEDY),
        ({"temperature": 1e-6}, Tier.GREEDY),
        ({"temperature": 0.5}, Tier.SAMPLED),
        ({"temperature": 0, "logprobs": 3, "logprobs_mode": "processed"}, Tier.GREEDY),
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1}, Tier.SAMPLED),
        ({"temperature": 0, "stop": ["a"], "stop_token_ids": [3]}, Tier.GREEDY),
        *(
            ({"temperature": 0, name: value}, Tier.FULL)
            for name, value in {
                "repetition_penalty": 1.1,
                "presence_penalty": -0.1,
                "frequency_penalty": 0.1,
                "logit_bias": {3: 0.1},
                "bad_words": ["a"],
                "min_tokens": 1,
                "structured_output": REGEX,
            }.items()
        ),
    ],
)
def test_the_tier_is_the_least_that_honours_every_parameter(
    options: dict[str, Any], tier: Tier
) -> None:
    assert one(**options).tier is tier


def test_a_seed_is_used_as_it_is_by_the_first_output() -> None:
    for seed in (0, 1, 2**63 - 1):
        assert one(seed=seed).seed == seed
        assert admit(seed=seed, n=3)[0].seed == seed


def test_seeds_depend_on_the_request_alone() -> None:
    assert [r.seed for r in admit(seed=5, n=4)] == [r.seed for r in admit([9], seed=5, n=4)]
    assert [r.seed for r in admit(seed=5, n=2)] == [r.seed for r in admit(seed=5, n=4)][:2]
    assert [r.seed for r in admit(seed=5, n=4)] == [r.seed for r in admit(seed=5, n=4, index=9)]
    assert [r.seed for r in admit(n=4, index=3)] == [r.seed for r in admit(n=4, index=3)]


def test_every_output_of_every_request_has_a_seed_of_its_own() -> None:
    # Users count seeds up; engines do as well. No two streams may be one.
    of_users = [r.seed for seed in range(64) for r in admit(seed=seed, n=32)]
    of_engines = [
        request.seed
        for engine_seed, index in itertools.product(range(8), range(0, 320, 4))
        for request in admit(rules=replace(RULES, engine_seed=engine_seed), index=index, n=4)
    ]
    seeds = of_users + of_engines
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_n_outputs_differ_in_their_seeds_and_numbers_only() -> None:
    requests = admit(n=5, seed=3, bad_words=["a"], presence_penalty=1.0, draft_sampling="coupled")
    assert [request.output_index for request in requests] == [0, 1, 2, 3, 4]
    assert all(replace(r, seed=3, output_index=0) == requests[0] for r in requests)


@pytest.mark.parametrize(
    ("temperature", "default"),
    [
        (0.0, ARGMAX),
        (0.1, ARGMAX),
        (0.2999, ARGMAX),
        (SAMPLED_FROM, SAMPLED),
        (0.7, SAMPLED),
        (1.5, SAMPLED),
    ],
)
def test_drafts_are_sampled_from_a_temperature_of_three_tenths_on_unless_somebody_says_otherwise(
    temperature: float, default: DraftSampling
) -> None:
    assert SAMPLED_FROM == 0.3
    assert one(temperature=temperature).draft_sampling is default


@pytest.mark.parametrize("temperature", [0.1, 1.0])
@pytest.mark.parametrize("in_engine", [None, "argmax", "coupled", "sampled"])
@pytest.mark.parametrize("wanted", ["argmax", "coupled", "sampled"])
def test_a_request_goes_before_the_engine_and_the_engine_before_the_default(
    temperature: float, in_engine: str | None, wanted: str
) -> None:
    rules = replace(RULES, draft_sampling=in_engine)
    request = one(rules=rules, temperature=temperature, draft_sampling=wanted)
    assert request.draft_sampling == wanted
    if in_engine is not None:
        assert one(rules=rules, temperature=temperature).draft_sampling == in_engine


@pytest.mark.parametrize("wanted", [None, "argmax", "coupled", "sampled"])
def test_a_greedy_request_takes_the_drafts_argmax_whatever_is_wanted(wanted: str | None) -> None:
    for in_engine in (None, "coupled", "sampled"):
        rules = replace(RULES, draft_sampling=in_engine)
        assert one(rules=rules, temperature=0, draft_sampling=wanted).draft_sampling is ARGMAX


LOOKUP = replace(RULES, drafter_samples=False)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_lookup_cannot_sample(temperature: float) -> None:
    error = refused(rules=LOOKUP, temperature=temperature, draft_sampling="sampled")
    assert error.what.startswith("draft_sampling: the draft method looks tokens up")
    assert (error.got, error.allowed) == ("sampled", "argmax, coupled")


@pytest.mark.parametrize("wanted", [None, "argmax", "coupled"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_lookup_proposes_a_point_mass(wanted: str | None, temperature: float) -> None:
    request = one(rules=LOOKUP, temperature=temperature, draft_sampling=wanted)
    assert request.draft_sampling is ARGMAX


@pytest.mark.parametrize("wanted", [None, "argmax", "coupled", "sampled"])
def test_without_a_draft_every_wish_is_served(wanted: str | None) -> None:
    rules = replace(RULES, drafter_samples=None)
    assert len(admit(rules=rules, draft_sampling=wanted)) == 1
