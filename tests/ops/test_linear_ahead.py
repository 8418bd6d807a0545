"""Kernels of `linear` are compiled before they are needed: each once, and none is missed."""

from __future__ import annotations

import pytest
import torch

from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine_setup import chunk_sizes, round_sizes
from outrider.ops.dispatch import is_hopper
from outrider.ops.linear import ahead, gated_linear, linear
from outrider.ops.linear.ahead import Projection, compile_ahead

COUNTS = (1, 5, 32, 64, 128, 300)
SHAPES = [(6144, 1024, False), (1024, 3072, False), (2048, 1024, True), (193, 72, False)]
"""N, K and whether it is gated; sums in one and in four segments, and a tail."""


def projections(device: str) -> list[Projection]:
    return [
        Projection(torch.randn(n, k, device=device).bfloat16(), gated) for n, k, gated in SHAPES
    ]


def test_on_a_portable_card_every_product_finds_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    portable = pytest.importorskip("outrider.ops.linear.triton")
    monkeypatch.setattr(ahead, "capability", lambda _: (8, 0))
    monkeypatch.setattr(ahead, "is_hopper", lambda _: False)
    monkeypatch.setattr(ahead, "overlaps_launches", lambda _: False)
    compiled: list[tuple[object, ...]] = []

    def record(x, weight, y, tile, pdl, warmup):  # type: ignore[no-untyped-def]
        assert warmup
        constants = portable.constants_of(len(x), *weight.shape, tile, pdl)
        compiled.append((*constants.values(), weight.shape[0] % 16 == 0, len(x) == 1))

    monkeypatch.setattr(portable, "launch", record)
    assert compile_ahead(projections("cpu"), COUNTS) == len(compiled) == len(set(compiled))
    for n, k, _ in SHAPES:
        for count in COUNTS:
            tile = portable.choose_tile(count, torch.bfloat16, (8, 0))
            wanted = portable.constants_of(count, n, k, tile, False)
            assert (*wanted.values(), n % 16 == 0, count == 1) in compiled, (n, k, count)


def test_on_hopper_every_product_finds_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = pytest.importorskip("outrider.ops.linear.hopper")
    monkeypatch.setattr(ahead, "capability", lambda _: (9, 0))
    monkeypatch.setattr(ahead, "is_hopper", lambda _: True)
    monkeypatch.setattr(hopper, "num_multiprocessors", lambda _: 132)
    compiled: list[tuple[object, ...]] = []

    def record(launch, *_):  # type: ignore[no-untyped-def]
        compiled.append((launch.constants, launch.tile.num_warps, launch.product.n % 16 == 0))

    monkeypatch.setattr(hopper.Launch, "warmup", record)
    assert compile_ahead(projections("cpu")[:3], COUNTS) == len(compiled) == len(set(compiled))
    for n, k, gated in SHAPES[:3]:
        for count in COUNTS:
            launch = hopper.launch_for(count, n, k, torch.bfloat16, torch.device("cpu"), gated)
            assert (launch.constants, launch.tile.num_warps, n % 16 == 0) in compiled, (n, count)
    hopper.launch_for.cache_clear()  # made for another card than the one there is


def test_sizes_are_those_of_rounds_and_of_chunks() -> None:
    config = EngineConfig(
        "model",
        max_num_seqs=3,
        max_prefill_tokens=1100,
        speculative_config=SpeculativeConfig("ngram", num_speculative_tokens=4),
    )
    assert round_sizes(config) == {1, 2, 4} | {5, 10, 20}  # three run as four
    sizes = chunk_sizes(config)
    assert (
        {16, 32, 48, 1008, 1024, 1088, 1100} <= sizes and max(sizes) == 1100 and 1040 not in sizes
    )
    assert chunk_sizes(EngineConfig("model", max_prefill_tokens=100)) == {
        16,
        32,
        48,
        64,
        80,
        96,
        100,
    }


@pytest.mark.gpu
def test_what_was_compiled_ahead_is_what_the_layers_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from triton.runtime.jit import JITFunction

    some = projections("cuda")
    assert compile_ahead(some, COUNTS) >= len(some)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("compiled while running")

    monkeypatch.setattr(JITFunction, "_do_compile", refuse)
    for projection in some:
        if projection.gated and not is_hopper(projection.weight):
            continue  # there the gate is a kernel of its own
        call = gated_linear if projection.gated else linear
        for count in COUNTS:
            x = torch.randn(count, projection.weight.shape[1], device="cuda").bfloat16()
            assert call(x, projection.weight).isfinite().all()


@pytest.mark.gpu
def test_nothing_is_compiled_twice_or_past_the_most_rows() -> None:
    projection = projections("cuda")[0]
    every = compile_ahead([projection], COUNTS)
    assert compile_ahead([projection, projection], COUNTS * 2) == every
    few = Projection(projection.weight, most_rows=4)
    assert compile_ahead([few], COUNTS) == 1 <= every
    assert compile_ahead([], COUNTS) == 0
