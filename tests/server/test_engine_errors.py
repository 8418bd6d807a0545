"""Whose fault an error of the engine is: clients get 400 for theirs, 5xx for the server's."""

from __future__ import annotations

import pytest

from outrider.engine_messages import to_error, to_fault
from outrider.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    DrainingError,
    EngineDeadError,
    EngineFaultError,
    OutriderError,
    RequestError,
    ServerError,
    StuckRoundError,
)
from outrider.server.errors import DeadlineError, from_outrider

WANTED = {
    EngineFaultError("a fault (MemoryError()) while its tokens were taken in", hint="again"): 500,
    CapacityError("memory ran out while request 1 ran alone", got="5 tokens"): 500,
    CapacityError("request 1 cannot be admitted to an idle engine"): 500,
    ConfigError("num_kv_blocks", got=3): 500,
    CheckpointError("a file is gone"): 500,
    ServerError("another server"): 500,
    OutriderError("prompt of a kind that nobody has thought of"): 500,
    StuckRoundError("results did not come"): 503,
    EngineDeadError("the engine process has ended"): 503,
    DrainingError("the engine is draining"): 503,
}


@pytest.mark.parametrize(("error", "status"), WANTED.items(), ids=str)
def test_what_is_not_the_clients_fault_names_no_field_of_the_request(
    error: OutriderError, status: int
) -> None:
    answer = from_outrider(to_error(to_fault(error)))  # as it comes out of the engine's process
    assert answer.status == status and answer.param is None
    body = answer.body()["error"]
    assert body["type"] == "server_error" and body["message"] == str(error)
    assert answer.code in ("engine_fault", "out_of_memory", "engine_unavailable")


def test_a_lack_of_memory_that_was_tried_again_already_is_not_to_be_tried_by_clients() -> None:
    answer = from_outrider(CapacityError("memory ran out"))
    assert answer.code == "out_of_memory" and answer.headers == {"x-should-retry": "false"}
    assert from_outrider(EngineFaultError("a fault")).headers == {}


def test_what_is_the_clients_fault_stays_400_with_the_field() -> None:
    answer = from_outrider(RequestError("stop string", got=5))
    assert (answer.status, answer.param) == (400, "stop")
    assert from_outrider(DeadlineError("too late")).status == 408
