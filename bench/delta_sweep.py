"""Time of a gated delta net's two kernels in a round, and what they move; or of a prompt's chunk.

    python bench/delta_sweep.py --out delta.json
    python bench/delta_sweep.py --prefill [--options]

Every cell is a CUDA graph of calls on different slots, so that no state is still in the L2 cache
when it is read. `inputs` is the kernel in front (convolution, norms, gates), `rule` replays what
the last round accepted (all of its rows, here) and runs T rows. Share: the states' read and write
at 4.2 TB/s, which is what one H200 sustains, over the time measured.

With --prefill: one layer's call for a whole prompt, its time on the GPU (a graph) and on the host
(eager, nothing waited for), and the GPU's time by kernel. --options tries other tile sizes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from outrider.ops.gated_delta_net import DeltaNetRows, DeltaNetWeights, delta_net_prefill
from outrider.ops.gated_delta_net.chunked import OPTIONS, chunked_rule
from outrider.ops.gated_delta_net.triton import launch_inputs
from outrider.ops.gated_delta_rule import DeltaState, PendingRecords
from outrider.ops.gated_delta_rule.hopper import launch_rows, tile
from outrider.ops.gated_delta_rule.triton import RuleInputs

BYTES_PER_SECOND = 4.2e12
KEY_HEADS, DIM, WIDTH, MAX_ROWS = 16, 128, 4, 9
NUM_SLOTS = 256
TILES = ((16, 1), (32, 1), (64, 1), (32, 2), (32, 4))
# Other options worth trying for the kernels of a prompt's chunk.
PREFILL_OPTIONS: dict[str, list[dict[str, int]]] = {
    "sum_decays": [{"num_warps": 2}],
    "solve": [{"BK": k, "num_warps": w} for k, w in ((32, 1), (64, 1), (128, 2), (64, 4))],
    "weigh": [
        {"BK": k, "BV": k, "num_warps": w, "num_stages": s}
        for k, w, s in ((64, 4, 2), (64, 8, 3), (128, 4, 2), (128, 8, 2))
    ],
    "states": [
        {"BV": v, "num_warps": w, "num_stages": s}
        for v, w, s in ((32, 4, 3), (32, 4, 4), (32, 2, 2), (64, 4, 3), (16, 4, 3), (16, 2, 3))
    ],
    "outputs": [
        {"BK": k, "BV": v, "num_warps": w, "num_stages": s}
        for k, v, w, s in ((64, 64, 4, 2), (128, 64, 4, 2), (128, 128, 8, 2), (64, 128, 8, 2))
    ],
}


@dataclass(frozen=True)
class Cell:
    """One point of the sweep; shape is a tile, None for the one that would be chosen."""

    value_heads: int
    batch: int
    rows: int
    shape: tuple[int, int] | None = None

    @property
    def channels(self) -> int:
        return (2 * KEY_HEADS + self.value_heads) * DIM

    @property
    def tile(self) -> tuple[int, int]:
        return self.shape or tile(self.batch * self.value_heads, self.rows)

    def bytes_moved(self, dtype: torch.dtype, state_dtype: torch.dtype) -> dict[str, float]:
        """Bytes of one sequence, every byte that is read or written once, in units of its state.

        `rule` is what kernels.md counts: the state in and out, records replayed, records
        written. `all` adds projections, the ring, what the first kernel hands to the second, and
        outputs.
        """
        state = self.value_heads * DIM * DIM * state_dtype.itemsize
        record = 4 * (KEY_HEADS * DIM + self.value_heads * (DIM + 1))
        rule = 2 * state + 2 * self.rows * record
        item = dtype.itemsize
        projected = (self.channels + 2 * self.value_heads) * item
        ring = (self.rows + WIDTH - 1) * self.channels * item
        handed = 4 * (KEY_HEADS * (DIM + 1) + self.value_heads)
        handed += self.value_heads * DIM * item
        output = self.value_heads * DIM * item
        everything = rule + self.rows * (projected + 2 * handed + output) + ring
        return {"rule": round(rule / state, 3), "all": round(everything / state, 3)}


class Layer:
    """Storage of NUM_SLOTS slots, weights, and the rows of the largest cell."""

    def __init__(
        self,
        value_heads: int,
        dtype: torch.dtype,
        state_dtype: torch.dtype,
        device: str,
        slots: int,
    ) -> None:
        def noise(*shape: int, scale: float = 1.0, kind: torch.dtype = torch.float32) -> Tensor:
            return (torch.randn(shape, device=device, dtype=torch.float32) * scale).to(kind)

        records = (2, slots, MAX_ROWS)
        self.delta = DeltaState(
            noise(slots, value_heads, DIM, DIM, scale=0.1, kind=state_dtype),
            noise(*records, KEY_HEADS, DIM, scale=0.09),
            noise(*records, value_heads, DIM, scale=0.3),
            torch.rand(*records, value_heads, device=device) * 0.2 + 0.8,
        )
        channels = (2 * KEY_HEADS + value_heads) * DIM
        self.ring = noise(slots, WIDTH - 1 + MAX_ROWS, channels, kind=dtype)
        self.weights = DeltaNetWeights(
            noise(channels, WIDTH, scale=0.5, kind=dtype),
            torch.linspace(0.02, 0.3, value_heads, device=device).log(),
            torch.ones(value_heads, device=device),
        )
        self.value_heads, self.dtype = value_heads, dtype

    def run(self, cell: Cell, slots: Tensor, *, overlap: bool) -> dict[str, Callable[..., Any]]:
        """The cell's two launches on these slots."""
        count, device = cell.batch * cell.rows, slots.device
        packed = torch.randn(count, cell.channels + 2 * cell.value_heads, device=device)
        b, a = packed.to(self.dtype)[:, cell.channels :].split(cell.value_heads, dim=1)
        rows = DeltaNetRows(packed.to(self.dtype)[:, : cell.channels], a, b)
        num_slots = self.ring.shape[0]
        pending = PendingRecords(
            *(
                torch.full((num_slots,), value, dtype=torch.int64, device=device)
                for value in (0, cell.rows, cell.rows)
            )
        )
        starts = torch.full((cell.batch,), 1000, dtype=torch.int64, device=device)
        num_rows = torch.full_like(starts, cell.rows)
        floats = {"dtype": torch.float32, "device": device}
        inputs = RuleInputs(
            torch.empty(count, KEY_HEADS, DIM, **floats),
            torch.empty(count, cell.value_heads, DIM, dtype=self.dtype, device=device),
            torch.empty(count, cell.value_heads, **floats),
            torch.empty(count, KEY_HEADS, **floats),
        )
        output = torch.empty_like(inputs.values)
        results = (
            inputs.queries, self.delta.record_keys, inputs.values, self.delta.record_decays,
            inputs.beta, inputs.key_query,
        )  # fmt: skip

        def first(warmup: bool = False) -> Any:
            return launch_inputs(
                rows, self.weights, self.ring, self.delta, pending, slots, starts, num_rows,
                results, overlap=overlap, warmup=warmup,
            )  # fmt: skip

        def second(warmup: bool = False) -> Any:
            return launch_rows(
                inputs, output, self.delta, pending, slots, num_rows, overlap=overlap,
                shape=cell.shape, warmup=warmup,
            )  # fmt: skip

        return {"inputs": first, "rule": second}


