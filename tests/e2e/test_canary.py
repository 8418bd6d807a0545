"""Wrong counts of accepted rows in one sequence's slot never touch another sequence's state."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from outrider.engine import Engine
from outrider.layers.rows import AttentionCache, DeltaCache
from outrider.ops.bookkeeping import reference as bookkeeping
from outrider.params import SamplingParams
from tests.checkpoints import SHAPES, TinyShape
from tests.checkpoints_qwen3 import QWEN3_SHAPES
from tests.harness import (
    Frozen,
    ScriptedDrafter,
    freeze,
    make_engine,
    random_tokens,
    run_requests,
)
from tests.trained import Folders

Checkpoints = Callable[[TinyShape], Path]

NUM_DRAFTS = 3
NUM_STEPS = 7
PROMPTS = [random_tokens(length, 128, length) for length in (35, 6, 17)]
VICTIM = 1
NEIGHBOURS = (0, 2)

COUNTS = (0, NUM_DRAFTS, NUM_DRAFTS + 1, NUM_DRAFTS + 2, -1, -(2**62), 2**31, 2**62)


@dataclass(frozen=True)
class Held:
    """What the engine holds for a neighbour, independent of where it lies."""

    target: Frozen
    draft_kv: list[Tensor] = field(repr=False)
    slot_entries: list[Tensor] = field(repr=False)

    @classmethod
    def of(cls, engine: Engine, sequence_id: int) -> Held:
        target = freeze(engine, sequence_id)
        blocks = torch.tensor(engine.cache.block_ids(sequence_id))
        draft_kv = [
            layer.kv_pool[:, blocks].transpose(2, 3).flatten(1, 2)[:, : target.num_computed].clone()
            for layer in engine.runner.draft_caches
            if isinstance(layer, AttentionCache)
        ]
        slot, table = engine.scheduler.sequence(sequence_id).slot, engine.runner.slots
        tensors = (
            table.num_committed,
            table.last_token_ids,
            table.token_ids,
            table.draft_token_ids,
            table.finished,
            *vars(table.pending).values(),
        )
        return cls(target, draft_kv, [tensor[slot].clone() for tensor in tensors])

    def differences(self, other: Held) -> list[str]:
        found = self.target.differences(other.target)
        for name in ("draft_kv", "slot_entries"):
            pairs = zip(getattr(self, name), getattr(other, name), strict=True)
            found += [f"{name} {i}" for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
        return found


class Setting:
    """A model, a way to draft for it, and what an undisturbed run holds after every step."""

    def __init__(self, path: Path, method: str, draft: Path | None = None) -> None:
        self.path, self.method, self.draft = path, method, draft
        params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
        outputs = run_requests(make_engine(path), PROMPTS, params)
        self.texts = {i: [*PROMPTS[i], *output.token_ids] for i, output in enumerate(outputs)}
        engine = self.begun()
        self.undisturbed = [self.stepped(engine) for _ in range(NUM_STEPS)]
        gained = [held[0].target.num_computed - len(PROMPTS[0]) for held in self.undisturbed]
        assert gained[-1] >= NUM_STEPS - 1, gained

    def begun(self) -> Engine:
        """An engine after the prompts' pass."""
        options: dict[str, Any] = {"max_num_seqs": 6, "method": self.method, "draft": self.draft}
        if self.method == "script":
            options |= {"method": "mtp", "drafter": ScriptedDrafter(coin, self.texts, 128)}
        engine = make_engine(self.path, NUM_DRAFTS, **options)
        params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
        for index, prompt in enumerate(PROMPTS):
            engine.add_request(str(index), prompt, params)
        engine.step()
        return engine

    @staticmethod
    def stepped(engine: Engine) -> list[Held]:
        engine.step()
        return [Held.of(engine, sequence_id) for sequence_id in NEIGHBOURS]


def coin(sequence_id: int, turn: int, index: int) -> bool:
    return random.Random(f"{sequence_id} {turn} {index}").random() < 0.7


@pytest.fixture(scope="module")
def settings(
    random_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Setting]:
    folders, made = Folders(tmp_path_factory), {}

    def setting(method: str) -> Setting:
        if method not in made:
            draft = folders.draft(QWEN3_SHAPES[0]) if method == "eagle3" else None
            path = folders.target(QWEN3_SHAPES[0]) if draft else random_checkpoint(SHAPES[0])
            made[method] = Setting(path, method, draft)
        return made[method]

    return setting


def canary_slots(engine: Engine) -> list[int]:
    """Slots of nobody."""
    running = {engine.scheduler.sequence(i).slot for i in range(len(PROMPTS))}
    return [slot for slot in range(len(engine.runner.slots.finished)) if slot not in running]


