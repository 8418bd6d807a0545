"""Times attention over paged keys and values: rounds and prompt chunks, in 16 bit.

    python bench/attention_sweep.py --out attention.json
    python bench/attention_sweep.py --portable        # and the kernels for any card
    python bench/attention_sweep.py --tiles           # and other tiles for prompt chunks

A round's number is the time of one layer's call in a CUDA graph that walks through a pool far
larger than L2, and the bytes of keys, values, queries and outputs as a share of 4.2 TB/s. A
chunk's is its products of visible pairs, in TFLOP/s.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.ops.attention import paged_attention, prefill_attention
from outrider.ops.attention.plan import Attending, Card, PrefillTile

BYTES_PER_SECOND = 4.2e12
COLD_BYTES = 400_000_000
"""What a graph reads at least, so that nothing is found in L2 (60 MB) at the next replay."""
BLOCK_SIZE = 64
NUM_BLOCKS = 16_640  # 32 sequences of 32k tokens, 4.4 GB
MAX_CALLS = 40
CONTEXTS = [1024, 8192, 32768]
BATCHES = [1, 8, 32]
ROWS = [1, 2, 3, 4, 5, 6]
CHUNKS = [(0, 1024), (0, 2048), (0, 8192), (7168, 1024), (31744, 1024)]
"""First position and number of tokens."""


@dataclass(frozen=True)
class Model:
    """Attention of a model's layer."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    gated: bool


MODELS = [Model("8B", 32, 8, 128, False), Model("9B", 16, 4, 256, True)]


