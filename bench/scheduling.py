"""What a step costs the scheduler: processor time of `plan` and of its commits, pure Python.

python bench/scheduling.py [--steps 200] [--profile] [--output bench/results/...jsonl]

Nothing runs on a device: results are made up, and making them up is not counted. Two situations,
each with and without the prefix cache: everybody decodes and nobody waits, and 2,000 more wait for
a place. The limits are those of the issue that asked for them; exit status 1 says that one is
exceeded.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import platform
import pstats
import random
import statistics
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

from outrider.batch import Batch, SpanResult
from outrider.cache.manager import CacheManager
from outrider.params import SamplingParams
from outrider.request import Request, Sequence
from outrider.scheduler import Scheduler, SchedulerConfig

NUM_RUNNING = 256
NUM_WAITING = 2000
NUM_DRAFTS = 3
BLOCK_SIZE = 64
NUM_PROMPT = 300
MAX_TOKENS = 100_000  # nobody ends while time is taken
NUM_RUNS = 5
LIMITS_US = {0: 300.0, NUM_WAITING: 1000.0}
"""Microseconds a step by the number of those who wait."""


@dataclass(frozen=True)
class Cost:
    """Microseconds of a step, medians over all of them; p90 is of plan and commits together."""

    num_running: int
    num_waiting: int
    prefix_cache: bool
    look_ahead: int
    plan_us: float
    commit_us: float
    total_us: float
    p90_us: float
    limit_us: float


class Load:
    """A scheduler with so many sequences, and results for whatever it plans."""

    def __init__(self, num_waiting: int, prefix_cache: bool, look_ahead: int) -> None:
        num_blocks = NUM_RUNNING * (-(-(NUM_PROMPT + 8000) // BLOCK_SIZE))
        unit = BLOCK_SIZE if prefix_cache else None
        self.cache = CacheManager(num_blocks, BLOCK_SIZE, NUM_RUNNING, prefix_unit=unit)
        config = SchedulerConfig(8192, 64, NUM_DRAFTS, prefix_unit=unit)
        self.scheduler = Scheduler(config, self.cache)
        self.num_waiting = num_waiting
        self._rng = random.Random(0)
        self._look_ahead = look_ahead
        self._in_flight: deque[Batch] = deque()
        self._sequences = [self._sequence(index) for index in range(NUM_RUNNING)]
        for sequence in self._sequences:
            self.scheduler.add(sequence)
        while any(sequence.num_committed <= NUM_PROMPT for sequence in self._sequences):
            self.step()
        for index in range(num_waiting):
            self.scheduler.add(self._sequence(NUM_RUNNING + index))

    def _sequence(self, number: int) -> Sequence:
        prompt = tuple(self._rng.randrange(1000) for _ in range(NUM_PROMPT))
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
        limit = NUM_PROMPT + MAX_TOKENS
        return Sequence(number, Request(str(number), prompt, params, (), limit, 0))

    def step(self) -> tuple[float, float]:
        """Seconds of the plan and of the commits."""
        begin = time.thread_time()
        batch = self.scheduler.plan()
        plan = time.thread_time() - begin
        assert batch is not None and batch.spans, "nothing to do"
        self._in_flight.append(batch)
        if len(self._in_flight) <= self._look_ahead:
            return plan, 0.0
        oldest = self._in_flight.popleft()
        results = self._results(oldest)
        begin = time.thread_time()
        for span, result in zip(oldest.spans, results, strict=True):
            self.scheduler.commit(span, result, result.token_ids, None)
        return plan, time.thread_time() - begin

    def _results(self, batch: Batch) -> list[SpanResult]:
        results: list[SpanResult] = []
        for span in batch.spans:
            effects = span.effects
            if not effects.samples:
                results.append(SpanResult(span.sequence_id))
                continue
            tokens = (7,) * (self._rng.randint(0, effects.num_drafts) + 1)
            proposed = (7,) * effects.num_drafts_next
            results.append(SpanResult(span.sequence_id, tokens, proposed_token_ids=proposed))
        return results


def measure(num_steps: int, num_waiting: int, prefix_cache: bool, look_ahead: int) -> Cost:
    load = Load(num_waiting, prefix_cache, look_ahead)
    for _ in range(10):
        load.step()
    gc.collect()
    gc.disable()  # a collection falls into one step of many and would only be noise
    times = [load.step() for _ in range(num_steps)]
    gc.enable()
    totals = sorted(1e6 * (plan + commit) for plan, commit in times)
    return Cost(
        NUM_RUNNING,
        num_waiting,
        prefix_cache,
        look_ahead,
        plan_us=round(statistics.median(1e6 * plan for plan, _ in times), 1),
        commit_us=round(statistics.median(1e6 * commit for _, commit in times), 1),
        total_us=round(statistics.median(totals), 1),
        p90_us=round(totals[len(totals) * 9 // 10], 1),
        limit_us=LIMITS_US[num_waiting],
    )


def quietest(num_steps: int, num_waiting: int, prefix_cache: bool, look_ahead: int) -> Cost:
    """Of NUM_RUNS runs: what else the machine does only adds to a time."""
    runs = [measure(num_steps, num_waiting, prefix_cache, look_ahead) for _ in range(NUM_RUNS)]
    return min(runs, key=lambda cost: cost.total_us)


def profile(num_steps: int) -> None:
    """Print the ten functions that take most of the time."""
    load = Load(0, prefix_cache=True, look_ahead=1)
    profiler = cProfile.Profile()
    for _ in range(num_steps):
        profiler.enable()
        batch = load.scheduler.plan()
        profiler.disable()
        assert batch is not None
        load._in_flight.append(batch)
        oldest = load._in_flight.popleft()
        results = load._results(oldest)
        profiler.enable()
        for span, result in zip(oldest.spans, results, strict=True):
            load.scheduler.commit(span, result, result.token_ids, None)
        profiler.disable()
    pstats.Stats(profiler, stream=sys.stdout).sort_stats("tottime").print_stats(10)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--profile", action="store_true", help="say where the time goes")
    parser.add_argument("--output", type=Path, help="append one JSON line for each situation")
    options = parser.parse_args()
    costs = [
        quietest(options.steps, num_waiting, prefix_cache, look_ahead=1)
        for num_waiting in (0, NUM_WAITING)
        for prefix_cache in (False, True)
    ]
    machine = {
        "command": " ".join(["python", *sys.argv]),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "runs": NUM_RUNS,
        "chosen": "the run with the least total",
        "clock": "thread",
    }
    for cost in costs:
        verdict = "ok" if cost.total_us <= cost.limit_us else "TOO SLOW"
        print(
            f"{cost.num_running} running, {cost.num_waiting:4} waiting, prefix cache "
            f"{'on ' if cost.prefix_cache else 'off'}: plan {cost.plan_us:7.1f} us, "
            f"commit {cost.commit_us:7.1f} us, together {cost.total_us:7.1f} us "
            f"(p90 {cost.p90_us:7.1f}), limit {cost.limit_us:.0f}: {verdict}"
        )
    if options.output is not None:
        with options.output.open("a") as file:
            file.writelines(json.dumps({**machine, **asdict(cost)}) + "\n" for cost in costs)
    if options.profile:
        profile(options.steps)
    return int(any(cost.total_us > cost.limit_us for cost in costs))


if __name__ == "__main__":
    sys.exit(main())
