"""WeightFiles: a checkpoint's safetensors files, memory-mapped and read by tensor name.

Knows file layouts (single, sharded with an index, loose shards); does not know what the tensors
are for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.errors import CheckpointError

_INDEX = "model.safetensors.index.json"

# The names that the safetensors format gives to element types.
_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class WeightFiles:
    """Tensors of the checkpoint in the folder `path`.

    Opening reads the headers only. `get` maps the tensor's bytes; nothing is copied until the
    tensor is used.

    Raises:
        CheckpointError: no safetensors file, a file that is truncated or not safetensors, a shard
            that the index names and that is absent, or a tensor that is not in the shard the
            index puts it in; the message names the file and the tensor.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        index = _read_index(path / _INDEX) if (path / _INDEX).exists() else {}
        self._handles = {name: _open(path / name) for name in _shards(path, index)}
        self._shard_of: dict[str, str] = {}
        for shard, handle in self._handles.items():
            for name in cast(list[str], handle.keys()):
                if index.get(name, shard) != shard:
                    continue  # the index says which copy is meant
                if name in self._shard_of:
                    raise CheckpointError(
                        f"tensor {name} is in two files",
                        got=[self._shard_of[name], shard],
                        allowed="one copy",
                    )
                self._shard_of[name] = shard
        for name, shard in index.items():
            if name not in self._shard_of:
                raise CheckpointError(
                    f"tensor {name} is not in {path / shard}, where {_INDEX} puts it",
                    hint="download the shard again",
                )

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._shard_of)

    def __contains__(self, name: object) -> bool:
        return name in self._shard_of

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor `name`, from the header."""
        return tuple(self._handle(name).get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Element type of the tensor `name`, from the header.

        Raises:
            CheckpointError: a type that torch has no equal of.
        """
        text = self._handle(name).get_slice(name).get_dtype()
        if text not in _DTYPES:
            raise CheckpointError(f"tensor {name}: element type", got=text, allowed=_DTYPES)
        return _DTYPES[text]

    def get(self, name: str) -> Tensor:
        """The tensor `name` on the CPU, backed by the mapped file: read it, do not write it."""
        return self._handle(name).get_tensor(name)

    def _handle(self, name: str) -> Any:
        if name not in self._shard_of:
            raise CheckpointError(f"tensor {name} is not in {self.path}")
        return self._handles[self._shard_of[name]]


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map: object = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not an index of safetensors ({error!r})") from error
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{path}: weight_map", got=weight_map, allowed="an object")
    index = cast(dict[str, object], weight_map)
    for name, shard in index.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{path}: file of {name}", got=shard, allowed="a file name")
    return cast(dict[str, str], index)


def _shards(path: Path, index: Mapping[str, str]) -> list[str]:
    if index:
        for name, shard in index.items():
            if not (path / shard).exists():
                raise CheckpointError(
                    f"shard {path / shard} is missing",
                    allowed=f"every file that {_INDEX} names (it holds {name})",
                    hint="download it again",
                )
        return sorted(set(index.values()))
    if (path / "model.safetensors").exists():
        return ["model.safetensors"]
    shards = sorted(file.name for file in path.glob("*.safetensors"))
    if not shards:
        raise CheckpointError(
            "no safetensors file in the model folder",
            got=str(path),
            allowed=f"model.safetensors, {_INDEX} with its shards, or any *.safetensors",
            hint="convert other formats to safetensors first",
        )
    return shards


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is truncated or not a safetensors file ({error})", hint="download it again"
        ) from error
