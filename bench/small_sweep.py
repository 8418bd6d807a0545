"""Time of the small kernels inside a CUDA graph, by number of rows.

    python bench/small_sweep.py --out small.json

Each operation is captured many times in a row, at the sizes of an 8B model, once with launches that
overlap (programmatic dependent launch) and once without. `us` is the time of one call in such a
chain; `gb_per_s` counts every byte read or written once, part of which comes from the L2 cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from outrider.ops.attention_inputs import HeadLayout, HeadNorms
from outrider.ops.attention_inputs.triton import attention_inputs_kernel
from outrider.ops.embedding.triton import embed_kernel
from outrider.ops.gated_delta_rule import DeltaState
from outrider.ops.paired_norms.triton import paired_norms_kernel
from outrider.ops.rms_norm.triton import (
    add_rms_norm_kernel,
    gated_rms_norm_kernel,
    rms_norm_kernel,
)
from outrider.ops.rotary.triton import rotary_angles_kernel
from outrider.ops.silu_mul.triton import silu_mul_kernel
from outrider.ops.state_copy.reference import copy_slots_reference
from outrider.ops.state_copy.triton import copy_slots_kernel

HIDDEN, INTERMEDIATE, VOCABULARY, EPS = 4096, 12288, 32768, 1e-6
LAYOUTS = {
    "8B": (HeadLayout(32, 8, 128, gated=False), 128),
    "9B": (HeadLayout(16, 4, 256, gated=True), 64),
}
NUM_BLOCKS, BLOCK_SIZE = 256, 16
MOST_COPIES = 32


def operations(
    num_rows: int, dtype: torch.dtype
) -> Iterator[tuple[str, int, Callable[[bool], object]]]:
    """Name, elements read and written in `dtype`, and the call, given whether launches overlap."""
    device = torch.device("cuda")

    def randn(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    rows = num_rows * HIDDEN
    x, residual, weight = randn(num_rows, HIDDEN), randn(num_rows, HIDDEN), randn(HIDDEN)
    yield "rms_norm", 2 * rows, lambda pdl: rms_norm_kernel(x, weight, EPS, True, pdl=pdl)
    yield (
        "add_rms_norm",
        4 * rows,
        lambda pdl: add_rms_norm_kernel(x, residual, weight, EPS, True, pdl=pdl),
    )
    inner, gate, inner_weight = randn(num_rows, 32, 128), randn(num_rows, 32, 128), randn(128)
    yield (
        "gated_rms_norm",
        3 * num_rows * 32 * 128,
        lambda pdl: gated_rms_norm_kernel(inner, gate, inner_weight, EPS, pdl=pdl),
    )
    gate_up = randn(num_rows, 2 * INTERMEDIATE)
    yield "silu_mul", 3 * num_rows * INTERMEDIATE, lambda pdl: silu_mul_kernel(gate_up, pdl=pdl)
    table, ids = randn(VOCABULARY, HIDDEN), torch.randint(VOCABULARY, (num_rows,), device=device)
    yield "embed", 2 * rows, lambda pdl: embed_kernel(table, ids, pdl=pdl)
    yield (
        "paired_norms",
        4 * rows,
        lambda pdl: paired_norms_kernel(table, ids, x, weight, weight, EPS, True, pdl=pdl),
    )
    frequencies = torch.rand(64, device=device)
    yield (
        "rotary_angles",
        2 * num_rows * 128 * 4 // dtype.itemsize,
        lambda pdl: rotary_angles_kernel(ids, frequencies, 1.0, pdl=pdl),
    )
    for name, (layout, rotary_dim) in LAYOUTS.items():
        size, kv_heads = layout.head_dim, layout.num_kv_heads
        projected = randn(num_rows, layout.width)
        head_weight = randn(size)
        norms = HeadNorms(head_weight, head_weight, EPS, zero_centred=True)
        angles = rotary_angles_kernel(
            ids, torch.rand(rotary_dim // 2, device=device), 1.0, pdl=False
        )
        pool = torch.zeros((2, NUM_BLOCKS, kv_heads, BLOCK_SIZE, size), dtype=dtype, device=device)
        index = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, device=device)[:num_rows]
        moved = (layout.num_heads + 2 * kv_heads) * size
        yield (
            f"attention_inputs {name}",
            2 * num_rows * moved + 2 * num_rows * rotary_dim * 4 // dtype.itemsize,
            lambda pdl, p=projected, y=layout, n=norms, a=angles, k=pool, i=index: (
                attention_inputs_kernel(p, y, n, a, k, i, pdl=pdl)
            ),
        )


def copies(
    num_pairs: int, dtype: torch.dtype, device: str = "cuda"
) -> Iterator[tuple[str, int, Callable[[bool], object]]]:
    """A layer's state (16 key heads, 32 value heads of 128, 9 rows) from slot to slot, fp32 S."""
    if num_pairs > MOST_COPIES:
        return
    slots, rows, keys, values, dim = 2 * MOST_COPIES, 9, 16, 32, 128

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    ring = zeros(slots, 3 + rows, (2 * keys + values) * dim, dtype=dtype)
    delta = DeltaState(
        zeros(slots, values, dim, dim),
        zeros(2, slots, rows, keys, dim),
        zeros(2, slots, rows, values, dim),
        zeros(2, slots, rows, values),
    )
    order = torch.randperm(slots, device=device)
    pairs = order[:num_pairs], order[-num_pairs:]
    kept, pending = (delta.state, ring), list(vars(delta).values())[1:]
    for name, copy in (("kernel", copy_slots_kernel), ("separate", copy_slots_reference)):
        for with_records in (False, True):
            moved = [*kept, *pending] if with_records else kept
            num_bytes = 2 * num_pairs * sum(x.nbytes for x in moved) // slots
            yield (
                f"state copy, {name}{', records' if with_records else ''}",
                num_bytes // dtype.itemsize,
                lambda _, copy=copy, records=with_records: copy(ring, delta, *pairs, records),
            )


def microseconds(call: Callable[[], object], calls: int = 64, repeats: int = 15) -> float:
    """Time of one of `calls` calls captured in a row; median over replays."""
    call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times: list[float] = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / calls)
    return statistics.median(times[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 32, 128, 1024])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    dtype: torch.dtype = getattr(torch, args.dtype)
    can_overlap = torch.cuda.get_device_capability()[0] >= 9
    cells: list[dict[str, Any]] = []
    for num_rows in args.rows:
        for name, elements, call in chain(operations(num_rows, dtype), copies(num_rows, dtype)):
            plain = microseconds(lambda call=call: call(False))
            best = microseconds(lambda call=call: call(True)) if can_overlap else plain
            cell = {
                "op": name,
                "rows": num_rows,
                "us": round(best, 3),
                "us_without_overlap": round(plain, 3),
                "gb_per_s": round(elements * dtype.itemsize / best / 1e3, 1),
            }
            cells.append(cell)
            print(json.dumps(cell), flush=True)
    if args.out:
        versions = {"torch": torch.__version__, "triton": triton.__version__}
        header = {"device": torch.cuda.get_device_name(), "dtype": args.dtype, **versions}
        args.out.write_text(json.dumps({**header, "cells": cells}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
