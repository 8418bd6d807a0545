"""Rotary settings of a configuration, wherever it keeps them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

from outrider.errors import CheckpointError
from outrider.layers.rotary import YarnScaling
from outrider.models.reading import Section


@dataclass(frozen=True)
class Rotary:
    """How a model rotates queries and keys; see layers.rotary.

    Attributes:
        rotary_dim: leading dimensions of a head that are rotated.
    """

    theta: float
    rotary_dim: int
    yarn: YarnScaling | None
    mrope_section: tuple[int, int, int] | None


def read_rotary(text: Section, default_factor: float, head_dim: int) -> Rotary:
    """From rope_parameters, rope_scaling or the old keys, wherever each of them stands."""
    sections = [
        section
        for section in (text.section("rope_parameters"), text.section("rope_scaling"), text)
        if section is not None
    ]
    yarn = None
    for section in sections[:-1]:
        kind = section.get("rope_type", section.get("type", "default"))
        # "mrope" is how old configurations spell the default rotation with an mrope_section.
        if kind == "yarn":
            yarn = _yarn(section, text)
        elif kind not in ("default", "mrope"):
            raise CheckpointError(
                f"{section.name}: rope type is not built yet",
                got=kind,
                allowed=("default", "yarn"),
            )
    with_theta = next((s for s in sections if s.get("rope_theta") is not None), text)
    with_factor = next((s for s in sections if s.get("partial_rotary_factor") is not None), text)
    factor = with_factor.positive_float("partial_rotary_factor", default=default_factor)
    rotary_dim = int(head_dim * factor)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise CheckpointError(
            f"{with_factor.name}: partial_rotary_factor rotates {rotary_dim} of {head_dim} dims",
            got=factor,
            allowed="a share of head_dim that is an even number of dims",
        )
    theta = with_theta.positive_float("rope_theta")
    if theta <= 1:
        raise CheckpointError(f"{with_theta.name}: rope_theta", got=theta, allowed="more than 1")
    return Rotary(theta, rotary_dim, yarn, _mrope_section(sections, rotary_dim))


def _mrope_section(sections: list[Section], rotary_dim: int) -> tuple[int, int, int] | None:
    """Frequencies for time, height and width, or None where a token has one position.

    Sections one behind the other, not interleaved, are None too: they divide frequencies between
    positions that are equal for text, and Outrider takes nothing but text.
    """
    section = next((s for s in sections if s.get("mrope_section") is not None), None)
    if section is None:
        return None
    value, half = section.get("mrope_section"), rotary_dim // 2
    counts = cast(list[object], value) if isinstance(value, list) else []
    numbers = [n for n in counts if isinstance(n, int) and not isinstance(n, bool) and n >= 0]
    if len(numbers) != 3 or len(counts) != 3 or sum(numbers) != half:
        raise CheckpointError(
            f"{section.name}: mrope_section",
            got=value,
            allowed=f"three numbers of frequencies (time, height, width) that add up to {half}, "
            f"half of the {rotary_dim} dims that are rotated",
        )
    if not section.boolean("mrope_interleaved", default=True):
        return None
    return numbers[0], numbers[1], numbers[2]


def _yarn(section: Section, text: Section) -> YarnScaling:
    for key in ("mscale", "mscale_all_dim"):
        if section.get(key) is not None:
            raise CheckpointError(f"{section.name}: {key} is not built yet", got=section.get(key))
    factor = section.positive_float("factor")
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=section.positive_int(
            "original_max_position_embeddings", text.positive_int("max_position_embeddings")
        ),
        beta_fast=section.positive_float("beta_fast", default=32.0),
        beta_slow=section.positive_float("beta_slow", default=1.0),
        attention_factor=section.positive_float(
            "attention_factor", default=0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        ),
        truncate=section.boolean("truncate", default=True),
    )