def compile_cell(job: tuple[Cell, torch.dtype, torch.dtype, bool]) -> None:
    """Put a cell's kernels into Triton's cache on disk; runs in a process of its own."""
    cell, dtype, state_dtype, overlap = job
    layer = Layer(cell.value_heads, dtype, state_dtype, "cpu", 1)
    slots = torch.zeros(cell.batch, dtype=torch.int64)
    for launch in layer.run(cell, slots, overlap=overlap).values():
        launch(warmup=True)


def compile_all(jobs: list[tuple[Cell, torch.dtype, torch.dtype, bool]], workers: int) -> None:
    distinct = {(job[0].value_heads, job[0].rows, job[0].tile): job for job in jobs}
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            list(pool.map(compile_cell, distinct.values()))
    except BrokenProcessPool as error:
        print(f"compiling ahead stopped ({error}); kernels are compiled as they come")


def graph_microseconds(launches: list[Callable[[], Any]], replays: int = 12) -> float:
    """Microseconds per launch of the list, captured as one graph; the best of three runs."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launches[0]()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    best = float("inf")
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e3 / replays)
    return best / len(launches)


def measure(cell: Cell, layer: Layer, overlap: bool) -> dict[str, Any]:
    """One row of the table."""
    calls = max(1, min(48, NUM_SLOTS // cell.batch))
    order = torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(1)).cuda()
    sets = [
        layer.run(cell, order[i * cell.batch : (i + 1) * cell.batch].contiguous(), overlap=overlap)
        for i in range(calls)
    ]

    def both(pair: dict[str, Callable[..., Any]]) -> Callable[[], None]:
        def run() -> None:
            pair["inputs"]()
            pair["rule"]()

        return run

    times = {name: graph_microseconds([pair[name] for pair in sets]) for name in ("inputs", "rule")}
    times["both"] = graph_microseconds([both(pair) for pair in sets])
    state = layer.delta.state[0].numel() * layer.delta.state.element_size()
    floor = 2e6 * cell.batch * state / BYTES_PER_SECOND
    return {
        "value_heads": cell.value_heads,
        "batch": cell.batch,
        "rows": cell.rows,
        "tile": list(cell.tile),
        "microseconds": {name: round(value, 2) for name, value in times.items()},
        "share": {name: round(floor / times[name], 3) for name in ("rule", "both")},
        "states_moved": cell.bytes_moved(layer.dtype, layer.delta.state.dtype),
    }


def host_microseconds(call: Callable[[], Any], calls: int = 30) -> float:
    """Microseconds the host needs for a call, the GPU's queue never being full."""
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - begin) * 1e6 / calls)
    return best


