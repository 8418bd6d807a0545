"""A pool of numbered things (cache blocks, state slots), each owned at most once."""

from collections.abc import Iterable


class IdPool:
    """Ids first_id .. first_id + size - 1. Freed ids are handed out again, newest first."""

    def __init__(self, name: str, size: int, first_id: int) -> None:
        self.name = name
        self.size = size
        self._first_id = first_id
        self._free = list(range(first_id + size - 1, first_id - 1, -1))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """Take `count` ids, or none at all and return None when fewer are free."""
        if count > len(self._free):
            return None
        ids = [self._free.pop() for _ in range(count)]
        self._taken.update(ids)
        return ids

    def give_back(self, ids: Iterable[int]) -> None:
        """Return ids that were taken."""
        for item in ids:
            assert item in self._taken, f"{self.name} {item} given back but not taken"
            self._taken.remove(item)
            self._free.append(item)

    def keep_only(self, ids: Iterable[int]) -> None:
        """From now on exactly these are taken, whatever was before."""
        self._taken = set(ids)
        everything = range(self._first_id + self.size - 1, self._first_id - 1, -1)
        self._free = [item for item in everything if item not in self._taken]

    def check_integrity(self) -> None:
        """Raise AssertionError unless every id is either free or taken, once."""
        everything = sorted(self._free) + sorted(self._taken)
        expected = range(self._first_id, self._first_id + self.size)
        assert sorted(everything) == list(expected), f"{self.name} pool lost or doubled an id"
