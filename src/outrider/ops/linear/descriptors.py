"""Descriptors with which SM90's bulk tensor copies read matrices."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


class Address:
    """What a tensor descriptor needs of a tensor, without keeping its memory alive."""

    def __init__(self, data_ptr: int, dtype: torch.dtype) -> None:
        self._data_ptr = data_ptr
        self.dtype = dtype

    def data_ptr(self) -> int:
        return self._data_ptr


@lru_cache(maxsize=8192)
def matrix_descriptor(
    data_ptr: int,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    stride: int,
    box_rows: int,
    box_columns: int,
) -> TensorDescriptor:
    """Descriptor of a matrix [rows, columns], read in boxes; what lies outside reads as zero.

    It is made of numbers alone, so that one for an address that has been freed does no harm and is
    right for the next matrix of that shape there: weights always hit the cache, activations often.
    """
    box = [box_rows, box_columns]
    layout: Any = gl.NVMMASharedLayout.get_default_for(box, gl.float16)  # or any 16-bit type
    return TensorDescriptor(Address(data_ptr, dtype), [rows, columns], [stride, 1], box, layout)


def can_copy(matrix: Tensor) -> bool:
    """Whether bulk tensor copies can read a matrix: 16-byte rows, contiguous within a row."""
    stride = row_stride(matrix)
    return (
        matrix.stride(1) == 1
        and stride >= matrix.shape[1]
        and stride % 8 == 0
        and matrix.data_ptr() % 16 == 0
    )


def row_stride(matrix: Tensor) -> int:
    """Stride between rows. That of a single row means nothing and may not suit a descriptor."""
    return matrix.stride(0) if matrix.shape[0] > 1 else matrix.shape[1]
