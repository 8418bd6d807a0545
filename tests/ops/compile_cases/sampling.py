"""Noise and sampling: every kernel of every launcher, on tensors without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from outrider.ops.philox import triton as philox
from outrider.ops.philox.triton import uniforms_kernel
from outrider.ops.sampling import triton, triton_rows, triton_threshold
from tests.ops.cross_compile import Case

COLLECT, SELECT = triton_threshold._collect, triton_threshold._select
CHUNK_STATS, RACE, FINISH = triton_rows._chunk_stats, triton_rows._race, triton_rows._finish
PROBS, EMIT_TOP, DRAW_LISTED = triton_rows._probs, triton_rows._emit_top, triton_rows._draw_listed

VOCAB_SIZES = {
    torch.bfloat16: (151936, 248320),
    torch.float16: (32000,),
    torch.float32: (248320, 7),
}


def compiled(kernel: Any, launch: Callable[[], object]) -> Any:
    """Of the kernels that `launch` would run, one is compiled, and none runs."""
    run, results = JITFunction.run, []

    def compile_only(self: Any, *args: Any, warmup: bool, **options: Any) -> None:
        if self is kernel:
            results.append(run(self, *args, warmup=True, **options))

    with mock.patch.object(JITFunction, "run", compile_only):
        launch()
    (result,) = results
    return result


def launches(
    dtype: torch.dtype, vocab_size: int, pdl: bool
) -> Iterator[tuple[str, Callable[[], object], tuple[Any, ...]]]:
    """Name, call and kernels of everything that reads logits of a dtype."""
    logits = torch.empty((2, vocab_size), dtype=dtype)
    float_row, id_row = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    token_ids = torch.zeros(vocab_size, dtype=torch.int64)
    law = (float_row, id_row, float_row, float_row)
    for ids in (None, token_ids):
        name = "" if ids is None else " mapped"
        yield (
            f"argmax{name}",
            lambda ids=ids: triton.argmax_kernel(logits, ids, pdl=pdl),
            (CHUNK_STATS, FINISH),
        )
        yield (
            f"sample{name}",
            lambda ids=ids: triton.sample_kernel(logits, law, id_row, id_row, ids, 0, pdl=pdl),
            (CHUNK_STATS, COLLECT, SELECT, RACE, FINISH),
        )
    yield (
        "processed_probs",
        lambda: triton.processed_probs_kernel(logits, law, pdl=pdl),
        (COLLECT, SELECT, PROBS),
    )
    for m in (1, 32, 1024):
        if m <= vocab_size:
            yield (
                f"top_m {m}",
                lambda m=m: triton.top_m_kernel(logits, m, pdl=pdl),
                (CHUNK_STATS, COLLECT, EMIT_TOP),
            )
            scores = torch.empty((2, m), dtype=dtype)
            ids = torch.zeros((2, m), dtype=torch.int64)

            def listed(scores: Tensor = scores, ids: Tensor = ids) -> object:
                return triton.draw_listed_kernel(scores, ids, law, id_row, id_row, 1, 3, pdl=pdl)

            yield f"draw_listed {m}", listed, (DRAW_LISTED,)


def noise_launches(
    vocab_size: int, pdl: bool
) -> Iterator[tuple[str, Callable[[], object], tuple[Any, ...]]]:
    """The same of what takes float32 weights or no logits at all."""
    weights, row = torch.empty((2, vocab_size)), torch.zeros(2, dtype=torch.int64)
    for index in (3, row):
        name = "an index" if index is row else "one index"
        yield (
            f"race, {name}",
            lambda index=index: triton.race_kernel(weights, row, row, 3, index, pdl=pdl),
            (RACE, FINISH),
        )
    for most, m in ((1, 1), (3, 32), (8, 64)):
        probs, drafts = torch.empty((2, most + 1, vocab_size)), torch.zeros(2, most).long()
        ids, q = torch.zeros(2, most, m).long(), torch.zeros(2, most, m)

        def terms(
            probs: Tensor = probs, drafts: Tensor = drafts, ids: Tensor = ids, q: Tensor = q
        ) -> object:
            return triton.block_terms_sparse_kernel(probs, drafts, row, ids, q, pdl=pdl)

        yield f"block_terms_sparse {most} x {m}", terms, (triton_rows._block_terms,)
    yield "uniforms", lambda: uniforms_kernel(row, row, 5, 2, pdl=pdl), (philox._uniforms,)


def cases(capability: int) -> Iterator[Case]:
    pdl = capability >= 90
    for dtype, vocab_sizes in VOCAB_SIZES.items():
        if dtype == torch.bfloat16 and capability < 80:
            continue
        for vocab_size in vocab_sizes:
            for name, call, kernels in launches(dtype, vocab_size, pdl):
                for kernel in kernels:
                    title = f"{name} {kernel.__name__} {vocab_size} {dtype}"
                    yield Case(title, lambda k=kernel, call=call: compiled(k, call))
    for name, call, kernels in noise_launches(248320, pdl):
        for kernel in kernels:
            yield Case(f"{name} {kernel.__name__}", lambda k=kernel, call=call: compiled(k, call))
