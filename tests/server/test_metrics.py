"""What /metrics counts, against what answers say and against times that are made up."""

from __future__ import annotations

from functools import partial

import pytest

from outrider.engine_messages import Stats
from outrider.server.metrics import Metrics
from outrider.trace import PassTimes
from tests.server.serving import Server, metric_of, wait_until

BODY = {"model": "tiny", "prompt": "def read_lines(path):", "temperature": 0, "max_tokens": 16}
PARTS = ("verify", "commit", "draft")


def test_metrics_count_what_was_done(server: Server) -> None:
    wait_until(server.is_idle, "an idle engine")
    before = partial(metric_of, server.get("/metrics").text)
    answer = server.post("/v1/completions", BODY).json()
    block, details = answer["outrider"], answer["usage"]["completion_tokens_details"]
    wanted = {
        "spec_decode_num_drafts_total": block["rounds"],
        "spec_decode_num_draft_tokens_total": block["drafted"],
        "spec_decode_num_accepted_tokens_total": block["accepted"],
        "generation_tokens_total": 16,
        "wasted_tokens_total": details["rejected_prediction_tokens"],
        "time_to_first_token_seconds_count": 1,
        "e2e_request_latency_seconds_count": 1,
    }
    awaited = before("draft_duration_seconds_count") + block["rounds"]
    wait_until(
        lambda: server.metric("draft_duration_seconds_count") >= awaited,
        "the times of the newest rounds",
    )
    after = partial(metric_of, server.get("/metrics").text)
    assert {name: after(name) - before(name) for name in wanted} == wanted
    at_first = partial(after, "spec_decode_num_accepted_tokens_per_pos_total", position="0")
    first = partial(before, "spec_decode_num_accepted_tokens_per_pos_total", position="0")
    assert at_first() - first() == block["accepted_per_position"][0]
    assert after("round_duration_seconds_count") > before("round_duration_seconds_count")
    rounds = after("round_device_seconds_count")
    assert [after(f"{part}_duration_seconds_count") for part in PARTS] == [rounds] * 3
    sums = [after(f"{part}_duration_seconds_sum") for part in PARTS]
    assert min(sums) > 0 and sum(sums) == pytest.approx(after("round_device_seconds_sum"))
    assert after("engine_up") == 1


def test_each_phase_of_a_round_is_counted_under_its_name() -> None:
    metrics = Metrics("tiny", 3)
    passes = (
        PassTimes(0.0, 7.0, (4.0, 1.0, 2.0), 1, is_round=True),
        PassTimes(9.0, 90.0, (30.0, 30.0, 30.0), 1, is_round=False),  # of a prompt
        PassTimes(99.0, 8.0, None, 1, is_round=True),  # on a GPU
    )
    stats = Stats(0, 0, 0.0, 0, step_seconds=(0.5, 0.25), pass_times=passes)
    metrics.engine_reported(stats)
    found = partial(metric_of, metrics.text().decode())
    assert [found(f"{part}_duration_seconds_sum") for part in PARTS] == [4.0, 1.0, 2.0]
    assert [found(f"{part}_duration_seconds_count") for part in PARTS] == [1, 1, 1]
    assert (found("round_device_seconds_sum"), found("round_device_seconds_count")) == (15.0, 2)
    assert (found("round_duration_seconds_sum"), found("round_duration_seconds_count")) == (0.75, 2)
