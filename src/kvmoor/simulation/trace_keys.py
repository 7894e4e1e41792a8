"""The blocks of a trace as keys of an index, and back."""

from collections.abc import Iterable

import numpy as np

from kvmoor.block_key import DIGEST_NBYTES, BlockKeys
from kvmoor.simulation.trace import Blocks, Trace


class TraceKeys:
    """Give each block of one trace a key; a trace was checked when it was read, so its keys are not checked again."""

    def __init__(self, trace: Trace) -> None:
        self._digests = np.empty(trace.num_unique_blocks, object)
        self._digests[:] = [number.to_bytes(DIGEST_NBYTES, "little") for number in range(trace.num_unique_blocks)]

    def of_blocks(self, blocks: Blocks) -> BlockKeys:
        """Return the keys of blocks from their numbers, each of which is there once."""
        return of_digests(tuple(self._digests[blocks].tolist()))


def of_digests(digests: tuple[bytes, ...]) -> BlockKeys:
    """Return keys of digests that came from such keys."""
    return BlockKeys._of(digests, 0)  # noqa: SLF001  (checked before)


def numbers_of(digests: Iterable[bytes]) -> Blocks:
    """Return the numbers of blocks from the digests of their keys."""
    return np.frombuffer(b"".join(digests), "<i4")[:: DIGEST_NBYTES // 4]
