"""Configs take every allowed value, normalise it once, and refuse the others by name."""

import dataclasses
import math
import pickle
from typing import Any

import pytest

from outrider.config import EngineConfig, SpeculativeConfig
from outrider.errors import ConfigError, RequestError
from outrider.params import SamplingParams
from outrider.spec.names import ALIASES, METHODS, canonical_method


@pytest.mark.parametrize(
    "name",
    [
        "mtp",
        "MTP",
        "qwen3_5_mtp",
        "Qwen3-5-MTP",
        "qwen3_next_mtp",
        "HY3_MTP",
        "hy3-mtp",
        "deepseek_mtp",
        " DeepSeek_MTP ",
    ],
)
def test_every_alias_of_mtp_means_mtp_in_any_spelling(name: str) -> None:
    assert SpeculativeConfig(method=name).method == "mtp"


def test_aliases_lead_to_methods() -> None:
    assert set(ALIASES.values()) <= set(METHODS)
    assert all(canonical_method(method) == method for method in METHODS)


@pytest.mark.parametrize("name", ["medusa", "", "mtp2"])
def test_an_unknown_method_is_refused_and_the_known_ones_are_listed(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig(method=name)
    assert repr(name) in str(caught.value)
    assert all(known in str(caught.value) for known in [*METHODS, *ALIASES])


def test_a_method_that_is_not_a_string_is_refused() -> None:
    with pytest.raises(ConfigError, match="speculative method: got 3"):
        SpeculativeConfig(method=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 8])
def test_one_to_eight_drafts_are_allowed(count: int) -> None:
    assert SpeculativeConfig("mtp", num_speculative_tokens=count).num_speculative_tokens == count


@pytest.mark.parametrize("count", [0, -1, 9, 2.0, True, "3", None])
def test_other_numbers_of_drafts_are_refused(count: Any) -> None:
    with pytest.raises(ConfigError, match=r"num_speculative_tokens: got .*from 1 to 8"):
        SpeculativeConfig("mtp", num_speculative_tokens=count)


def test_a_draft_model_is_refused_by_a_method_without_one() -> None:
    with pytest.raises(ConfigError, match="mtp has no checkpoint of its own: got 'draft'"):
        SpeculativeConfig("mtp", model="draft")


def test_engine_defaults_are_valid_and_frozen() -> None:
    config = EngineConfig("model")
    assert config.num_speculative_tokens == 0
    assert config.tokenizer_source == "model"
    assert config.kv_cache_memory_gib is None and config.kv_cache_bytes == 1 << 30
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]


def test_engine_derives_from_what_was_set() -> None:
    config = EngineConfig(
        "model",
        tokenizer="other",
        kv_cache_memory_gib=0.5,
        speculative_config=SpeculativeConfig("mtp", num_speculative_tokens=5),
    )
    assert config.tokenizer_source == "other"
    assert config.kv_cache_bytes == 1 << 29
    assert config.num_speculative_tokens == 5


GOOD_ENGINE: list[dict[str, Any]] = [
    {"block_size": 16},
    {"block_size": 256},
    {"block_size": 48},
    {"prefill_grid": 7, "max_prefill_tokens": 7},
    {"kv_cache_memory_gib": 2},
    {"kv_cache_memory_gib": 2**20, "num_threads": 1024, "max_num_seqs": 2**20},
    {"dtype": "bfloat16", "device": "cuda", "load_format": "dummy"},
    {"max_model_len": 1, "num_kv_blocks": 1, "max_num_seqs": 1},
    {"revision": "main", "debug_checks": True},
    {"gpu_memory_utilization": 1},
    {"gpu_memory_utilization": 1e-3, "kv_cache_memory_gib": None},
    {"state_dtype": "float16", "enforce_eager": True, "deterministic": True},
    {"state_dtype": "bfloat16", "deterministic": False, "look_ahead": 0},
    {"look_ahead": 2},
]


@pytest.mark.parametrize("values", GOOD_ENGINE, ids=str)
def test_allowed_engine_values_are_kept(values: dict[str, Any]) -> None:
    config = EngineConfig("model", **values)
    assert {name: getattr(config, name) for name in values} == values


