"""What the device knows of each sequence, by slot, so that a round needs nothing from the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.batch import NULL_SLOT, SlotSetup
from outrider.ops.bookkeeping import SlotTensors
from outrider.ops.gated_delta_rule import PendingRecords
from outrider.sampling.arrays import SamplingArrays
from outrider.sampling.padded import PaddedLists
from outrider.sampling.rules import RuleTable
from outrider.spec.choose import MODES
from outrider.spec.verify import SparseLaw

# No token has this id, so an unused entry matches nothing.
UNUSED_STOP_ID = -1


def to_device(
    values: Sequence[int] | Sequence[float] | Sequence[Sequence[int]],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """A tensor of host numbers, without waiting for what the device is doing."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


class SlotTable:
    """Per-slot tensors. The null slot is finished for ever: rows that name it do nothing.

    Attributes:
        num_committed: [slots] int64, tokens of the text.
        last_token_ids: [slots] int64, the newest of them.
        token_ids: [slots, max_model_len + 1] int32, the text; the last column is written by rows
            that commit nothing, and never read.
        draft_token_ids: [slots, K] int64, proposed for the next round.
        num_proposed: [slots] int64, how many of them there are.
        draft_modes: [slots] int64, index into spec.choose.MODES.
        draft_law: [slots, K, m], what sampled drafts were drawn from; unset without sampling.
        length_limits: [slots] int64.
        finished: [slots] bool.
        stop_token_ids: one list for each slot; unused entries are UNUSED_STOP_ID.
        rules: what changes each slot's logits.
        pending: records of recurrent layers not yet replayed.
    """

    def __init__(
        self,
        num_slots: int,
        num_drafts: int,
        draft_top_m: int,
        vocab_size: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self._vocab_size = vocab_size
        self.num_committed = ints(num_slots)
        self.last_token_ids = ints(num_slots)
        text_shape = (num_slots, max_model_len + 1)
        self.token_ids = torch.zeros(text_shape, dtype=torch.int32, device=device)
        self.draft_token_ids = ints(num_slots, num_drafts)
        self.num_proposed = ints(num_slots)
        self.draft_modes = ints(num_slots)
        law = (num_slots, num_drafts, draft_top_m)
        self.draft_law = SparseLaw(ints(*law), torch.zeros(law, device=device))
        self.length_limits = ints(num_slots)
        self.finished = torch.zeros(num_slots, dtype=torch.bool, device=device)
        self.stop_token_ids = PaddedLists(num_slots, torch.int64, device, UNUSED_STOP_ID)
        self.rules = RuleTable(num_slots, device)
        self.sampling = SamplingArrays.empty(num_slots, vocab_size, device)
        self.pending = PendingRecords(ints(num_slots), ints(num_slots), ints(num_slots))
        self.num_committed[NULL_SLOT] = 1
        self.finished[NULL_SLOT] = True

    @property
    def tensors(self) -> SlotTensors:
        """What the bookkeeping of rounds reads and writes."""
        return SlotTensors(
            num_committed=self.num_committed,
            last_token_ids=self.last_token_ids,
            token_ids=self.token_ids,
            draft_token_ids=self.draft_token_ids,
            num_proposed=self.num_proposed,
            length_limits=self.length_limits,
            finished=self.finished,
            stop_token_ids=self.stop_token_ids.values,
            seeds=self.sampling.seeds,
            pending=self.pending,
        )

    @property
    def layout(self) -> int:
        """Changes when a tensor is replaced by a wider one; a graph holds for one layout."""
        return self.stop_token_ids.num_widenings

    def set_up(self, setup: SlotSetup) -> None:
        """Make a slot ready for a new sequence; nothing of its last one remains visible."""
        slot = setup.slot
        self.num_committed[slot] = setup.num_committed
        if setup.cached_token_ids:
            cached = to_device(setup.cached_token_ids, torch.int32, self.token_ids.device)
            self.token_ids[slot, : len(cached)] = cached
        self.draft_token_ids[slot] = 0
        self.num_proposed[slot] = 0
        self.length_limits[slot] = setup.length_limit
        self.finished[slot] = False
        self.stop_token_ids.store(slot, setup.stop_token_ids)
        self.sampling.store(setup, self._vocab_size)
        self.rules.store(setup)
        self.draft_modes[slot] = MODES.index(setup.draft_sampling)
        for tensor in (self.pending.last_num_rows, self.pending.num_accepted_rows):
            tensor[slot] = 0

    def history(self, slots: Tensor, length: int) -> Tensor:
        """[B, length] int64, the texts of `slots` up to an upper bound of their lengths."""
        return self.token_ids[slots, :length].long()

    def store_law(self, slots: Tensor, q: SparseLaw) -> None:
        """Keep what the drafts of `slots` [B] were drawn from."""
        width, most = q.probs.shape[2], q.probs.shape[1]
        self.draft_law.token_ids[slots, :most, :width] = q.token_ids
        self.draft_law.probs[slots, :most, :width] = q.probs
