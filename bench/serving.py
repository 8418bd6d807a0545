"""What serving costs a round: the engine process under HTTP load, against the same load offline.

python bench/serving.py models/tiny-qwen3.5 [--output bench/results/...jsonl]

A closed loop of streaming clients, each sending its next request when the last has ended, drives
`outrider serve`. The engine process is sampled while it works: which part of the code its main
thread is in, and whether anything of HTTP is on the stack or even imported. Then the same requests
run through an engine in this process, as many at once, with no server. A round is a call of
`Engine.step`, timed around the call in both, by the wall and by the CPU time of its thread, which
other users of the machine do not change as much.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

from outrider import engine_connection, engine_process
from outrider.cli import main as outrider_main
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine import Engine
from outrider.params import SamplingParams

NUM_AT_ONCE = 8
PROMPT_LEN, OUTPUT_LEN = 64, 48
SAMPLE_SECONDS = 0.005
HTTP_PACKAGES = {"fastapi", "starlette", "uvicorn", "h11", "httptools", "pydantic"}
OPTIONS: dict[str, Any] = {
    **{"dtype": "float32", "device": "cpu", "num_threads": 1, "max_model_len": 256},
    **{"max_num_seqs": NUM_AT_ONCE, "kv_cache_memory_gib": 0.02, "enable_prefix_caching": False},
}
DRAFTS = 3

ROLE, PROFILE = "OUTRIDER_BENCH_ROLE", "OUTRIDER_BENCH_PROFILE"


# In the server's processes.


def run_server(model: str) -> int:
    """`outrider serve`, with an engine process that is sampled."""
    start = engine_connection._start_process
    usual = subprocess.Popen

    def sampled(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        assert command[-1] == "outrider.engine_process"
        options["env"] = options["env"] | {ROLE: "engine"}
        return usual([sys.executable, __file__, model], **options)

    def start_sampled(startup: Any) -> subprocess.Popen[bytes]:
        engine_connection.subprocess.Popen = sampled  # type: ignore[misc]
        try:
            return start(startup)
        finally:
            engine_connection.subprocess.Popen = usual  # type: ignore[misc]

    engine_connection._start_process = start_sampled
    spec = ["--speculative-algorithm", "mtp", "--speculative-num-draft-tokens", str(DRAFTS)]
    flags: list[str] = []
    for name, value in OPTIONS.items():
        flag = name.replace("_", "-")
        flags += [f"--no-{flag}"] if value is False else [f"--{flag}", str(value)]
    return outrider_main(["serve", model, "--port", "0", *flags, *spec])


class StepClock:
    """Wall and CPU seconds of all steps of an engine; its linears run on one thread."""

    def __init__(self) -> None:
        self.num_rounds = 0
        self.seconds = self.cpu_seconds = 0.0

    def timed(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def run(engine: Engine) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            outputs = step(engine)
            self.seconds += time.perf_counter() - wall
            self.cpu_seconds += time.thread_time() - cpu
            self.num_rounds += 1
            return outputs

        return run

    @property
    def totals(self) -> list[float]:
        return [self.num_rounds, self.seconds, self.cpu_seconds]


def round_times(totals: Sequence[float], seconds: float) -> dict[str, Any]:
    """What a result says of the rounds of a run that took so long."""
    num_rounds, in_rounds, cpu_seconds = totals
    return {
        "num_rounds": num_rounds,
        "round_ms": 1e3 * in_rounds / num_rounds,
        "round_cpu_ms": 1e3 * cpu_seconds / num_rounds,
        "share_of_time_in_rounds": in_rounds / seconds,
    }


def run_engine() -> int:
    """The engine process itself, beside a thread that looks at it."""
    clock = StepClock()
    Engine.step = clock.timed(Engine.step)  # type: ignore[method-assign]
    threading.Thread(target=_sample, args=(clock,), daemon=True).start()
    return engine_process.main()


def _sample(clock: StepClock) -> None:
    """Count where the main thread is, and write the counts down twice a second."""
    main, counts, packages = threading.main_thread().ident, Counter[str](), Counter[str]()
    written = time.monotonic()
    while True:
        time.sleep(SAMPLE_SECONDS)
        frame = sys._current_frames().get(main or 0)
        if frame is not None:
            counts[_place(frame)] += 1
            packages.update(_packages(frame) & HTTP_PACKAGES)
        if time.monotonic() - written > 0.5:
            written = time.monotonic()
            imported = {name.partition(".")[0] for name in list(sys.modules)} & HTTP_PACKAGES
            found = {
                "samples": counts,
                "on_stack": packages,
                "imported": sorted(imported),
                "rounds": clock.totals,
            }
            temporary = Path(os.environ[PROFILE] + ".new")
            temporary.write_text(json.dumps(found))
            temporary.rename(os.environ[PROFILE])


def _place(frame: FrameType | None) -> str:
    """The part of the work that a stack belongs to."""
    while frame is not None:
        name = frame.f_code.co_name
        if frame.f_code.co_filename == engine_process.__file__:
            if name == "receive":
                return "waits for messages"
            if name == "_load":
                return "loads"
            if name not in ("main", "run", "_step"):
                return "reads and writes messages"
        if name == "step" and frame.f_code.co_filename.endswith("outrider/engine.py"):
            return "rounds"
        frame = frame.f_back
    return "else"


def _packages(frame: FrameType | None) -> set[str]:
    names: set[str] = set()
    while frame is not None:
        names.add(str(frame.f_globals.get("__name__", "")).partition(".")[0])
        frame = frame.f_back
    return names


# In the process that measures.


def requests(vocab_size: int, number: int) -> list[list[int]]:
    rng = random.Random(0)
    return [rng.choices(range(2, vocab_size), k=PROMPT_LEN) for _ in range(number)]


async def drive(url: str, prompts: list[list[int]]) -> int:
    """NUM_AT_ONCE clients until all prompts are done; returns the tokens that came."""
    todo, num_tokens = deque(prompts), 0

    async def client(http: httpx.AsyncClient) -> None:
        nonlocal num_tokens
        while todo:
            body = {
                **{"prompt": todo.popleft(), "max_tokens": OUTPUT_LEN, "temperature": 0},
                **{"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}},
            }
            async with http.stream("POST", f"{url}/v1/completions", json=body) as response:
                response.raise_for_status()
                lines = [line async for line in response.aiter_lines() if line]
            num_tokens += json.loads(lines[-2].removeprefix("data: "))["usage"]["completion_tokens"]

    async with httpx.AsyncClient(timeout=600) as http:
        await asyncio.gather(*(client(http) for _ in range(NUM_AT_ONCE)))
    return num_tokens


def served(model: str, prompts: list[list[int]]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.json"
        environment = os.environ | {ROLE: "server", PROFILE: str(profile)}
        command = [sys.executable, __file__, model]
        server = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        try:
            assert server.stderr is not None
            url = ""
            for line in server.stderr:
                if "ready at " in line:
                    url = line.rpartition(" ")[2].strip()
                    break
            asyncio.run(drive(url, prompts[:NUM_AT_ONCE]))  # warm
            time.sleep(1)
            counted = json.loads(profile.read_text())
            started = time.perf_counter()
            num_tokens = asyncio.run(drive(url, prompts))
            seconds = time.perf_counter() - started
            time.sleep(1)
            found = json.loads(profile.read_text())
        finally:
            server.terminate()
            server.wait(30)
    totals = found["rounds"], counted["rounds"]
    samples = Counter(found["samples"]) - Counter(counted["samples"])
    return {
        "kind": "served",
        "seconds": seconds,
        "num_tokens": num_tokens,
        **round_times([a - b for a, b in zip(*totals, strict=True)], seconds),
        "engine_samples": dict(samples),
        "http_on_engine_stack": found["on_stack"],
        "http_imported_by_engine": found["imported"],
    }


def offline(model: str, prompts: list[list[int]]) -> dict[str, Any]:
    spec = SpeculativeConfig("mtp", num_speculative_tokens=DRAFTS)
    engine = Engine(EngineConfig(model, speculative_config=spec, **OPTIONS))
    params = SamplingParams(max_tokens=OUTPUT_LEN, temperature=0, ignore_eos=True)

    def run(todo: deque[list[int]]) -> tuple[float, int, StepClock]:
        clock = StepClock()
        step = clock.timed(Engine.step)
        started, num_tokens, index = time.perf_counter(), 0, 0
        for index in range(NUM_AT_ONCE):
            engine.add_request(str(index), todo.popleft(), params)
        while engine.has_work:
            for output in step(engine):
                if output.finished:
                    num_tokens += len(output.token_ids)
                    if todo:
                        index += 1
                        engine.add_request(str(index), todo.popleft(), params)
        return time.perf_counter() - started, num_tokens, clock

    run(deque(prompts[:NUM_AT_ONCE]))
    seconds, num_tokens, clock = run(deque(prompts))
    return {
        "kind": "offline",
        "seconds": seconds,
        "num_tokens": num_tokens,
        **round_times(clock.totals, seconds),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--num-requests", type=int, default=96)
    parser.add_argument("--output", type=Path, help="append the results, one object a line")
    args = parser.parse_args()
    vocab_size = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
    prompts = requests(vocab_size, args.num_requests)
    context = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "num_at_once": NUM_AT_ONCE,
        "prompt_len": PROMPT_LEN,
        "output_len": OUTPUT_LEN,
        "engine": OPTIONS | {"method": "mtp", "num_drafts": DRAFTS},
    }
    for measure in (offline, served) * 3:  # the machine may be shared
        result = measure(args.model, prompts)
        print(json.dumps(result), flush=True)
        if args.output is not None:
            with args.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result | context) + "\n")
    return 0


if __name__ == "__main__":
    match os.environ.get(ROLE):
        case "server":
            sys.exit(run_server(sys.argv[1]))
        case "engine":
            os._exit(run_engine())
        case _:
            sys.exit(main())
