"""What vLLM's own cache of blocks on the device has dropped, for `eviction="device-lru"`.

The block pool tells one observer of its own, its metrics collector, of each block that it is about to drop, and of a
reset. `DeviceCacheWatch` takes that place and passes all on to whoever had it. So nothing is searched: a block costs a
call when it is dropped, and once a step the scheduler asks for those that are really gone.

Only what leaves is told. What a load brought to the device could be told too, and `device-lru` would then give up its
copy first; but vLLM stores a block when it is computed and never again, so that would often be the last copy.
"""

from typing import Any


class DeviceCacheWatch:
    """Observe one `BlockPool`, by the names of vLLM's `KVCacheMetricsCollector`. Called by the scheduler's thread."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._next: Any = pool.metrics_collector
        self._map: Any = pool.cached_block_hash_to_block  # a reset puts a new one in its place
        self._dropped: dict[bytes, None] = {}  # since the last `take_left`, oldest first
        pool.metrics_collector = self

    def take_left(self) -> list[bytes]:
        """Return the keys of blocks that left since the last call, the last one first: so a prompt is in order.

        A key is the hash of a block and the number of its group in 4 bytes, as an `OffloadKey`. One that the device has
        still, in another block, or has again, is left out. Costs as much as was dropped.
        """
        if not self._dropped:
            return []
        dropped, self._dropped = self._dropped, {}
        cached = self._pool.cached_block_hash_to_block
        return [key for key in reversed(dropped) if cached.get_one_block(key) is None]

    def on_block_evicted(self, block: Any) -> None:
        """Take note of a block that the pool is about to drop, if it is in its cache at all."""
        key = block.block_hash
        if key is not None:
            self._dropped[key] = None
        if self._next is not None:
            self._next.on_block_evicted(block)

    def on_block_allocated(self, block: Any) -> None:
        """Pass it on."""
        if self._next is not None:
            self._next.on_block_allocated(block)

    def on_block_accessed(self, block: Any) -> None:
        """Pass it on."""
        if self._next is not None:
            self._next.on_block_accessed(block)

    def reset(self) -> None:
        """Take note that everything has left: the pool has forgotten all of it just now."""
        self._dropped.update(dict.fromkeys(self._map._cache))  # noqa: SLF001 - it cannot be iterated otherwise
        self._map = self._pool.cached_block_hash_to_block
        if self._next is not None:
            self._next.reset()
