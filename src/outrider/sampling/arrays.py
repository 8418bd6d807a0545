"""Sampling parameters of many sequences as device arrays."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.batch import SlotSetup


@dataclass(frozen=True)
class SamplingArrays:
    """One entry per slot, or per row once gathered.

    Attributes:
        temperature: float32; 0 means greedy.
        top_k: int64; the vocabulary's size where it is off.
        top_p, min_p: float32; 1 and 0 where they are off.
        seeds: int64.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor

    @classmethod
    def empty(cls, size: int, vocab_size: int, device: torch.device) -> SamplingArrays:
        """Arrays of greedy entries."""
        return cls(
            temperature=torch.zeros(size, device=device),
            top_k=torch.full((size,), vocab_size, dtype=torch.int64, device=device),
            top_p=torch.ones(size, device=device),
            min_p=torch.zeros(size, device=device),
            seeds=torch.zeros(size, dtype=torch.int64, device=device),
        )

    def store(self, setup: SlotSetup, vocab_size: int) -> None:
        """Overwrite the entry of one slot."""
        top_k = vocab_size if setup.top_k is None else min(setup.top_k, vocab_size)
        self.temperature[setup.slot] = setup.temperature
        self.top_k[setup.slot] = top_k
        self.top_p[setup.slot] = setup.top_p
        self.min_p[setup.slot] = setup.min_p
        self.seeds[setup.slot] = setup.seed

    def gather(self, index: Tensor) -> SamplingArrays:
        """Entries `index`, in its shape."""
        return SamplingArrays(
            self.temperature[index],
            self.top_k[index],
            self.top_p[index],
            self.min_p[index],
            self.seeds[index],
        )
