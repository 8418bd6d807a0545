"""Compiles the kernels of `linear` before the first pass needs them, on all processor cores.

Which kernel serves a product follows from its shape alone, and most of the time of a compilation is
the assembler's, a process of its own. So threads are enough, and what an engine would otherwise
compile one after the other, in its first passes, is there when it starts. Triton keeps compiled
kernels on disk: a later start only reads them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from outrider.ops.dispatch import capability, is_hopper
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


def compile_ahead(
    projections: Iterable[Projection], row_counts: Iterable[int], num_threads: int | None = None
) -> int:
    """Compile what `linear` and `gated_linear` will launch on a GPU; nothing is launched.

    Args:
        projections: weights on one CUDA device.
        row_counts: numbers of rows that x will have.
        num_threads: None is one for each core.

    Returns:
        How many different kernels there are.
    """
    counts = sorted(set(row_counts))
    kernels: dict[object, Callable[[], object]] = {}
    for projection in projections:
        most = projection.most_rows
        some = counts if most is None else [count for count in counts if count <= most]
        for kernel, compile_it in _kernels(projection, some):
            kernels.setdefault(kernel, compile_it)
    calls = list(kernels.values())
    for call in calls[:1]:
        call()  # what Triton sets up once, it sets up in one thread
    with ThreadPoolExecutor(num_threads or os.cpu_count() or 1) as pool:
        for future in [pool.submit(call) for call in calls[1:]]:
            future.result()
    return len(calls)


def _kernels(
    projection: Projection, counts: list[int]
) -> Iterator[tuple[object, Callable[[], object]]]:
    """(what tells a kernel from others, the call that compiles it) for each number of rows."""
    weight, gated = projection.weight, projection.gated
    (n, k), dtype, device = weight.shape, weight.dtype, weight.device
    if uses_library(dtype, capability(device)):
        return
    divisible = (dtype, n % 16 == 0, k % 16 == 0, n == 1)
    if is_hopper(weight):
        from outrider.ops.linear.hopper import fits, launch_for

        if fits(weight):
            for count in counts:
                launch = launch_for(count, n, k, dtype, device, gated)
                x, y = _like(weight, count, k), _like(weight, count, n // 2 if gated else n)
                yield (launch.constants, divisible), partial(launch.warmup, x, weight, y)
            return
    from outrider.ops.dispatch import overlaps_launches
    from outrider.ops.linear.triton import choose_tile, launch

    pdl = overlaps_launches(weight)
    for count in counts:
        tile = choose_tile(count, dtype, capability(device))
        x, y = _like(weight, count, k), _like(weight, count, n)
        compile_it = partial(launch, x, weight, y, tile, pdl, warmup=True)
        yield (tile, count <= 32, k, divisible), compile_it


def _like(weight: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """A matrix of the weight's type without memory: compilers look at types and alignment only."""
    return torch.empty((num_rows, num_columns), dtype=weight.dtype, device="meta")
