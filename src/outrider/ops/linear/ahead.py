"""Compiles the kernels of `linear` before the first pass needs them, on all processor cores.

Which kernel serves a product follows from its shape alone, and most of the time of a compilation is
the assembler's, a process of its own. So threads are enough, and what an engine would otherwise
compile one after the other, in its first passes, is there when it starts. Triton keeps compiled
kernels on disk: a later start only reads them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from outrider.ops.dispatch import capability, is_hopper, overlaps_launches
from outrider.ops.linear.segments import uses_library


@dataclass(frozen=True)
class Projection:
    """A weight [N, K] and what is multiplied by it.

    Attributes:
        gated: whether `gated_linear` does it.
        most_rows: x never has more; None is any number.
    """

    weight: Tensor
    gated: bool = False
    most_rows: int | None = None


def compile_ahead(projections: Iterable[Projection], row_counts: Iterable[int]) -> int:
    """Compile what `linear` and `gated_linear` will launch on a GPU; nothing is launched.

    Args:
        projections: weights on one CUDA device.
        row_counts: numbers of rows that x will have.

    Returns:
        How many different kernels there are.
    """
    counts = sorted(set(row_counts))
    kernels: dict[object, Callable[[], object]] = {}
    for projection in projections:
        most = projection.most_rows
        for count in counts:
            if most is None or count <= most:
                kernels.setdefault(*_kernel(projection, count))
    kernels.pop(None, None)
    calls = list(kernels.values())
    for call in calls[:1]:
        call()  # what Triton sets up once, it sets up in one thread
    with ThreadPoolExecutor(_num_cores()) as pool:
        for future in [pool.submit(call) for call in calls[1:]]:
            future.result()
    return len(calls)


def _num_cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _kernel(projection: Projection, count: int) -> tuple[object, Callable[[], object]]:
    """What tells the kernel from others, and the call that compiles it; None for the library's."""
    weight, gated = projection.weight, projection.gated
    (n, k), dtype, device = weight.shape, weight.dtype, weight.device
    x, y = _like(weight, count, k), _like(weight, count, n)
    divisible = (dtype, n % 16 == 0, k % 16 == 0, n == 1, count == 1)
    if uses_library(dtype, capability(device)):
        return None, lambda: None
    if is_hopper(weight):
        from outrider.ops.linear.hopper import fits, launch_for

        if fits(weight):
            launch = launch_for(count, n, k, dtype, device, gated)
            y = y[:, : n // 2] if gated else y
            key = (launch.constants, launch.tile.num_warps, divisible[:-1])
            return key, partial(launch.warmup, x, weight, y)
    from outrider.ops.linear.triton import choose_tile, constants_of, launch

    tile, pdl = choose_tile(count, dtype, capability(device)), overlaps_launches(weight)
    constants = constants_of(count, n, k, tile, pdl)
    key = (tuple(constants.values()), divisible)
    return key, partial(launch, x, weight, y, tile, pdl, warmup=True)


def _like(weight: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """A matrix of the weight's type without memory: compilers look at types and alignment only."""
    return torch.empty((num_rows, num_columns), dtype=weight.dtype, device="meta")
