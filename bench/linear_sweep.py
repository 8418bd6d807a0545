"""Times `linear` on SM90 against the matrix library, and other tiles against the one it chooses.

    python -m bench.linear_sweep --out sweep.json                 # the table
    python -m bench.linear_sweep --sweep --out sweep.json         # and all candidate tiles
    python -m bench.linear_sweep --segments 1 --shapes o down     # another cut of the sum

Every number is the time per call of a CUDA graph that goes through enough copies of the weight to
find none of them in L2. A cell reads: microseconds of ours / of the library, then ours as a share
of 4.2 TB/s where bytes are the limit and in TFLOP/s where products are. Candidates are compiled by
several processes before anything is timed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.ops.linear.hopper_tiles import SHARED_MEMORY, Product, Tile, choose_tile
from outrider.ops.linear.segments import MAX_COUNTERS, num_segments

SHAPES = {
    "qkv": (4096, 6144),
    "o": (4096, 4096),
    "gate_up": (4096, 24576),
    "down": (12288, 4096),
    "in_proj": (4096, 12352),
    "gated_qkv": (4096, 10240),
    "eagle_qkv": (8192, 6144),
    "draft_head": (4096, 32000),
    "head": (4096, 151936),
    "down_4b": (9728, 2560),
}
"""Inner and outer sizes: Qwen3-8B, Qwen3.5-9B, EAGLE3, Qwen3-4B."""

ROW_COUNTS = [1, 4, 16, 32, 64, 128, 256, 1024]
BYTES_PER_SECOND = 4.2e12
BYTES_IN_ROTATION = 400 << 20
NUM_MULTIPROCESSORS = 132


def candidates(product: Product) -> Iterator[Tile]:
    """Tiles worth trying for a product, among them what choose_tile may not know of."""
    num_rows = product.num_rows
    if num_rows <= 32:
        tokens = next(size for size in (8, 16, 32) if size >= num_rows)
        bases = [(tokens, 64, 4, True)] + [(tokens, 128, 8, True)] * (tokens == 32)
        depths = (128, 256)
    elif num_rows <= 64:
        bases = [(64, 64, 4, True), (64, 128, 8, True), (64, 32, 4, False), (64, 64, 4, False)]
        depths = (64, 128)
    else:
        bases = [(128, outputs, 8, False) for outputs in (64, 128, 256)]
        bases += [(128, 128, 8, True), (128, 64, 4, True)]
        if num_rows > 128:
            bases += [(256, 128, 8, True), (256, 64, 4, True)]
        depths = (64, 128) if num_rows <= 256 else (64,)
    for tokens, outputs, num_warps, weights_first in bases:
        for depth in depths:
            for spread in (False, True) if product.segments > 1 else (False,):
                if product.k % (depth * product.segments):
                    continue
                if spread and product.num_programs(tokens, outputs, False) > MAX_COUNTERS:
                    continue
                # Two sets of sums of 128 registers each do not fit.
                if not spread and product.segments > 1 and tokens * outputs > 512 * num_warps * 4:
                    continue
                stage_counts: set[int] = set()
                for resident in (1, 2, 3):
                    room = SHARED_MEMORY // resident - 1024 - 8 * 12
                    stage_counts.add(min(room // ((tokens + outputs) * depth * 2), 10))
                for stages in sorted(stage_counts):
                    if 2 <= stages <= product.k // depth:
                        yield Tile(tokens, outputs, depth, stages, num_warps, weights_first, spread)


def compile_here(product: Product, tile: Tile, dtype: torch.dtype) -> None:
    """In a process of its own: fill Triton's cache on disk with one kernel."""
    from outrider.ops.linear.hopper import Launch

    num_rows, n, k = product[:3]
    x, weight = torch.empty(num_rows, k, dtype=dtype), torch.empty(n, k, dtype=dtype)
    Launch(product, tile).warmup(x, weight, torch.empty(num_rows, n, dtype=dtype))


def become_compiler() -> None:
    """Compile for SM90 without a context on the card."""
    from tests.ops.cross_compile import mock_driver

    torch.set_num_threads(1)
    mock_driver(90)


def compile_all(jobs: list[tuple[Product, Tile]], dtype: torch.dtype) -> None:
    """Compile what differs; N and K are no constants, but divisibility and one row of tiles are."""
    distinct: dict[object, tuple[Product, Tile]] = {}
    for product, tile in jobs:
        one_row = product.num_rows <= tile.tokens
        distinct[tile, product.segments, one_row, product.n % 16, product.k % 16] = (product, tile)
    begin = time.perf_counter()
    workers = max(1, min(16, (os.cpu_count() or 1) - 1))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, become_compiler) as pool:
        futures = {pool.submit(compile_here, *job, dtype): job for job in distinct.values()}
        for future in as_completed(futures):
            if error := future.exception():
                print(f"does not compile: {tuple(futures[future][1])}: {error!r}"[:300])
    print(f"{len(distinct)} kernels compiled, {time.perf_counter() - begin:.0f} s", flush=True)


