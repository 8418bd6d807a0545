"""From a checkpoint folder to a target model on its device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from outrider.config import EngineConfig
from outrider.errors import ConfigError
from outrider.models.base import CausalLM
from outrider.models.config import ModelConfig
from outrider.models.loader import (
    LoadReport,
    WeightFiles,
    WeightMap,
    check_coverage,
    dummy_weights,
    load_weights,
    prepare_parameters,
)
from outrider.models.presets import is_preset, preset_config
from outrider.models.qwen3 import Qwen3ForCausalLM
from outrider.models.qwen3_5 import Qwen3_5ForCausalLM
from outrider.ops.dispatch import capability

ARCHITECTURES: Mapping[str, Callable[[ModelConfig], CausalLM]] = {
    "qwen3": Qwen3ForCausalLM,
    "qwen3_5": Qwen3_5ForCausalLM,
}
"""Target class by ModelConfig.model_type."""

logger = logging.getLogger(__name__)

_Module = TypeVar("_Module", bound=nn.Module)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Checkpoint:
    """A folder being loaded: its configuration, its tensors, and who took which of them.

    Attributes:
        files: None for dummy weights.
    """

    path: Path
    config: ModelConfig
    files: WeightFiles | None
    dtype: torch.dtype
    device: torch.device
    seed: int
    reports: list[LoadReport]

    @classmethod
    def open(cls, path: Path, engine: EngineConfig) -> Checkpoint:
        """Read the configuration and the tensor headers of a local folder.

        Args:
            path: the folder, or a preset, which has a configuration and no tensors.

        Raises:
            CheckpointError: the folder cannot be read.
            ConfigError: there is no such preset, or weights are asked of one, or no such device.
        """
        config = _read_config(path, engine)
        files = None if engine.load_format == "dummy" else WeightFiles(path)
        device = _resolve_device(engine)
        dtype = _resolve_dtype(engine.dtype, config.dtype, device)
        return cls(path, config, files, dtype, device, engine.seed, [])

    def fill(self, module: _Module, weight_map: WeightMap) -> _Module:
        """Give a module its weights; returns it, on the device."""
        if self.files is None:
            prepare_parameters(module, self.dtype, self.device)
            dummy_weights(module, self.seed)
        else:
            report = load_weights(module, self.files, weight_map, self.dtype, self.device)
            self.reports.append(report)
        return module.to(self.device)

    def close(self) -> None:
        """Check that every tensor found a place, once all modules have been filled."""
        if self.files is not None:
            check_coverage(self.files, self.reports)


def _read_config(path: Path, engine: EngineConfig) -> ModelConfig:
    if not is_preset(path):
        return ModelConfig.from_hf(path)
    config = preset_config(path)
    if engine.load_format != "dummy":
        raise ConfigError(
            f"{path} is a preset, which has no weights: load_format",
            got=engine.load_format,
            allowed="dummy",
            hint="set load_format to dummy for random weights, or name a checkpoint",
        )
    return config


def _resolve_device(engine: EngineConfig) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if engine.device == "cuda" and not has_cuda:
        raise ConfigError(
            "device", got="cuda", allowed="cpu on this machine", hint="use device='auto'"
        )
    return torch.device("cuda" if has_cuda and engine.device != "cpu" else "cpu")


def load_target(checkpoint: Checkpoint) -> CausalLM:
    """The target model of a checkpoint, with its weights."""
    architecture = ARCHITECTURES[checkpoint.config.model_type]
    with torch.device("meta"):
        model = architecture(checkpoint.config)
    return checkpoint.fill(model, model.weight_map)


def _resolve_dtype(wanted: str, stored: str, device: torch.device) -> torch.dtype:
    """The compute type; GPUs before SM80 cannot compute in bfloat16 and take float16 for it."""
    dtype = DTYPES[stored if wanted == "auto" else wanted]
    if dtype != torch.bfloat16 or device.type != "cuda" or capability(device) >= (8, 0):
        return dtype
    if wanted == "bfloat16":
        raise ConfigError(
            "dtype",
            got=wanted,
            allowed="float16 or float32 on a GPU of compute capability "
            f"{'.'.join(map(str, capability(device)))}",
            hint="use dtype='auto' or 'float16'",
        )
    logger.warning("this GPU cannot compute in bfloat16: computing in float16")
    return torch.float16
