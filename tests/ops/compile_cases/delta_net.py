"""Kernels of the gated delta net in the types and shapes that are dispatched to them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from outrider.ops.gated_delta_net import DeltaNetRows, DeltaNetWeights
from outrider.ops.gated_delta_net.triton import launch_inputs, launch_ring_store
from outrider.ops.gated_delta_rule import DeltaState, PendingRecords
from outrider.ops.gated_delta_rule.triton import RuleInputs, launch_rule
from outrider.ops.state_copy.triton import copy_slots_kernel
from tests.ops.cross_compile import Case

MAX_ROWS = 9
SLOTS = 2
OBLONG = (8, 24)
"""Unequal key and value dimensions: blocks of two shapes in one kernel."""


def integers(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int64)


def storage(heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype) -> DeltaState:
    """State of (key heads, value heads) with (key, value) dimensions."""
    records = (2, SLOTS, MAX_ROWS)
    return DeltaState(
        torch.empty(SLOTS, heads[1], dims[1], dims[0], dtype=dtype),
        torch.empty(*records, heads[0], dims[0]),
        torch.empty(*records, heads[1], dims[1]),
        torch.empty(*records, heads[1]),
    )


def rule_inputs(delta: DeltaState, count: int, dtype: torch.dtype) -> RuleInputs:
    (_, heads, value_dim, key_dim), key_heads = delta.state.shape, delta.record_keys.shape[3]
    return RuleInputs(
        torch.empty(count, key_heads, key_dim),
        torch.empty(count, heads, value_dim, dtype=dtype),
        torch.empty(count, heads),
        torch.empty(count, key_heads),
    )


def dtypes(capability: int) -> list[torch.dtype]:
    types = [torch.float16, torch.float32]
    return types if capability < 80 else [torch.bfloat16, *types]


def input_cases(capability: int, dtype: torch.dtype) -> Iterator[Case]:
    pending = PendingRecords(*(integers(SLOTS) for _ in range(3)))
    for (keys, values), (key_dim, value_dim) in (
        ((16, 32), (128, 128)),
        ((2, 4), (64, 64)),
        ((1, 3), OBLONG),
    ):
        delta = storage((keys, values), (key_dim, value_dim), torch.float32)
        channels, rows, size = 2 * keys * key_dim + values * value_dim, 4, f"{key_dim}x{value_dim}"
        oblong = "oblong-" if key_dim != value_dim else ""  # told apart by a name's first word
        packed = torch.empty(rows, channels + 16 + 2 * values, dtype=dtype)
        b, a = packed[:, channels + 16 :].split(values, dim=1)
        net = DeltaNetRows(packed[:, :channels], a, b)
        conv = torch.empty(channels, 4, dtype=dtype)
        weights = DeltaNetWeights(conv, torch.empty(values), torch.empty(values))
        ring = torch.empty(SLOTS, 3 + MAX_ROWS, channels, dtype=dtype)
        rule = rule_inputs(delta, rows, dtype)
        recorded = (
            rule.queries, delta.record_keys, rule.values, delta.record_decays, rule.beta,
            rule.key_query,
        )  # fmt: skip
        chunk = (
            torch.empty(rows, keys, key_dim, dtype=dtype),
            torch.empty(rows, keys, key_dim, dtype=dtype), rule.values,
            torch.empty(rows, values), rule.beta, None,
        )  # fmt: skip
        for overlap in {False, capability >= 90}:
            yield Case(
                f"{oblong}round inputs {dtype} {size} overlap={overlap}",
                partial(
                    launch_inputs, net, weights, ring, delta, pending, integers(2), integers(2),
                    integers(2), recorded, overlap=overlap, warmup=True,
                ),
            )  # fmt: skip
        yield Case(
            f"{oblong}prompt inputs {dtype} {size}",
            partial(
                launch_inputs, net, weights, ring, delta, None, integers(1), integers(1), None,
                chunk, overlap=False, warmup=True,
            ),
        )  # fmt: skip
        store = partial(launch_ring_store, net.qkv, ring, integers(1), integers(1), warmup=True)
        yield Case(f"ring store {dtype} {size}", store)


def portable_cases(capability: int, dtype: torch.dtype, state: torch.dtype) -> Iterator[Case]:
    pending = PendingRecords(*(integers(SLOTS) for _ in range(3)))
    for dims in ((128, 128), (64, 64), (16, 16), OBLONG):
        delta = storage((2, 4), dims, state)
        rule = rule_inputs(delta, 4, dtype)
        yield Case(
            f"{'oblong-' if dims == OBLONG else ''}portable rule {dtype} {state} {dims}",
            partial(
                launch_rule, rule, torch.empty_like(rule.values), delta, pending, integers(2),
                integers(2), overlap=capability >= 90, warmup=True,
            ),
        )  # fmt: skip
    replay = storage((16, 32), (128, 128), state)
    yield Case(
        f"replay {state}",
        partial(
            launch_rule, None, None, replay, pending, integers(2), None, overlap=False, warmup=True
        ),
    )


def copy_cases(dtype: torch.dtype, state: torch.dtype) -> Iterator[Case]:
    for heads, dims in (
        ((16, 32), (128, 128)),
        ((2, 4), (16, 16)),
        ((1, 3), OBLONG),
        ((1, 3), (5, 7)),
    ):
        delta = storage(heads, dims, state)
        channels = 2 * heads[0] * dims[0] + heads[1] * dims[1]
        ring = torch.empty(SLOTS, 3 + MAX_ROWS, channels, dtype=dtype)
        yield Case(
            f"copy {dtype} {state} {dims}",
            partial(copy_slots_kernel, ring, delta, integers(1), integers(1), True, warmup=True),
        )


def gluon_cases(capability: int, dtype: torch.dtype, state: torch.dtype) -> Iterator[Case]:
    from outrider.ops.gated_delta_rule.hopper import launch_rows

    pending = PendingRecords(*(integers(SLOTS) for _ in range(3)))
    delta = storage((16, 32), (128, 128), state)
    usual = state == torch.float32
    shapes = ((16, 1), (32, 2), (32, 1), (32, 4)) if usual else ((32, 2),)
    for width in (1, 4, 9) if usual else (4,):
        rule = rule_inputs(delta, 2 * width, dtype)
        for shape in shapes:
            yield Case(
                f"gluon rule {dtype} {state} T={width} tile={shape}",
                partial(
                    launch_rows, rule, torch.empty_like(rule.values), delta, pending, integers(2),
                    integers(2), overlap=capability >= 90, shape=shape, warmup=True,
                ),
            )  # fmt: skip


def cases(capability: int) -> Iterator[Case]:
    for dtype in dtypes(capability):
        yield from input_cases(capability, dtype)
        for state in dtypes(capability):
            yield from portable_cases(capability, dtype, state)
            yield from copy_cases(dtype, state)
            if capability >= 80:
                yield from gluon_cases(capability, dtype, state)
