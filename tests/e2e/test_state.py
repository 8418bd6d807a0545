"""Whatever is accepted or refused, a sequence's state is bit for bit that of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from outrider.batch import Batch
from outrider.engine import Engine
from outrider.layers.rows import AttentionCache, DeltaCache
from outrider.params import SamplingParams
from tests.checkpoints import SHAPES, TinyShape
from tests.harness import (
    Frozen,
    Script,
    ScriptedDrafter,
    freeze,
    make_engine,
    random_tokens,
    run_requests,
)

Checkpoints = Callable[[TinyShape], Path]

PROMPT_LENGTHS = (70, 1, 33)
NUM_TOKENS = 22
LONG = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)


def coin(sequence_id: int, turn: int, index: int) -> bool:
    return random.Random(f"{sequence_id} {turn} {index}").random() < 0.75


PATTERNS: dict[str, Script] = {
    "all right": lambda sequence_id, turn, index: True,
    "all wrong": lambda sequence_id, turn, index: False,
    "alternating rounds": lambda sequence_id, turn, index: turn % 2 == 0,
    "alternating drafts": lambda sequence_id, turn, index: index % 2 == 0,
    "right until another place each round": lambda s, turn, index: index < (turn + s) % 9,
    "random": coin,
}


def prompts_for(shape: TinyShape) -> list[list[int]]:
    return [random_tokens(n, shape.vocab_size, n) for n in PROMPT_LENGTHS]


def submit(engine: Engine, prompts: Sequence[Sequence[int]]) -> None:
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), list(prompt), LONG)


class Plain:
    """What plain decoding, one sequence at a time, holds at every length, and its text."""

    def __init__(self, path: Path, shape: TinyShape) -> None:
        self.prompts = prompts_for(shape)
        self.frozen: list[dict[int, Frozen]] = []
        self.texts: dict[int, list[int]] = {}
        for index, prompt in enumerate(self.prompts):
            engine = make_engine(path)
            engine.add_request("only", prompt, LONG)
            outputs, frozen = [], {}
            for _ in range(NUM_TOKENS + 9):
                outputs = engine.step()
                state = freeze(engine, 0)
                frozen[state.num_computed] = state
            self.frozen.append(frozen)
            self.texts[index] = [*prompt, *outputs[0].token_ids]


@pytest.fixture(scope="module", params=[SHAPES[0], SHAPES[3]], ids=lambda shape: shape.label)
def shape(request: pytest.FixtureRequest) -> TinyShape:
    return request.param


@pytest.fixture(scope="module")
def plain(random_checkpoint: Checkpoints, shape: TinyShape) -> Plain:
    return Plain(random_checkpoint(shape), shape)


def check_against_plain(engine: Engine, plain: Plain) -> int:
    """Compare every sequence; the most tokens decoded by any, 0 while one is in its prompt."""
    lengths: list[int] = []
    for index, prompt in enumerate(plain.prompts):
        held = freeze(engine, index)
        if held.num_computed < len(prompt):
            return 0
        differences = held.differences(plain.frozen[index][held.num_computed])
        assert not differences, f"sequence {index} at {held.num_computed}: {differences}"
        lengths.append(held.num_computed - len(prompt))
    return max(lengths)


@pytest.mark.parametrize(
    ("pattern", "num_drafts"),
    [*((pattern, k) for pattern in PATTERNS for k in (1, 8)), ("random", 3), ("all right", 3)],
)
def test_drafts_leave_the_bits_of_a_run_that_never_drafted(
    random_checkpoint: Checkpoints, shape: TinyShape, plain: Plain, pattern: str, num_drafts: int
) -> None:
    drafter = ScriptedDrafter(PATTERNS[pattern], plain.texts, shape.vocab_size)
    engine = make_engine(random_checkpoint(shape), num_drafts, drafter=drafter)
    submit(engine, plain.prompts)
    while check_against_plain(engine_after_step(engine), plain) < NUM_TOKENS:
        pass
    assert min(drafter.proposed.values()) > 1


def engine_after_step(engine: Engine) -> Engine:
    engine.step()
    return engine


def test_the_scripts_really_accept_what_they_say(
    random_checkpoint: Checkpoints, shape: TinyShape, plain: Plain
) -> None:
    accepted: dict[str, list[int]] = {}
    for pattern in ("all right", "all wrong", "alternating drafts"):
        drafter = ScriptedDrafter(PATTERNS[pattern], plain.texts, shape.vocab_size)
        engine = make_engine(random_checkpoint(shape), 3, drafter=drafter)
        params = SamplingParams(max_tokens=13, temperature=0, ignore_eos=True)
        [output] = run_requests(engine, plain.prompts[:1], params)
        accepted[pattern] = [r.num_accepted for r in output.rounds if r.draft_token_ids]
    # 1 token comes from the prompt's pass; 12 are left. The last rounds draft less.
    assert accepted["all right"] == [3, 3, 3]
    assert accepted["all wrong"] == [0] * 11
    assert accepted["alternating drafts"] == [1] * 6


@pytest.mark.parametrize("garbage", [-(2**62), -1, 3, 2**62])
def test_garbage_in_slots_that_do_not_run_moves_nothing(
    random_checkpoint: Checkpoints, shape: TinyShape, plain: Plain, garbage: int
) -> None:
    drafter = ScriptedDrafter(PATTERNS["random"], plain.texts, shape.vocab_size)
    engine = make_engine(random_checkpoint(shape), 3, drafter=drafter, max_num_seqs=8)
    submit(engine, plain.prompts)
    engine.step()
    running = {engine.scheduler.sequence(index).slot for index in range(len(plain.prompts))}
    canaries = [slot for slot in range(9) if slot not in running]
    pending = engine.runner.slots.pending
    pending.num_accepted_rows[canaries] = garbage
    pending.last_num_rows[canaries] = 4
    before = fill_canaries(engine, canaries)
    while check_against_plain(engine_after_step(engine), plain) < 8:
        pass
    assert all(
        torch.equal(was, now) for was, now in zip(before, held_by(engine, canaries), strict=True)
    )


def test_garbage_counts_are_clamped_to_the_last_rounds_rows(
    random_checkpoint: Checkpoints, shape: TinyShape, plain: Plain
) -> None:
    drafter = ScriptedDrafter(PATTERNS["all right"], plain.texts, shape.vocab_size)
    engine = make_engine(random_checkpoint(shape), 3, drafter=drafter)
    submit(engine, plain.prompts)
    pending = engine.runner.slots.pending
    for _ in range(4):
        engine.step()
        decoded = pending.num_accepted_rows > 0
        # All drafts are right, so that every row was accepted and a larger count means the same.
        pending.num_accepted_rows[decoded] = 2**40
        check_against_plain(engine, plain)


def next_batch(engine: Engine) -> Batch:
    batch = engine.scheduler.plan()
    assert batch is not None and batch.rounds
    return batch


def held_by(engine: Engine, slots: Sequence[int]) -> list[torch.Tensor]:
    """Copies of all per-slot storage of the slots."""
    held: list[torch.Tensor] = []
    for layer in engine.runner.target_caches:
        if isinstance(layer, DeltaCache):
            delta = layer.delta
            held += [layer.conv_ring[slots], delta.state[slots]]
            held += [
                records[:, slots]
                for records in (delta.record_keys, delta.record_updates, delta.record_decays)
            ]
    return [tensor.clone() for tensor in held]


def fill_canaries(engine: Engine, slots: Sequence[int]) -> list[torch.Tensor]:
    """Put recognisable numbers into the slots; a copy of them."""
    for layer in engine.runner.target_caches:
        if isinstance(layer, DeltaCache):
            for slot in slots:
                layer.conv_ring[slot] = slot + 0.25
                layer.delta.state[slot] = slot + 0.5
                for records in (
                    layer.delta.record_keys,
                    layer.delta.record_updates,
                    layer.delta.record_decays,
                ):
                    records[:, slot] = slot + 0.75
    return held_by(engine, slots)


def test_blocks_of_other_sequences_and_free_blocks_are_never_written(
    random_checkpoint: Checkpoints, shape: TinyShape, plain: Plain
) -> None:
    drafter = ScriptedDrafter(PATTERNS["random"], plain.texts, shape.vocab_size)
    engine = make_engine(random_checkpoint(shape), 8, drafter=drafter)
    submit(engine, plain.prompts)
    for _ in range(8):
        engine.step()
    owned = {0}  # the null block
    for index in range(len(plain.prompts)):
        owned |= set(engine.cache.block_ids(index))
    for layer in engine.runner.target_caches:
        if isinstance(layer, AttentionCache):
            free = [block for block in range(layer.kv_pool.shape[1]) if block not in owned]
            assert free and layer.kv_pool[:, free].isnan().all()


def test_a_slot_marked_finished_is_inert_on_the_device(
    random_checkpoint: Checkpoints, shape: TinyShape, plain: Plain
) -> None:
    # Looking ahead will submit rounds for sequences whose end the host has not seen yet.
    drafter = ScriptedDrafter(PATTERNS["random"], plain.texts, shape.vocab_size)
    engine = make_engine(random_checkpoint(shape), 3, drafter=drafter)
    submit(engine, plain.prompts)
    for _ in range(3):
        engine.step()
    finished = engine.scheduler.sequence(1)
    table, slot = engine.runner.slots, finished.slot
    assert slot is not None
    table.finished[slot] = True
    before, frozen = held_by(engine, [slot]), freeze(engine, 1)
    counts = [
        tensor[slot].clone()
        for tensor in (table.num_committed, table.last_token_ids, *vars(table.pending).values())
    ]
    engine.runner.submit(next_batch(engine))
    after = [
        tensor[slot]
        for tensor in (table.num_committed, table.last_token_ids, *vars(table.pending).values())
    ]
    assert counts == after
    assert all(
        torch.equal(was, now) for was, now in zip(before, held_by(engine, [slot]), strict=True)
    )
    assert not freeze(engine, 1).differences(frozen)


def test_a_slot_that_finished_at_its_length_is_inert_on_the_device(
    random_checkpoint: Checkpoints, shape: TinyShape, plain: Plain
) -> None:
    drafter = ScriptedDrafter(PATTERNS["random"], plain.texts, shape.vocab_size)
    engine = make_engine(random_checkpoint(shape), 3, drafter=drafter)
    submit(engine, plain.prompts)
    for _ in range(3):
        engine.step()
    table, slot = engine.runner.slots, engine.scheduler.sequence(1).slot
    table.finished[slot] = True
    table.length_limits[slot] = table.num_committed[slot]
    before = held_by(engine, [slot])  # type: ignore[list-item]
    engine.runner.submit(next_batch(engine))
    after = held_by(engine, [slot])  # type: ignore[list-item]
    assert all(torch.equal(was, now) for was, now in zip(before, after, strict=True))
