"""Which blocks of keys and values hold which text, so that another sequence may read them.

A node is one full block behind the blocks of its parents, and the token that followed it: the
draft's keys and values of a block's last position were made with that token, so a text that goes
on otherwise needs a node of its own. Tokens are compared one by one: the keys of `children` are the
tokens themselves, and a hash is never taken for identity.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Node:
    """A cached block.

    Attributes:
        key: the block's tokens, and the one that followed them.
        num_users: sequences whose text runs through the node. All of a node's ancestors have at
            least as many.
        checkpoint: slot that holds the recurrent state at the block's end, or None.
    """

    block_id: int
    key: tuple[int, ...]
    parent: Node | None
    children: dict[tuple[int, ...], Node] = field(default_factory=dict["tuple[int, ...]", "Node"])
    num_users: int = 0
    checkpoint: int | None = None


class PrefixTree:
    """All cached blocks. Knows no pools: what is evicted is returned."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._roots: dict[tuple[int, ...], Node] = {}
        # In the order in which they were last used, oldest first.
        self._unused: OrderedDict[Node, None] = OrderedDict()

    @property
    def num_unused(self) -> int:
        """Nodes that nobody uses; all of them can be evicted."""
        return len(self._unused)

    def match(self, token_ids: Sequence[int]) -> list[Node]:
        """The longest path of nodes whose text begins `token_ids` and is followed by one more.

        Does not modify anything.
        """
        size = self._block_size
        path: list[Node] = []
        children = self._roots
        while (len(path) + 1) * size < len(token_ids):
            node = children.get(tuple(token_ids[len(path) * size : (len(path) + 1) * size + 1]))
            if node is None:
                break
            path.append(node)
            children = node.children
        return path

    def insert(self, parent: Node | None, key: tuple[int, ...], block_id: int) -> Node:
        """The node of a block behind `parent`, for one more sequence that runs through it.

        A new one, or one that holds the same text.

        Args:
            key: the block's tokens, and the one behind it.
        """
        children = self._roots if parent is None else parent.children
        new = Node(block_id, key, parent)
        node = children.setdefault(key, new)  # hashed once
        if node is new:
            node.num_users = 1
        else:
            self.use(node)
        return node

    def use(self, node: Node) -> None:
        """A sequence runs through the node."""
        node.num_users += 1
        self._unused.pop(node, None)

    def leave(self, node: Node) -> None:
        """A sequence runs through it no longer; leave a path from its end to its beginning."""
        assert node.num_users > 0, "left more often than used"
        node.num_users -= 1
        if node.num_users == 0:
            self._unused[node] = None

    def leave_all(self) -> list[Node]:
        """No sequence runs through any node; returns all nodes, parents before children."""
        nodes = self.nodes()
        known = dict.fromkeys(nodes)
        order = dict.fromkeys(self._unused) | known
        self._unused = OrderedDict((node, None) for node in order if node in known)
        for node in nodes:
            node.num_users = 0
        return nodes

    def evict(self) -> Node:
        """Take out the unused node that was used longest ago, of those that nothing hangs on."""
        node = next(node for node in self._unused if not node.children)
        del self._unused[node]
        siblings = self._roots if node.parent is None else node.parent.children
        del siblings[node.key]
        return node

    def nodes(self) -> list[Node]:
        """Every node, parents before children."""
        found = list(self._roots.values())
        for node in found:
            found.extend(node.children.values())
        return found

    def check_integrity(self) -> None:
        """Raise AssertionError unless counts and paths agree."""
        nodes = self.nodes()
        assert set(self._unused) == {node for node in nodes if node.num_users == 0}
        for node in nodes:
            assert node.num_users >= sum(child.num_users for child in node.children.values())
            assert len(node.key) == self._block_size + 1
        blocks = [node.block_id for node in nodes]
        assert len(blocks) == len(set(blocks)), "a block is cached twice"
