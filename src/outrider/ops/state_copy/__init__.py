"""Copies of recurrent state from slot to slot: checkpoints of the prefix cache, and their use."""

from torch import Tensor

from outrider.ops.dispatch import uses_kernels
from outrider.ops.gated_delta_rule import DeltaState
from outrider.ops.state_copy.reference import copy_slots_reference


def copy_slots(
    conv_ring: Tensor, delta: DeltaState, sources: Tensor, targets: Tensor, *, with_records: bool
) -> None:
    """Copy what one layer holds of the slots `sources` to `targets`, bit for bit.

    The convolution's ring is indexed by position, so it stands for the same position in its new
    place.

    Args:
        conv_ring: [slots, ring_size, C], contiguous like all of `delta`, in any type.
        sources, targets: [N] int64; the targets are distinct and none of them is a source.
        with_records: records are copied too, for what is pending; else only S and the ring.
    """
    if uses_kernels(conv_ring):
        from outrider.ops.state_copy.triton import copy_slots_kernel

        copy_slots_kernel(conv_ring, delta, sources, targets, with_records)
        return
    copy_slots_reference(conv_ring, delta, sources, targets, with_records)
