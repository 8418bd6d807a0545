"""Prometheus metrics and the periodic line in the log, from what AsyncLLM tells.

Names are those that dashboards for vLLM read, with the prefix `outrider:`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from outrider.async_llm import RequestStream
from outrider.engine_messages import RequestDelta, Stats
from outrider.trace import Origin, SpeculationStats

logger = logging.getLogger("outrider.server")

LOG_SECONDS = 10.0

_LATENCIES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKEN_TIMES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_ROUND_TIMES = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 1.0)
_PHASE_TIMES = (0.0001, 0.00025, 0.0005, *_ROUND_TIMES)
_LENGTHS = tuple(float(2**power) for power in range(18))


@dataclass
class _Times:
    """Of one request, by the monotonic clock."""

    started: float
    first: float | None = None
    last: float = 0.0
    num_tokens: int = 0


class Metrics:
    """Observes an AsyncLLM; survives the engine's restarts."""

    def __init__(self, model_name: str, max_draft_tokens: int) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._times: dict[str, _Times] = {}
        self._totals = SpeculationStats()
        self._num_prompt_tokens = self._num_output_tokens = 0
        self._stats = Stats(0, 0, 0.0, 0)
        self._num_preemptions_before = 0
        self._make_gauges()
        self._make_counters(max_draft_tokens)
        self._make_histograms()

    def _gauge(self, name: str, about: str) -> Gauge:
        made = Gauge(f"outrider:{name}", about, ["model_name"], registry=self.registry)
        return made.labels(self._model_name)

    def _counter(self, name: str, about: str) -> Counter:
        made = Counter(f"outrider:{name}", about, ["model_name"], registry=self.registry)
        return made.labels(self._model_name)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(
            f"outrider:{name}", about, ["model_name"], buckets=buckets, registry=self.registry
        )
        return made.labels(self._model_name)

    def _make_gauges(self) -> None:
        self._up = self._gauge("engine_up", "1 while the engine is loaded and lives")
        self._running = self._gauge("num_requests_running", "sequences that hold a slot")
        self._waiting = self._gauge("num_requests_waiting", "sequences that wait for a slot")
        self._kv_usage = self._gauge("kv_cache_usage_perc", "share of KV blocks held, 0 to 1")

    def _make_counters(self, max_draft_tokens: int) -> None:
        counter = self._counter
        self._prompt_tokens = counter("prompt_tokens", "prompt tokens of requests that got output")
        self._output_tokens = counter("generation_tokens", "tokens of outputs")
        self._preemptions = counter("num_preemptions", "sequences that gave up their place")
        self._restarts = counter("engine_restarts", "engine processes started after one had ended")
        self._prefix_queries = counter(
            "prefix_cache_queries", "prompt tokens looked up in the prefix cache"
        )
        self._prefix_hits = counter("prefix_cache_hits", "prompt tokens found in the prefix cache")
        self._drafts = counter("spec_decode_num_drafts", "rounds that verified drafts")
        self._draft_tokens = counter("spec_decode_num_draft_tokens", "drafts verified")
        self._accepted = counter("spec_decode_num_accepted_tokens", "drafts accepted")
        self._wasted = counter("wasted_tokens", "drafts verified that are no part of a text")
        per_position = Counter(
            "outrider:spec_decode_num_accepted_tokens_per_pos",
            "drafts accepted at each position, from 0",
            ["model_name", "position"],
            registry=self.registry,
        )
        self._accepted_at = [
            per_position.labels(self._model_name, str(position))
            for position in range(max_draft_tokens)
        ]
        self._ended = Counter(
            "outrider:request_success",
            "outputs that ended, by reason; abort where the client left or the engine was lost",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        for reason in ("stop", "length", "abort"):
            self._ended.labels(self._model_name, reason)

    def _make_histograms(self) -> None:
        histogram = self._histogram
        self._ttft = histogram("time_to_first_token_seconds", "until the first token", _LATENCIES)
        self._token_time = histogram(
            "time_per_output_token_seconds",
            "time between tokens; those of one round share its time evenly",
            _TOKEN_TIMES,
        )
        self._latency = histogram("e2e_request_latency_seconds", "of whole requests", _LATENCIES)
        self._round_time = histogram("round_duration_seconds", "of engine steps", _ROUND_TIMES)
        self._device_time = histogram(
            "round_device_seconds", "of rounds from first operation to results", _PHASE_TIMES
        )
        self._phase_times = [
            histogram(f"{name}_duration_seconds", f"{about}; nothing where not known", _PHASE_TIMES)
            for name, about in (
                ("verify", "target pass and decision of a round"),
                ("commit", "commit of a round"),
                ("draft", "draft steps of a round"),
            )
        ]
        self._prompt_length = histogram("request_prompt_tokens", "prompt tokens", _LENGTHS)
        self._output_length = histogram("request_generation_tokens", "output tokens", _LENGTHS)

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)

    def engine_is_up(self, up: bool) -> None:
        """The engine was loaded, or has ended."""
        self._up.set(up)
        if not up:
            self._set_stats(Stats(0, 0, 0.0, 0))
            self._num_preemptions_before = 0

    def engine_restarted(self) -> None:
        """A new engine process was started in place of one that ended."""
        self._restarts.inc()

    def request_started(self, request: RequestStream) -> None:
        self._times[request.request_id] = _Times(time.monotonic())

    def request_grew(self, request: RequestStream, delta: RequestDelta) -> None:
        times, now = self._times[request.request_id], time.monotonic()
        num_new = sum(len(completion.token_ids) for completion in delta.completions)
        if times.first is None:
            times.first = now
            self._ttft.observe(now - times.started)
            self._take_prompt(request, delta)
        else:
            for _ in range(num_new):
                self._token_time.observe((now - times.last) / num_new)
        times.last = now
        times.num_tokens += num_new
        self._output_tokens.inc(num_new)
        self._num_output_tokens += num_new
        for completion in delta.completions:
            self._take_rounds(SpeculationStats.of(list(completion.rounds)))
            kept = sum(
                origin.origin is Origin.DRAFTED
                for trace in completion.rounds
                for origin in trace.origins
            )
            drafted = sum(len(trace.draft_token_ids) for trace in completion.rounds)
            self._wasted.inc(drafted - kept)
            if completion.finish_reason is not None:
                self._ended.labels(self._model_name, completion.finish_reason.value).inc()

    def _take_prompt(self, request: RequestStream, delta: RequestDelta) -> None:
        num_prompt = len(request.prompt_token_ids)
        self._prompt_tokens.inc(num_prompt)
        self._num_prompt_tokens += num_prompt
        self._prompt_length.observe(num_prompt)
        self._prefix_queries.inc(num_prompt)
        self._prefix_hits.inc(delta.num_cached_tokens)

    def _take_rounds(self, stats: SpeculationStats) -> None:
        self._totals += stats
        self._drafts.inc(stats.num_rounds)
        self._draft_tokens.inc(stats.num_drafted)
        self._accepted.inc(stats.num_accepted)
        for counter, count in zip(self._accepted_at, stats.accepted_per_position, strict=False):
            counter.inc(count)

    def request_ended(self, request: RequestStream) -> None:
        times = self._times.pop(request.request_id)
        if times.first is None:
            return  # it was refused, or left before anything came
        self._latency.observe(time.monotonic() - times.started)
        self._output_length.observe(times.num_tokens)
        lost = sum(reason is None for reason in request.finish_reasons)
        self._ended.labels(self._model_name, "abort").inc(lost)

    def engine_reported(self, stats: Stats) -> None:
        self._set_stats(stats)
        self._preemptions.inc(max(stats.num_preemptions - self._num_preemptions_before, 0))
        self._num_preemptions_before = stats.num_preemptions
        for seconds in stats.step_seconds:
            self._round_time.observe(seconds)
        for times in stats.pass_times:
            if times.is_round:
                self._device_time.observe(times.seconds)
                for histogram, seconds in zip(self._phase_times, times.parts or (), strict=False):
                    histogram.observe(seconds)

    def _set_stats(self, stats: Stats) -> None:
        self._stats = stats
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._kv_usage.set(stats.kv_usage)

    async def log_periodically(self, seconds: float = LOG_SECONDS) -> None:
        """A line now and then, while there is something to say; until cancelled."""
        before = self._counts()
        while True:
            await asyncio.sleep(seconds)
            now = self._counts()
            if now != before or self._stats.num_running or self._stats.num_waiting:
                logger.info("%s", self._line(before, now, seconds))
            before = now

    def _counts(self) -> tuple[int, int, SpeculationStats]:
        return self._num_prompt_tokens, self._num_output_tokens, self._totals

    def _line(
        self,
        before: tuple[int, int, SpeculationStats],
        now: tuple[int, int, SpeculationStats],
        seconds: float,
    ) -> str:
        rounds = now[2].num_rounds - before[2].num_rounds
        accepted = now[2].num_accepted - before[2].num_accepted
        length = f"{1 + accepted / rounds:.2f}" if rounds else "-"
        return (
            f"running={self._stats.num_running} waiting={self._stats.num_waiting} "
            f"kv={self._stats.kv_usage:.1%} "
            f"prompt_tokens_per_s={(now[0] - before[0]) / seconds:.1f} "
            f"output_tokens_per_s={(now[1] - before[1]) / seconds:.1f} "
            f"acceptance_length={length}"
        )
