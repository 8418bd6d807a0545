"""What a benchmark was run with, what could be the best, and where its results go.

Knows nothing of how anything is timed.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.checks import check_writable
from outrider.errors import ConfigError
from outrider.layers.rows import DeltaCacheSpec, LayerCacheSpec
from outrider.models.base import CausalLM
from outrider.runner.storage import kv_bytes_per_token
from outrider.spec.base import Drafter

READ_BANDWIDTHS: Mapping[str, float] = {"H200": 4.2e12}
"""Bytes a second that a plain copy kernel was measured to read, by a part of the GPU's name."""

_SHORTEST_CELL = 8


def versions(device: torch.device) -> dict[str, str | None]:
    """What a result depends on besides the command."""
    return {
        "outrider": _version("outrider"),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "device": device_name(device),
    }


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's architecture."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"


def read_bandwidth(device: torch.device) -> float | None:
    """Bytes a second that a device can read; None where nobody measured it."""
    name = device_name(device)
    return next((rate for part, rate in READ_BANDWIDTHS.items() if part in name), None)


def process_age() -> float | None:
    """Seconds since this process began; None where the system does not tell."""
    if sys.platform != "linux":
        return None
    try:
        # The fields after the name, which may hold anything; the 20th is the start in ticks.
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        ticks = int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return age if ticks > 0 and age > 0 else None  # some sandboxes say 0


@dataclass(frozen=True)
class RoundWork:
    """The rounds whose traffic is counted.

    Attributes:
        num_sequences: that run together.
        context_len: tokens before a round, the same for all of them.
        num_drafts: k, drafted for the next round.
    """

    num_sequences: int
    context_len: int
    num_drafts: int


def round_bytes(
    target: CausalLM,
    drafter: Drafter | None,
    work: RoundWork,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
) -> int | None:
    """Bytes that one round cannot do without; None where a draft method does not say.

    Once for the target pass, and once more for each of the k chain steps of a draft: every weight
    but the embedding table, of which a few rows are read, and the keys and values of each
    sequence. A recurrent state is read and written once. Activations are left out.

    Args:
        dtype: type of keys and values.
        state_dtype: type of recurrent states.
    """
    total = _size(target_weights(target))
    total += _sequence_bytes(target.cache_specs, work, dtype, state_dtype)
    if drafter is None:
        return total
    for step in range(1, work.num_drafts + 1):
        weights = drafter.step_weights(step)
        if weights is None:
            return None
        total += _size(weights)
        total += _sequence_bytes(drafter.cache_specs, work, dtype, state_dtype)
    return total


def target_weights(target: CausalLM) -> list[Tensor]:
    """The weights that a target pass reads whole; an embedding counts where it is the head too."""
    tied = target.config.tie_word_embeddings
    return [
        weight
        for name, weight in target.named_parameters()
        if tied or not name.startswith("embed_tokens.")
    ]


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _sequence_bytes(
    specs: tuple[LayerCacheSpec, ...],
    work: RoundWork,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
) -> int:
    state = sum(
        spec.num_value_heads * spec.value_dim * spec.key_dim
        for spec in specs
        if isinstance(spec, DeltaCacheSpec)
    )
    kv = kv_bytes_per_token(specs, dtype) * work.context_len
    return work.num_sequences * (kv + 2 * state * state_dtype.itemsize)


class ResultFile:
    """Appends results to a file, a JSON object a line, as they come."""

    def __init__(self, path: Path | None, context: Mapping[str, Any]) -> None:
        """
        Args:
            path: None writes nothing.
            context: what every line says besides its own result.

        Raises:
            ConfigError: the file cannot be written.
        """
        self._path = path
        self.context = dict(context)
        if path is not None:
            check_writable(ConfigError, "results", path)

    def write(self, result: Mapping[str, Any]) -> None:
        """Append one line."""
        if self._path is None:
            return
        line = json.dumps(self.context | dict(result), default=str)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def now() -> str:
    """Date and time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


class Table:
    """A table whose rows are printed as they come, the headings at once."""

    def __init__(self, *headings: str) -> None:
        self._widths = [max(len(heading), _SHORTEST_CELL) for heading in headings]
        self.row(*headings)

    def row(self, *cells: str) -> None:
        """Print one row, a cell for each heading."""
        pairs = zip(cells, self._widths, strict=True)
        print("  ".join(cell.rjust(width) for cell, width in pairs), flush=True)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
