"""What a step costs the host: plan, batch, results, commit, report. The device answers at once.

python bench/host.py models/tiny-qwen3.5 [--sequences 256] [--steps 200] [--output FILE]

A real engine with its tokenizer; in place of the rounds' graphs stands something that makes results
up, so that what is left is what the host does beside a GPU. Medians of steps, in microseconds of
processor time: the clock's is more where the cores are shared.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine import Engine
from outrider.ops.bookkeeping import NUM_COUNTS
from outrider.params import SamplingParams
from outrider.runner.graphs import Arriving, RoundKey
from outrider.tokenizer import Tokenizer

NUM_DRAFTS = 3
MAX_LEN = 4000


class InstantGraphs:
    """Rounds that accept a random number of drafts and write random tokens."""

    def __init__(self, vocab_size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (4096, NUM_COUNTS + 3 * NUM_DRAFTS + 1)
        self._results = torch.randint(0, vocab_size, shape, generator=generator)
        accepted = torch.randint(0, NUM_DRAFTS + 1, (4096,), generator=generator)
        zero, all_drafts = torch.zeros_like(accepted), torch.full_like(accepted, NUM_DRAFTS)
        counts = (accepted, accepted + 1, zero, zero, all_drafts, all_drafts)
        self._results[:, :NUM_COUNTS] = torch.stack(counts, 1)
        self._at = 0

    def run(self, key: RoundKey, numbers: Tensor) -> Arriving:
        self._at = (self._at + 7) % (4096 - key.num_sequences)
        return Arriving(self._results[self._at : self._at + key.num_sequences], None)


class Stopwatch:
    """Seconds that calls of a function took, added up until they are read."""

    def __init__(self, owner: Any, name: str) -> None:
        self._function: Callable[..., Any] = getattr(owner, name)
        self._seconds = 0.0
        setattr(owner, name, self._timed)

    def _timed(self, *args: Any, **kwargs: Any) -> Any:
        begin = time.thread_time()
        try:
            return self._function(*args, **kwargs)
        finally:
            self._seconds += time.thread_time() - begin

    def read(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def decoding_engine(model: str, num_sequences: int) -> Engine:
    """All sequences decode, and none of them ends while time is taken."""
    config = EngineConfig(
        model,
        dtype="float32",
        device="cpu",
        max_model_len=MAX_LEN,
        max_num_seqs=num_sequences,
        num_kv_blocks=num_sequences * MAX_LEN // 64,
        look_ahead=1,
        speculative_config=SpeculativeConfig("mtp", num_speculative_tokens=NUM_DRAFTS),
    )
    engine = Engine(config, Tokenizer.from_pretrained(Path(model)))
    rng = random.Random(0)
    for index in range(num_sequences):
        prompt = [rng.randrange(2, engine.model_config.vocab_size) for _ in range(8)]
        wish = SamplingParams(max_tokens=MAX_LEN - 8, temperature=0, ignore_eos=True)
        engine.add_request(str(index), prompt, wish)
    while engine.scheduler.head is not None:
        engine.step()
    engine.runner._graphs = InstantGraphs(engine.model_config.vocab_size)  # type: ignore[assignment]
    return engine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--warm-up", type=int, default=200, help="steps before: texts have a length"
    )
    parser.add_argument("--output", type=Path, help="append one JSON line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    engine = decoding_engine(options.model, options.sequences)
    for _ in range(options.warm_up):
        engine.step()
    parts = {
        "plan": Stopwatch(engine.scheduler, "plan"),
        "submit": Stopwatch(engine.runner, "submit"),
        "collect": Stopwatch(engine.runner, "collect"),
        "collect and commit": Stopwatch(engine, "_commit_oldest"),
        "report": Stopwatch(engine, "_emit"),
        "step": Stopwatch(engine, "step"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    gc.collect()
    gc.disable()  # a collection falls into one step of many and would only be noise
    for _ in range(options.steps):
        engine.step()
        for name, stopwatch in parts.items():
            seconds[name].append(stopwatch.read())
    cost = {name: round(1e6 * statistics.median(each), 1) for name, each in seconds.items()}
    print(f"{options.sequences} sequences, microseconds a step: {cost}")
    if options.output is not None:
        about = {
            "command": " ".join(["python", *sys.argv]),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "machine": platform.machine(),
            "sequences": options.sequences,
            "steps": options.steps,
        }
        with options.output.open("a") as file:
            file.write(json.dumps(about | cost) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