BAD_ENGINE: list[tuple[str, Any]] = [
    ("model", ""),
    ("model", 3),
    ("tokenizer", ""),
    ("revision", 1),
    ("dtype", "float64"),
    ("dtype", None),
    ("device", "tpu"),
    ("load_format", "gguf"),
    ("seed", -1),
    ("seed", 2**63),
    ("seed", True),
    ("seed", 1.0),
    ("max_model_len", 0),
    ("max_model_len", "4096"),
    ("max_num_seqs", 0),
    ("max_num_seqs", True),
    ("block_size", 0),
    ("block_size", 24),
    ("block_size", 8),
    ("block_size", 272),
    ("num_kv_blocks", 0),
    ("kv_cache_memory_gib", 0),
    ("kv_cache_memory_gib", -1.0),
    ("kv_cache_memory_gib", math.nan),
    ("kv_cache_memory_gib", math.inf),
    ("kv_cache_memory_gib", True),
    ("gpu_memory_utilization", 0),
    ("gpu_memory_utilization", 1.01),
    ("gpu_memory_utilization", math.nan),
    ("gpu_memory_utilization", None),
    ("gpu_memory_utilization", True),
    ("state_dtype", "auto"),
    ("state_dtype", None),
    ("enforce_eager", None),
    ("enforce_eager", 1),
    ("deterministic", 1),
    ("deterministic", "yes"),
    ("look_ahead", -1),
    ("look_ahead", 3),
    ("look_ahead", True),
    ("look_ahead", 1.0),
    ("prefill_grid", 0),
    ("max_prefill_tokens", 63),
    ("speculative_config", {"method": "mtp"}),
    ("speculative_config", "mtp"),
    ("debug_checks", 1),
    ("kv_cache_memory_gib", 1e300),
    ("num_threads", 1025),
    ("max_num_seqs", 2**20 + 1),
    ("num_state_checkpoints", 2**20 + 1),
    ("max_model_len", 2**31),
    ("num_kv_blocks", 2**31),
    ("checkpoint_interval", 2**31),
    ("max_prefill_tokens", 2**31),
]


@pytest.mark.parametrize(("name", "value"), BAD_ENGINE, ids=str)
def test_an_engine_value_that_is_not_allowed_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{"model": "model", name: value})
    error = caught.value
    assert error.what.startswith(name)
    assert error.got is value
    assert error.allowed


def test_sequences_of_a_request_become_tuples() -> None:
    params = SamplingParams(stop=["a", "b"], stop_token_ids=[1, 2], bad_words=[])
    assert params.stop == params.stop_strings == ("a", "b")
    assert params.stop_token_ids == (1, 2)
    assert params.bad_words == ()
    assert SamplingParams(stop="end").stop_strings == ("end",)
    assert SamplingParams().stop_strings == ()


@pytest.mark.parametrize(
    ("temperature", "greedy"), [(0, True), (0.0, True), (9e-6, True), (1e-5, False), (1.0, False)]
)
def test_temperatures_below_a_hundred_thousandth_are_greedy(
    temperature: float, greedy: bool
) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy


GOOD_SAMPLING: list[dict[str, Any]] = [
    {"max_tokens": 1},
    {"temperature": 100.0},
    {"top_k": 1},
    {"top_p": 1e-9},
    {"top_p": 1},
    {"min_p": 1.0},
    {"seed": 0},
    {"seed": 2**63 - 1},
    {"max_draft_tokens": 0},
    {"speculation": False, "ignore_eos": True},
]


@pytest.mark.parametrize("values", GOOD_SAMPLING, ids=str)
def test_allowed_sampling_values_are_kept(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    assert {name: getattr(params, name) for name in values} == values


BAD_SAMPLING: list[tuple[str, Any]] = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", None),
    ("max_tokens", True),
    ("max_tokens", 3.0),
    ("max_tokens", 2**63),
    pytest.param("max_tokens", 10**5000, id="max_tokens-5000 digits"),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "1"),
    ("temperature", None),
    ("temperature", True),
    ("temperature", 10**400),
    ("top_k", 0),
    ("top_k", -1),
    ("top_k", 2.0),
    ("top_k", 2**63),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", -0.5),
    ("top_p", math.nan),
    ("min_p", -0.01),
    ("min_p", 1.01),
    ("min_p", math.nan),
    ("seed", -1),
    ("seed", 2**63),
    ("seed", 1.5),
    ("stop", 3),
    ("stop", b"end"),
    ("stop", {"a"}),
    ("stop_token_ids", 3),
    ("stop_token_ids", "ab"),
    ("ignore_eos", 1),
    ("speculation", None),
    ("max_draft_tokens", -1),
    ("max_draft_tokens", True),
    ("max_draft_tokens", 2**63),
]


@pytest.mark.parametrize(("name", "value"), BAD_SAMPLING, ids=str)
def test_a_sampling_value_that_is_not_allowed_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    error = caught.value
    assert error.what.startswith(name)
    assert error.got is value
    assert error.allowed


