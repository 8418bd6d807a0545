"""Draft methods by name: where their weights come from, and which targets can host them.

Adding a method means a file for its model, a file for its Drafter, its name in spec.names, and one
entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from outrider.config import SpeculativeConfig
from outrider.errors import ConfigError
from outrider.models.base import CausalLM
from outrider.models.build import Checkpoint
from outrider.models.config import ModelConfig
from outrider.spec import eagle3, mtp, ngram
from outrider.spec.base import Drafter
from outrider.spec.names import DraftSampling


@dataclass(frozen=True)
class DraftMethod:
    """One way to draft.

    Attributes:
        refusal: why a target cannot host it, or None where it can.
        set_up: builds the drafter beside a loaded target.
    """

    refusal: Callable[[ModelConfig], str | None]
    set_up: Callable[[Checkpoint, CausalLM, SpeculativeConfig], Drafter]


METHODS: Mapping[str, DraftMethod] = {
    "mtp": DraftMethod(mtp.refusal, mtp.set_up),
    "eagle3": DraftMethod(eagle3.refusal, eagle3.set_up),
    "ngram": DraftMethod(ngram.refusal, ngram.set_up),
}


def build_drafter(checkpoint: Checkpoint, target: CausalLM, config: SpeculativeConfig) -> Drafter:
    """The drafter that `config` asks for.

    Raises:
        ConfigError: the target cannot host the method.
        CheckpointError: the draft's checkpoint cannot be read or does not fit the target.
    """
    method = METHODS[config.method]
    refusal = method.refusal(checkpoint.config)
    if refusal is not None:
        hosted = [name for name, other in METHODS.items() if not other.refusal(checkpoint.config)]
        raise ConfigError(
            f"{checkpoint.config.model_type} cannot host speculative method {config.method}: "
            f"{refusal}",
            got=config.method,
            allowed=hosted,
            hint="choose another method, or leave speculative_config out",
        )
    drafter = method.set_up(checkpoint, target, config)
    if config.draft_sampling == DraftSampling.SAMPLED and not drafter.samples:
        raise ConfigError(
            f"draft_sampling: method {config.method} looks tokens up and has no distribution",
            got="sampled",
            allowed=("argmax", "coupled"),
        )
    default = SpeculativeConfig(config.method, config.model).draft_top_m
    if config.draft_top_m != default and not drafter.samples:
        raise ConfigError(
            f"draft_top_m: method {config.method} has no distribution to cut",
            got=config.draft_top_m,
            hint="leave it out",
        )
    return drafter
