"""Draft methods by name: where their weights come from, and which targets can host them.

Adding a method means a file with its model, a file with its Drafter, and one entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from outrider.config import SpeculativeConfig
from outrider.errors import ConfigError
from outrider.models.build import Checkpoint
from outrider.models.config import ModelConfig
from outrider.models.qwen3_5 import Qwen3_5ForCausalLM
from outrider.models.qwen3_5_mtp import Qwen3_5MTP
from outrider.spec.base import Drafter
from outrider.spec.mtp import MTPDrafter


@dataclass(frozen=True)
class DraftMethod:
    """One way to draft.

    Attributes:
        refusal: why a target cannot host it, or None where it can.
        setup: builds the drafter beside a loaded target.
    """

    refusal: Callable[[ModelConfig], str | None]
    setup: Callable[[Checkpoint, Qwen3_5ForCausalLM, SpeculativeConfig], Drafter]


def _mtp_refusal(config: ModelConfig) -> str | None:
    if config.num_mtp_layers == 0:
        return "its checkpoint has no MTP head (mtp_num_hidden_layers is 0 or absent)"
    return None


def _setup_mtp(
    checkpoint: Checkpoint, target: Qwen3_5ForCausalLM, _config: SpeculativeConfig
) -> Drafter:
    with torch.device("meta"):
        head = Qwen3_5MTP(checkpoint.config)
    return MTPDrafter(checkpoint.fill(head, Qwen3_5MTP.weight_map), target)


METHODS: Mapping[str, DraftMethod] = {"mtp": DraftMethod(_mtp_refusal, _setup_mtp)}


def build_drafter(
    checkpoint: Checkpoint, target: Qwen3_5ForCausalLM, config: SpeculativeConfig
) -> Drafter:
    """The drafter that `config` asks for.

    Raises:
        ConfigError: the target cannot host the method.
    """
    method = METHODS[config.method]
    refusal = method.refusal(checkpoint.config)
    if refusal is not None:
        hosted = [name for name, other in METHODS.items() if not other.refusal(checkpoint.config)]
        raise ConfigError(
            f"{checkpoint.config.model_type} cannot host speculative method {config.method}: "
            f"{refusal}",
            got=config.method,
            allowed=hosted or "no method for this checkpoint",
            hint="choose another method, or leave speculative_config out",
        )
    return method.setup(checkpoint, target, config)
