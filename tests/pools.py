"""What tests ask of a cache's pools. No torch here."""

from __future__ import annotations

from outrider.cache.manager import CacheManager


def is_idle(cache: CacheManager) -> bool:
    """No sequence holds anything: each would hold a slot, and no block is anybody's but the tree's.

    Cached blocks are there to be had, so that they count as free.
    """
    return cache.slots.num_free == cache.slots.size and cache.num_available == cache.blocks.size
