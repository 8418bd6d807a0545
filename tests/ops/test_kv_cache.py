"""Keys and values land in their rows of the pool and nowhere else."""

import pytest
import torch

from outrider.ops.kv_cache.reference import write_kv_reference as write_kv


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_land_at_their_index_and_every_other_place_keeps_its_bits(dtype: torch.dtype) -> None:
    pool = torch.full((2, 5, 3, 16, 7), float("nan"), dtype=dtype)
    rows = torch.arange(4 * 3 * 7, dtype=torch.float32).view(4, 3, 7)
    keys, values = rows.to(dtype), (rows + 0.5).to(dtype)
    places = [(1, 0), (4, 15), (2, 7), (1, 1)]
    write_kv(keys, values, pool, torch.tensor([block * 16 + offset for block, offset in places]))
    for row, (block, offset) in enumerate(places):
        assert torch.equal(pool[0, block, :, offset], keys[row])
        assert torch.equal(pool[1, block, :, offset], values[row])
        pool[:, block, :, offset] = float("nan")
    assert pool.isnan().all()


def test_rows_that_nobody_keeps_share_the_null_block_and_touch_nothing_else() -> None:
    pool = torch.full((2, 3, 1, 16, 2), 7.0)
    rows = torch.full((4, 1, 2), float("nan"))
    write_kv(rows, rows, pool, torch.zeros(4, dtype=torch.int64))
    assert (pool[:, 1:] == 7.0).all()
    assert (pool[:, 0, :, 1:] == 7.0).all()
