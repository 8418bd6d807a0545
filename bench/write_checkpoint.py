"""Write a preset's random weights as an ordinary checkpoint, to measure how fast one is loaded.

python bench/write_checkpoint.py preset:qwen3-8b FOLDER
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.config import EngineConfig
from outrider.models import presets
from outrider.models.build import Checkpoint, load_target
from outrider.models.loader import _slots

SHARD_BYTES = 4 * 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("preset")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    checkpoint = Checkpoint.open(
        Path(options.preset), EngineConfig(options.preset, load_format="dummy")
    )
    target = load_target(checkpoint)
    parameters = dict(target.named_parameters())
    index: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    size = 0

    def flush() -> None:
        nonlocal shard, size
        if shard:
            name = f"model-{len(set(index.values())) + 1:05d}.safetensors"
            save_file(shard, options.folder / name)
            index.update(dict.fromkeys(shard, name))
            shard, size = {}, 0

    for part, slot in _slots(target, target.weight_map).items():
        tensor = parameters[slot.parameter].data
        if slot.shape:
            tensor = tensor.narrow(0, slot.start, slot.shape[0])
        name = part if part.startswith("lm_head") else f"model.{part}"
        shard[name] = tensor.cpu().contiguous()
        size += shard[name].nbytes
        if size > SHARD_BYTES:
            flush()
    flush()
    config = presets.PRESETS[options.preset.removeprefix(presets.PREFIX)]
    (options.folder / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    (options.folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": index}), encoding="utf-8"
    )
    print(f"{len(index)} tensors, {torch.cuda.memory_allocated() / 2**30:.1f} GiB on the GPU")


if __name__ == "__main__":
    main()
