"""Rounds as CUDA graphs. Nobody else knows of graphs.

The first round of a key runs as it is, which compiles and loads its kernels; the second is captured
and from then on replayed. Both are the same kernels with the same numbers, so the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.runner.inputs import Work


@dataclass(frozen=True)
class RoundKey:
    """What two rounds must share to be one graph.

    Attributes:
        num_sequences: B, padding included.
        num_verified: T.
        table_width: columns of the block tables.
        layout: where tensors of the slot table lie that can be replaced.
    """

    num_sequences: int
    num_verified: int
    table_width: int
    work: Work
    layout: tuple[int, ...]


@dataclass
class _Program:
    """One key's graph.

    Attributes:
        numbers: what the host says of the round; the graph reads it here.
        graph: None until the key is met again.
        packed: the results, where the graph leaves them.
    """

    numbers: Tensor
    graph: torch.cuda.CUDAGraph | None
    packed: Tensor


class RoundGraphs:
    """Runs rounds by capture and replay.

    All graphs share one memory pool: they run one after the other on one stream, and what a graph
    leaves behind is copied away before the next one starts.
    """

    def __init__(self, run: Callable[[RoundKey, Tensor], Tensor], device: torch.device) -> None:
        """run: the round itself, which reads and writes device memory only."""
        self._run = run
        self._device = device
        self._programs: dict[RoundKey, _Program] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._layout: tuple[int, ...] = ()

    @property
    def num_graphs(self) -> int:
        """Graphs captured and alive."""
        return sum(program.graph is not None for program in self._programs.values())

    def run(self, key: RoundKey, numbers: Tensor) -> Tensor:
        """Run a round; returns its packed results on the device, valid until the next run.

        Args:
            numbers: see inputs.round_numbers, on the CPU.
        """
        if key.layout != self._layout:
            # Graphs of another layout read memory that is given back: they may never run again.
            self._programs.clear()
            self._layout = key.layout
        numbers = numbers.pin_memory()
        program = self._programs.get(key)
        if program is None:
            own = numbers.to(self._device, non_blocking=True)
            packed = self._run(key, own)
            self._programs[key] = _Program(own, None, packed)
            return packed
        program.numbers.copy_(numbers, non_blocking=True)
        if program.graph is None:
            program.graph, program.packed = self._capture(key, program.numbers)
        program.graph.replay()
        return program.packed

    def _capture(self, key: RoundKey, numbers: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            packed = self._run(key, numbers)
        return graph, packed
