"""Blocks and slots of every sequence, changed only as a whole: reserve, write, commit.

A sequence holds one slot and a list of blocks. `reserve` makes room for positions that a step may
write; `commit` says how many tokens of them stand. Positions past the commit are simply written
again later, so nothing is ever rewound.
"""

from dataclasses import dataclass, field

from outrider.batch import NULL_BLOCK, NULL_SLOT
from outrider.cache.id_pool import IdPool


@dataclass
class _Holding:
    slot: int
    block_ids: list[int] = field(default_factory=list[int])
    num_committed: int = 0


class CacheManager:
    """One transaction over the block pool and the slot pool."""

    def __init__(self, num_blocks: int, block_size: int, num_slots: int) -> None:
        """num_blocks and num_slots do not count the null block and the null slot."""
        self.block_size = block_size
        self.blocks = IdPool("block", num_blocks, NULL_BLOCK + 1)
        self.slots = IdPool("slot", num_slots, NULL_SLOT + 1)
        self._holdings: dict[int, _Holding] = {}

    def num_blocks_for(self, num_positions: int) -> int:
        return -(-num_positions // self.block_size)

    def admit(self, sequence_id: int, num_positions: int) -> int | None:
        """Give the sequence a slot and blocks for its first positions; None, and no trace, if not.

        Returns:
            The slot, held until `release`.
        """
        assert sequence_id not in self._holdings, f"sequence {sequence_id} is admitted already"
        if self.slots.num_free == 0:
            return None
        block_ids = self.blocks.take(self.num_blocks_for(num_positions))
        if block_ids is None:
            return None
        slots = self.slots.take(1)
        assert slots is not None
        self._holdings[sequence_id] = _Holding(slots[0], block_ids)
        return slots[0]

    def reserve(self, sequence_id: int, num_positions: int) -> bool:
        """Extend the sequence's blocks to cover num_positions; False, and no trace, if not."""
        holding = self._holdings[sequence_id]
        missing = self.num_blocks_for(num_positions) - len(holding.block_ids)
        if missing <= 0:
            return True
        block_ids = self.blocks.take(missing)
        if block_ids is None:
            return False
        holding.block_ids.extend(block_ids)
        return True

    def commit(self, sequence_id: int, num_tokens: int) -> None:
        """num_tokens more positions stand; they were reserved before."""
        holding = self._holdings[sequence_id]
        holding.num_committed += num_tokens
        capacity = len(holding.block_ids) * self.block_size
        assert holding.num_committed <= capacity, "committed past what was reserved"

    def block_ids(self, sequence_id: int) -> tuple[int, ...]:
        """Blocks in order of position; a copy."""
        return tuple(self._holdings[sequence_id].block_ids)

    def release(self, sequence_id: int) -> None:
        """Return everything the sequence holds."""
        holding = self._holdings.pop(sequence_id)
        self.blocks.give_back(holding.block_ids)
        self.slots.give_back([holding.slot])

    @property
    def is_idle(self) -> bool:
        """Nobody holds anything."""
        return not self._holdings

    def check_integrity(self) -> None:
        """Raise AssertionError unless pools and holdings agree."""
        self.blocks.check_integrity()
        self.slots.check_integrity()
        held = [block for holding in self._holdings.values() for block in holding.block_ids]
        assert len(held) == len(set(held)) == self.blocks.size - self.blocks.num_free, held
        held_slots = [holding.slot for holding in self._holdings.values()]
        taken = self.slots.size - self.slots.num_free
        assert len(held_slots) == len(set(held_slots)) == taken, held_slots
