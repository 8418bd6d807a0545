"""Which implementation of an operation runs: the one place that looks at devices.

Tensors on a CPU use the reference, tensors on a CUDA device the kernel. Two environment variables
exist for debugging and tests, read once: OUTRIDER_OPS=reference runs the reference operations on a
GPU too, and OUTRIDER_CAPABILITY=7.5 makes every choice as if the card had that capability.
"""

from __future__ import annotations

import os
from functools import cache

import torch
from torch import Tensor

_OVERRIDE = os.environ.get("OUTRIDER_OPS", "")
_CAPABILITY = os.environ.get("OUTRIDER_CAPABILITY", "")
assert _OVERRIDE in ("", "reference"), f"OUTRIDER_OPS is {_OVERRIDE!r}; allowed: reference"


def overrides() -> list[str]:
    """Environment variables that are set, which change which kernels run."""
    names = (("OUTRIDER_OPS", _OVERRIDE), ("OUTRIDER_CAPABILITY", _CAPABILITY))
    return [f"{name}={value}" for name, value in names if value]


def kernels_are_on() -> bool:
    """Whether a GPU runs kernels, and not the reference operations, which wait for the device."""
    return _OVERRIDE != "reference"


def uses_kernels(tensor: Tensor) -> bool:
    """Whether operations on this tensor run as kernels."""
    return tensor.is_cuda and kernels_are_on()


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device, (9, 0) for Hopper; or what the override says."""
    if _CAPABILITY:
        major, minor = _CAPABILITY.split(".")
        return int(major), int(minor)
    return torch.cuda.get_device_capability(device)


def is_hopper(tensor: Tensor) -> bool:
    """Whether kernels written for SM90 (wgmma, bulk tensor copies) can run."""
    return capability(tensor.device)[0] == 9


def overlaps_launches(tensor: Tensor) -> bool:
    """Whether a kernel may be launched before the one in front of it has ended.

    Programmatic dependent launch, SM90 and newer: a kernel so launched loads weights early and
    waits for its predecessor (gdc_wait) before it reads or writes anything that others write.
    """
    return capability(tensor.device)[0] >= 9


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count
