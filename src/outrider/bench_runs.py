"""Runs requests through an engine, notes when their tokens arrive, and makes rates of it."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outrider.bench_report import RoundWork, process_age, read_bandwidth, round_bytes
from outrider.config import EngineConfig
from outrider.engine import Engine
from outrider.output import RequestOutput, total_speculation
from outrider.params import SamplingParams
from outrider.trace import SpeculationStats


@dataclass(frozen=True)
class Window:
    """The part of a run in which every sequence decoded: from the last one's first token on, until
    the first one ended."""

    seconds: float
    num_tokens: int
    num_passes: int


@dataclass(frozen=True)
class Run:
    """Requests that were queued together and run until all had ended.

    Attributes:
        seconds: from the first request's arrival to the last token.
        first_tokens: seconds to each request's first token.
        window: None where the first sequence had ended before the last one began.
    """

    seconds: float
    first_tokens: tuple[float, ...]
    stats: SpeculationStats
    window: Window | None

    @property
    def raw(self) -> dict[str, Any]:
        """What a result file keeps."""
        return {
            "seconds": self.seconds,
            "num_tokens": self.stats.num_tokens,
            "num_passes": self.stats.num_passes,
            "num_rounds": self.stats.num_rounds,
            "num_accepted": self.stats.num_accepted,
            "first_tokens": self.first_tokens,
            "window": None if self.window is None else dataclasses.asdict(self.window),
        }


class Bench:
    """An engine, and requests for it."""

    def __init__(self, config: EngineConfig, options: dict[str, Any]) -> None:
        """
        Args:
            options: of SamplingParams, for all requests.
        """
        begin = time.perf_counter()
        self.engine = Engine(config)
        self.device = next(self.engine.runner.target.parameters()).device
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.load_seconds = time.perf_counter() - begin
        self.ready_seconds = process_age()
        self._options: dict[str, Any] = {"temperature": 0.0, **options}
        self._prompts = random.Random(config.seed)

    def run(self, num_requests: int, input_len: int, output_len: int) -> Run:
        """Queue requests at once and run them to their end.

        Every run has new prompts, so that no cache of prefixes serves it. The seeds of its requests
        are the same in each, and with them the rounds that synthetic acceptance gives.
        """
        requests = [self._request(index, input_len, output_len) for index in range(num_requests)]
        watch = _Watch(num_requests)
        for index, (prompt, params) in enumerate(requests):
            self.engine.add_request(str(index), prompt, params)
        while self.engine.has_work:
            watch.see(self.engine.step())
        return watch.run()

    def _request(
        self, index: int, input_len: int, output_len: int
    ) -> tuple[list[int], SamplingParams]:
        vocab_size = self.engine.model_config.vocab_size
        prompt = self._prompts.choices(range(vocab_size), k=input_len)
        seed = (self._options.get("seed", self.engine.config.seed) + index) % 2**63
        fixed: dict[str, Any] = {"seed": seed, "max_tokens": output_len, "ignore_eos": True}
        return prompt, SamplingParams(**(self._options | fixed))

    def floor(self, num_sequences: int, context_len: int) -> tuple[int | None, float | None]:
        """Bytes of a round, and the seconds that reading them takes; None where not known."""
        engine, options = self.engine, self._options
        num_drafts = engine.config.num_speculative_tokens if options.get("speculation", True) else 0
        num_drafts = min(num_drafts, options.get("max_draft_tokens", num_drafts))
        num_bytes = round_bytes(
            engine.runner.target,
            engine.runner.drafter,
            RoundWork(num_sequences, context_len, num_drafts),
            engine.runner.options.dtype,
            getattr(torch, engine.config.state_dtype),
        )
        bandwidth = read_bandwidth(self.device)
        if num_bytes is None or bandwidth is None:
            return num_bytes, None
        return num_bytes, num_bytes / bandwidth


class _Watch:
    """Notes when the tokens of a run arrive."""

    def __init__(self, num_requests: int) -> None:
        self._begin = time.perf_counter()
        self._num_requests = num_requests
        self._first: dict[str, float] = {}
        self._newest: dict[str, RequestOutput] = {}
        self._finished: dict[str, RequestOutput] = {}
        self._all_began: tuple[float, int, int] | None = None
        self._window: Window | None = None
        self._seconds = 0.0

    def see(self, outputs: Sequence[RequestOutput]) -> None:
        """Take what one step of the engine gave."""
        self._seconds = time.perf_counter() - self._begin
        none_finished = not self._finished
        for output in outputs:
            if output.error is not None:
                raise output.error
            self._newest[output.request_id] = output
            if output.token_ids:
                self._first.setdefault(output.request_id, self._seconds)
            if output.finished:
                self._finished[output.request_id] = output
        if none_finished and self._finished and self._all_began is not None:
            began, num_tokens, num_passes = self._all_began
            self._window = Window(
                self._seconds - began, self._tokens() - num_tokens, self._passes() - num_passes
            )
        if self._all_began is None and len(self._first) == self._num_requests:
            self._all_began = self._seconds, self._tokens(), self._passes()

    def run(self) -> Run:
        """The whole, once all have ended."""
        assert len(self._finished) == self._num_requests, "the engine stopped before its requests"
        first_tokens = tuple(self._first[str(index)] for index in range(self._num_requests))
        stats = total_speculation(self._finished.values())
        return Run(self._seconds, first_tokens, stats, self._window)

    def _tokens(self) -> int:
        return sum(len(output.token_ids) for output in self._newest.values())

    def _passes(self) -> int:
        return sum(len(output.rounds) for output in self._newest.values())


@dataclass(frozen=True)
class Latency:
    """Decoding at one batch size, over several pairs of a long and a short run.

    Attributes:
        floor_bytes, floor_seconds: of a round; None where not known.
    """

    batch_size: int
    long: tuple[Run, ...]
    short: tuple[Run, ...]
    floor_bytes: int | None
    floor_seconds: float | None

    @property
    def decode_rates(self) -> list[float]:
        """Tokens a second of each long run, without what its prompts took.

        (tokens of the long run - tokens of a short one) / (difference of their times), with the
        quickest short run: prompts and the beginning are the same work in all of them.
        """
        quickest = min(self.short, key=lambda run: run.seconds)
        rates: list[float] = []
        for run in self.long:
            seconds = run.seconds - quickest.seconds
            tokens = run.stats.num_tokens - quickest.stats.num_tokens
            rates.append(tokens / seconds if seconds > 0 else 0.0)
        return rates

    @property
    def decode_rate(self) -> float:
        """The best of them."""
        return max(self.decode_rates)

    @property
    def _windows(self) -> list[Window]:
        windows = [run.window for run in self.long]
        return [window for window in windows if window is not None and window.num_passes > 0]

    @property
    def full_batch_rate(self) -> float | None:
        """Tokens a second while every sequence decoded; the best run's."""
        return max((window.num_tokens / window.seconds for window in self._windows), default=None)

    @property
    def round_seconds(self) -> float | None:
        """From one round to the next while every sequence decoded; the best run's."""
        times = [window.seconds * self.batch_size / window.num_passes for window in self._windows]
        return min(times, default=None)

    @property
    def share_of_floor(self) -> float | None:
        """How much of a round's time the floor is."""
        seconds, floor = self.round_seconds, self.floor_seconds
        return floor / seconds if seconds is not None and floor is not None else None

    @property
    def stats(self) -> SpeculationStats:
        """Of the long runs."""
        return sum((run.stats for run in self.long), SpeculationStats())

    @property
    def result(self) -> dict[str, Any]:
        """What a result file keeps."""
        return {
            "kind": "latency",
            "batch_size": self.batch_size,
            "decode_tokens_per_second": self.decode_rate,
            "decode_tokens_per_second_all": self.decode_rates,
            "full_batch_tokens_per_second": self.full_batch_rate,
            "round_seconds": self.round_seconds,
            "acceptance_length": self.stats.acceptance_length,
            "floor_bytes": self.floor_bytes,
            "floor_seconds": self.floor_seconds,
            "share_of_floor": self.share_of_floor,
            "long_runs": [run.raw for run in self.long],
            "short_runs": [run.raw for run in self.short],
        }


def measure_latency(
    bench: Bench, batch_size: int, input_len: int, output_len: int, num_iters: int
) -> Latency:
    """Time pairs of a long run and one of a quarter of its length, after a pair to warm up."""
    lengths = (output_len, output_len // 4)
    pairs = [
        [bench.run(batch_size, input_len, length) for length in lengths]
        for _ in range(num_iters + 1)
    ][1:]
    num_bytes, seconds = bench.floor(batch_size, input_len + output_len // 2)
    long, short = zip(*pairs, strict=True)
    return Latency(batch_size, long, short, num_bytes, seconds)