def by_kernel(call: Callable[[], Any], calls: int = 10) -> list[tuple[float, int, str]]:
    """(microseconds, launches, name) of every kernel of one call, the slowest first."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    rows = [
        (event.self_device_time_total / calls, event.count // calls, event.key)
        for event in profile.key_averages()
        if event.self_device_time_total and event.count >= calls
    ]
    return sorted(rows, reverse=True)


def measure_prefill(value_heads: int, num_rows: int, dtype: torch.dtype, *, options: bool) -> None:
    """Print the times of one layer's chunk of num_rows rows at the start of a prompt."""
    layer = Layer(value_heads, dtype, torch.float32, "cuda", 4)
    channels = layer.ring.shape[2]
    packed = torch.randn(num_rows, channels + 2 * value_heads, device="cuda").to(dtype)
    b, a = packed[:, channels:].split(value_heads, dim=1)
    rows = DeltaNetRows(packed[:, :channels], a, b)
    slot = torch.ones(1, dtype=torch.int64, device="cuda")
    start = torch.zeros_like(slot)
    ends = (*range(64, num_rows, 64), num_rows)

    def call() -> Any:
        return delta_net_prefill(
            rows, layer.weights, layer.ring, layer.delta, slot, start, ends, starts_sequence=True
        )

    call()
    gpu, host = graph_microseconds([call] * 4), host_microseconds(call)
    print(f"HV{value_heads} prompt of {num_rows}: GPU {gpu:.1f} us, host {host:.1f} us", flush=True)
    for microseconds, count, name in by_kernel(call):
        print(f"    {microseconds:8.2f} us in {count} of {name[:90]}")
    if not options:
        return
    unit = torch.nn.functional.normalize
    queries, keys = (
        unit(torch.randn(num_rows, KEY_HEADS, DIM, device="cuda"), dim=-1).to(dtype)
        for _ in range(2)
    )
    values = torch.randn(num_rows, value_heads, DIM, device="cuda").to(dtype)
    g, beta = (torch.rand(num_rows, value_heads, device="cuda") for _ in range(2))

    def rule(changed: dict[str, dict[str, int]]) -> float:
        arguments = (queries, keys, values, -0.2 * g, beta, layer.delta.state[1])
        return graph_microseconds([lambda: chunked_rule(*arguments, {**OPTIONS, **changed})] * 4)

    usual = rule({})
    print(f"  the rule alone {usual:.1f} us; with other options:")
    for kernel, candidates in PREFILL_OPTIONS.items():
        for candidate in candidates:
            try:
                print(f"    {rule({kernel: candidate}) - usual:+8.1f} us {kernel} {candidate}")
            except (RuntimeError, triton.TritonError) as error:
                print(f"    {kernel} {candidate}: {str(error)[-120:]}")


