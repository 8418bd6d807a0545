"""Bookkeeping kernels: integers only, so one case each and two shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from outrider.ops.bookkeeping import triton as kernels
from tests.ops.cross_compile import Case


def _pointers(number: int, *, flags: tuple[int, ...] = ()) -> list[Any]:
    return [torch.empty(16, dtype=torch.bool if i in flags else torch.int64) for i in range(number)]


def cases(capability: int) -> Iterator[Case]:
    """Decoding and a round of three drafts."""
    text = torch.empty(16, dtype=torch.int32)
    for rows in (1, 4):
        arguments = _pointers(17, flags=(6,))
        yield Case(
            f"round_rows T {rows}",
            lambda rows=rows, arguments=arguments: kernels._round_rows.warmup(
                *arguments, 8, 32, rows, rows, 64, 128, grid=(8,), num_warps=1
            ),
        )
        for rates in (0, 3):
            arguments = _pointers(25, flags=(4, 12, 20, 21))
            arguments[10] = text
            arguments[7] = torch.empty(4)
            yield Case(
                f"commit_round T {rows} rates {rates}",
                lambda rows=rows, arguments=arguments, rates=rates: kernels._commit_round.warmup(
                    *arguments, 64, rows, rows, 3, 4, rates, 4, True, True, grid=(8,), num_warps=1
                ),
            )
        arguments = _pointers(13, flags=(2, 3))
        yield Case(
            f"store_proposal T {rows}",
            lambda rows=rows, arguments=arguments: kernels._store_proposal.warmup(
                *arguments, 8, rows, rows, 3, 4, grid=(8,), num_warps=1
            ),
        )
    yield Case(
        "transfer",
        lambda: kernels._transfer.warmup(*_pointers(2), 100, 1024, grid=(1,), num_warps=4),
    )
    yield Case(
        "chain_rows",
        lambda: kernels._chain_rows.warmup(
            *_pointers(9, flags=(4,)), 8, 32, 3, 4, 64, grid=(8,), num_warps=1
        ),
    )
