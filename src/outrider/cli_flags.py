"""Command line flags made from the config dataclasses, and back.

The field is the only source: its name gives the flag, its annotation the type, its default the
default, and the Args section of the class docstring the help. A flag that was not given leaves no
trace in the namespace, so that a value from elsewhere (the checkpoint) can stand in its place.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, Union, cast, get_args, get_origin

from outrider.config import EngineConfig, SpeculativeConfig
from outrider.errors import ConfigError
from outrider.params import SamplingParams
from outrider.spec.names import METHODS

SPECULATION_FLAGS: Mapping[str, str] = {
    "method": "speculative-algorithm",
    "model": "speculative-draft-model",
    "num_speculative_tokens": "speculative-num-draft-tokens",
    "draft_sampling": "speculative-draft-sampling",
    "draft_top_m": "speculative-draft-top-m",
    "draft_vocab": "speculative-draft-vocab",
    "synthetic_acceptance_length": "speculative-synthetic-acceptance-length",
    "synthetic_acceptance_rates": "speculative-synthetic-acceptance-rates",
}
"""Fields of SpeculativeConfig and their flags."""

SAMPLING_FLAGS: Mapping[str, str] = {"seed": "request-seed"}
"""Fields of SamplingParams whose plain name is taken by an engine flag."""

_METAVARS: Mapping[type, str] = {int: "N", float: "X", str: "TEXT"}


def add_engine_flags(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """MODEL, a flag for every field of EngineConfig, and those for speculation.

    Args:
        without: fields of EngineConfig that the command has no use for.
    """
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    add_flags(parser, EngineConfig, only=[name for name in names if name not in without])
    group = parser.add_argument_group(
        "speculation", "either these flags, or all of it in --speculative-config"
    )
    add_flags(group, SpeculativeConfig, SPECULATION_FLAGS)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for every field of SamplingParams."""
    group = parser.add_argument_group(
        "sampling", "what is not given is the checkpoint's recommendation, else the default here"
    )
    add_flags(group, SamplingParams, SAMPLING_FLAGS)


def add_flags(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,  # pyright: ignore[reportPrivateUsage]
    config: type,
    names: Mapping[str, str] | None = None,
    only: Collection[str] | None = None,
) -> None:
    """Add an argument for every field of a dataclass.

    Args:
        names: flags, without dashes, of the fields whose flag is not their own name. Without one
            a field that has no default is positional.
        only: the fields to add; None adds all.
    """
    helps = field_help(config)
    annotations = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        if only is not None and field.name not in only:
            continue
        flag = (names or {}).get(field.name)
        options = _value_options(annotations[field.name])
        repeats = " May be given again." if options.get("action") == "append" else ""
        options["help"] = _help(field, helps.get(field.name, "") + repeats)
        if flag is None and field.default is dataclasses.MISSING:
            options["metavar"] = field.name.upper()
            parser.add_argument(destination(config, field.name), **options)
            continue
        parser.add_argument(
            f"--{flag or field.name.replace('_', '-')}",
            dest=destination(config, field.name),
            default=argparse.SUPPRESS,
            **options,
        )


def given(args: argparse.Namespace, config: type) -> dict[str, Any]:
    """The fields of a dataclass that the command line gave, by name."""
    values = vars(args)
    return {
        field.name: values[name]
        for field in dataclasses.fields(config)
        if (name := destination(config, field.name)) in values
    }


def check_drafts(options: Mapping[str, Any], sampling: Mapping[str, Any]) -> None:
    """Refuse flags that say how a request is drafted for where nothing drafts.

    Args:
        options: of the engine.
        sampling: what was given of SamplingParams.

    Raises:
        ConfigError: there is such a flag.
    """
    idle = [name for name in ("max_draft_tokens", "draft_sampling") if name in sampling]
    if idle and options["speculative_config"] is None:
        flags = " ".join(f"--{name.replace('_', '-')}" for name in idle)
        raise ConfigError(
            "there are no drafts", got=flags, hint="name a method with --speculative-algorithm"
        )
    if idle and sampling.get("speculation") is False:
        flags = " ".join(f"--{name.replace('_', '-')}" for name in idle)
        raise ConfigError("--no-speculation leaves no drafts", got=flags, hint="give either")


