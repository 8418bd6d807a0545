"""Eagle3Config: an EAGLE3 sidecar's config.json, in both layouts. The only reader of its quirks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from outrider.errors import CheckpointError
from outrider.layers.rotary import YarnScaling
from outrider.models.config import ModelConfig, read_json, refuse_quantized
from outrider.models.reading import Section
from outrider.models.rope import read_rotary

logger = logging.getLogger(__name__)

_TAP_KEY = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Eagle3Config:
    """Shape and variants of a draft.

    Attributes:
        tapped_layers: target layers whose input is read, ascending.
        norm_before_residual: the residual starts from the normed projection.
        norm_before_fc: the concatenated taps are normed before the projection.
        fc_norm: each tap is normed on its own before the projection.
        norm_output: the hidden state is recycled after the final norm instead of before it.
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    yarn: YarnScaling | None
    rms_norm_eps: float
    vocab_size: int
    draft_vocab_size: int
    max_position_embeddings: int
    tapped_layers: tuple[int, ...]
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @classmethod
    def from_hf(cls, path: Path, target: ModelConfig, query_rows: int) -> Eagle3Config:
        """Read the config.json in the folder `path`.

        Args:
            target: the model it drafts for.
            query_rows: rows of the checkpoint's q_proj, which tell the head size where the
                configuration is silent or wrong about it.

        Raises:
            CheckpointError: a key is missing, wrong, or does not fit the target; named.
        """
        name, config = f"{path.name}/config.json", read_json(path / "config.json")
        return cls.from_dict(name, config, target, query_rows)

    @classmethod
    def from_dict(
        cls, name: str, config: Mapping[str, object], target: ModelConfig, query_rows: int
    ) -> Eagle3Config:
        """The same from parsed JSON, which errors call `name`; raises as `from_hf` does."""
        top = Section(name, config)
        layer = top.section("transformer_layer_config") or top
        refuse_quantized(top, layer)
        _check_layers(layer)
        _refuse_unbuilt(layer)
        vocab_size = layer.positive_int("vocab_size", default=target.vocab_size)
        if vocab_size != target.vocab_size:
            raise CheckpointError(
                f"{layer.name}: vocab_size",
                got=vocab_size,
                allowed=f"{target.vocab_size}, the target's",
                hint="the draft was trained for another target",
            )
        num_heads = layer.positive_int("num_attention_heads")
        head_dim = _head_dim(layer, num_heads, query_rows)
        rotary = read_rotary(layer, 1.0, head_dim)
        hidden_size = layer.positive_int("hidden_size")
        sections = [top, top.section("eagle_config") or top, layer]

        def flag(key: str) -> bool:
            section = next((s for s in sections if s.get(key) is not None), top)
            return section.boolean(key, default=False)

        return cls(
            hidden_size=hidden_size,
            target_hidden_size=target.hidden_size,
            intermediate_size=layer.positive_int("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=layer.positive_int("num_key_value_heads", default=num_heads),
            head_dim=head_dim,
            rotary_dim=rotary.rotary_dim,
            rope_theta=rotary.theta,
            yarn=rotary.yarn,
            rms_norm_eps=layer.positive_float("rms_norm_eps", default=1e-6),
            vocab_size=vocab_size,
            draft_vocab_size=top.positive_int("draft_vocab_size", default=vocab_size),
            max_position_embeddings=layer.positive_int(
                "max_position_embeddings", default=target.max_position_embeddings
            ),
            tapped_layers=_tapped_layers(top, target.num_layers),
            norm_before_residual=flag("norm_before_residual"),
            norm_before_fc=flag("norm_before_fc"),
            fc_norm=flag("fc_norm"),
            norm_output=flag("norm_output"),
        )


def _refuse_unbuilt(layer: Section) -> None:
    """Refuse, by name, variants that would load and then draft something else."""
    for key, wanted in (
        ("hidden_act", "silu"),
        ("use_sliding_window", False),
        ("layer_types", ["full_attention"]),
    ):
        value = layer.get(key, wanted)
        if value != wanted:
            raise CheckpointError(f"{layer.name}: {key}", got=value, allowed=str(wanted))


def _head_dim(layer: Section, num_heads: int, query_rows: int) -> int:
    """What the weights say, whatever the configuration does."""
    head_dim, rest = divmod(query_rows, num_heads)
    if rest:
        raise CheckpointError(
            f"{layer.name}: num_attention_heads",
            got=num_heads,
            allowed=f"a divisor of q_proj's {query_rows} rows",
        )
    listed = layer.positive_int("head_dim", default=head_dim)
    if listed != head_dim:
        logger.warning("%s: head_dim is %d, but the weights have %d", layer.name, listed, head_dim)
    return head_dim


def _check_layers(layer: Section) -> None:
    num_layers = layer.positive_int("num_hidden_layers", default=1)
    if num_layers != 1:
        raise CheckpointError(
            f"{layer.name}: num_hidden_layers",
            got=num_layers,
            allowed="1, the one layer of an EAGLE3 draft",
        )


def _tapped_layers(top: Section, num_layers: int) -> tuple[int, ...]:
    """Layers whose input is read.

    Two conventions are in use for the same tensors: ids of layers entered, and ids of layers whose
    output is meant, one less. The usual triple is recognised in both; other ids are outputs under
    `eagle_config` and entered layers at the top level, as the tools that write them do.
    """
    usual = (2, num_layers // 2, num_layers - 3)
    eagle = top.section("eagle_config")
    section = eagle if eagle is not None and eagle.get(_TAP_KEY) is not None else top
    listed = section.get(_TAP_KEY)
    if listed is None:
        ids: tuple[int, ...] = usual
    else:
        ids = _checked_ids(section, listed)
        outputs = tuple(layer - 1 for layer in usual)
        if ids == outputs or (ids != usual and section is not top):
            ids = tuple(layer + 1 for layer in ids)
    if list(ids) != sorted(set(ids)):
        raise CheckpointError(
            f"{section.name}: {_TAP_KEY}",
            got=list(ids),
            allowed="distinct layers in ascending order",
            hint=f"a target of {num_layers} layers is too shallow for the usual three"
            if listed is None
            else None,
        )
    if ids[-1] >= num_layers or ids[0] < 0:
        raise CheckpointError(
            f"{section.name}: {_TAP_KEY}: the target has no such layer to tap",
            got=list(ids),
            allowed=f"layers 0 to {num_layers - 1}",
            hint="the draft was trained for a deeper target",
        )
    return ids


def _checked_ids(section: Section, listed: object) -> tuple[int, ...]:
    values = cast(list[object], listed) if isinstance(listed, list) else []
    ids = tuple(value for value in values if type(value) is int)
    if not ids or len(ids) != len(values):
        raise CheckpointError(f"{section.name}: {_TAP_KEY}", got=listed, allowed="a list of ids")
    return ids
