"""Reference Philox4x32-10 on int64 tensors that hold unsigned 32-bit words.

Race times are the noise of ops.sampling; its kernels make them where they use them.
"""

from enum import IntEnum

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
NUM_PHILOX_ROUNDS = 10


class Purpose(IntEnum):
    """Streams of one seed that never meet.

    TARGET is keyed by the absolute position of a token. The others decide the fate of drafts and
    are keyed by the round, that is by the number of committed tokens at its start, and an index in
    the block: a position that is drawn again in a later round meets fresh numbers.
    """

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    SYNTHETIC = 4


def _multiply(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 64-bit product; the product may wrap, its bits are right."""
    product = word * multiplier
    return (product >> 32) & MASK, product & MASK


def philox_reference(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: Tensor) -> Tensor:
    """Four 32-bit words for each counter.

    Args:
        counter: four int64 tensors of values in [0, 2^32), of shapes that broadcast to [...].
        seed: int64 of a shape that broadcasts to [...], all 64 bits used as the key.

    Returns:
        [..., 4] int64, values in [0, 2^32).
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = seed & MASK, (seed >> 32) & MASK
    for _ in range(NUM_PHILOX_ROUNDS):
        high0, low0 = _multiply(c0, MULTIPLIERS[0])
        high1, low1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
    return torch.stack((c0, c1, c2, c3), dim=-1)


def _counter(
    token_block: Tensor, key: Tensor, purpose: Purpose, index: Tensor | int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Counter words: block of four token ids, 64 bits of key, purpose and index in the block."""
    if not isinstance(index, Tensor):
        index = key.new_full((), index)
    return token_block, key & MASK, key >> 32, index * 256 + int(purpose)


def _exponential(words: Tensor) -> Tensor:
    # Winners of a race have small times, where float32 keeps all 32 bits. A word near 2^32 would
    # round up to 1, whose time is infinite.
    uniform = ((words.float() + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)
    return -torch.log1p(-uniform)


def race_times_reference(
    seeds: Tensor, keys: Tensor, num_tokens: int, purpose: Purpose, index: Tensor | int
) -> Tensor:
    """Standard exponential times, one for each row and token id: the noise of a sampled row.

    argmin over ids of time / p is a sample from p. The time of an id depends on (seed, key,
    purpose, index, id) only: neither the batch nor the vocabulary's end matters.

    Args:
        seeds: [R] int64.
        keys: [R] int64; for Purpose.TARGET the absolute position of the token being drawn, else
            the number of committed tokens at the start of the round.
        index: place in the block, one for all rows or [R] int64.

    Returns:
        [R, num_tokens] float32, positive and finite.
    """
    block = torch.arange(-(-num_tokens // 4), device=seeds.device)  # four ids share a counter
    row_index = index[:, None] if isinstance(index, Tensor) else index
    words = philox_reference(_counter(block, keys[:, None], purpose, row_index), seeds[:, None])
    return _exponential(words.flatten(1)[:, :num_tokens])


def race_times_of_reference(
    seeds: Tensor, keys: Tensor, token_ids: Tensor, purpose: Purpose, index: int
) -> Tensor:
    """The entries `token_ids` [R, m] of what race_times_reference gives."""
    counter = _counter(token_ids // 4, keys[:, None], purpose, index)
    words = philox_reference(counter, seeds[:, None])
    return _exponential(words.gather(-1, (token_ids % 4)[..., None])[..., 0])


def uniforms_reference(seeds: Tensor, keys: Tensor, count: int, purpose: Purpose) -> Tensor:
    """seeds, keys [R] -> [R, count]."""
    index = torch.arange(count, device=seeds.device)
    counter = _counter(torch.zeros_like(index), keys[:, None], purpose, index)
    words = philox_reference(counter, seeds[:, None])[..., 0]
    return ((words.float() + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)
