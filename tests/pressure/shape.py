"""What a world is drawn from: memory, budgets, habits of its users and of its device."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class WorldShape:
    """What a seed decides once.

    Attributes:
        spare_blocks: blocks beyond those that the longest request needs.
        prefix_unit: None without a prefix cache.
        num_checkpoints: None for models without a recurrent state.
        look_ahead: most batches in flight when the next one is planned.
        is_lazy: the device runs a batch when its results are asked for, not when it is submitted.
        failure_rate: of batches that are lost, by submission or by collection.
    """

    block_size: int
    prefill_grid: int
    max_prefill_tokens: int
    num_drafts: int
    num_slots: int
    spare_blocks: int
    prefix_unit: int | None
    num_checkpoints: int | None
    checkpoint_interval: int
    look_ahead: int
    is_lazy: bool
    acceptance: float
    finds_less: bool
    arrival_rate: float
    abort_rate: float
    failure_rate: float
    has_priorities: bool

    @classmethod
    def draw(cls, rng: random.Random) -> WorldShape:
        block_size = rng.choice([1, 2, 4, 8, 16])
        grid = rng.choice([1, 4, 8, 16])
        unit = math.lcm(block_size, grid) * rng.choice([1, 1, 2])
        is_recurrent = rng.random() < 0.5
        return cls(
            block_size=block_size,
            prefill_grid=grid,
            max_prefill_tokens=grid + rng.choice([0, 5, 16, 100]),
            num_drafts=rng.choice([0, 1, 3, 8]),
            num_slots=rng.choice([1, 2, 4, 6, 9]),
            spare_blocks=rng.choice([0, 0, 0, 1, 3, 40]) * 16 // block_size,
            prefix_unit=unit if rng.random() < 0.7 else None,
            num_checkpoints=rng.choice([1, 2, 5, 30]) if is_recurrent else None,
            checkpoint_interval=unit * rng.choice([1, 2, 4]),
            look_ahead=rng.choice([0, 1, 1, 2]),
            is_lazy=rng.random() < 0.5,
            acceptance=rng.choice([0.0, 0.5, 0.9, 1.0]),
            finds_less=rng.random() < 0.2,
            arrival_rate=rng.choice([0.1, 0.3, 1.0]),
            abort_rate=rng.choice([0.0, 0.0, 0.05]),
            failure_rate=rng.choice([0.0, 0.0, 0.02]),
            has_priorities=rng.random() < 0.3,
        )
