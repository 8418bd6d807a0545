"""Attention kernels in the configurations that models use, and a few odd ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from outrider.ops.attention.plan import Attending, Card, PrefillTile
from tests.ops.cross_compile import Case

HEADS = [(32, 8, 128), (16, 4, 256), (24, 4, 256), (16, 8, 64), (16, 1, 128), (64, 4, 128)]
"""Query heads, key/value heads, head_dim."""
ODD_HEADS = [(6, 2, 24), (4, 2, 16)]


def arguments(
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    batch: int = 2,
    num_tokens: int = 1,
    block_size: int = 64,
    gated: bool = False,
) -> Attending:
    """Tensors of the right types on the CPU."""
    num_heads, num_kv_heads, head_dim = heads
    queries = torch.empty((batch, num_tokens, num_heads, head_dim), dtype=dtype)
    integers = torch.zeros((batch, 16), dtype=torch.int64)
    pool = torch.empty((2, 2, num_kv_heads, block_size, head_dim), dtype=dtype)
    gate = torch.empty((batch, num_tokens, num_heads, 2 * head_dim), dtype=dtype)[..., head_dim:]
    starts, num_rows = torch.zeros((2, batch), dtype=torch.int64)
    output = torch.empty_like(queries)
    return Attending(queries, pool, integers, starts, num_rows, gate if gated else None, output)


def round_case(name: str, module: Any, attending: Attending, card: Card) -> Case:
    def launch() -> Any:
        items, combine = module.round_launches(attending, card)
        combine.compile()
        return items.compile()

    return Case(name, launch)


def prefill_case(name: str, attending: Attending, card: Card) -> Case:
    from outrider.ops.attention.triton_prefill import prefill_launch

    tile = PrefillTile.of(attending, card)
    return Case(name, lambda: prefill_launch(attending, tile).compile())


def cases(capability: int) -> Iterator[Case]:
    from outrider.ops.attention import triton as portable

    card = Card((capability // 10, capability % 10), 132, capability >= 90)
    dtypes = [torch.float16, torch.float32]
    if capability >= 80:
        dtypes.append(torch.bfloat16)
    for heads, gated in [(HEADS[0], False), (HEADS[1], True), (ODD_HEADS[0], True)]:
        for dtype in dtypes:
            name = f"{heads} {dtype} gated={gated}"
            block_size = 48 if heads in ODD_HEADS else 64
            attending = arguments(heads, dtype, gated=gated, block_size=block_size)
            yield round_case(f"portable round {name}", portable, attending, card)
            chunk = arguments(
                heads, dtype, gated=gated, batch=1, num_tokens=70, block_size=block_size
            )
            yield prefill_case(f"prefill {name}", chunk, card)
    if capability != 90:
        return

    from outrider.ops.attention import hopper

    for heads in HEADS:
        for num_tokens in (1, 4, 9):
            for dtype, gated in [(torch.bfloat16, True), (torch.float16, False)]:
                attending = arguments(heads, dtype, num_tokens=num_tokens, gated=gated)
                name = f"round {heads} T={num_tokens} {dtype} gated={gated}"
                yield round_case(name, hopper, attending, card)
    for batch, block_size in [(100, 128), (256, 256)]:
        attending = arguments(HEADS[0], torch.bfloat16, batch=batch, block_size=block_size)
        yield round_case(f"round batch {batch} block {block_size}", hopper, attending, card)