def flag_names(
    args: argparse.Namespace, config: type, names: Mapping[str, str] | None = None
) -> list[str]:
    """What the command line gave of a dataclass, as the flags that stand there."""
    shown: list[str] = []
    for field in dataclasses.fields(config):
        if field.name in given(args, config):
            flag = (names or {}).get(field.name)
            is_positional = flag is None and field.default is dataclasses.MISSING
            flag = flag or field.name.replace("_", "-")
            shown.append(field.name.upper() if is_positional else f"--{flag}")
    return shown


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments for EngineConfig or LLM.

    Raises:
        ConfigError: the speculation flags make no sense.
    """
    return given(args, EngineConfig) | {"speculative_config": _speculative_config(args)}


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments for SamplingParams.

    Raises:
        RequestError: one of them cannot be served.
    """
    options = given(args, SamplingParams)
    SamplingParams(**options)  # refuses now what would be refused after the model has been loaded
    return options


def field_help(config: type) -> dict[str, str]:
    """The text of each entry in the Args section of a class docstring, on one line."""
    doc = inspect.cleandoc(config.__doc__ or "")
    section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)*)", doc, re.MULTILINE)
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", section[1] if section else "", re.M)
    return {name: " ".join(text.split()) for name, text in entries}


def _speculative_config(args: argparse.Namespace) -> SpeculativeConfig | None:
    single = given(args, SpeculativeConfig)
    whole = given(args, EngineConfig).get("speculative_config")
    if whole is None and not single:
        return None
    if whole is not None and single:
        flags = [f"--{SPECULATION_FLAGS[name]}" for name in single]
        raise ConfigError(
            "--speculative-config already says all of it", got=" ".join(flags), hint="give either"
        )
    known = [field.name for field in dataclasses.fields(SpeculativeConfig)]
    values: dict[str, Any] = single
    if whole is not None:
        if not isinstance(whole, dict) or not set(cast(dict[str, Any], whole)) <= set(known):
            raise ConfigError(
                "--speculative-config", got=whole, allowed=f"a JSON object of {', '.join(known)}"
            )
        values = cast(dict[str, Any], whole)
    if "method" not in values:
        raise ConfigError(
            "speculation has no method",
            got=values,
            allowed=METHODS,
            hint="name one with --speculative-algorithm",
        )
    return SpeculativeConfig(**values)


def destination(config: type, name: str) -> str:
    """Attribute of the namespace; two dataclasses may use the same field name."""
    return f"{config.__name__}.{name}"


def _help(field: dataclasses.Field[Any], text: str) -> str:
    silent = (None, (), dataclasses.MISSING)
    if field.default not in silent and not isinstance(field.default, bool):
        text += f" (default: {field.default})"
    return text.replace("%", "%%")


def _value_options(annotation: Any) -> dict[str, Any]:
    """How argparse reads a value of this type."""
    is_union = get_origin(annotation) in (Union, types.UnionType)
    kinds = [kind for kind in get_args(annotation) if kind is not types.NoneType]
    kinds = kinds if is_union else [annotation]
    for kind in kinds:
        if get_origin(kind) is Sequence:
            (item,) = get_args(kind)
            return {"action": "append", "type": item, "metavar": _METAVARS[item]}
    if set(kinds) == {str, int}:
        return {"type": _number_or_text, "metavar": "N|TEXT"}
    if len(kinds) > 1:  # the dataclass says which of the forms JSON can take
        return {"type": _json, "metavar": "JSON"}
    (kind,) = kinds
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if kind in _METAVARS:
        return {"type": kind, "metavar": _METAVARS[kind]}
    if get_origin(kind) is Literal:  # which values are allowed is the dataclass's to say
        return {"metavar": "{" + ",".join(get_args(kind)) + "}"}
    if get_origin(kind) is Mapping:
        return {"type": _json_mapping(*get_args(kind)), "metavar": "JSON"}
    return {"type": _json, "metavar": "JSON"}


def _number_or_text(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not JSON ({error}): {text[:80]!r}") from error


def read_json_object(text: str) -> dict[str, Any]:
    """A JSON object from the command line; argparse reports what is none."""
    content = _json(text)
    if not isinstance(content, dict):
        raise argparse.ArgumentTypeError(f"not a JSON object: {text!r}")
    return cast(dict[str, Any], content)


def _json_mapping(key: Callable[[Any], Any], value: Callable[[Any], Any]) -> Callable[[str], Any]:
    """Reads a JSON object, whose keys are always strings, as a mapping of these types."""

    def read(text: str) -> Any:
        try:
            return {key(k): value(v) for k, v in read_json_object(text).items()}
        except (TypeError, ValueError) as error:
            raise argparse.ArgumentTypeError(f"{error}: {text!r}") from error

    return read
