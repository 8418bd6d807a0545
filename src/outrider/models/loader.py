"""Fills a module's parameters from a checkpoint, strictly, or with random values.

Which checkpoint tensor goes where is data (WeightMap) that stands on the architecture's class; this
file knows no architecture.
"""

from __future__ import annotations

import logging
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn

from outrider.errors import CheckpointError
from outrider.models.weight_files import WeightFiles

__all__ = [
    "LoadReport",
    "WeightFiles",
    "WeightMap",
    "check_coverage",
    "dummy_generator",
    "dummy_weights",
    "load_weights",
    "prepare_parameters",
]

logger = logging.getLogger(__name__)

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_MOST_NAMED = 8
_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"

DUMMY_STD = 0.02
DUMMY_MEANS: Mapping[str, float] = {"zeros": 0.0, "ones": 1.0, "normal": 0.0}
"""Mean of a dummy parameter by its `dummy_init`; for a norm, the value that changes nothing."""


@dataclass(frozen=True)
class WeightMap:
    """How checkpoint names become parameter names of one module.

    Attributes:
        prefixes: the first that a checkpoint name starts with is stripped. Names that start with
            none are another module's. "" takes bare names, but only those of parameters that the
            module has, so that it does not claim the other modules' names.
        skip: regular expressions for checkpoint names that nobody wants (vision).
        packed: end of a module's path -> the checkpoint paths, put in its place, whose tensors are
            packed along dim 0. The module names their row counts in `part_sizes`, and in
            `interleaved` whether their rows take turns.
        renames: beginnings of stripped names, and what stands in their place in the module.
    """

    prefixes: tuple[str, ...]
    skip: tuple[str, ...] = ()
    packed: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    renames: Mapping[str, str] = field(default_factory=dict[str, str])

    def strip(self, name: str) -> tuple[str, str] | None:
        """(prefix, rest) of a checkpoint name, or None where no prefix matches."""
        for prefix in self.prefixes:
            if name.startswith(prefix):
                return prefix, self._renamed(name[len(prefix) :])
        return None

    def _renamed(self, rest: str) -> str:
        for old, new in self.renames.items():
            if rest.startswith(old):
                return new + rest[len(old) :]
        return rest

    def skips(self, name: str) -> bool:
        """Whether nobody wants the checkpoint tensor `name`."""
        return any(re.search(pattern, name) for pattern in self.skip)

    def parts(self, module_path: str) -> tuple[str, ...] | None:
        """Checkpoint paths of the parts of the module at `module_path`, or None if not packed."""
        for suffix in sorted(self.packed, key=len, reverse=True):
            if f".{module_path}".endswith(f".{suffix}"):
                stem = module_path[: len(module_path) - len(suffix)]
                return tuple(stem + part for part in self.packed[suffix])
        return None


@dataclass(frozen=True)
class LoadReport:
    """Checkpoint names that one call of `load_weights` used, and those that its map skips."""

    consumed: frozenset[str]
    skipped: frozenset[str]


@dataclass(frozen=True)
class _Slot:
    """Rows of a parameter that one checkpoint tensor fills: from `start` on, every step-th."""

    parameter: str
    start: int
    shape: tuple[int, ...]
    step: int = 1


def load_weights(
    module: nn.Module,
    files: WeightFiles,
    weight_map: WeightMap,
    dtype: torch.dtype,
    device: torch.device | str,
) -> LoadReport:
    """Fill every parameter of `module`, each exactly once, on `device`.

    Parameters become `dtype`, except that those marked `keep_dtype` keep their own. The module may
    have been built on the meta device. A checkpoint that carries lm_head.weight for a module
    without a head of its own is accepted if it equals the embedding.

    Raises:
        CheckpointError: parameters without a tensor, tensors under the map's prefixes without a
            parameter, or tensors of the wrong shape or type; all of them are collected and named
            (8 of each kind, then counted). The module's values are undefined afterwards.
    """
    slots = _slots(module, weight_map)
    sources: dict[str, str] = {}
    skipped: set[str] = set()
    unexpected: list[str] = []
    problems: list[str] = []
    for name in files.names():
        if weight_map.skips(name):
            skipped.add(name)
            continue
        match weight_map.strip(name):
            case None:
                continue
            case (_, rest) if rest in slots:
                if rest in sources:
                    problems.append(f"{name} and {sources[rest]} both fill {slots[rest].parameter}")
                sources[rest] = name
            case (_, rest) if rest == _HEAD and _EMBEDDING in slots:
                skipped.add(name)
            case ("", _):
                continue
            case _:
                unexpected.append(name)
    problems += [f"{name}: {text}" for name, text in _mismatches(files, sources, slots)]
    missing = [part for part in slots if part not in sources]
    _raise_if_any(files, problems, missing, unexpected)
    _check_tied_head(files, weight_map, skipped, sources)

    prepare_parameters(module, dtype, device)
    parameters = dict(module.named_parameters())
    for part, name in sources.items():
        slot = slots[part]
        target = parameters[slot.parameter].data
        if slot.shape:
            target = target[slot.start :: slot.step][: slot.shape[0]]
        target.copy_(files.get(name))
    return LoadReport(frozenset(sources.values()), frozenset(skipped))


