"""Times `linear` on SM90 against the matrix library, and other tiles against the one it chooses.

    python -m bench.linear_sweep --out sweep.json                 # the table
    python -m bench.linear_sweep --sweep --out sweep.json         # and candidate tiles
    python -m bench.linear_sweep --segments 1 --shapes o down     # another cut of the sum
    python -m bench.linear_sweep --chain --out chain.json         # layers of dependent operations
    python -m bench.linear_sweep --chain --sweep --cut qkv 2      # one projection's sum cut in two

Every number is the time per call of a CUDA graph that goes through enough copies of the weight to
find none of them in L2. A cell reads: microseconds of ours / of the library, then ours as a share
of 4.2 TB/s where bytes are the limit and in TFLOP/s where products are. With --sweep the best two
candidates follow, then the tile that is chosen. --chain times a whole layer of Qwen3-8B without
attention, or of one that has Qwen3.5-9B's wider first projections instead, where a kernel starts
while the one before ends; with --sweep it also tries other tiles for one projection at a time.
Kernels are compiled by several processes before anything is timed; what is not ready after half of
the time is left out.
"""

from __future__ import annotations

import argparse
import gc
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

from outrider.ops.linear import gated_linear, linear
from outrider.ops.linear.hopper_tiles import (
    HALF,
    SHARED_MEMORY,
    WIDTHS,
    Product,
    Tile,
    choose_tile,
    estimate,
    fill_ring,
    tiles,
)
from outrider.ops.linear.segments import num_segments
from outrider.ops.rms_norm import add_rms_norm
from outrider.ops.silu_mul import silu_mul

SHAPES = {
    "qkv": (4096, 6144),
    "o": (4096, 4096),
    "gate_up": (4096, 24576),
    "down": (12288, 4096),
    "in_proj": (4096, 12352),
    "gated_qkv": (4096, 10240),
    "eagle_qkv": (8192, 6144),
    "fc": (8192, 4096),
    "draft_head": (4096, 32000),
    "head": (4096, 151936),
    "head_9b": (4096, 248320),
    "down_4b": (9728, 2560),
}
"""Inner and outer sizes: Qwen3-8B, Qwen3.5-9B, EAGLE3, Qwen3-4B."""

ROW_COUNTS = [1, 4, 16, 32, 64, 128, 256, 1024]
BYTES_PER_SECOND = 4.2e12
BYTES_IN_ROTATION = 400 << 20
NUM_MULTIPROCESSORS = 132
MAX_CANDIDATES = 12


def candidates(product: Product) -> list[Tile]:
    """Up to MAX_CANDIDATES tiles besides the chosen one, the likely ones first."""
    found = skinny_candidates(product) if product.num_rows <= 32 else wide_candidates(product)
    chosen = choose_tile(product)
    distinct = dict.fromkeys(
        tile
        for tile in found
        if tile.stages >= 2 and product.k % (tile.depth * product.segments) == 0 and tile != chosen
    )
    return list(distinct)[:MAX_CANDIDATES]


