"""What was stored and removed, in vLLM's names, for its KV cache events."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvmoor.block_key import BlockKey


@dataclass(frozen=True, slots=True)
class ChunkEvent:
    """Say that chunks can be found from now on, or (`removed`) cannot."""

    keys: list[bytes]
    removed: bool


class ChunkEvents:
    """Remember which chunk each stored block belongs to, and tell of chunks rather than blocks. Not thread-safe.

    It costs some hundred bytes a block, so nothing is remembered unless `keep` was called: then events have to be taken
    at every step.
    """

    def __init__(self) -> None:
        self._kept = False
        self._chunk_of: dict[bytes, bytes] = {}  # by digest of a block
        self._digests_of: dict[bytes, tuple[bytes, ...]] = {}
        self._events: list[ChunkEvent] = []

    def keep(self) -> None:
        """Begin to remember."""
        self._kept = True

    def note_stored(self, chunks: Iterable[tuple[bytes, Sequence[BlockKey]]]) -> None:
        """Take note of chunks that can be found, and their blocks."""
        if not self._kept:
            return
        stored = []
        for chunk, keys in chunks:
            digests = self._digests_of[chunk] = tuple(key.digest for key in keys)
            self._chunk_of.update(dict.fromkeys(digests, chunk))
            stored.append(chunk)
        self._events.append(ChunkEvent(stored, removed=False))

    def note_evicted(self, evicted: Iterable[tuple[int, Sequence[bytes]]]) -> list[bytes]:
        """Take note of blocks that gave way, by their digests; return the chunks that are incomplete by now."""
        if not self._kept:
            return []
        digests = (digest for _, each in evicted for digest in each)
        chunks = list(dict.fromkeys(self._chunk_of[digest] for digest in digests if digest in self._chunk_of))
        self.note_dropped(chunks)
        return chunks

    def note_dropped(self, chunks: Iterable[bytes]) -> None:
        """Take note of chunks that cannot be found any more."""
        dropped = [chunk for chunk in chunks if chunk in self._digests_of]
        for chunk in dropped:
            for digest in self._digests_of.pop(chunk):
                del self._chunk_of[digest]
        if dropped:
            self._events.append(ChunkEvent(dropped, removed=True))

    def clear(self) -> None:
        """Forget everything after a reset, of which vLLM tells itself."""
        self._chunk_of.clear()
        self._digests_of.clear()
        self._events.clear()

    def take(self) -> list[ChunkEvent]:
        """Return what happened since the last call, oldest first."""
        events, self._events = self._events, []
        return events
