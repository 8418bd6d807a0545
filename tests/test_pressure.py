"""The scheduler and the cache under pressure: random worlds, held against the contract.

A world is a scheduler, a cache, users, and a device that knows the truth; pressure/contract.py says
what every plan is held against. Every fault of pressure/mutations.py must be noticed by the same
worlds.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.pressure.mutation import Mutation
from tests.pressure.mutations import MUTATIONS
from tests.pressure.world import World

NUM_STEPS = 300
SEEDS_PER_TEST = 20
MOST_SEEDS = 60
"""In which a fault has to be noticed."""

BROKEN = (TypeError, AttributeError, NameError)
"""What a fault that is written wrongly raises."""

EVENTS = (
    "finished",
    "aborted",
    "preempted",
    "ended in flight",
    "plan refused",
    "batch lost",
    "tokens from the prefix cache",
    "state kept in a round",
)


def run(seed: int, num_steps: int) -> World:
    world = World(seed)
    try:
        world.run(num_steps)
    except BaseException as error:
        error.add_note(f"World({seed}).run({num_steps})")
        raise
    return world


def run_many(seeds: range, num_steps: int) -> None:
    """All of them, and everything that may happen happens in some."""
    events: Counter[str] = Counter()
    for seed in seeds:
        events += run(seed, num_steps).events
    assert all(events[event] for event in EVENTS), events


@pytest.mark.parametrize("part", range(4))
def test_random_worlds_serve_everybody_what_plain_decoding_answers(part: int) -> None:
    run_many(range(part * SEEDS_PER_TEST, (part + 1) * SEEDS_PER_TEST), NUM_STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_many_more_worlds_serve_everybody(part: int) -> None:
    run_many(range(1000 + part * 50, 1050 + part * 50), 500)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_fault_is_noticed(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation.apply(monkeypatch)
    for seed in range(MOST_SEEDS):
        try:
            run(seed, NUM_STEPS)
        except BROKEN:
            raise
        except Exception:
            return
    pytest.fail(f"nobody noticed: {mutation.fault}")


def test_a_dozen_faults_are_tried_and_each_says_what_is_wrong() -> None:
    assert len(MUTATIONS) >= 12
    faults = [mutation.fault for mutation in MUTATIONS]
    assert len(set(faults)) == len(faults) and all(fault.endswith(".") for fault in faults)