def skinny_candidates(product: Product) -> Iterator[Tile]:
    """Rings of one, two and three programs per multiprocessor, and the other orientation."""
    tokens = next(size for size in (8, 16, 32) if size >= product.num_rows)
    spread = product.segments > 1
    yield fill_ring(product, 64, fitting_width(product), 128, False, False)
    yield fill_ring(product, 64, fitting_width(product), 128, False, False, HALF)
    for depth in (128, 256):
        for budget in (HALF, 3 * HALF // 2, 2 * HALF):
            yield fill_ring(product, tokens, 64, depth, True, spread, budget)
    yield fill_ring(product, tokens, 128, 128, True, spread)
    if spread:
        yield fill_ring(product, tokens, 64, 128, True, False)
        yield fill_ring(product, tokens, 64, 128, True, False, HALF)


def fitting_width(product: Product) -> int:
    """The fewest outputs a program with which every multiprocessor has one program at most."""
    fits = (w for w in WIDTHS if -(-product.n // w) <= product.num_multiprocessors)
    return next(fits, WIDTHS[-1])


def wide_candidates(product: Product) -> Iterator[Tile]:
    """The best by estimate, also with steps of other length or in half of the memory."""
    best = sorted(tiles(product), key=partial(estimate, product))
    for tile in best[:3]:
        yield tile
        yield other_ring(product, tile, depth=192 - tile.depth)
    # Powers of two, which may do better than their number of programs says.
    for tokens, outputs in ((128, 64), (64, 128), (128, 128)):
        yield fill_ring(product, tokens, outputs, 64, False, product.segments > 1)
    # Of the others, one for each size of tile, whichever way round.
    seen = {tile.tokens * tile.outputs for tile in best[:3]}
    for tile in best[3:12]:
        if tile.tokens * tile.outputs not in seen or tile.spread:
            seen.add(tile.tokens * tile.outputs)
            yield tile
    for tile in best[:3]:
        yield other_ring(product, tile, budget=HALF)


def other_ring(
    product: Product, tile: Tile, depth: int | None = None, budget: int = SHARED_MEMORY
) -> Tile:
    depth = depth or tile.depth
    how = (tile.weights_first, tile.spread)
    return fill_ring(product, tile.tokens, tile.outputs, depth, *how, budget)


def compile_here(product: Product, tile: Tile, dtype: torch.dtype, chain: bool) -> None:
    """In a process of its own: fill Triton's cache on disk with one kernel."""
    from outrider.ops.linear.hopper import Launch

    num_rows, n, k = product[:3]
    x, weight = torch.empty(num_rows, k, dtype=dtype), torch.empty(n, k, dtype=dtype)
    gated = chain and n == SHAPES["gate_up"][1]
    y = torch.empty(num_rows, n // 2 if gated else n, dtype=dtype)
    Launch(product, tile, gated).warmup(x, weight, y)


def become_compiler() -> None:
    """Compile for SM90 without a context on the card."""
    from tests.ops.cross_compile import mock_driver

    torch.set_num_threads(1)
    mock_driver(90)


def kernel_key(product: Product, tile: Tile) -> tuple[object, ...]:
    """What a compiled kernel differs in: N and K count only as multiples of 16 or not."""
    one_row = product.num_rows <= tile.tokens
    return (
        tile,
        product.n == SHAPES["gate_up"][1],
        product.segments,
        one_row,
        product.n % 16 == 0,
        product.k % 16 == 0,
    )


def compile_all(
    jobs: list[tuple[Product, Tile]], dtype: torch.dtype, chain: bool, deadline: float
) -> set[tuple[object, ...]]:
    """Compile jobs, the first ones first, as many as the time allows; returns their kernel_key."""
    distinct = {kernel_key(*job): job for job in reversed(jobs)}
    keys = list(dict.fromkeys(kernel_key(*job) for job in jobs))
    begin = time.perf_counter()
    workers = max(1, min(14, (os.cpu_count() or 1) - 1))
    context = multiprocessing.get_context("spawn")
    done: set[tuple[object, ...]] = set()
    with ProcessPoolExecutor(workers, context, become_compiler) as pool:
        futures = {pool.submit(compile_here, *distinct[key], dtype, chain): key for key in keys}
        try:
            for future in as_completed(futures, timeout=max(1.0, deadline - begin)):
                if error := future.exception():
                    print(f"does not compile: {futures[future]}: {error!r}"[:300])
                else:
                    done.add(futures[future])
        except TimeoutError:
            pool.shutdown(wait=True, cancel_futures=True)
    print(f"{len(done)} of {len(keys)} kernels, {time.perf_counter() - begin:.0f} s", flush=True)
    return done


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


def measure(cell: Cell, sweep: bool, ready: set[Any], deadline: float) -> dict[str, Any]:
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
            if kernel_key(cell.product, tile) not in ready:
                continue
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


FIRST = ("qkv", "gated_qkv", "in_proj")
"""First projections of a layer: of Qwen3-8B, and the two of Qwen3.5-9B."""
OTHERS = ("o", "gate_up", "down")
HIDDEN = 4096
NUM_LAYERS = 4

CUTS: dict[str, int] = {}
"""Segments that are not the rule's."""


def product_of(name: str, num_rows: int) -> Product:
    k, n = SHAPES[name]
    return Product(num_rows, n, k, CUTS.get(name) or num_segments(n, k), NUM_MULTIPROCESSORS)


class Chain:
    """Layers without attention, where each operation reads what the last has written."""

    def __init__(self, first: str, dtype: torch.dtype) -> None:
        self.first = first
        self.names = (first, *OTHERS)
        self.norm = torch.ones(HIDDEN, dtype=dtype, device="cuda")
        shapes = {name: SHAPES[name] for name in self.names}
        self.layers = [
            {
                name: torch.randn(n, k, dtype=dtype, device="cuda") / k**0.5
                for name, (k, n) in shapes.items()
            }
            for _ in range(NUM_LAYERS)
        ]
        self.floor = 2e6 * sum(n * k for k, n in shapes.values()) / BYTES_PER_SECOND

    def run(self, x: Tensor, project: Callable[[str, Tensor, Tensor], Tensor]) -> Tensor:
        """x [R, HIDDEN] through all layers, projections by `project(name, x, weight)`."""
        hidden, stream = x, x
        for layer in self.layers:
            normed, stream = add_rms_norm(hidden, stream, self.norm, 1e-6, zero_centred=False)
            mixed = project(self.first, normed, layer[self.first])[:, :HIDDEN]
            mixed = project("o", mixed, layer["o"])
            normed, stream = add_rms_norm(mixed, stream, self.norm, 1e-6, zero_centred=False)
            hidden = project("gate_up", normed, layer["gate_up"])
            hidden = project("down", hidden, layer["down"])
        return hidden

    def time(self, x: Tensor, project: Callable[[str, Tensor, Tensor], Tensor]) -> float:
        """Microseconds of a layer."""
        return graph_time([lambda: self.run(x, project)], replays=11) / NUM_LAYERS

    def ours(self, x: Tensor, chosen: dict[str, Tile]) -> float:
        """Microseconds of a layer with certain tiles."""
        from outrider.ops.linear.hopper import Launch

        launches = {
            name: Launch(product_of(name, len(x)), tile, name == "gate_up")
            for name, tile in chosen.items()
        }

        def project(name: str, x: Tensor, weight: Tensor) -> Tensor:
            y = x.new_empty(len(x), len(weight) // 2 if name == "gate_up" else len(weight))
            launches[name](x, weight, y)
            return y

        return self.time(x, project)


class Descent:
    """The best tiles found so far for a chain at one number of rows, one projection at a time."""

    def __init__(self, chain: Chain, x: Tensor, ready: set[Any], deadline: float) -> None:
        self.chain, self.x, self.ready, self.deadline = chain, x, ready, deadline
        self.best = {name: choose_tile(product_of(name, len(x))) for name in chain.names}
        self.start = self.best_us = min(chain.ours(x, self.best) for _ in range(3))

    def improve(self, name: str, found: list[Tile]) -> list[tuple[float, Tile]]:
        """Try tiles for a projection and keep the best; returns all times, sorted."""
        product = product_of(name, len(self.x))
        times = {self.best[name]: self.best_us}
        for tile in found:
            if time.perf_counter() < self.deadline and kernel_key(product, tile) in self.ready:
                times[tile] = self.chain.ours(self.x, self.best | {name: tile})
        for tile in sorted(times, key=times.__getitem__)[:2]:
            if times[tile] < self.best_us - 0.15:
                again = self.chain.ours(self.x, self.best | {name: tile})
                times[tile] = max(times[tile], again)  # a lucky measurement does not count
        tile = min(times, key=times.__getitem__)
        if times[tile] < self.best_us - 0.15:
            self.best[name], self.best_us = tile, times[tile]
        return sorted((us, tile) for tile, us in times.items())[:8]


def project_by_library(name: str, x: Tensor, weight: Tensor) -> Tensor:
    y = torch.mm(x, weight.T)
    return silu_mul(y) if name == "gate_up" else y


def project_by_ours(name: str, x: Tensor, weight: Tensor) -> Tensor:
    return gated_linear(x, weight) if name == "gate_up" else linear(x, weight)


def measure_chain(
    chain: Chain, num_rows: int, sweep: bool, ready: set[Any], deadline: float
) -> dict[str, Any]:
    """A layer by the library, by ours, and with the best tile for each projection in turn."""
    x = torch.randn(num_rows, HIDDEN, dtype=chain.norm.dtype, device="cuda")
    row: dict[str, Any] = {"first": chain.first, "num_rows": num_rows, "floor_us": chain.floor}
    row["library_us"] = chain.time(x, project_by_library)
    row["ours_us"] = chain.time(x, project_by_ours)
    text = f"{row['ours_us']:7.1f} / {row['library_us']:7.1f}  floor {chain.floor:.1f}"
    if sweep:
        descent = Descent(chain, x, ready, deadline)
        # What others prefer depends on the largest; only the first is new in the other layers.
        names = ("gate_up", "down", "qkv", "o") if chain.first == "qkv" else (chain.first,)
        for name in names:
            row[name] = descent.improve(name, candidates(product_of(name, num_rows)))
        row["best_us"], row["best"] = descent.best_us, descent.best
        text += f"   {descent.start:7.1f} -> {descent.best_us:7.1f}"
        text += "".join(f"  {name} {fields(tile)}" for name, tile in descent.best.items())
    print(f"chain {chain.first} {num_rows:>5}: {text}", flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description="Time linear layers on SM90.")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=ROW_COUNTS)
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--segments", type=int, help="instead of the rule's")
    parser.add_argument("--cut", nargs=2, metavar=("SHAPE", "SEGMENTS"), help="of one shape only")
    parser.add_argument("--first", nargs="+", choices=FIRST, default=FIRST, help="of the chains")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--chain", action="store_true")
    parser.add_argument("--seconds", type=float, default=90, help="limit of the whole run")
    parser.add_argument("--out", type=Path, help="JSON file")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    dtype = getattr(torch, arguments.dtype)
    names: list[str] = [*arguments.first, *OTHERS] if arguments.chain else arguments.shapes
    if arguments.segments:
        CUTS.update({name: arguments.segments for name in names})
    if arguments.cut:
        CUTS[arguments.cut[0]] = int(arguments.cut[1])
    products = {
        (name, num_rows): product_of(name, num_rows)
        for name in names
        for num_rows in arguments.rows
        if SHAPES[name][1] < 100_000 or num_rows <= 256  # heads see a prompt's last row only
    }
    jobs = [(product, choose_tile(product)) for product in products.values()]
    if arguments.sweep:
        ranked = [[(p, tile) for tile in candidates(p)] for p in products.values()]
        jobs += [job for jobs in itertools.zip_longest(*ranked) for job in jobs if job]
    ready = compile_all(jobs, dtype, arguments.chain, begin + arguments.seconds / 2)
    gc.freeze()  # a capture may collect garbage first
    deadline = begin + arguments.seconds
    rows: list[dict[str, Any]] = []

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        if arguments.out:
            arguments.out.write_text(json.dumps(rows))

    if arguments.chain:
        for first in arguments.first:
            chain = Chain(first, dtype)
            for num_rows in arguments.rows:
                if time.perf_counter() < deadline:
                    keep(measure_chain(chain, num_rows, arguments.sweep, ready, deadline))
    else:
        for name in names:
            k, n = SHAPES[name]
            copies = max(2, min(16, BYTES_IN_ROTATION // (2 * n * k)))
            weights = [
                torch.randn(n, k, dtype=dtype, device="cuda") / k**0.5 for _ in range(copies)
            ]
            for num_rows in arguments.rows:
                if (name, num_rows) in products and time.perf_counter() < deadline:
                    cell = Cell(name, products[name, num_rows], dtype, weights)
                    keep(measure(cell, arguments.sweep, ready, deadline))
            del weights
    print(f"{time.perf_counter() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
