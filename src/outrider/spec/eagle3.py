"""Method `eagle3`: a one-layer draft in a checkpoint of its own."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import torch
from torch import Tensor

from outrider.config import SpeculativeConfig
from outrider.errors import CheckpointError, ConfigError
from outrider.layers.rows import RowBatch
from outrider.models.base import CausalLM
from outrider.models.build import Checkpoint
from outrider.models.config import ModelConfig
from outrider.models.eagle3 import Eagle3
from outrider.models.eagle3_config import Eagle3Config
from outrider.models.files import resolve_checkpoint
from outrider.models.loader import WeightFiles, WeightMap, check_coverage, dummy_generator
from outrider.models.presets import EAGLE3, is_preset, preset_draft_config
from outrider.spec.base import ChainDrafter, Drafter, Taps

logger = logging.getLogger(__name__)

# The "speculators" layout calls the layer layers.0.
_LAYER_NAMES = {"layers.0.": "midlayer."}

# What the taps go through before the chain begins.
_FIRST_STEP_ONLY = ("fc.", "input_norm.", "fc_norm.")


class Eagle3Drafter(ChainDrafter):
    """Reads three residual streams of the target; recycles its own output."""

    def __init__(self, draft: Eagle3, target: CausalLM, target_ids: Tensor | None) -> None:
        """target_ids: [draft_vocab_size] target id of each draft id, None for the identity."""
        self._draft = draft
        self._embedding = getattr(draft, "embed_tokens", target.embed_tokens)
        self._target_ids = target_ids
        self.taps = Taps(layers=draft.config.tapped_layers)
        self.cache_specs = draft.cache_specs

    @property
    def target_ids(self) -> Tensor | None:
        return self._target_ids

    @property
    def network(self) -> Eagle3:
        return self._draft

    @property
    def output_weight(self) -> Tensor:
        return self._draft.lm_head.weight

    def step_weights(self, step: int) -> tuple[Tensor, ...]:
        left_out = ("embed_tokens.",) if step == 1 else ("embed_tokens.", *_FIRST_STEP_ONLY)
        parameters = self._draft.named_parameters()
        return tuple(weight for name, weight in parameters if not name.startswith(left_out))

    def feed(self, tapped: Tensor, next_token_ids: Tensor, rows: RowBatch) -> Tensor:
        return self.step(self._draft.project(tapped), next_token_ids, rows)

    def step(self, hidden: Tensor, token_ids: Tensor, rows: RowBatch) -> Tensor:
        return self._draft(self._embedding, token_ids, hidden, rows, self._caches)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._draft.logits(hidden)


def refusal(config: ModelConfig) -> str | None:
    """Why a target cannot host the method."""
    if config.model_type != "qwen3":
        return "its hidden states cannot be tapped for EAGLE3 yet; Qwen3 targets can"
    return None


def set_up(checkpoint: Checkpoint, target: CausalLM, config: SpeculativeConfig) -> Drafter:
    """Load the sidecar beside the target, or make a random one where the target is random.

    Raises:
        CheckpointError: it does not fit itself or the target; the tensor or field is named.
        ConfigError: a preset beside a target with weights, or the other way round.
    """
    assert config.model is not None, "SpeculativeConfig checks that a sidecar is named"
    if is_preset(config.model) != (checkpoint.files is None):
        raise ConfigError(
            "EAGLE3 draft: presets have random weights and go with load_format dummy only",
            got=config.model,
            allowed=EAGLE3 if checkpoint.files is None else "a folder or hub id",
        )
    if is_preset(config.model):
        return _random_drafter(checkpoint, target, config.model)
    path = resolve_checkpoint(config.model, None)
    files = WeightFiles(path)
    draft_config = _read_config(path, files, checkpoint.config)
    _warn_of_short_positions(draft_config, checkpoint.config)
    own_embedding = _find(files, "embed_tokens.weight") is not None
    if not own_embedding and draft_config.hidden_size != checkpoint.config.hidden_size:
        raise CheckpointError(
            f"{path}: embed_tokens.weight is missing, and the target's is of another width",
            got=checkpoint.config.hidden_size,
            allowed=f"hidden_size {draft_config.hidden_size}",
        )
    with torch.device("meta"):
        draft = Eagle3(draft_config, own_embedding=own_embedding)
    sidecar = dataclasses.replace(checkpoint, path=path, files=files, reports=[])
    sidecar.fill(draft, _weight_map(files))
    check_coverage(files, sidecar.reports, optional=())
    target_ids = _target_ids(files, draft_config)
    if target_ids is not None:
        target_ids = target_ids.to(checkpoint.device)
    return Eagle3Drafter(draft, target, target_ids)


def _random_drafter(checkpoint: Checkpoint, target: CausalLM, preset: str) -> Drafter:
    """Random weights, and a draft vocabulary of random target ids in ascending order."""
    config = preset_draft_config(preset, checkpoint.config)
    with torch.device("meta"):
        draft = Eagle3(config, own_embedding=False)
    checkpoint.fill(draft, Eagle3.weight_map)
    size, vocab_size = config.draft_vocab_size, config.vocab_size
    if size == vocab_size:
        return Eagle3Drafter(draft, target, None)
    generator = dummy_generator("d2t", checkpoint.seed, "cpu")  # the same ids on every device
    ids = torch.randperm(vocab_size, generator=generator)[:size].sort().values
    return Eagle3Drafter(draft, target, ids.to(checkpoint.device))


def _find(files: WeightFiles, name: str) -> str | None:
    """The checkpoint's spelling of a bare name."""
    return next((full for full in (name, f"model.{name}") if full in files), None)


