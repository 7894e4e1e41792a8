"""From vLLM's keys of chunks to our keys of blocks.

    OffloadKey    hash of the chunk's last block (covers all before it) | number of the group in vLLM, 4 bytes
    BlockKey      digest of namespace, hash and place in the chunk, and the group's place among the offloaded ones

A chunk is `blocks_per_chunk` blocks of ours: a request may find the first of them in the device's own cache, and load
only the others.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from kvmoor.block_key import BlockKey, BlockKeys
from kvmoor.errors import RequestError
from kvmoor.key_builder import KeyBuilder, Namespace

_GROUP_NBYTES: Final = 4
_CACHED_KEYS: Final = 2**16
"""How many chunks' keys are remembered, about 300 bytes each. Guessed: the requests that wait at one time are asked for
at every step, all others twice in their life."""


class ChunkKeys:
    """Make the keys of the blocks of a chunk, and remember them. Not thread-safe.

    `group_ids` are vLLM's numbers of the offloaded groups, in the order in which everything else names them;
    `tokens_per_block` are those of their device blocks.
    """

    def __init__(
        self, namespace: Namespace, *, group_ids: Sequence[int], tokens_per_block: Sequence[int], blocks_per_chunk: int
    ) -> None:
        self._group_ids = tuple(group_ids)
        self._tokens_per_block = tuple(tokens_per_block)
        self.blocks_per_chunk: Final = blocks_per_chunk
        self._known: dict[bytes, tuple[BlockKey, ...]] = {}
        self._use(namespace)

    def _use(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._groups = {
            group_id: (group, KeyBuilder(namespace, tokens_per_block=tokens))
            for group, (group_id, tokens) in enumerate(zip(self._group_ids, self._tokens_per_block, strict=True))
        }
        self._known.clear()

    @property
    def namespace(self) -> Namespace:
        """Return what all keys have in common."""
        return self._namespace

    def of(self, offload_key: bytes) -> tuple[BlockKey, ...]:
        """Return the keys of the blocks of a chunk. Raises `RequestError` for a group that is not offloaded."""
        found = self._known.get(offload_key)
        if found is None:
            found = self._make(offload_key)
            if len(self._known) >= _CACHED_KEYS:
                del self._known[next(iter(self._known))]  # the oldest
            self._known[offload_key] = found
        return found

    def of_last_blocks(self, block_keys: Iterable[bytes]) -> list[BlockKeys]:
        """Return the keys of the chunks that end with given blocks, in this order, by group.

        `block_keys` are hashes of device blocks with the number of their group behind them, whether offloaded or not. A
        chunk of several blocks cannot be told from the inside of one, so only those that are remembered are returned.
        """
        by_group_id: dict[int, list[bytes]] = {}
        for block_key in block_keys:
            by_group_id.setdefault(_group_id(block_key), []).append(block_key)
        found = []
        for group_id, (group, builder) in self._groups.items():
            named = by_group_id.get(group_id, [])
            if self.blocks_per_chunk == 1:
                found.append(builder.engine_keys((key[:-_GROUP_NBYTES] for key in named), group=group))
            else:
                found.append(BlockKeys((key.digest for name in named for key in self._known.get(name, ())), group))
        return [keys for keys in found if len(keys)]

    def next_epoch(self) -> None:
        """Make other keys from now on: the weights have changed, or may have."""
        self._use(self._namespace.next_epoch())

    def _make(self, offload_key: bytes) -> tuple[BlockKey, ...]:
        block_hash, group_id = offload_key[:-_GROUP_NBYTES], _group_id(offload_key)
        if group_id not in self._groups:
            raise RequestError(f"vLLM asked for group {group_id}, and offloads groups {list(self._groups)}")
        group, builder = self._groups[group_id]
        if self.blocks_per_chunk == 1:
            return tuple(builder.engine_keys([block_hash], group=group))
        places = (place.to_bytes(4, "big") for place in range(self.blocks_per_chunk))
        return tuple(builder.engine_keys([block_hash + place for place in places], group=group))


def _group_id(key: bytes) -> int:
    return int.from_bytes(key[-_GROUP_NBYTES:], "big")
