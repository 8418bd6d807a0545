"""Every tile shape that `linear` chooses, for a wide, a narrow and an odd weight."""

from collections.abc import Iterator
from functools import partial

import torch

from tests.ops.cross_compile import Case

WEIGHTS = [
    (24576, 4096),
    (12352, 4096),
    (6144, 4096),
    (4096, 4096),
    (1024, 3072),
    (193, 72),
    (1, 72),
    (5, 7),
]
"""N and K: one, two and four segments, and tails."""

ROW_COUNTS = (1, 16, 32, 64, 96, 128, 160, 256, 1024)


def cases(capability: int) -> Iterator[Case]:
    from outrider.ops.linear.segments import uses_library

    major_minor = divmod(capability, 10)
    dtypes = [torch.float32, torch.float16] + [torch.bfloat16] * (capability >= 80)
    for dtype in dtypes:
        if not uses_library(dtype, major_minor):
            yield from portable_cases(dtype, major_minor)
        if major_minor[0] == 9 and dtype != torch.float32:
            yield from hopper_cases(dtype)


def portable_cases(dtype: torch.dtype, capability: tuple[int, int]) -> Iterator[Case]:
    from outrider.ops.linear.triton import choose_tile, launch

    for n, k in ((1024, 3072), (193, 72), (1, 72), (5, 7)):
        weight = torch.empty(n, k, dtype=dtype)
        for num_rows in (1, 24, 64, 128):
            x, y = torch.empty(num_rows, k, dtype=dtype), torch.empty(num_rows, n, dtype=dtype)
            tile = choose_tile(num_rows, dtype, capability)
            pdl = capability >= (9, 0)
            yield Case(
                f"portable {dtype} {num_rows} x {k} -> {n}",
                partial(launch, x, weight, y, tile, pdl, warmup=True),
            )


def hopper_cases(dtype: torch.dtype) -> Iterator[Case]:
    from outrider.ops.linear.hopper import Launch, fits
    from outrider.ops.linear.hopper_tiles import Product, choose_tile
    from outrider.ops.linear.segments import num_segments

    seen: set[object] = set()
    for n, k in WEIGHTS:
        weight = torch.empty(n, k, dtype=dtype)
        if not fits(weight):
            continue
        segments = num_segments(n, k)
        for num_rows in ROW_COUNTS:
            product = Product(num_rows, n, k, segments, num_multiprocessors=132)
            tile = choose_tile(product)
            if (tile, segments, n % 16) in seen:
                continue
            seen.add((tile, segments, n % 16))
            x, y = torch.empty(num_rows, k, dtype=dtype), torch.empty(num_rows, n, dtype=dtype)
            yield Case(
                f"hopper {dtype} {num_rows} x {k} -> {n} {tuple(tile)}",
                partial(Launch(product, tile).warmup, x, weight, y),
            )
            if n in (24576, 1024):
                yield Case(
                    f"gated {dtype} {num_rows} x {k} -> {n} {tuple(tile)}",
                    partial(Launch(product, tile, gated=True).warmup, x, weight, y[:, : n // 2]),
                )