def _weight_map(files: WeightFiles) -> WeightMap:
    usual = Eagle3.weight_map
    speculators = any(".layers.0." in f".{name}" for name in files.names())
    return dataclasses.replace(usual, renames=_LAYER_NAMES) if speculators else usual


def _read_config(path: Path, files: WeightFiles, target: ModelConfig) -> Eagle3Config:
    suffix = ".self_attn.q_proj.weight"
    queries = [name for name in files.names() if name.endswith(suffix)]
    if len(queries) != 1:
        raise CheckpointError(
            f"{path}: layers with a {suffix[1:]}",
            got=queries,
            allowed="one, as an EAGLE3 draft has",
        )
    shape = files.shape(queries[0])
    if len(shape) != 2:
        raise CheckpointError(f"{queries[0]}: shape", got=list(shape), allowed="two dimensions")
    return Eagle3Config.from_hf(path, target, shape[0])


def _warn_of_short_positions(draft: Eagle3Config, target: ModelConfig) -> None:
    if draft.max_position_embeddings < target.max_position_embeddings:
        logger.warning(
            "the draft was trained for %d positions and the target for %d: its rotary embedding "
            "is extrapolated past that, and fewer drafts may be accepted",
            draft.max_position_embeddings,
            target.max_position_embeddings,
        )


def _target_ids(files: WeightFiles, config: Eagle3Config) -> Tensor | None:
    """[draft_vocab_size] target ids from the stored offsets, checked."""
    size, vocab_size = config.draft_vocab_size, config.vocab_size
    name = _find(files, "d2t")
    if name is None:
        if size != vocab_size:
            raise CheckpointError(
                "d2t is missing",
                got=f"draft_vocab_size {size}",
                allowed=f"no d2t only where it is the target's vocab_size, {vocab_size}",
                hint="a smaller draft vocabulary needs the map to target ids",
            )
        return None
    offsets = files.get(name)
    if offsets.is_floating_point():
        raise CheckpointError(f"{name}: element type", got=offsets.dtype, allowed="integers")
    if tuple(offsets.shape) != (size,):
        raise CheckpointError(f"{name}: shape", got=list(offsets.shape), allowed=f"[{size}]")
    ids = torch.arange(size) + offsets.long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise CheckpointError(
            f"{name}: target ids",
            got=f"from {int(ids.min())} to {int(ids.max())}",
            allowed=f"from 0 to {vocab_size - 1}",
        )
    if ids.unique().numel() != size:
        raise CheckpointError(f"{name}: target ids", got="repeated ids", allowed="distinct ids")
    mask_name = _find(files, "t2d")
    if mask_name is not None:
        mask = files.get(mask_name)
        if tuple(mask.shape) != (vocab_size,):
            raise CheckpointError(
                f"{mask_name}: shape", got=list(mask.shape), allowed=f"[{vocab_size}]"
            )
        listed = mask.bool().nonzero()[:, 0]
        if not torch.equal(listed, ids.sort().values):
            raise CheckpointError(
                f"{name} and {mask_name} name different target ids",
                got=f"{listed.numel()} ids in {mask_name}",
                allowed=f"the {size} ids of {name}",
            )
    return ids
