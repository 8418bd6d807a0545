"""Rounds as CUDA graphs. Nobody else knows of graphs.

The first round of a key runs as it is, which compiles and loads its kernels; the second is captured
and from then on replayed. Both are the same kernels with the same numbers, so the same bits.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle

import torch
from torch import Tensor

from outrider.ops.bookkeeping import transfer
from outrider.runner.inputs import Work

NUM_BUFFERS = 4
"""Host buffers of a graph: more than there are rounds in flight, which look_ahead bounds to 3."""


@dataclass(frozen=True)
class RoundKey:
    """What two rounds must share to be one graph.

    Attributes:
        num_sequences: B, padding included.
        num_verified: T.
        table_width: columns of the block tables.
        layout: of the slot table, see SlotTable.layout.
    """

    num_sequences: int
    num_verified: int
    table_width: int
    work: Work
    layout: int


class _Buffers:
    """Pinned host tensors of one shape, taken in turn and never given back to the allocator."""

    def __init__(self, like: Tensor) -> None:
        shape, dtype = like.shape, like.dtype
        self._next = cycle(
            [torch.empty(shape, dtype=dtype, pin_memory=True) for _ in range(NUM_BUFFERS)]
        )

    def take(self) -> Tensor:
        return next(self._next)


@dataclass
class _Program:
    """One key's graph.

    Attributes:
        numbers: what the host says of the round; the graph reads it here.
        packed: the results, where the graph leaves them.
        graph: None until the key is met again.
    """

    numbers: Tensor
    packed: Tensor
    graph: torch.cuda.CUDAGraph | None = None
    sent: _Buffers = field(init=False)
    received: _Buffers = field(init=False)

    def __post_init__(self) -> None:
        self.sent, self.received = _Buffers(self.numbers), _Buffers(self.packed)


@dataclass(frozen=True)
class Arriving:
    """Numbers on their way to the host: there once the event has happened; None is at once."""

    packed: Tensor
    event: torch.cuda.Event | None

    @classmethod
    def send(cls, numbers: Tensor) -> Arriving:
        """Start to copy; nothing waits."""
        if not numbers.is_cuda:
            return cls(numbers, None)
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        event = torch.cuda.Event(enable_timing=True)  # the end of a pass, see timing.py
        event.record()
        return cls(host, event)


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
        self._layout = 0

    def run(self, key: RoundKey, numbers: Tensor) -> Arriving:
        """Run a round and send its packed results on their way; nothing waits.

        Args:
            numbers: see inputs.round_numbers, on the CPU.
        """
        if key.layout != self._layout:
            # Graphs of another layout read memory that is given back: they may never run again.
            torch.cuda.synchronize(self._device)
            self._programs.clear()
            self._layout = key.layout
        program = self._programs.get(key)
        if program is None:
            own = numbers.to(self._device)
            program = self._programs[key] = _Program(own, self._run(key, own))
        else:
            host = program.sent.take()
            host.copy_(numbers)
            transfer(host, program.numbers)
            if program.graph is None:
                program.graph, program.packed = self._capture(key, program.numbers)
            program.graph.replay()
        received = program.received.take()
        transfer(program.packed, received)
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return Arriving(received, event)

    def _capture(self, key: RoundKey, numbers: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        with (
            _without_collection(),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            packed = self._run(key, numbers)
        return graph, packed


@contextmanager
def _without_collection() -> Generator[None]:
    """Keep Python's collector from freeing something of CUDA's, which would end a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def bucket(num_sequences: int) -> int:
    """Sequences that a round on a GPU is padded to: few sizes, so that few graphs are made."""
    sizes = (1, 2, 4, 8, 16, 24, 32, 48, 64)
    return next((s for s in sizes if s >= num_sequences), -(-num_sequences // 32) * 32)


def power_of_two(number: int) -> int:
    """The least one that is not smaller."""
    return 1 << max(number - 1, 0).bit_length()