def line(row: dict[str, Any]) -> str:
    cell = f"HV{row['value_heads']} B{row['batch']:<3} T{row['rows']} tile {row['tile']}"
    if "error" in row:
        return f"{cell}: {row['error']}"
    times, share, moved = (row[name] for name in ("microseconds", "share", "states_moved"))
    return (
        f"{cell}: inputs {times['inputs']:6.2f} us"
        f"  rule {times['rule']:7.2f} us ({share['rule']:.2f})"
        f"  both {times['both']:7.2f} us ({share['both']:.2f})  states moved {moved['rule']}"
        f" (all {moved['all']})"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parser.add_argument("--value-heads", type=int, nargs="+", default=[32, 48])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6])
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--state-dtype", choices=["float32", "float16", "bfloat16"],
                        default="float32")  # fmt: skip
    parser.add_argument("--tiles", action="store_true", help="every tile, not only the chosen one")
    parser.add_argument("--workers", type=int, default=8, help="processes that compile ahead")
    parser.add_argument("--budget", type=float, default=300, help="seconds after which it stops")
    parser.add_argument("--prefill", action="store_true", help="a prompt's chunk, not rounds")
    parser.add_argument("--prompt", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--options", action="store_true", help="with --prefill: other tile sizes")
    options = parser.parse_args()
    begin = time.perf_counter()
    dtype, state_dtype = (getattr(torch, name) for name in (options.dtype, options.state_dtype))
    if options.prefill:
        for value_heads, num_rows in product(options.value_heads, options.prompt):
            measure_prefill(value_heads, num_rows, dtype, options=options.options)
        return 0
    overlap = torch.cuda.get_device_capability()[0] >= 9
    shapes = TILES if options.tiles else (None,)
    cells = [
        Cell(*cell) for cell in product(options.value_heads, options.batch, options.rows, shapes)
    ]
    compile_all([(cell, dtype, state_dtype, overlap) for cell in cells], options.workers)
    print(f"compiled after {time.perf_counter() - begin:.1f} s")
    rows: list[dict[str, Any]] = []
    layer = None
    for cell in cells:
        if time.perf_counter() - begin > options.budget:
            print("out of time, the rest was left out")
            break
        if layer is None or layer.value_heads != cell.value_heads:
            layer = None
            torch.cuda.empty_cache()
            layer = Layer(cell.value_heads, dtype, state_dtype, "cuda", NUM_SLOTS)
        try:
            row = measure(cell, layer, overlap)
        except (RuntimeError, triton.TritonError) as error:
            row = {"value_heads": cell.value_heads, "batch": cell.batch, "rows": cell.rows,
                   "tile": list(cell.tile), "error": str(error)[-300:]}  # fmt: skip
        rows.append(row)
        print(line(row), flush=True)
    print(f"took {time.perf_counter() - begin:.1f} s")
    if options.out:
        settings = {"device": torch.cuda.get_device_name(), "torch": torch.__version__,
                    "triton": triton.__version__, "dtype": options.dtype,
                    "state_dtype": options.state_dtype, "overlap": overlap}  # fmt: skip
        options.out.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n")
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
