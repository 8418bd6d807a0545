"""Blocks and slots have one owner each, and a refused change leaves no trace."""

import random

import pytest

from outrider.batch import NULL_BLOCK, NULL_SLOT
from outrider.cache.id_pool import IdPool
from outrider.cache.manager import CacheManager
from tests.pools import is_idle


def free_counts(cache: CacheManager) -> tuple[int, int]:
    return cache.blocks.num_free, cache.slots.num_free


def test_a_pool_hands_out_every_id_once() -> None:
    pool = IdPool("thing", 4, first_id=3)
    taken = pool.take(4)
    assert taken is not None and sorted(taken) == [3, 4, 5, 6]
    assert pool.num_free == 0
    pool.check_integrity()


def test_a_pool_gives_all_that_is_asked_for_or_nothing() -> None:
    pool = IdPool("thing", 3, first_id=0)
    assert pool.take(4) is None and pool.num_free == 3
    assert pool.take(0) == []
    assert len(pool.take(2) or []) == 2
    assert pool.take(2) is None and pool.num_free == 1


def test_ids_that_came_back_are_handed_out_again() -> None:
    pool = IdPool("thing", 2, first_id=0)
    first = pool.take(2)
    assert first is not None
    pool.give_back(first)
    again = pool.take(2)
    assert again is not None and sorted(again) == sorted(first)


def test_giving_back_what_was_not_taken_is_a_bug() -> None:
    pool = IdPool("thing", 2, first_id=0)
    with pytest.raises(AssertionError, match="thing 1 given back but not taken"):
        pool.give_back([1])
    taken = pool.take(1)
    assert taken is not None
    pool.give_back(taken)
    with pytest.raises(AssertionError):
        pool.give_back(taken)


def test_a_pool_notices_a_lost_and_a_doubled_id() -> None:
    pool = IdPool("thing", 3, first_id=0)
    pool._free.pop()
    with pytest.raises(AssertionError, match="lost or doubled"):
        pool.check_integrity()
    pool._free += [1, 1]
    with pytest.raises(AssertionError, match="lost or doubled"):
        pool.check_integrity()


@pytest.mark.parametrize(
    ("num_positions", "num_blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (160, 10)]
)
def test_positions_are_rounded_up_to_blocks(num_positions: int, num_blocks: int) -> None:
    assert CacheManager(10, 16, 1).num_blocks_for(num_positions) == num_blocks


def test_the_null_block_and_the_null_slot_are_never_handed_out() -> None:
    cache = CacheManager(num_blocks=4, block_size=16, num_slots=2)
    slots = [cache.admit(i, 32) for i in range(2)]
    assert sorted(slot for slot in slots if slot is not None) == [1, 2] and NULL_SLOT == 0
    blocks = cache.block_ids(0) + cache.block_ids(1)
    assert sorted(blocks) == [1, 2, 3, 4] and NULL_BLOCK == 0


def test_admission_without_a_slot_leaves_no_trace() -> None:
    cache = CacheManager(num_blocks=4, block_size=16, num_slots=1)
    assert cache.admit(0, 16) is not None
    before = free_counts(cache)
    assert cache.admit(1, 16) is None
    assert free_counts(cache) == before
    cache.check_integrity()


def test_admission_without_enough_blocks_leaves_no_trace() -> None:
    cache = CacheManager(num_blocks=3, block_size=16, num_slots=2)
    assert cache.admit(0, 49) is None
    assert free_counts(cache) == (3, 2) and is_idle(cache)
    assert cache.admit(0, 48) is not None


def test_reserving_extends_the_blocks_in_order_of_position_and_keeps_those_there() -> None:
    cache = CacheManager(num_blocks=5, block_size=16, num_slots=1)
    cache.admit(7, 20)
    first = cache.block_ids(7)
    assert len(first) == 2
    assert cache.reserve(7, 32) and cache.block_ids(7) == first
    assert cache.reserve(7, 33) and cache.block_ids(7)[:2] == first
    assert len(cache.block_ids(7)) == 3
    assert cache.reserve(7, 5) and len(cache.block_ids(7)) == 3  # nothing is ever taken back


def test_a_refused_reservation_leaves_no_trace() -> None:
    cache = CacheManager(num_blocks=3, block_size=16, num_slots=1)
    cache.admit(0, 16)
    held = cache.block_ids(0)
    assert not cache.reserve(0, 64)
    assert cache.block_ids(0) == held and free_counts(cache) == (2, 0)
    assert cache.reserve(0, 48)


def test_committing_past_the_reservation_is_a_bug() -> None:
    cache = CacheManager(num_blocks=2, block_size=16, num_slots=1)
    cache.admit(0, 16)
    cache.commit(0, 10)
    cache.commit(0, 16)
    with pytest.raises(AssertionError, match="past what was reserved"):
        cache.commit(0, 17)


def test_the_same_sequence_cannot_be_admitted_twice() -> None:
    cache = CacheManager(num_blocks=4, block_size=16, num_slots=2)
    cache.admit(0, 1)
    with pytest.raises(AssertionError, match="sequence 0 is admitted already"):
        cache.admit(0, 1)


def test_release_returns_everything() -> None:
    cache = CacheManager(num_blocks=4, block_size=16, num_slots=2)
    cache.admit(0, 40)
    cache.admit(1, 1)
    cache.release(0)
    assert free_counts(cache) == (3, 1) and not is_idle(cache)
    cache.release(1)
    assert free_counts(cache) == (4, 2) and is_idle(cache)


def test_the_copy_of_the_block_ids_does_not_change_later() -> None:
    cache = CacheManager(num_blocks=4, block_size=16, num_slots=1)
    cache.admit(0, 16)
    held = cache.block_ids(0)
    cache.reserve(0, 64)
    assert len(held) == 1


def test_integrity_is_broken_by_a_block_with_two_owners() -> None:
    cache = CacheManager(num_blocks=4, block_size=16, num_slots=2)
    cache.admit(0, 16)
    cache.admit(1, 16)
    cache.check_integrity()
    cache._holdings[1].block_ids[0] = cache._holdings[0].block_ids[0]
    with pytest.raises(AssertionError):
        cache.check_integrity()


@pytest.mark.parametrize("seed", range(5))
def test_any_series_of_changes_keeps_every_block_with_one_owner(seed: int) -> None:
    rng = random.Random(seed)
    cache = CacheManager(num_blocks=12, block_size=16, num_slots=4)
    positions: dict[int, int] = {}  # what each live sequence has reserved, kept beside the manager
    for number in range(400):
        kind, wish = rng.choice(["admit", "reserve", "reserve", "release"]), rng.randint(1, 90)
        used = sum(-(-p // 16) for p in positions.values())
        if kind == "admit":
            fits = len(positions) < 4 and used + -(-wish // 16) <= 12
            assert (cache.admit(number, wish) is not None) == fits
            if fits:
                positions[number] = wish
        elif positions:
            chosen = rng.choice(list(positions))
            if kind == "release":
                cache.release(chosen)
                del positions[chosen]
            else:
                wanted = max(wish, positions[chosen])
                grown = -(-wanted // 16) - -(-positions[chosen] // 16)
                fits = used + grown <= 12
                assert cache.reserve(chosen, wish) == fits
                if fits:
                    positions[chosen] = wanted
        cache.check_integrity()
        assert cache.blocks.num_free == 12 - sum(-(-p // 16) for p in positions.values())
        for sequence_id, count in positions.items():
            assert len(cache.block_ids(sequence_id)) == -(-count // 16)
