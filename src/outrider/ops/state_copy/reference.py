"""Reference copies of slots, in plain PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from outrider.ops.gated_delta_rule import DeltaState


def copy_slots_reference(
    conv_ring: Tensor, delta: DeltaState, sources: Tensor, targets: Tensor, with_records: bool
) -> None:
    """sources, targets [N]; see the public function for the contract."""
    for tensor in (delta.state, conv_ring):
        tensor.index_copy_(0, targets, tensor.index_select(0, sources))
    if with_records:
        for records in (delta.record_keys, delta.record_updates, delta.record_decays):
            records.index_copy_(1, targets, records.index_select(1, sources))
