"""Blocks and slots of every sequence, changed only as a whole: reserve, write, commit.

A sequence holds one slot and a list of blocks. `reserve` makes room for positions that a step may
write; `commit` says how many tokens of them stand. Positions past the commit are simply written
again later, so nothing is ever rewound.

With the prefix cache, blocks that are full and committed are published, and stay when their
sequence leaves, until somebody needs the memory. Another sequence whose text begins alike holds
them too; nobody writes them any more. Models with recurrent state need that state as well: a
checkpoint, a slot of its own that belongs to a node.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.batch import NULL_BLOCK, NULL_SLOT
from outrider.cache.id_pool import IdPool
from outrider.cache.prefix_tree import Node, PrefixTree


@dataclass(frozen=True)
class Match:
    """What of a text is cached.

    Attributes:
        num_tokens: whole blocks of it, less than the text.
        checkpoint: slot to take the recurrent state from; None for models without.
        num_shared: tokens whose blocks are cached, of which a state may be missing.
    """

    nodes: tuple[Node, ...]
    num_tokens: int
    checkpoint: int | None
    num_shared: int = 0


NO_MATCH = Match((), 0, None)


@dataclass
class _Holding:
    """What a sequence holds.

    Attributes:
        nodes: of its first blocks, as far as they are published.
        table: block_ids as they were handed out, until they change.
    """

    slot: int
    block_ids: list[int]
    nodes: list[Node] = field(default_factory=list[Node])
    num_committed: int = 0
    table: tuple[int, ...] | None = None


class CacheManager:
    """One transaction over blocks, slots and the prefix cache."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        *,
        prefix_unit: int | None = None,
        num_checkpoints: int | None = None,
    ) -> None:
        """
        Args:
            num_blocks, num_slots: the null ones not counted.
            prefix_unit: sequences share text in multiples of this many tokens, a multiple of
                block_size; None caches nothing.
            num_checkpoints: slots for recurrent states, behind the sequences' own; None for models
                that have none.
        """
        self.block_size = block_size
        self.blocks = IdPool("block", num_blocks, NULL_BLOCK + 1)
        self.slots = IdPool("slot", num_slots, NULL_SLOT + 1)
        first_checkpoint = NULL_SLOT + 1 + num_slots
        self.checkpoints = IdPool("checkpoint", num_checkpoints or 0, first_checkpoint)
        self._needs_checkpoint = num_checkpoints is not None
        self._prefix_unit = prefix_unit
        self._tree = PrefixTree(block_size)
        # Nodes with a checkpoint, the one that was used longest ago first.
        self._checkpointed: OrderedDict[Node, None] = OrderedDict()
        self._holdings: dict[int, _Holding] = {}

    def num_blocks_for(self, num_positions: int) -> int:
        return -(-num_positions // self.block_size)

    @property
    def num_available(self) -> int:
        """Blocks that can be had: free, or cached and unused."""
        return self.blocks.num_free + self._tree.num_unused

    @property
    def wants_checkpoints(self) -> bool:
        """Whether text can only be shared where the recurrent state was kept."""
        return self._prefix_unit is not None and self._needs_checkpoint

    def match(self, token_ids: Sequence[int]) -> Match:
        """The longest cached beginning of a text that leaves a token to compute."""
        if self._prefix_unit is None:
            return NO_MATCH
        path = self._tree.match(token_ids)
        step = self._prefix_unit // self.block_size
        most = len(path) // step * step
        for length in range(most, 0, -step):
            checkpoint = path[length - 1].checkpoint
            if checkpoint is not None or not self._needs_checkpoint:
                num_tokens = length * self.block_size
                return Match(tuple(path[:length]), num_tokens, checkpoint, most * self.block_size)
        return Match((), 0, None, most * self.block_size)

    def admit(self, sequence_id: int, num_positions: int, match: Match = NO_MATCH) -> int | None:
        """Give the sequence a slot and blocks for its first positions; None, and no trace, if not.

        Args:
            match: what it reads from the cache, as `match` answered just now.

        Returns:
            The slot, held until `release`.
        """
        assert sequence_id not in self._holdings, f"sequence {sequence_id} is admitted already"
        slots = self.slots.take(1)
        if slots is None:
            return None
        for node in match.nodes:
            self._tree.use(node)
        block_ids = self._take(self.num_blocks_for(num_positions) - len(match.nodes))
        if block_ids is None:
            for node in reversed(match.nodes):
                self._tree.leave(node)
            self.slots.give_back(slots)
            return None
        if match.checkpoint is not None:
            self._touch(match.nodes[-1])
        shared = [node.block_id for node in match.nodes]
        self._holdings[sequence_id] = _Holding(
            slots[0], shared + block_ids, list(match.nodes), match.num_tokens
        )
        return slots[0]

    def reserve(self, sequence_id: int, num_positions: int) -> bool:
        """Extend the sequence's blocks to cover num_positions; False, and no trace, if not."""
        holding = self._holdings[sequence_id]
        missing = self.num_blocks_for(num_positions) - len(holding.block_ids)
        if missing <= 0:
            return True
        block_ids = self._take(missing)
        if block_ids is None:
            return False
        holding.block_ids.extend(block_ids)
        holding.table = None
        return True

    def num_missing(self, sequence_id: int, num_positions: int) -> int:
        """Blocks that `reserve` would have to take."""
        missing = self.num_blocks_for(num_positions) - len(self._holdings[sequence_id].block_ids)
        return max(missing, 0)

    def commit(self, sequence_id: int, num_positions: int) -> None:
        """The first num_positions stand; they were reserved before.

        Need not be said of less than a block.
        """
        holding = self._holdings[sequence_id]
        assert num_positions <= len(holding.block_ids) * self.block_size, (
            "committed past what was reserved"
        )
        holding.num_committed = num_positions

    def publish(self, sequence_id: int, text: Callable[[int, int], tuple[int, ...]]) -> bool:
        """Let others read the blocks that are full by now.

        Args:
            text: tokens begin .. end - 1 of the sequence, of which there is one more than is
                committed here, or more.

        Returns:
            Whether the sequence's table has changed: it reads another's copy of a block now.
        """
        if self._prefix_unit is None:
            return False
        holding, size = self._holdings[sequence_id], self.block_size
        changes = False
        for index in range(len(holding.nodes), holding.num_committed // size):
            parent = holding.nodes[-1] if holding.nodes else None
            key = text(index * size, (index + 1) * size + 1)
            node = self._tree.insert(parent, key, holding.block_ids[index])
            holding.nodes.append(node)
            if node.block_id != holding.block_ids[index]:
                # Somebody computed the same text: one copy is enough, or a sequence that outlives
                # the other would hold both, and need more memory than it was let in with.
                self.blocks.give_back([holding.block_ids[index]])
                holding.block_ids[index] = node.block_id
                holding.table = None
                changes = True
        return changes

    def take_checkpoint(self, sequence_id: int, position: int) -> int | None:
        """A slot for the sequence's state at `position`; None where there is one already, or none.

        It belongs to the caller until `keep_checkpoint` or `drop_checkpoint`. The oldest kept one
        gives way.
        """
        holding, index = self._holdings[sequence_id], position // self.block_size - 1
        if index < len(holding.nodes) and holding.nodes[index].checkpoint is not None:
            return None
        if self.checkpoints.num_free == 0 and self._checkpointed:
            self._give_back_checkpoint(next(iter(self._checkpointed)))
        taken = self.checkpoints.take(1)
        return None if taken is None else taken[0]

    def keep_checkpoint(self, sequence_id: int, position: int, slot: int) -> None:
        """The slot holds the state behind the published text up to `position`."""
        holding, index = self._holdings[sequence_id], position // self.block_size - 1
        if index >= len(holding.nodes) or holding.nodes[index].checkpoint is not None:
            self.checkpoints.give_back([slot])
            return
        holding.nodes[index].checkpoint = slot
        self._checkpointed[holding.nodes[index]] = None

    def drop_checkpoint(self, slot: int) -> None:
        """A slot that was taken is not needed after all."""
        self.checkpoints.give_back([slot])

    def block_ids(self, sequence_id: int) -> tuple[int, ...]:
        """Blocks in order of position; a copy."""
        holding = self._holdings[sequence_id]
        if holding.table is None:
            holding.table = tuple(holding.block_ids)
        return holding.table

    def release(self, sequence_id: int) -> None:
        """Return everything the sequence holds; what is published stays as long as it can."""
        holding = self._holdings.pop(sequence_id)
        for index in reversed(range(len(holding.block_ids))):
            if index < len(holding.nodes):
                self._tree.leave(holding.nodes[index])
            else:
                self.blocks.give_back([holding.block_ids[index]])
        self.slots.give_back([holding.slot])

    def release_all(self) -> None:
        """Nobody holds anything any more, however far a failure let the last change get.

        What belongs to no cached node is free again.
        """
        self._holdings.clear()
        nodes = self._tree.leave_all()
        kept = {node: node.checkpoint for node in nodes if node.checkpoint is not None}
        order = dict.fromkeys(self._checkpointed) | dict.fromkeys(kept)
        self._checkpointed = OrderedDict((node, None) for node in order if node in kept)
        self.blocks.keep_only(node.block_id for node in nodes)
        self.checkpoints.keep_only(kept.values())
        self.slots.keep_only(())

    def clear(self) -> None:
        """Forget everything that is cached and unused."""
        while self._tree.num_unused:
            self._evict()

    def _take(self, count: int) -> list[int] | None:
        if count > self.num_available:
            return None
        while self.blocks.num_free < count:
            self._evict()
        return self.blocks.take(count)

    def _evict(self) -> None:
        node = self._tree.evict()
        self.blocks.give_back([node.block_id])
        if node.checkpoint is not None:
            self._give_back_checkpoint(node)

    def _give_back_checkpoint(self, node: Node) -> None:
        assert node.checkpoint is not None, "a node without a checkpoint"
        self.checkpoints.give_back([node.checkpoint])
        node.checkpoint = None
        del self._checkpointed[node]

    def _touch(self, node: Node) -> None:
        self._checkpointed.move_to_end(node)

    def check_integrity(self) -> None:
        """Raise AssertionError unless pools, tree and holdings agree."""
        for pool in (self.blocks, self.slots, self.checkpoints):
            pool.check_integrity()
        self._tree.check_integrity()
        nodes = self._tree.nodes()
        cached = {node.block_id for node in nodes}
        private = [
            block
            for holding in self._holdings.values()
            for block in holding.block_ids
            if block not in cached
        ]
        taken = self.blocks.size - self.blocks.num_free
        assert len(private) == len(set(private)), "a block has two owners"
        assert len(private) + len(cached) == taken, "a block is lost"
        for node in nodes:
            users = sum(node in holding.nodes for holding in self._holdings.values())
            assert node.num_users == users, "users of a cached block"
        held_slots = [holding.slot for holding in self._holdings.values()]
        taken_slots = self.slots.size - self.slots.num_free
        assert len(held_slots) == len(set(held_slots)) == taken_slots, held_slots
        kept = [node.checkpoint for node in nodes if node.checkpoint is not None]
        assert len(kept) == len(set(kept)) == len(self._checkpointed), "checkpoints"
