"""Reference Philox4x32-10 on int64 tensors that hold unsigned 32-bit words."""

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
NUM_PHILOX_ROUNDS = 10

# Purposes keep the streams of one seed apart.
PURPOSE_TARGET = 0


def _multiply(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 64-bit product; the product may wrap, its bits are right."""
    product = word * multiplier
    return (product >> 32) & MASK, product & MASK


def philox_reference(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: Tensor) -> Tensor:
    """Four words [...] and seed [...] -> [..., 4]."""
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = seed & MASK, (seed >> 32) & MASK
    for _ in range(NUM_PHILOX_ROUNDS):
        high0, low0 = _multiply(c0, MULTIPLIERS[0])
        high1, low1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
    return torch.stack((c0, c1, c2, c3), dim=-1)


def race_times_reference(seeds: Tensor, positions: Tensor, num_tokens: int) -> Tensor:
    """seeds, positions [R] -> [R, num_tokens]."""
    block = torch.arange(-(-num_tokens // 4), device=seeds.device)  # four ids share a counter
    purpose = torch.full_like(block[:1], PURPOSE_TARGET)
    words = philox_reference(
        (block, positions[:, None] & MASK, positions[:, None] >> 32, purpose), seeds[:, None]
    )
    uniform = (words.flatten(1)[:, :num_tokens].float() + 0.5) * 2.0**-32
    # Winners have small times, where float32 keeps all 32 bits. A word near 2^32 rounds up to 1.
    return -torch.log1p(-uniform.clamp(max=1.0 - 2.0**-24))