def graph_time(calls: list[Callable[[], object]], replays: int = 7) -> float:
    """Microseconds per call inside a graph of all calls."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
    for _ in range(replays + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[2:]) * 1e3 / len(calls)


class Cell:
    """One weight shape and one number of rows."""

    def __init__(self, name: str, product: Product, dtype: torch.dtype, weights: list[Tensor]):
        self.name, self.product, self.weights = name, product, weights
        self.x = torch.randn(product.num_rows, product.k, dtype=dtype, device="cuda")
        self.y = torch.empty(product.num_rows, product.n, dtype=dtype, device="cuda")

    def time(self, call: Callable[[Tensor], object]) -> float:
        """Microseconds of a call with a weight, weights taking turns."""
        turns = itertools.islice(itertools.cycle(self.weights), max(len(self.weights), 6))
        return graph_time([partial(call, weight) for weight in turns])

    def library(self) -> float:
        return self.time(lambda weight: torch.mm(self.x, weight.T, out=self.y))

    def ours(self, tile: Tile) -> float:
        from outrider.ops.linear.hopper import Launch

        launch = Launch(self.product, tile)
        return self.time(lambda weight: launch(self.x, weight, self.y))

    def result(self) -> Tensor:
        """Output of the last call of the last graph."""
        return self.y.clone()

    def rate(self, microseconds: float) -> str:
        num_rows, n, k = self.product[:3]
        if num_rows >= 256:
            return f"{2e-6 * num_rows * n * k / microseconds:.0f} TF"
        return f"{2 * (n * k + num_rows * (n + k)) / microseconds / BYTES_PER_SECOND * 1e6:.2f}"


def measure(cell: Cell, sweep: bool, deadline: float) -> dict[str, Any]:
    """Times of one cell; a candidate that fails is printed and left out."""
    chosen = choose_tile(cell.product)
    row: dict[str, Any] = {"shape": cell.name, **cell.product._asdict(), "chosen": chosen}
    row["library_us"] = cell.library()
    row["ours_us"] = cell.ours(chosen)
    expected = cell.result()
    text = f"{row['ours_us']:7.1f} / {row['library_us']:7.1f}  {cell.rate(row['ours_us']):>7}"
    if sweep:
        times: list[tuple[float, Tile]] = []
        for tile in candidates(cell.product):
            if time.perf_counter() > deadline:
                print("out of time: the sweep of this cell is not complete")
                break
            try:
                times.append((cell.ours(tile), tile))
                if not torch.equal(cell.result(), expected):
                    print(f"OTHER BITS: {cell.name} {cell.product} {tuple(tile)}")
            except Exception as error:
                print(f"failed: {cell.name} {cell.product.num_rows} {tuple(tile)}: {error!r}"[:300])
                torch.cuda.synchronize()  # a sticky error ends the sweep here
        times.sort()
        row["candidates"] = times[:8]
        for microseconds, tile in times[:2]:
            text += f"   {microseconds:7.1f} {fields(tile)}"
        text += f"   chosen {fields(chosen)}"
    print(
        f"{cell.name:>10} S {cell.product.segments} {cell.product.num_rows:>5}: {text}", flush=True
    )
    return row


def fields(tile: Tile) -> str:
    """tokens x outputs x depth / stages; w: weights first, s: spread."""
    marks = "w" * tile.weights_first + "s" * tile.spread
    return f"{tile.tokens}x{tile.outputs}x{tile.depth}/{tile.stages}{marks}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=ROW_COUNTS)
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--segments", type=int, help="instead of the rule's")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--seconds", type=float, default=90, help="limit of the whole run")
    parser.add_argument("--out", type=Path, help="JSON file")
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    deadline = time.perf_counter() + arguments.seconds
    products = {
        (name, num_rows): Product(
            num_rows, n, k, arguments.segments or num_segments(n, k), NUM_MULTIPROCESSORS
        )
        for name in arguments.shapes
        for k, n in [SHAPES[name]]
        for num_rows in arguments.rows
        if n < 100_000 or num_rows <= 256  # heads see the last row of a prompt only
    }
    jobs = [(product, choose_tile(product)) for product in products.values()]
    if arguments.sweep:
        jobs += [(p, tile) for p in products.values() for tile in candidates(p)]
    compile_all(jobs, dtype)
    rows: list[dict[str, Any]] = []
    for name in arguments.shapes:
        k, n = SHAPES[name]
        copies = max(2, min(16, BYTES_IN_ROTATION // (2 * n * k)))
        weights = [torch.randn(n, k, dtype=dtype, device="cuda") / k**0.5 for _ in range(copies)]
        for num_rows in arguments.rows:
            if (name, num_rows) not in products or time.perf_counter() > deadline:
                continue
            cell = Cell(name, products[name, num_rows], dtype, weights)
            rows.append(measure(cell, arguments.sweep, deadline))
            if arguments.out:
                arguments.out.write_text(json.dumps(rows))
        del weights
    print(f"{time.perf_counter() - deadline + arguments.seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
