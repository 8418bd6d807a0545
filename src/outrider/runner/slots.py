"""What the device knows of each sequence, by slot, so that a round needs nothing from the host."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.batch import SlotSetup
from outrider.ops.gated_delta_rule import PendingRecords
from outrider.sampling.arrays import SamplingArrays

# No token has this id, so an unused stop entry matches nothing.
UNUSED_STOP_ID = -1


class SlotTable:
    """Per-slot tensors.

    Attributes:
        num_committed: [slots] int64, tokens of the text.
        last_token_ids: [slots] int64, the newest of them.
        draft_token_ids: [slots, K] int64, proposed for the next round.
        length_limits: [slots] int64.
        finished: [slots] bool.
        stop_token_ids: [slots, M] int64; M grows with the longest list seen.
        pending: records of recurrent layers not yet replayed.
    """

    def __init__(
        self, num_slots: int, num_drafts: int, vocab_size: int, device: torch.device
    ) -> None:
        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self._vocab_size = vocab_size
        self.num_committed = ints(num_slots)
        self.last_token_ids = ints(num_slots)
        self.draft_token_ids = ints(num_slots, num_drafts)
        self.length_limits = ints(num_slots)
        self.finished = torch.zeros(num_slots, dtype=torch.bool, device=device)
        self.stop_token_ids = torch.full_like(ints(num_slots, 1), UNUSED_STOP_ID)
        self.sampling = SamplingArrays.empty(num_slots, vocab_size, device)
        self.pending = PendingRecords(ints(num_slots), ints(num_slots), ints(num_slots))

    def set_up(self, setup: SlotSetup) -> None:
        """Make a slot ready for a new sequence; nothing of its last one remains visible."""
        slot = setup.slot
        self.num_committed[slot] = setup.num_committed
        self.draft_token_ids[slot] = 0
        self.length_limits[slot] = setup.length_limit
        self.finished[slot] = False
        self._store_stop_ids(slot, setup.stop_token_ids)
        self.sampling.store(setup, self._vocab_size)
        for tensor in (self.pending.last_num_rows, self.pending.num_accepted_rows):
            tensor[slot] = 0

    def _store_stop_ids(self, slot: int, stop_token_ids: tuple[int, ...]) -> None:
        missing = len(stop_token_ids) - self.stop_token_ids.shape[1]
        if missing > 0:
            self.stop_token_ids = torch.nn.functional.pad(
                self.stop_token_ids, (0, missing), value=UNUSED_STOP_ID
            )
        self.stop_token_ids[slot] = UNUSED_STOP_ID
        stops = torch.tensor(stop_token_ids, dtype=torch.int64)
        self.stop_token_ids[slot, : len(stop_token_ids)] = stops
