"""Reference write into paged storage."""

from torch import Tensor


def write_kv_reference(keys: Tensor, values: Tensor, kv_pool: Tensor, flat_index: Tensor) -> None:
    """keys, values [R, heads, D] -> rows flat_index of kv_pool."""
    block_size = kv_pool.shape[3]
    blocks, offsets = flat_index // block_size, flat_index % block_size
    kv_pool[0, blocks, :, offsets] = keys
    kv_pool[1, blocks, :, offsets] = values
