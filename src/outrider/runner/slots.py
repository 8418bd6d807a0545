"""What the device knows of each sequence, by slot, so that a round needs nothing from the host."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.batch import SlotSetup
from outrider.ops.gated_delta_rule import PendingRecords
from outrider.sampling.arrays import SamplingArrays
from outrider.sampling.padded import PaddedLists
from outrider.sampling.rules import RuleTable
from outrider.spec.choose import MODES
from outrider.spec.verify import SparseLaw

# No token has this id, so an unused entry matches nothing.
UNUSED_STOP_ID = -1


class SlotTable:
    """Per-slot tensors.

    Attributes:
        num_committed: [slots] int64, tokens of the text.
        last_token_ids: [slots] int64, the newest of them.
        token_ids: [slots, max_model_len] int32, the text.
        draft_token_ids: [slots, K] int64, proposed for the next round.
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
        self.token_ids = torch.zeros((num_slots, max_model_len), dtype=torch.int32, device=device)
        self.draft_token_ids = ints(num_slots, num_drafts)
        self.draft_modes = ints(num_slots)
        law = (num_slots, num_drafts, draft_top_m)
        self.draft_law = SparseLaw(ints(*law), torch.zeros(law, device=device))
        self.length_limits = ints(num_slots)
        self.finished = torch.zeros(num_slots, dtype=torch.bool, device=device)
        self.stop_token_ids = PaddedLists(num_slots, torch.int64, device, UNUSED_STOP_ID)
        self.rules = RuleTable(num_slots, device)
        self.sampling = SamplingArrays.empty(num_slots, vocab_size, device)
        self.pending = PendingRecords(ints(num_slots), ints(num_slots), ints(num_slots))

    def set_up(self, setup: SlotSetup) -> None:
        """Make a slot ready for a new sequence; nothing of its last one remains visible."""
        slot = setup.slot
        self.num_committed[slot] = setup.num_committed
        self.draft_token_ids[slot] = 0
        self.length_limits[slot] = setup.length_limit
        self.finished[slot] = False
        self.stop_token_ids.store(slot, setup.stop_token_ids)
        self.sampling.store(setup, self._vocab_size)
        self.rules.store(setup)
        self.draft_modes[slot] = MODES.index(setup.draft_sampling)
        for tensor in (self.pending.last_num_rows, self.pending.num_accepted_rows):
            tensor[slot] = 0

    def history(self, slots: Tensor) -> Tensor:
        """[B, L] int64, the texts of `slots`, as wide as the longest of them."""
        longest = int(self.num_committed[slots].max())
        return self.token_ids[slots, :longest].long()

    def store_law(self, slots: Tensor, q: SparseLaw) -> None:
        """Keep what the drafts of `slots` [B] were drawn from."""
        width, most = q.probs.shape[2], q.probs.shape[1]
        self.draft_law.token_ids[slots, :most, :width] = q.token_ids
        self.draft_law.probs[slots, :most, :width] = q.probs