def check_coverage(
    files: WeightFiles, reports: Sequence[LoadReport], optional: Sequence[str] = (r"^mtp\.",)
) -> None:
    """Check that every tensor was used or is left out knowingly, and log one line about it.

    Args:
        reports: those of all modules loaded from `files`.
        optional: regular expressions for tensors that may be left over, as a draft head's are when
            nothing drafts.

    Raises:
        CheckpointError: tensors that nobody used; 8 are named.
    """
    consumed = frozenset[str]().union(*(report.consumed for report in reports))
    skipped = frozenset[str]().union(*(report.skipped for report in reports)) - consumed
    left = [name for name in files.names() if name not in consumed and name not in skipped]
    unused = [name for name in left if any(re.search(pattern, name) for pattern in optional)]
    _raise_if_any(files, [], [], [name for name in left if name not in unused])
    logger.info(
        "%s: %d tensors loaded, %d skipped%s, %d of an unused draft left out%s",
        files.path.name,
        len(consumed),
        len(skipped),
        _by_first_words(skipped),
        len(unused),
        _by_first_words(unused),
    )


def prepare_parameters(module: nn.Module, dtype: torch.dtype, device: torch.device | str) -> None:
    """Make every parameter a tensor of its final type on `device`, with undefined values.

    Works from the meta device as well. A parameter that is registered twice stays shared. Marks
    (`keep_dtype`, `dummy_init`) move along; a parameter marked `keep_dtype` keeps its type.
    """
    device = torch.device(device)
    replaced: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, old in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if id(old) not in replaced:
                wanted = old.dtype if getattr(old, "keep_dtype", False) else dtype
                new = nn.Parameter(
                    torch.empty(old.shape, dtype=wanted, device=device), requires_grad=False
                )
                for mark in ("keep_dtype", "dummy_init"):
                    if hasattr(old, mark):
                        setattr(new, mark, getattr(old, mark))
                replaced[id(old)] = new
            setattr(owner, name, replaced[id(old)])


def dummy_weights(module: nn.Module, seed: int) -> None:
    """Fill every parameter in place, on its device, with values that depend on name and seed only.

    Normal with standard deviation 0.02 around the mean of the parameter's `dummy_init` ("zeros",
    "ones" or "normal", which is the default). The module must not be on the meta device; see
    `prepare_parameters`.
    """
    for name, parameter in module.named_parameters():
        mean = DUMMY_MEANS[getattr(parameter, "dummy_init", "normal")]
        generator = dummy_generator(name, seed, parameter.device)
        parameter.data.normal_(mean, DUMMY_STD, generator=generator)


def dummy_generator(name: str, seed: int, device: torch.device | str) -> torch.Generator:
    """Random numbers that depend on a name, a seed and the kind of device only."""
    generator = torch.Generator(device=device)
    # One word for both: the CPU's generator reads the low 32 bits of its seed only.
    return generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))


def _slots(module: nn.Module, weight_map: WeightMap) -> dict[str, _Slot]:
    """Stripped checkpoint name -> the rows that it fills, over all parameters of `module`."""
    slots: dict[str, _Slot] = {}
    for name, parameter in module.named_parameters():
        path, _, leaf = name.rpartition(".")
        shape = tuple(parameter.shape)
        parts = weight_map.parts(path)
        if parts is None:
            slots[name] = _Slot(name, 0, shape)
            continue
        owner = module.get_submodule(path)
        sizes = cast(Sequence[int], owner.part_sizes)
        assert len(sizes) == len(parts) and sum(sizes) == shape[0], f"part_sizes of {path}"
        step = len(parts) if owner.interleaved else 1
        start = 0
        for part, size in zip(parts, sizes, strict=True):
            slots[f"{part}.{leaf}"] = _Slot(name, start, (size, *shape[1:]), step)
            start += 1 if owner.interleaved else size
    return slots


def _mismatches(
    files: WeightFiles, sources: Mapping[str, str], slots: Mapping[str, _Slot]
) -> Iterator[tuple[str, str]]:
    for part, name in sources.items():
        got, wanted = files.shape(name), slots[part].shape
        if got != wanted:
            yield name, f"shape {list(got)}, wanted {list(wanted)} for {slots[part].parameter}"
        elif files.dtype(name) not in _FLOATS:
            yield name, f"{files.dtype(name)}, which is not built yet; wanted one of {_FLOATS}"


def _check_tied_head(
    files: WeightFiles, weight_map: WeightMap, skipped: Iterable[str], sources: Mapping[str, str]
) -> None:
    for name in skipped:
        stripped = weight_map.strip(name)
        if stripped is None or stripped[1] != _HEAD or weight_map.skips(name):
            continue
        embedding = sources[_EMBEDDING]
        if not torch.equal(files.get(name), files.get(embedding)):
            raise CheckpointError(
                f"{name} differs from {embedding}, but the configuration ties the two",
                hint="set tie_word_embeddings to false in config.json",
            )


def _raise_if_any(
    files: WeightFiles, problems: Sequence[str], missing: Sequence[str], unexpected: Sequence[str]
) -> None:
    texts = [
        f"{kind} {_named(names)}"
        for kind, names in (
            ("wrong tensors:", problems),
            ("missing tensors:", missing),
            ("unexpected tensors:", unexpected),
        )
        if names
    ]
    if texts:
        raise CheckpointError(
            f"weights in {files.path} do not fit the model: {'; '.join(texts)}",
            hint="check that config.json and the weights belong together",
        )


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMED])
    rest = len(names) - _MOST_NAMED
    return shown if rest <= 0 else f"{shown} and {rest} more"


def _by_first_words(names: Iterable[str]) -> str:
    """ " (model.visual: 12)" and the like: counts by the first two words of the names."""
    counts = Counter(".".join(name.split(".")[:2]) for name in names)
    return f" ({', '.join(f'{word}: {count}' for word, count in counts.items())})" if counts else ""
