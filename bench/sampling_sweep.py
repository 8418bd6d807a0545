"""Microseconds of the sampling kernels, in a CUDA graph, over rows and vocabulary sizes.

    python bench/sampling_sweep.py --out sampling.json

Logits are bfloat16 with the spread of a language model's. Up to about 100 MB of them stay in the L2
cache between calls, as they do when the head has just written them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from torch import Tensor

from outrider.ops.philox import Purpose
from outrider.ops.sampling import argmax, processed_probs, race, sample, top_m

ROWS = (1, 4, 32, 128, 256)
VOCAB_SIZES = (151936, 248320)
CALLS, REPLAYS = 10, 5


def microseconds(call: Callable[[], object]) -> float:
    """Least time of one call over a few replays of a graph of CALLS."""
    for _ in range(2):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    graph.replay()
    least = float("inf")
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        least = min(least, begin.elapsed_time(end) * 1e3 / CALLS)
    return least


def calls(num_rows: int, vocab_size: int) -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    generator = torch.Generator("cuda").manual_seed(0)
    noise = torch.randn((num_rows, vocab_size), generator=generator, device="cuda")
    logits = (noise * 2.5).to(torch.bfloat16)
    logits[:, :: vocab_size // 40] += 8
    weights = noise.clamp(min=0)
    running = torch.arange(num_rows, device="cuda")

    def law(
        temperature: float, top_k: int, top_p: float, min_p: float = 0.0
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        def floats(value: float) -> Tensor:
            return torch.full((num_rows,), value, device="cuda")

        return floats(temperature), torch.full_like(running, top_k), floats(top_p), floats(min_p)

    laws = {
        "plain": law(1.0, vocab_size, 1.0),
        "min_p 0.05": law(1.0, vocab_size, 1.0, 0.05),
        "top_k 20, top_p 0.95": law(1.0, 20, 0.95),
        "top_p 0.95": law(1.0, vocab_size, 0.95),
        "hot top_p 0.95": law(3.0, vocab_size, 0.95),
    }
    timed: dict[str, Callable[[], object]] = {"argmax": lambda: argmax(logits)}
    timed["torch.argmax"] = lambda: logits.argmax(-1)
    for name, parameters in laws.items():
        timed[f"sample, {name}"] = lambda p=parameters: sample(logits, *p, running, running)
    timed["processed_probs, top_k 20, top_p 0.95"] = lambda: processed_probs(
        logits, *laws["top_k 20, top_p 0.95"]
    )
    timed["top_m 32"] = lambda: top_m(logits, 32)
    timed["race"] = lambda: race(weights, running, running, Purpose.RESIDUAL, running)
    return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results: list[dict[str, object]] = []
    for vocab_size in VOCAB_SIZES:
        for num_rows in ROWS:
            for name, call in calls(num_rows, vocab_size).items():
                time = round(microseconds(call), 2)
                results.append({"op": name, "vocab": vocab_size, "rows": num_rows, "us": time})
                print(f"{name:40} V {vocab_size:6} R {num_rows:3} {time:9.2f} us", flush=True)
    if args.out:
        header = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "dtype": "bfloat16",
        }
        args.out.write_text(json.dumps(header | {"results": results}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
