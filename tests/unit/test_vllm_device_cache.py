"""What vLLM's cache on the device drops reaches the index, and nothing else does. No vLLM is needed."""

from types import SimpleNamespace

import pytest

from kvmoor.coordinator import Coordinator
from kvmoor.errors import SettingsError
from kvmoor.integrations.vllm.device_cache import DeviceCacheWatch
from kvmoor.integrations.vllm.keys import ChunkKeys
from kvmoor.integrations.vllm.scheduler_side import SchedulerSide
from kvmoor.integrations.vllm.settings import read_settings
from kvmoor.key_builder import Namespace
from kvmoor.transfer_messages import SlotRange


def key_of(name: str, group_id: int = 0) -> bytes:
    return name.encode().ljust(32) + group_id.to_bytes(4, "big")


A, B, C, D, E = map(key_of, "abcde")


class Pool:
    """Drop and reset as vLLM's block pool does: the observer is told of a block before its hash is gone."""

    def __init__(self, metrics_collector=None):
        self.metrics_collector = metrics_collector
        self.reset_map()

    def reset_map(self):
        cache = {}
        self.cached_block_hash_to_block = SimpleNamespace(_cache=cache, get_one_block=cache.get)

    def cache(self, *keys):
        for key in keys:
            blocks = self.cached_block_hash_to_block._cache.setdefault(key, [])
            blocks.append(SimpleNamespace(block_hash=key))

    def drop(self, *keys):
        for key in keys:
            blocks = self.cached_block_hash_to_block._cache[key]
            block = blocks.pop()
            self.metrics_collector.on_block_evicted(block)
            if not blocks:
                del self.cached_block_hash_to_block._cache[key]

    def reset_prefix_cache(self):
        self.reset_map()
        self.metrics_collector.reset()


class Collector:
    """Note what an observer of the pool is told."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *blocks: self.calls.append((name, *blocks))


def test_what_was_dropped_is_told_once() -> None:
    """The last block dropped comes first, since a pool drops a prompt from its end; then there is no news."""
    pool = Pool()
    watch = DeviceCacheWatch(pool)
    pool.cache(A, B, C)

    pool.drop(C, B)

    assert [B, C] == watch.take_left()
    assert [] == watch.take_left()


def test_what_the_device_has_still_or_again_has_not_left() -> None:
    """A block that is cached twice, or was computed again in the same step, is found there."""
    pool = Pool()
    watch = DeviceCacheWatch(pool)
    pool.cache(A, A, B, C)

    pool.drop(A, B, C)
    pool.cache(B)

    assert [C] == watch.take_left()
    pool.drop(A)
    assert [A] == watch.take_left()


def test_a_block_without_a_hash_is_none_that_leaves() -> None:
    """The pool tells of every block that it hands out, also of those that never were in its cache."""
    pool = Pool()
    watch = DeviceCacheWatch(pool)

    pool.metrics_collector.on_block_evicted(SimpleNamespace(block_hash=None))

    assert [] == watch.take_left()


def test_a_reset_of_the_device_drops_everything() -> None:
    """All that was cached has left, and the watch goes on with what comes after."""
    pool = Pool()
    watch = DeviceCacheWatch(pool)
    pool.cache(A, B, C)
    pool.drop(C)

    pool.reset_prefix_cache()
    pool.cache(A)

    assert [B, C] == watch.take_left()
    pool.cache(D)
    pool.reset_prefix_cache()
    assert [D, A] == watch.take_left()


def test_who_observed_the_pool_before_still_does() -> None:
    """The figures of residency that vLLM may keep itself get every call."""
    collector = Collector()
    pool = Pool(collector)
    watch = DeviceCacheWatch(pool)
    assert pool.metrics_collector is watch
    block = SimpleNamespace(block_hash=A)

    watch.on_block_allocated(block)
    watch.on_block_accessed(block)
    watch.on_block_evicted(block)
    watch.reset()

    named = ["on_block_allocated", "on_block_accessed", "on_block_evicted"]
    assert [*((name, block) for name in named), ("reset",)] == collector.calls


def make_side(blocks_per_chunk: int = 1) -> SchedulerSide:
    keys = ChunkKeys(
        Namespace(model="m", layout_fingerprint=bytes(32)),
        group_ids=[0, 2],
        tokens_per_block=[16, 16],
        blocks_per_chunk=blocks_per_chunk,
    )
    side = SchedulerSide(Coordinator(2, eviction="device-lru"), keys, num_groups=2, num_ranks=1, job_timeout_s=30.0)
    side.publish([SlotRange(group, 0, 4 * blocks_per_chunk) for group in (0, 1)])
    return side


def store(side: SchedulerSide, *keys: bytes) -> None:
    prepared = side.prepare_store("r", list(keys))
    assert prepared is not None
    side.complete_store("r", set(prepared.keys))


def first_to_go(side: SchedulerSide, num_chunks: int, group_id: int = 0) -> set[bytes]:
    """Store new chunks, and return which of a to d gave way."""
    store(side, *(key_of(f"new {number}", group_id) for number in range(num_chunks)))
    return {name for name in (key_of(name, group_id) for name in "abcd") if side.lookup(name).name == "ABSENT"}


@pytest.mark.parametrize("blocks_per_chunk", [1, 4])
def test_what_left_the_device_last_is_kept_longest(blocks_per_chunk) -> None:
    """Leaving counts as a use: of four chunks those go first that neither left nor were used since."""
    side = make_side(blocks_per_chunk)
    store(side, A, B)
    store(side, C)
    store(side, D)

    side.note_left_device([A, B])

    assert {C, D} == first_to_go(side, 2)
    assert {C, D, B} == first_to_go(side, 3)


def test_other_groups_and_unknown_blocks_change_nothing() -> None:
    """Blocks of a group that is not offloaded, or that were never stored, are passed over; groups stay apart."""
    side = make_side()
    in_second = [key_of(name, 2) for name in "abcd"]
    store(side, A, B, C, D)
    store(side, *in_second)

    side.note_left_device([E, key_of("a", 1), key_of("b", 7), in_second[3]])

    assert {D} == first_to_go(side, 1)
    assert {in_second[2]} == first_to_go(side, 1, group_id=2)


def test_the_inside_of_a_chunk_says_nothing() -> None:
    """With four blocks a chunk, only the hash of its last block names it; others are of no chunk."""
    side = make_side(blocks_per_chunk=4)
    store(side, A)
    store(side, B)

    side.note_left_device([key_of("third block of a")])

    store(side, C, D)
    assert {A} == first_to_go(side, 1)


def test_nothing_of_before_a_reset_is_told_of_after_it() -> None:
    """Blocks that were stored before a reset are other blocks now, whatever the device drops."""
    side = make_side()
    store(side, A)
    side.reset()
    side.note_reset_flushed()
    store(side, A, B, C, D)

    side.note_left_device([D])

    assert {C} == first_to_go(side, 1)


def test_the_setting_is_known() -> None:
    """`device-lru` can be chosen, and a wrong name is answered with all choices."""
    assert "device-lru" == read_settings({"host_memory": "1GiB", "eviction": "device-lru"}).eviction
    with pytest.raises(SettingsError, match="give 'lru' or 'arc' or 'device-lru'"):
        read_settings({"host_memory": "1GiB", "eviction": "lfu"})
