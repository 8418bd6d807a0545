"""Norms, SiLU * up, attention inputs, rotary angles, embedding and paired norms.

Every case calls the launcher that the public function calls, on tensors without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from outrider.ops.attention_inputs import HeadLayout, HeadNorms
from outrider.ops.attention_inputs.triton import _attention_inputs, attention_inputs_kernel
from outrider.ops.embedding.triton import _embed, embed_kernel
from outrider.ops.paired_norms.triton import _paired_norms, paired_norms_kernel
from outrider.ops.rms_norm.triton import (
    _add_rms_norm,
    _gated_rms_norm,
    _rms_norm,
    add_rms_norm_kernel,
    gated_rms_norm_kernel,
    rms_norm_kernel,
)
from outrider.ops.rotary.triton import _rotary_angles, rotary_angles_kernel
from outrider.ops.silu_mul.triton import _silu_mul, silu_mul_kernel
from tests.ops.cross_compile import Case

SIZES = (256, 1000, 2560, 4096, 5120, 12288)
LAYOUTS = {
    "8b": (HeadLayout(32, 8, 128, gated=False), 128),
    "9b": (HeadLayout(16, 4, 256, gated=True), 64),
    "odd": (HeadLayout(3, 1, 24, gated=True), 20),
}


def compiled(kernel: Any, launch: Callable[[], object]) -> Any:
    """The kernel that `launch` would run, compiled and not run."""
    compile_or_run, results = kernel.run, []

    def compile_only(*args: Any, warmup: bool, **options: Any) -> None:
        results.append(compile_or_run(*args, warmup=True, **options))

    with mock.patch.object(kernel, "run", compile_only):
        launch()
    (result,) = results
    return result


def launches(dtype: torch.dtype, pdl: bool) -> Iterator[tuple[str, Any, Callable[[], object]]]:
    """Name, kernel and call of everything that runs in one dtype."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    ids = torch.zeros(2, dtype=torch.int64)
    for size in SIZES:
        x, weight = empty(2, size), empty(size)
        for zero in (False, True):
            name = f"{size} {'zero-centred' if zero else 'plain'}"
            yield (
                f"rms_norm {name}",
                _rms_norm,
                lambda x=x, w=weight, zero=zero: rms_norm_kernel(x, w, 1e-6, zero, pdl=pdl),
            )
            yield (
                f"add_rms_norm {name}",
                _add_rms_norm,
                lambda x=x, w=weight, zero=zero: add_rms_norm_kernel(x, x, w, 1e-6, zero, pdl=pdl),
            )
            yield (
                f"paired_norms {name}",
                _paired_norms,
                lambda x=x, w=weight, zero=zero: paired_norms_kernel(
                    x, ids, x, w, w, 1e-6, zero, pdl=pdl
                ),
            )
        yield f"embed {size}", _embed, lambda x=x: embed_kernel(x, ids, pdl=pdl)
        yield f"silu_mul {size}", _silu_mul, lambda x=x: silu_mul_kernel(x, pdl=pdl)
    for heads, size in ((32, 128), (3, 24)):
        gate, weight = empty(2, heads, size), empty(size)
        for x in {dtype: gate, torch.float32: empty(2, heads, size, dtype=torch.float32)}.values():
            yield (
                f"gated_rms_norm {heads} x {size} of {x.dtype}",
                _gated_rms_norm,
                lambda x=x, g=gate, w=weight: gated_rms_norm_kernel(x, g, w, 1e-6, pdl=pdl),
            )
    for name, (layout, rotary_dim) in LAYOUTS.items():
        weight, angles = empty(layout.head_dim), empty(2, rotary_dim, dtype=torch.float32)
        pool = empty(2, 3, layout.num_kv_heads, 16, layout.head_dim)
        for norms in (
            None,
            HeadNorms(weight, weight, 1e-6, zero_centred=False),
            HeadNorms(weight, weight, 1e-6, zero_centred=True),
        ):
            kind = "no" if norms is None else "zero-centred" if norms.zero_centred else "plain"
            x = empty(2, layout.width)
            yield (
                f"attention_inputs {name}, {kind} norms",
                _attention_inputs,
                lambda x=x, y=layout, n=norms, a=angles, p=pool: attention_inputs_kernel(
                    x, y, n, (a, a), p, ids, pdl=pdl
                ),
            )


def cases(capability: int) -> Iterator[Case]:
    dtypes = [torch.float16, torch.float32, *([torch.bfloat16] if capability >= 80 else [])]
    pdl = capability >= 90
    for dtype in dtypes:
        for name, kernel, launch in launches(dtype, pdl):
            yield Case(f"{name} {dtype}", lambda k=kernel, go=launch: compiled(k, go))
    frequencies = torch.empty(32)
    positions = torch.zeros(2, dtype=torch.int64)

    def angles() -> object:
        return rotary_angles_kernel(positions, frequencies, 1.0, pdl=pdl)

    def sectioned() -> object:
        three = positions.expand(3, -1).contiguous()
        return rotary_angles_kernel(three, frequencies, 1.0, (11, 11, 10), pdl=pdl)

    yield Case("rotary_angles", lambda: compiled(_rotary_angles, angles))
    yield Case("rotary_angles_of_three", lambda: compiled(_rotary_angles, sectioned))
