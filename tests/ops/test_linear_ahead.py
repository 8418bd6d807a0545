"""Kernels of `linear` are compiled for every number of rows that will come, and no other ones."""

from __future__ import annotations

import pytest
import torch

from outrider.ops.dispatch import is_hopper
from outrider.ops.linear import gated_linear, linear
from outrider.ops.linear.ahead import Projection, compile_ahead

COUNTS = (1, 5, 32, 64, 128, 300)


def weights() -> list[Projection]:
    """Two shapes, the second with a sum in segments; one that is gated."""
    shapes = [(6144, 1024, False), (1024, 3072, False), (2048, 1024, True)]
    return [
        Projection(torch.randn(n, k, dtype=torch.bfloat16, device="cuda"), gated)
        for n, k, gated in shapes
    ]


@pytest.mark.gpu
def test_what_was_compiled_ahead_is_what_the_layers_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from triton.runtime.jit import JITFunction

    projections = weights()
    assert compile_ahead(projections, COUNTS) >= len(projections)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("compiled while running")

    monkeypatch.setattr(JITFunction, "_do_compile", refuse)
    for projection in projections:
        if projection.gated and not is_hopper(projection.weight):
            continue  # there the gate is a kernel of its own
        call = gated_linear if projection.gated else linear
        for count in COUNTS:
            x = torch.randn(count, projection.weight.shape[1], device="cuda").bfloat16()
            assert call(x, projection.weight).isfinite().all()


@pytest.mark.gpu
def test_nothing_is_compiled_twice_or_past_the_most_rows() -> None:
    projection = weights()[0]
    every = compile_ahead([projection], COUNTS)
    assert compile_ahead([projection, projection], COUNTS * 2) == every
    few = Projection(projection.weight, most_rows=4)
    assert compile_ahead([few], COUNTS) == 1 <= every
    assert compile_ahead([], COUNTS) == 0
