"""Reference write into paged storage."""

from torch import Tensor


def write_kv_reference(keys: Tensor, values: Tensor, kv_pool: Tensor, flat_index: Tensor) -> None:
    """keys, values [R, heads, D] -> rows flat_index of kv_pool."""
    tokens = kv_pool.flatten(1, 2)  # [2, num_blocks * block_size, heads, D]
    tokens[0].index_copy_(0, flat_index, keys)
    tokens[1].index_copy_(0, flat_index, values)