def seconds_per_call(calls: list[Callable[[], object]], repeats: int = 7) -> float:
    """Median time of a graph of the calls, divided by their number."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times: list[float] = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(times) / len(calls)


class Pool:
    """Keys and values of one layer of a model, and tables that walk through them."""

    def __init__(self, model: Model, dtype: torch.dtype) -> None:
        self.model, self.dtype = model, dtype
        shape = (2, NUM_BLOCKS, model.num_kv_heads, BLOCK_SIZE, model.head_dim)
        self.kv_pool = torch.empty(shape, dtype=dtype, device="cuda").normal_()
        self.order = torch.randperm(NUM_BLOCKS, device="cuda")

    def rows(self, batch: int, num_tokens: int) -> tuple[Tensor, Tensor | None]:
        """Queries, and a gate that is a view as the projection's is."""
        model = self.model
        shape = (batch, num_tokens, model.num_heads, 2 * model.head_dim)
        wide = torch.randn(shape, dtype=self.dtype, device="cuda")
        gate = wide[..., model.head_dim :] if model.gated else None
        return wide[..., : model.head_dim].contiguous(), gate

    def tables(self, batch: int, num_positions: int, wanted: int) -> list[Tensor]:
        """At most `wanted` tables of different blocks, as many as the pool has room for."""
        width = -(-num_positions // BLOCK_SIZE)
        count = max(1, min(wanted, NUM_BLOCKS // (width * batch)))
        parts = self.order[: count * width * batch].view(count, batch, width)
        return list(parts)


def time_round(
    pool: Pool, context: int, batch: int, num_tokens: int, attend: Callable[..., Tensor]
) -> dict[str, Any]:
    """A round whose last row sees `context` positions."""
    model = pool.model
    queries, gate = pool.rows(batch, num_tokens)
    token_bytes = 2 * model.num_kv_heads * model.head_dim * queries.element_size()
    num_bytes = batch * context * token_bytes + 2 * queries.numel() * queries.element_size()
    wanted = min(MAX_CALLS, max(2, -(-COLD_BYTES // num_bytes)))
    starts = torch.full((batch,), context - num_tokens, device="cuda")
    num_rows = torch.full((batch,), num_tokens, device="cuda")
    calls = [
        functools.partial(attend, queries, pool.kv_pool, table, starts, num_rows, gate)
        for table in pool.tables(batch, context, wanted)
    ]
    seconds = seconds_per_call(calls)
    return {
        "microseconds": round(seconds * 1e6, 2),
        "share": round(num_bytes / seconds / BYTES_PER_SECOND, 3),
    }


def time_chunk(
    pool: Pool, start: int, num_tokens: int, attend: Callable[..., object]
) -> dict[str, Any]:
    """A prompt chunk, on three different tables."""
    queries, gate = pool.rows(1, num_tokens)
    starts = torch.tensor([start], device="cuda")
    num_rows = torch.tensor([num_tokens], device="cuda")
    calls = [
        functools.partial(attend, queries, pool.kv_pool, table, starts, num_rows, gate)
        for table in pool.tables(1, start + num_tokens, 3)
    ]
    seconds = seconds_per_call(calls, repeats=5)
    pairs = num_tokens * start + num_tokens * (num_tokens + 1) // 2
    flops = 4 * pairs * pool.model.num_heads * pool.model.head_dim
    return {
        "microseconds": round(seconds * 1e6, 1),
        "tflops": round(flops / seconds * 1e-12, 1),
    }


def other_tiles(pool: Pool) -> dict[str, Callable[..., object]]:
    """Prompt chunks with tiles that PrefillTile.of did not choose."""
    from outrider.ops.attention.triton_prefill import prefill_launch

    def attend(tile: PrefillTile, *args: Any) -> None:
        prefill_launch(Attending(*args, torch.empty_like(args[0])), tile).run()

    queries, gate = pool.rows(1, 1)
    number = torch.zeros(1, dtype=torch.int64, device="cuda")
    example = Attending(queries, pool.kv_pool, number[None], number, number, gate, queries)
    chosen = PrefillTile.of(example, Card.of(queries))
    half = replace(chosen, rows=64, num_warps=4)
    tiles = [
        *(replace(chosen, num_stages=count) for count in (2, 3, 5, 7)),
        *(replace(half, num_stages=count) for count in (3, 5)),
        replace(chosen, tokens=32),
        replace(chosen, descriptors=False, num_stages=3),
    ]
    return {
        f"{tile.rows}x{tile.tokens} warps {tile.num_warps} stages {tile.num_stages}"
        + ("" if tile.descriptors else " pointers"): functools.partial(attend, tile)
        for tile in tiles
    }


def measure(name: dict[str, Any], time_it: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """One line of the results; one that cannot run says why and takes nothing with it."""
    try:
        row = name | time_it()
    except Exception as error:
        # Triton, the driver and the allocator have no exception in common.
        row = name | {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return row


def sweep(options: argparse.Namespace, dtype: torch.dtype) -> list[dict[str, Any]]:
    from outrider.ops.attention.triton import paged_attention_kernel

    results: list[dict[str, Any]] = []
    for model in MODELS:
        pool = Pool(model, dtype)
        kernels = {"": (paged_attention, ROWS)}
        if options.portable:
            kernels["portable"] = (paged_attention_kernel, [1, 4])
        for kernel, (attend, rows) in kernels.items():
            for context in CONTEXTS:
                for batch in BATCHES:
                    for num_tokens in rows:
                        name = {"model": model.name, "kind": f"{kernel} round".strip()}
                        name |= {"context": context, "batch": batch, "rows": num_tokens}
                        call = functools.partial(
                            time_round, pool, context, batch, num_tokens, attend
                        )
                        results.append(measure(name, call))
        chunks: dict[str, Callable[..., object]] = {"": prefill_attention}
        if options.tiles:
            chunks |= other_tiles(pool)
        for tile, attend_chunk in chunks.items():
            for start, num_tokens in CHUNKS:
                name = {"model": model.name, "kind": f"chunk {tile}".strip()}
                name |= {"start": start, "tokens": num_tokens}
                call = functools.partial(time_chunk, pool, start, num_tokens, attend_chunk)
                results.append(measure(name, call))
        del pool
        torch.cuda.empty_cache()
    return results


def print_tables(results: list[dict[str, Any]]) -> None:
    """Rounds as one table for each model and kernel: microseconds (share)."""
    rounds = [row for row in results if "rows" in row and "error" not in row]
    for model, kind in dict.fromkeys((row["model"], row["kind"]) for row in rounds):
        own = [row for row in rounds if (row["model"], row["kind"]) == (model, kind)]
        rows = sorted({row["rows"] for row in own})
        print(f"\n{model} {kind}: microseconds (share of 4.2 TB/s)")
        print("| context x batch | " + " | ".join(f"T {count}" for count in rows) + " |")
        print("|---" * (len(rows) + 1) + "|")
        for context, batch in dict.fromkeys((row["context"], row["batch"]) for row in own):
            cells = {
                row["rows"]: f"{row['microseconds']:.1f} ({row['share']:.2f})"
                for row in own
                if (row["context"], row["batch"]) == (context, batch)
            }
            line = " | ".join(cells.get(count, "") for count in rows)
            print(f"| {context // 1024}k x {batch} | {line} |")


def main() -> int:
    parser = argparse.ArgumentParser(description="Time attention on this machine's GPU.")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--portable", action="store_true", help="also the portable kernels")
    parser.add_argument("--tiles", action="store_true", help="also other tiles for prompt chunks")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU here", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    begin = time.perf_counter()
    dtype = torch.bfloat16 if torch.cuda.get_device_capability()[0] >= 8 else torch.float16
    results = sweep(options, dtype)
    print_tables(results)
    seconds = round(time.perf_counter() - begin, 1)
    print(f"\n{torch.cuda.get_device_name()}, {dtype}, torch {torch.__version__}, {seconds} s")
    if options.out is not None:
        header = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "dtype": str(dtype),
            "seconds": seconds,
        }
        options.out.write_text(json.dumps(header | {"results": results}, indent=1) + "\n")
    return 1 if any("error" in row for row in results) else 0


if __name__ == "__main__":
    raise SystemExit(main())