def per_slot_storage(engine: Engine, slots: list[int]) -> list[Tensor]:
    """Copies of everything recurrent that the slots hold."""
    held: list[Tensor] = []
    for layer in engine.runner.target_caches:
        if isinstance(layer, DeltaCache):
            delta = layer.delta
            held += [layer.conv_ring[slots], delta.state[slots]]
            records = (delta.record_keys, delta.record_updates, delta.record_decays)
            held += [record[:, slots] for record in records]
    return held


def fill(engine: Engine, slots: list[int]) -> None:
    """Put numbers into the slots that no computation makes."""
    for layer in engine.runner.target_caches:
        if isinstance(layer, DeltaCache):
            layer.conv_ring[slots] = 1234.5
            layer.delta.state[slots] = 2345.5
            for record in (
                layer.delta.record_keys,
                layer.delta.record_updates,
                layer.delta.record_decays,
            ):
                record[:, slots] = 3456.5


def check_free_blocks(engine: Engine) -> None:
    """Blocks that nobody owns still hold the NaN that they were filled with."""
    owned = {0}.union(*(engine.cache.block_ids(i) for i in range(len(PROMPTS))))
    for layer in (*engine.runner.target_caches, *engine.runner.draft_caches):
        if isinstance(layer, AttentionCache):
            free = [block for block in range(layer.kv_pool.shape[1]) if block not in owned]
            assert free and bool(layer.kv_pool[:, free].isnan().all())


@pytest.mark.parametrize(
    ("method", "count"),
    [
        *(("script", count) for count in COUNTS),
        *(("mtp", count) for count in COUNTS),
        *(("eagle3", count) for count in (0, NUM_DRAFTS, 2**62)),
    ],
)
def test_any_count_of_accepted_rows_stays_within_its_own_slot(
    settings: Callable[[str], Setting], method: str, count: int
) -> None:
    setting = settings(method)
    engine = setting.begun()
    victim = engine.scheduler.sequence(VICTIM).slot
    canaries = canary_slots(engine)
    fill(engine, canaries)
    before = per_slot_storage(engine, canaries)
    for step, expected in enumerate(setting.undisturbed):
        engine.runner.slots.pending.num_accepted_rows[victim] = count
        held = setting.stepped(engine)
        for sequence_id, was, now in zip(NEIGHBOURS, expected, held, strict=True):
            differences = now.differences(was)
            assert not differences, f"sequence {sequence_id}, step {step}: {differences}"
    after = per_slot_storage(engine, canaries)
    assert all(torch.equal(was, now) for was, now in zip(before, after, strict=True))
    check_free_blocks(engine)


def test_a_wrong_count_does_change_the_state_of_its_own_slot(
    settings: Callable[[str], Setting],
) -> None:
    # Else the counts that the test above writes would not be read at all.
    def victims_state(count: int | None) -> Frozen:
        engine = settings("script").begun()
        for _ in range(3):
            if count is not None:
                slot = engine.scheduler.sequence(VICTIM).slot
                engine.runner.slots.pending.num_accepted_rows[slot] = count
            engine.step()
        return freeze(engine, VICTIM)

    undisturbed = victims_state(None)
    assert any(name.startswith("state") for name in victims_state(0).differences(undisturbed))


@pytest.mark.parametrize("all_of_them", [False, True])
@pytest.mark.parametrize("method", ["script", "mtp", "eagle3"])
def test_a_wrong_verdict_on_one_sequence_stays_within_it(
    settings: Callable[[str], Setting], method: str, all_of_them: bool
) -> None:
    """0 or K accepted drafts, whatever the target says of them."""
    setting = settings(method)
    engine = setting.begun()
    accept_matching = bookkeeping.accept_matching
    victim = VICTIM  # the rows of a round are those of the running sequences, oldest first

    def wrong(sampled: Tensor, draft_token_ids: Tensor, num_drafts: Tensor) -> Tensor:
        num_accepted = accept_matching(sampled, draft_token_ids, num_drafts)
        num_accepted[victim] = num_drafts[victim] if all_of_them else 0
        return num_accepted

    canaries = canary_slots(engine)
    fill(engine, canaries)
    before = per_slot_storage(engine, canaries)
    with mock.patch.object(bookkeeping, "accept_matching", wrong):
        for expected in setting.undisturbed:
            held = setting.stepped(engine)
            for was, now in zip(expected, held, strict=True):
                assert not now.differences(was)
    gained = engine.scheduler.sequence(VICTIM).num_computed - len(PROMPTS[VICTIM])
    assert gained == NUM_STEPS * (NUM_DRAFTS + 1 if all_of_them else 1)
    after = per_slot_storage(engine, canaries)
    assert all(torch.equal(was, now) for was, now in zip(before, after, strict=True))
    check_free_blocks(engine)
