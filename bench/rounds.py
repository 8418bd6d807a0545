"""Where the time of a round goes on a GPU, and how much of it the GPU waits for the host.

python bench/rounds.py preset:qwen3-8b --batch-size 32 [--method mtp --drafts 3 ...]

Prints one line for each kernel of a round: how often it runs, and the time from the end of the
kernel before it to its own end, which adds up to the round whether or not kernels overlap. The
idle share is the part of the rounds' time that lies between the end of one and the begin of the
next, measured with events on the stream, without the profiler.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine import Engine
from outrider.params import SamplingParams


def make_engine(options: argparse.Namespace) -> Engine:
    spec = None
    if options.method:
        draft = "preset:eagle3" if options.method == "eagle3" else None
        spec = SpeculativeConfig(
            options.method,
            draft,
            options.drafts,
            draft_vocab=options.draft_vocab,
            synthetic_acceptance_length=options.acceptance,
        )
    return Engine(
        EngineConfig(
            options.model,
            load_format="dummy",
            device="cuda",
            max_num_seqs=options.batch_size,
            max_model_len=options.input_len + 1024,
            max_prefill_tokens=8192,
            speculative_config=spec,
        )
    )


def start(engine: Engine, options: argparse.Namespace) -> None:
    """Everybody decodes, and graphs are captured."""
    params = SamplingParams(max_tokens=1000, temperature=options.temperature, ignore_eos=True)
    rng = torch.Generator().manual_seed(0)
    for index in range(options.batch_size):
        prompt = torch.randint(
            2, engine.model_config.vocab_size, (options.input_len,), generator=rng
        )
        engine.add_request(str(index), prompt.tolist(), params)
    for _ in range(12):
        engine.step()


def idle_share(engine: Engine, num_rounds: int) -> tuple[float, float]:
    """(milliseconds a round, share of it between rounds)."""
    graphs = engine.runner._graphs
    assert graphs is not None
    run, events = graphs.run, []

    def timed(*args: Any) -> Any:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        arriving = run(*args)
        end.record()
        events.append((begin, end))
        return arriving

    graphs.run = timed  # type: ignore[method-assign]
    for _ in range(num_rounds):
        engine.step()
    torch.cuda.synchronize()
    graphs.run = run  # type: ignore[method-assign]
    inside = sum(begin.elapsed_time(end) for begin, end in events)
    whole = events[0][0].elapsed_time(events[-1][1])
    return whole / len(events), 1 - inside / whole


def kernel_table(engine: Engine, num_rounds: int) -> list[dict[str, Any]]:
    """Kernels by the time that they add to the rounds."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_rounds):
            engine.step()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((e.time_range.end, e.time_range.start, e.name) for e in events)
    added: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    last = spans[0][1]
    for end, _, name in spans:
        short = re.sub(r"<.*|\(.*", "", name)[-48:]
        added[short] += max(end - last, 0.0)
        counts[short] += 1
        last = max(last, end)
    return [
        {
            "kernel": name,
            "times": round(counts[name] / num_rounds, 1),
            "us a round": round(added[name] / num_rounds, 1),
        }
        for name in sorted(added, key=lambda name: -added[name])
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--method")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--draft-vocab", type=int)
    parser.add_argument("--acceptance", type=float, default=3.0)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out")
    options = parser.parse_args()
    engine = make_engine(options)
    start(engine, options)
    milliseconds, idle = idle_share(engine, options.rounds)
    table = kernel_table(engine, 10)
    print(f"{options.model} batch {options.batch_size} {options.method or 'plain'}: "
          f"{milliseconds:.3f} ms a round, {100 * idle:.2f} % between rounds")  # fmt: skip
    for row in table[:24]:
        print(f"{row['us a round']:9.1f} us {row['times']:7.1f} x {row['kernel']}")
    if options.out:
        result = {"options": vars(options), "ms": milliseconds, "idle": idle, "kernels": table}
        with open(options.out, "a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
