"""Memory is divided as said, used to the last block, and what does not fit names what would."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.config import EngineConfig, SpeculativeConfig
from outrider.errors import CapacityError, ConfigError
from outrider.models.config import ModelConfig
from outrider.runner.memory import (
    GIB,
    MIB,
    DeviceMemory,
    MemoryBudget,
    MemoryNeeds,
    gib,
    measure_budget,
    plan_memory,
    workspace_bytes,
)

# A GPU of 100 GiB, of which weights hold 20 and others 2: 90 - 22 = 68 GiB are available.
GPU = MemoryBudget(DeviceMemory(100 * GIB, 78 * GIB), 0.9, None)
HOST = MemoryBudget(None, 0.9, GIB)
# 17 slots with the null one are 17 GiB, workspace is 1, so that 50 GiB or 50 blocks are left.
NEEDS = MemoryNeeds(
    weight_bytes=20 * GIB,
    workspace_bytes=GIB,
    slot_bytes=GIB,
    block_bytes=GIB,
    block_size=64,
    max_num_seqs=16,
    max_model_len=None,
    model_limit=640,
)


def needs(**changes: Any) -> MemoryNeeds:
    return replace(NEEDS, **changes)


def test_states_and_workspace_come_first_and_blocks_take_the_rest_but_the_null_block() -> None:
    plan = plan_memory(GPU, NEEDS)
    assert (plan.max_model_len, plan.num_blocks) == (640, 49)
    assert plan.kv_bytes == 50 * GIB and NEEDS.state_bytes == 17 * GIB


def test_what_others_hold_counts_against_the_share() -> None:
    others = MemoryBudget(DeviceMemory(100 * GIB, 58 * GIB), 0.9, None)
    assert others.available == 48 * GIB
    assert plan_memory(others, NEEDS).num_blocks == 29
    assert plan_memory(replace(others, utilization=1.0), NEEDS).num_blocks == 39


def test_no_more_blocks_are_planned_than_all_sequences_can_fill() -> None:
    assert plan_memory(GPU, needs(max_model_len=65)).num_blocks == 2 * 16
    assert plan_memory(GPU, needs(max_model_len=65, num_kv_blocks=40)).num_blocks == 40


def test_a_length_that_was_not_asked_for_is_what_fits_into_one_sequence() -> None:
    plan = plan_memory(GPU, needs(slot_bytes=3 * GIB))  # 51 GiB of states leave 16
    assert (plan.max_model_len, plan.num_blocks) == (640, 15)
    plan = plan_memory(GPU, needs(slot_bytes=3 * GIB, model_limit=10_000))
    assert (plan.max_model_len, plan.num_blocks) == (15 * 64, 15)
    assert plan.lines()[0] == "max_model_len: 960 of the checkpoint's 10000"


def test_a_length_that_was_asked_for_is_kept_where_it_just_fits() -> None:
    plan = plan_memory(GPU, needs(max_model_len=49 * 64, model_limit=10_000))
    assert (plan.max_model_len, plan.num_blocks) == (49 * 64, 49)


def test_a_limit_of_the_kv_holds_on_a_gpu_and_is_all_there_is_on_a_cpu() -> None:
    assert plan_memory(replace(GPU, kv_limit=30 * GIB), NEEDS).num_blocks == 30
    assert plan_memory(replace(GPU, kv_limit=300 * GIB), NEEDS).num_blocks == 49
    small = needs(block_bytes=16 * MIB)
    assert plan_memory(HOST, small).num_blocks == 64
    assert plan_memory(HOST, replace(small, slot_bytes=500 * GIB)).num_blocks == 64


def test_a_model_without_recurrent_layers_gives_all_to_the_blocks() -> None:
    assert plan_memory(GPU, needs(slot_bytes=0)).num_blocks == 66


def test_a_number_of_blocks_is_taken_as_it_is() -> None:
    plan = plan_memory(HOST, needs(num_kv_blocks=3))
    assert (plan.max_model_len, plan.num_blocks) == (192, 3)
    assert plan_memory(GPU, needs(num_kv_blocks=49)).num_blocks == 49


def refused(budget: MemoryBudget, wanted: MemoryNeeds) -> CapacityError:
    with pytest.raises(CapacityError) as caught:
        plan_memory(budget, wanted)
    return caught.value


def test_a_length_that_does_not_fit_is_refused_with_every_number_and_what_to_do() -> None:
    error = refused(GPU, needs(max_model_len=60 * 64, model_limit=10_000))
    assert str(error) == (
        "KV cache holds less than one sequence of 3840 tokens: needs 20.00 GiB for the weights, "
        "1.00 GiB for workspace, 17.00 GiB for the states of 16 sequences, 60.00 GiB for a "
        "sequence; has 68.00 GiB beside the weights, with gpu_memory_utilization 0.9 of 100.00 GiB "
        "and 78.00 GiB free: got '49 blocks of 64 tokens, 1073741824 bytes each'; allowed: at "
        "least 60 blocks; lower max_model_len to 3136, or lower max_num_seqs to 5"
    )


def test_states_that_do_not_fit_are_refused_before_anything_else() -> None:
    error = refused(GPU, needs(max_num_seqs=80))
    assert error.what == (
        "recurrent states do not fit: needs 20.00 GiB for the weights, 1.00 GiB for workspace, "
        "81.00 GiB for the states of 80 sequences"
    )
    # 68 GiB less workspace, a block and the null block, and the null slot.
    assert error.hint == "lower max_num_seqs to 64"
    error = refused(GPU, needs(max_num_seqs=67))
    assert error.hint == "lower max_num_seqs to 64, or raise gpu_memory_utilization to 0.93"


def test_a_gpu_that_is_full_already_says_so() -> None:
    full = MemoryBudget(DeviceMemory(100 * GIB, 5 * GIB), 0.9, None)
    error = refused(full, needs(slot_bytes=0))
    assert "has" not in error.what and "0.00 GiB beside the weights" in str(error.got)
    assert error.hint == "raise gpu_memory_utilization to 0.98"
    error = refused(full, needs(slot_bytes=0, workspace_bytes=9 * GIB))
    assert error.hint == "free memory that others hold, or take a smaller model"


def test_too_many_blocks_for_a_gpu_are_refused() -> None:
    error = refused(GPU, needs(num_kv_blocks=50))
    assert error.what.startswith("num_kv_blocks does not fit: needs 20.00 GiB for the weights")
    assert (error.got, error.allowed) == (50, "at most 49")


def test_a_setting_that_is_too_small_is_named_and_not_the_memory() -> None:
    long = needs(max_model_len=640)
    assert refused(GPU, replace(long, num_kv_blocks=9)).hint == (
        "raise num_kv_blocks to 10, or lower max_model_len to 576"
    )
    assert refused(replace(GPU, kv_limit=9 * GIB), long).hint == (
        "raise kv_cache_memory_gib to 10.0, or lower max_model_len to 576"
    )
    error = refused(replace(HOST, kv_limit=7), needs(block_bytes=MIB))
    assert error.hint == "raise kv_cache_memory_gib to 0.001"
    assert "holds less than one sequence of 64 tokens" in str(error)


def test_a_length_beyond_the_checkpoints_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len: got 641; allowed: at most 640"):
        plan_memory(GPU, needs(max_model_len=641))


sizes = st.integers(1, 5 * GIB)


@given(
    total=st.integers(1, 200 * GIB),
    free=st.floats(0, 1),
    share=st.floats(0.01, 1),
    limit=st.none() | sizes,
    wanted=st.builds(
        MemoryNeeds,
        weight_bytes=st.just(0),
        workspace_bytes=st.integers(0, GIB),
        slot_bytes=st.just(0) | sizes,
        block_bytes=sizes,
        block_size=st.sampled_from([16, 64]),
        max_num_seqs=st.integers(1, 40),
        max_model_len=st.none() | st.integers(1, 1000),
        model_limit=st.just(1000),
        num_kv_blocks=st.none() | st.integers(1, 60),
    ),
)
@settings(max_examples=300, deadline=None)
def test_a_plan_fits_and_holds_a_sequence_and_what_a_refusal_names_helps(
    total: int, free: float, share: float, limit: int | None, wanted: MemoryNeeds
) -> None:
    budget = MemoryBudget(DeviceMemory(total, int(total * free)), share, limit)
    try:
        plan = plan_memory(budget, wanted)
    except CapacityError as error:
        check_remedies(budget, wanted, error.hint or "")
        return
    assert plan.max_model_len == (wanted.max_model_len or plan.max_model_len)
    assert plan.num_blocks * wanted.block_size >= plan.max_model_len >= 1
    available = budget.available
    assert available is not None
    left = available - wanted.workspace_bytes - wanted.state_bytes - plan.kv_bytes
    assert left >= 0
    if wanted.num_kv_blocks is None:
        full = plan.num_blocks == wanted.num_blocks_of(plan.max_model_len) * wanted.max_num_seqs
        unused = left if limit is None else limit - plan.num_blocks * wanted.block_bytes
        assert full or min(left, unused) < wanted.block_bytes


REMEDIES = {
    r"lower max_model_len to (\d+)": ("max_model_len", int),
    r"lower max_num_seqs to (\d+)": ("max_num_seqs", int),
    r"raise num_kv_blocks to (\d+)": ("num_kv_blocks", int),
    r"raise gpu_memory_utilization to ([\d.]+)": ("utilization", float),
    r"raise kv_cache_memory_gib to ([\d.]+)": ("kv_limit", lambda x: int(float(x) * GIB)),
}


def check_remedies(budget: MemoryBudget, wanted: MemoryNeeds, hint: str) -> None:
    """What is to be lowered to some value is enough alone, and so is what is to be raised, as far
    as it is what the refusal was about."""
    for pattern, (name, read) in REMEDIES.items():
        found = re.search(pattern, hint)
        if found is None:
            continue
        change: dict[str, Any] = {name: read(found[1])}
        if name in ("utilization", "kv_limit"):
            again = (replace(budget, **change), wanted)
        else:
            again = (budget, replace(wanted, **change))
        try:
            plan_memory(*again)
        except CapacityError as error:
            # Another limit may be the next that is met, but not the same one.
            assert re.search(pattern, error.hint or "") is None, (hint, str(error))


def test_the_report_says_in_gib_what_was_given_to_what() -> None:
    assert plan_memory(GPU, needs(max_model_len=192)).lines() == [
        "max_model_len: 192 of the checkpoint's 640",
        "GPU memory: 100.00 GiB, of which gpu_memory_utilization 0.9 allows 90.00 GiB",
        "  weights            20.00 GiB",
        "  recurrent state    17.00 GiB  16 sequences, 1024.00 MiB each",
        "  KV cache           49.00 GiB  48 blocks of 64 tokens, 1024.00 MiB each",
        "  workspace           1.00 GiB  kept for activations and graphs",
        "  other use           2.00 GiB  this process's own and other processes",
        "  left                1.00 GiB",
    ]


def test_the_report_of_a_cpu_tells_of_what_is_known() -> None:
    lines = plan_memory(HOST, needs(block_bytes=MIB, slot_bytes=MIB)).lines()
    assert [line.split("  ")[-1] for line in lines[1:]] == [
        " 20.00 GiB".strip(),
        "16 sequences, 1.00 MiB each",
        "160 blocks of 64 tokens, 1.00 MiB each",
    ]


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0.00 GiB"), (GIB, "1.00 GiB"), (1.5 * GIB, "1.50 GiB"), (MIB, "0.000977 GiB")],
)
def test_sizes_are_shown_so_that_small_ones_are_not_nothing(size: float, text: str) -> None:
    assert gib(size) == text


def test_a_cpu_has_a_gib_of_kv_or_what_was_said() -> None:
    cpu = torch.device("cpu")
    assert measure_budget(EngineConfig("m"), cpu) == MemoryBudget(None, 0.9, GIB)
    config = EngineConfig("m", kv_cache_memory_gib=0.25, gpu_memory_utilization=0.5)
    assert measure_budget(config, cpu) == MemoryBudget(None, 0.5, GIB // 4)


def test_a_gpu_is_measured_after_the_allocator_gave_back_what_it_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given_back: list[bool] = []

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        assert given_back and device.index == 1
        return 30 * GIB, 40 * GIB

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(True))
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    cuda = torch.device("cuda", 1)
    memory = DeviceMemory(total=40 * GIB, free=30 * GIB)
    assert measure_budget(EngineConfig("m"), cuda) == MemoryBudget(memory, 0.9, None)
    config = EngineConfig("m", kv_cache_memory_gib=3)
    assert measure_budget(config, cuda) == MemoryBudget(memory, 0.9, 3 * GIB)


def test_the_workspace_grows_with_the_rows_of_a_round_and_of_a_prompt_chunk(
    trained_model: Path,
) -> None:
    model = ModelConfig.from_hf(trained_model)
    plain = workspace_bytes(EngineConfig("m"), model, 2)
    spec = SpeculativeConfig("mtp", num_speculative_tokens=3)
    drafting = workspace_bytes(EngineConfig("m", speculative_config=spec), model, 2)
    assert drafting - plain == 16 * 3 * 4096 * (2 + 4 * 4)  # rows of 4096 logits
    longer = workspace_bytes(EngineConfig("m", max_prefill_tokens=1024), model, 2)
    assert longer - plain == 512 * 2 * (8 * 256 + 4 * 704)
    assert GIB < plain < 2 * GIB
