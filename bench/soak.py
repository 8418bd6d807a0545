"""Many requests for a long time under cache pressure: nothing leaks and every text is right.

python bench/soak.py models/tiny-qwen3.5 --minutes 10 [--method mtp] [--out FILE]

Keeps `--concurrent` requests alive, a fifth of which are aborted at a random step. Prompts share
prefixes and return, blocks and checkpoints are few, results come a step late, and outputs outgrow
the blocks there are, so that sequences give way. Texts are compared with those of an engine that
has room for all. One that gave way is prefilled again, which is equal to rounding only: a text may
then differ where two tokens were within rounding of each other, and is counted as wrong all the
same. Prints a line every half a minute. Exit status 1: a text was wrong, something leaked, or
nobody had to give way, so that the run shows nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import time
from pathlib import Path

from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine import Engine
from outrider.params import SamplingParams

NUM_PROMPTS = 24
NUM_TOKENS = 64
NUM_BLOCKS = 56


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * resource.getpagesize() / 2**20


def make_engine(options: argparse.Namespace, *, alone: bool) -> Engine:
    spec = None if alone or not options.method else SpeculativeConfig(options.method)
    return Engine(
        EngineConfig(
            options.model,
            dtype="float32",
            device="cpu",
            max_model_len=200,
            block_size=16,
            prefill_grid=16,
            num_kv_blocks=400 if alone else NUM_BLOCKS,
            max_num_seqs=4 if alone else 16,
            enable_prefix_caching=not alone,
            look_ahead=0 if alone else 1,
            speculative_config=spec,
            **({} if alone else {"num_state_checkpoints": 8, "checkpoint_interval": 32}),
        )
    )


def prompts(vocab_size: int) -> list[list[int]]:
    rng = random.Random(0)
    shared = [[rng.randrange(2, vocab_size) for _ in range(100)] for _ in range(3)]
    return [
        shared[index % 3][: rng.randrange(1, 100)]
        + [rng.randrange(2, vocab_size) for _ in range(rng.randrange(1, 30))]
        for index in range(NUM_PROMPTS)
    ]


def expected_texts(options: argparse.Namespace) -> tuple[list[list[int]], list[tuple[int, ...]]]:
    engine = make_engine(options, alone=True)
    texts = prompts(engine.model_config.vocab_size)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    for index, prompt in enumerate(texts):
        engine.add_request(str(index), prompt, params)
    outputs: dict[str, tuple[int, ...]] = {}
    while engine.has_work:
        outputs |= {output.request_id: output.token_ids for output in engine.step()}
    return texts, [outputs[str(index)] for index in range(len(texts))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--method", default="mtp")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--concurrent", type=int, default=64)
    parser.add_argument("--out")
    options = parser.parse_args()
    texts, expected = expected_texts(options)
    engine = make_engine(options, alone=False)
    rng = random.Random(1)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    live: dict[str, tuple[int, int | None]] = {}
    count = aborted = finished = wrong = cached = step = 0
    begin = last = time.monotonic()
    rows: list[dict[str, float]] = []
    while time.monotonic() - begin < options.minutes * 60 or live:
        while len(live) < options.concurrent and time.monotonic() - begin < options.minutes * 60:
            index = rng.randrange(len(texts))
            ends = step + rng.randrange(1, 120) if rng.random() < 0.2 else None
            engine.add_request(str(count), texts[index], params)
            live[str(count)] = (index, ends)
            count += 1
        for name, (_, ends) in list(live.items()):
            if ends is not None and step >= ends:
                engine.abort(name)
                del live[name]
                aborted += 1
        for output in engine.step():
            if output.finished and output.request_id in live:
                index, _ = live.pop(output.request_id)
                finished += 1
                cached += output.num_cached_tokens
                wrong += output.error is not None or output.token_ids != expected[index]
        step += 1
        if time.monotonic() - last > 30:
            last = time.monotonic()
            engine.cache.check_integrity()
            gc.collect()
            row = {
                "seconds": round(last - begin), "steps": step, "finished": finished,
                "aborted": aborted, "wrong": wrong, "cached tokens": cached,
                "preemptions": engine.scheduler.num_preemptions, "MiB": round(resident_mib(), 1),
            }  # fmt: skip
            rows.append(row)
            print(row, flush=True)
    outputs = engine.drain()
    engine.cache.clear()
    pools = (engine.cache.blocks, engine.cache.slots, engine.cache.checkpoints)
    leaked = [pool.name for pool in pools if pool.num_free != pool.size]
    preemptions = engine.scheduler.num_preemptions
    print(
        f"{finished} finished, {aborted} aborted, {preemptions} times somebody gave way, "
        f"{wrong} wrong, leaked: {leaked or 'nothing'}"
    )
    if options.out:
        Path(options.out).write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return 1 if wrong or leaked or outputs or not preemptions else 0


if __name__ == "__main__":
    raise SystemExit(main())
