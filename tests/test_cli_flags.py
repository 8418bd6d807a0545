"""Flags come from the config dataclasses and lead back to them."""

import argparse
import dataclasses
import json
from typing import Any

import pytest

from outrider.cli_flags import (
    SAMPLING_FLAGS,
    SPECULATION_FLAGS,
    add_engine_flags,
    add_sampling_flags,
    engine_options,
    field_help,
    given,
    sampling_options,
)
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.errors import ConfigError
from outrider.params import SamplingParams, StructuredOutput

MTP = {"method": "mtp", "num_speculative_tokens": 5}

# For each field: what the command line says, and what the field holds then.
ENGINE: dict[str, tuple[list[str], Any]] = {
    "model": ([], "M"),
    "tokenizer": (["--tokenizer", "T"], "T"),
    "revision": (["--revision", "main"], "main"),
    "dtype": (["--dtype", "float16"], "float16"),
    "device": (["--device", "cpu"], "cpu"),
    "load_format": (["--load-format", "dummy"], "dummy"),
    "seed": (["--seed", "7"], 7),
    "num_threads": (["--num-threads", "2"], 2),
    "max_model_len": (["--max-model-len", "512"], 512),
    "max_num_seqs": (["--max-num-seqs", "3"], 3),
    "gpu_memory_utilization": (["--gpu-memory-utilization", "0.5"], 0.5),
    "block_size": (["--block-size", "32"], 32),
    "num_kv_blocks": (["--num-kv-blocks", "9"], 9),
    "kv_cache_memory_gib": (["--kv-cache-memory-gib", "0.5"], 0.5),
    "state_dtype": (["--state-dtype", "bfloat16"], "bfloat16"),
    "enable_prefix_caching": (["--no-enable-prefix-caching"], False),
    "num_state_checkpoints": (["--num-state-checkpoints", "5"], 5),
    "checkpoint_interval": (["--checkpoint-interval", "256"], 256),
    "prefill_grid": (["--prefill-grid", "7"], 7),
    "max_prefill_tokens": (["--max-prefill-tokens", "70"], 70),
    "speculative_config": (
        ["--speculative-config", json.dumps(MTP)],
        SpeculativeConfig("mtp", num_speculative_tokens=5),
    ),
    "enforce_eager": (["--enforce-eager"], True),
    "deterministic": (["--deterministic"], True),
    "look_ahead": (["--look-ahead", "0"], 0),
    "debug_checks": (["--debug-checks"], True),
}
SAMPLING: dict[str, tuple[list[str], Any]] = {
    "max_tokens": (["--max-tokens", "9"], 9),
    "temperature": (["--temperature", "0"], 0.0),
    "top_k": (["--top-k", "40"], 40),
    "top_p": (["--top-p", "0.9"], 0.9),
    "min_p": (["--min-p", "0.1"], 0.1),
    "seed": (["--request-seed", "11"], 11),
    "stop": (["--stop", "\n\n", "--stop", "def "], ("\n\n", "def ")),
    "stop_token_ids": (["--stop-token-ids", "4", "--stop-token-ids", "5"], (4, 5)),
    "ignore_eos": (["--ignore-eos"], True),
    "max_draft_tokens": (["--max-draft-tokens", "2"], 2),
    "priority": (["--priority", "3"], 3),
    "speculation": (["--no-speculation"], False),
    "n": (["--n", "2"], 2),
    "repetition_penalty": (["--repetition-penalty", "1.1"], 1.1),
    "presence_penalty": (["--presence-penalty", "0.5"], 0.5),
    "frequency_penalty": (["--frequency-penalty", "0.5"], 0.5),
    "logit_bias": (["--logit-bias", '{"12": 1.5}'], {12: 1.5}),
    "bad_words": (["--bad-words", "no"], ("no",)),
    "min_tokens": (["--min-tokens", "3"], 3),
    "logprobs": (["--logprobs", "1"], 1),
    "prompt_logprobs": (["--prompt-logprobs", "1"], 1),
    "logprobs_mode": (["--logprobs-mode", "processed"], "processed"),
    "draft_sampling": (["--draft-sampling", "coupled"], "coupled"),
    "structured_output": (
        ["--structured-output", '{"kind": "regex", "text": "[0-9]+"}'],
        StructuredOutput("regex", "[0-9]+"),
    ),
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_engine_flags(parser)
    add_sampling_flags(parser)
    return parser


def parse(*words: str) -> argparse.Namespace:
    return make_parser().parse_args(["M", *words])


def names(config: type) -> set[str]:
    return {field.name for field in dataclasses.fields(config)}


def test_the_tables_of_this_file_know_every_field() -> None:
    assert set(ENGINE) == names(EngineConfig)
    assert set(SAMPLING) == names(SamplingParams)
    assert set(SPECULATION_FLAGS) == names(SpeculativeConfig)


def test_a_command_line_without_flags_means_the_dataclass_defaults() -> None:
    args = parse()
    assert EngineConfig(**engine_options(args)) == EngineConfig("M")
    assert SamplingParams(**sampling_options(args)) == SamplingParams()
    assert given(args, SamplingParams) == {}


@pytest.mark.parametrize("name", ENGINE)
def test_an_engine_flag_sets_its_field_and_no_other(name: str) -> None:
    words, value = ENGINE[name]
    config = EngineConfig(**engine_options(parse(*words)))
    assert config == EngineConfig(**{"model": "M", name: value})


@pytest.mark.parametrize("name", SAMPLING)
def test_a_sampling_flag_sets_its_field_and_no_other(name: str) -> None:
    words, value = SAMPLING[name]
    params = SamplingParams(**sampling_options(parse(*words)))
    assert params == SamplingParams(**{name: value})
    assert params != SamplingParams()


@pytest.mark.parametrize("config", [EngineConfig, SamplingParams, SpeculativeConfig])
def test_every_flag_that_works_has_the_help_of_its_docstring(config: type) -> None:
    helps = field_help(config)
    assert set(helps) == names(config)
    assert all(helps.values())


def test_help_of_several_lines_is_joined_and_its_section_ends_where_the_docstring_says() -> None:
    @dataclasses.dataclass
    class Example:
        """An example.

        Args:
            first: one line
                and another: with a colon.
            second: 100% sure.

        Raises:
            third: not an argument.
        """

    assert field_help(Example) == {
        "first": "one line and another: with a colon.",
        "second": "100% sure.",
    }


def test_the_help_shows_every_flag_and_its_default() -> None:
    text = " ".join(make_parser().format_help().split())
    assert "--max-num-seqs N most sequences that run at once" in text
    assert "and is logged. (default: 16)" in text
    assert "--dtype {auto,float32,bfloat16,float16}" in text
    assert "--logit-bias JSON token id -> value added to its logit." in text


def test_the_request_seed_does_not_touch_the_engine_seed() -> None:
    assert SAMPLING_FLAGS == {"seed": "request-seed"}
    args = parse("--seed", "1", "--request-seed", "2")
    assert (engine_options(args)["seed"], sampling_options(args)["seed"]) == (1, 2)


def test_single_flags_and_the_json_mean_the_same_speculation() -> None:
    single = parse("--speculative-algorithm", "qwen3_5_MTP", "--speculative-num-draft-tokens", "5")
    whole = parse("--speculative-config", json.dumps(MTP))
    assert engine_options(single) == engine_options(whole)
    assert engine_options(single)["speculative_config"] == SpeculativeConfig("mtp", None, 5)


@pytest.mark.parametrize(("word", "value"), [("512", 512), ("ids.json", "ids.json")])
def test_a_draft_vocabulary_is_a_number_or_the_name_of_a_file(word: str, value: int | str) -> None:
    args = parse("--speculative-algorithm", "mtp", "--speculative-draft-vocab", word)
    assert engine_options(args)["speculative_config"] == SpeculativeConfig("mtp", draft_vocab=value)


def test_the_number_of_drafts_may_be_left_to_its_default() -> None:
    options = engine_options(parse("--speculative-algorithm", "mtp"))
    assert options["speculative_config"] == SpeculativeConfig("mtp")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--speculative-config", json.dumps(MTP), "--speculative-algorithm", "mtp"],
            "already says all of it: got '--speculative-algorithm'; give either",
        ),
        (["--speculative-num-draft-tokens", "2"], "speculation has no method"),
        (["--speculative-config", "{}"], "speculation has no method"),
        (["--speculative-config", "3"], "a JSON object of method, model"),
        (["--speculative-config", '{"method": "mtp", "k": 1}'], "a JSON object of method, model"),
        (["--speculative-algorithm", "tea-leaves"], "method is not known: got 'tea-leaves'"),
        (["--speculative-algorithm", "mtp", "--speculative-draft-model", "D"], "no checkpoint"),
        (["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 0}'], "got 0"),
    ],
    ids=["both", "no method", "empty", "number", "unknown key", "unknown method", "model", "k=0"],
)
def test_speculation_flags_that_make_no_sense_are_errors(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_options(parse(*words))


@pytest.mark.parametrize(
    "words",
    [
        ["--speculative-config", "{"],
        ["--logit-bias", "[1]"],
        ["--logit-bias", '{"x": 1}'],
        ["--max-tokens", "many"],
        ["--top-p", "x"],
    ],
    ids=lambda words: " ".join(words),
)
def test_a_value_that_cannot_be_read_is_an_error_of_the_parser(words: list[str]) -> None:
    with pytest.raises(argparse.ArgumentError):
        parse(*words)