@pytest.mark.parametrize("stop", ["", ["a", ""], [3]], ids=str)
def test_stop_strings_that_are_empty_or_no_strings_are_refused(stop: Any) -> None:
    with pytest.raises(RequestError, match=r"stop string: got .*not empty"):
        SamplingParams(stop=stop)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"stop": "a\ud800"}, "stop string"),
        ({"bad_words": ["a\udfff"]}, "bad word"),
        ({"structured_output": {"kind": "regex", "text": "a\ud800"}}, "structured output text"),
    ],
)
def test_text_that_is_not_valid_unicode_is_refused(fields: dict[str, Any], what: str) -> None:
    with pytest.raises(RequestError, match=rf"^{what}.* is not valid Unicode at character 1"):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    "fields", [{"stop_token_ids": [2**63]}, {"logit_bias": {2**63: 1.0}}], ids=str
)
def test_token_ids_of_more_than_64_bits_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"token id: got 9223372036854775808; allowed: an int"):
        SamplingParams(**fields)


@pytest.mark.parametrize("token_id", [-1, "a", True, 1.0])
def test_stop_token_ids_that_are_no_ids_are_refused(token_id: Any) -> None:
    with pytest.raises(RequestError, match="stop token id: got "):
        SamplingParams(stop_token_ids=[1, token_id])


ASKING: dict[str, tuple[Any, Any]] = {  # a value that will do, and one that will not
    "n": (2, 0),
    "repetition_penalty": (1.1, 0.0),
    "presence_penalty": (-0.5, 2.5),
    "frequency_penalty": (0.5, -3),
    "logit_bias": ({3: 1.0}, {-1: 1.0}),
    "bad_words": (["no"], [""]),
    "min_tokens": (1, 129),
    "logprobs": (0, 65),
    "prompt_logprobs": (1, -1),
    "logprobs_mode": ("processed", "cooked"),
    "structured_output": ({"kind": "regex", "text": "a"}, {"kind": "regex"}),
    "draft_sampling": ("coupled", "beam"),
}


@pytest.mark.parametrize("name", ASKING)
def test_a_rule_is_taken_where_it_makes_sense_and_refused_otherwise(name: str) -> None:
    right, wrong = ASKING[name]
    assert SamplingParams(**{name: right}) != SamplingParams()
    for value in (wrong, True, object()):
        with pytest.raises(RequestError):
            SamplingParams(**{name: value})


def test_a_logit_bias_that_is_not_a_number_is_refused_by_its_token() -> None:
    with pytest.raises(RequestError, match="logit_bias of token 3"):
        SamplingParams(logit_bias={3: float("nan")})


def test_synthetic_acceptance_is_a_length_or_falling_rates_and_not_both() -> None:
    assert SpeculativeConfig("mtp").synthetic_rates is None
    rates = SpeculativeConfig("mtp", synthetic_acceptance_length=2.5).synthetic_rates
    assert rates is not None and 1 + sum(rates) == pytest.approx(2.5)
    for options in (
        {"synthetic_acceptance_length": 4.5},
        {"synthetic_acceptance_length": 0.9},
        {"synthetic_acceptance_rates": [0.5, 0.6, 0.1]},
        {"synthetic_acceptance_rates": [0.5, 0.4]},
        {"synthetic_acceptance_rates": [1.5, 0.4, 0.1]},
        {"synthetic_acceptance_length": 2.0, "synthetic_acceptance_rates": [0.5, 0.4, 0.1]},
        {"draft_sampling": "beam"},
        {"draft_top_m": 0},
    ):
        with pytest.raises(ConfigError):
            SpeculativeConfig("mtp", **options)


@pytest.mark.parametrize("value", [1, 32768, "ids.json"], ids=str)
def test_a_draft_vocabulary_is_a_number_of_ids_or_a_file(value: int | str) -> None:
    assert SpeculativeConfig("hy3_mtp", draft_vocab=value).draft_vocab == value


@pytest.mark.parametrize("value", [0, -1, "", True, 2.0, [1, 2], b"ids"], ids=str)
def test_a_draft_vocabulary_that_is_neither_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"draft_vocab: got .*file of token ids, or a number"):
        SpeculativeConfig("mtp", draft_vocab=value)


@pytest.mark.parametrize(("method", "model"), [("ngram", None), ("eagle3", "draft")])
def test_a_draft_vocabulary_is_refused_by_methods_that_do_not_use_the_targets_head(
    method: str, model: str | None
) -> None:
    with pytest.raises(ConfigError, match=f"draft_vocab: method {method} .*draft with mtp"):
        SpeculativeConfig(method, model, draft_vocab=64)


def test_configs_pickle() -> None:
    engine = EngineConfig("model", speculative_config=SpeculativeConfig("hy3_mtp"))
    params = SamplingParams(stop=["x"], seed=4)
    assert pickle.loads(pickle.dumps((engine, params))) == (engine, params)
