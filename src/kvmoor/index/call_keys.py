"""The keys of one call, checked and sorted by group."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvmoor.block_key import BlockKey, BlockKeys
from kvmoor.errors import RequestError


@dataclass(frozen=True, slots=True, eq=False)
class GroupKeys:
    """The digests of one group in a call, in order, and where in the call they stand."""

    group: int
    digests: Sequence[bytes]
    positions: NDArray[np.intp]


_positions = np.arange(4096)


def _first_positions(count: int) -> NDArray[np.intp]:
    """Return 0, 1, 2, ...; always of one array, since every call needs them."""
    global _positions  # noqa: PLW0603  (replaced as a whole by a longer one, so that any thread may)
    positions = _positions
    if count > len(positions):
        positions = _positions = np.arange(2 * count)
    return positions[:count]


def as_sequence(keys: Iterable[BlockKey]) -> Sequence[BlockKey]:
    """Return keys that can be looked at twice. Raises `RequestError` for what is no collection of keys."""
    if isinstance(keys, BlockKeys):
        return keys
    try:
        return tuple(keys)
    except TypeError as error:
        raise RequestError(f"keys are a {type(keys).__name__}: give a sequence of BlockKey objects") from error


def keys_by_group(keys: Iterable[object], num_groups: int) -> list[GroupKeys]:
    """Sort the keys of a call by group. `BlockKeys` were checked when they were made, so only their group is.

    Raises `RequestError` for what is no `BlockKey`, for a group that does not exist and for a key that is named twice.
    """
    if isinstance(keys, BlockKeys):
        if not keys.digests:
            return []
        if keys.group >= num_groups:
            raise RequestError(f"{keys!r}: there is no such group, the index has groups 0 to {num_groups - 1}")
        return [GroupKeys(keys.group, keys.digests, _first_positions(len(keys.digests)))]
    found: dict[int, dict[bytes, int]] = {}
    for position, key in enumerate(keys):
        if not isinstance(key, BlockKey):
            raise RequestError(f"key {position} is a {type(key).__name__}: give BlockKey objects")
        if key.group >= num_groups:
            raise RequestError(
                f"key {position}, {key!r}, is of a group that does not exist: "
                f"the index has groups 0 to {num_groups - 1}"
            )
        first = found.setdefault(key.group, {}).setdefault(key.digest, position)
        if first != position:
            raise RequestError(f"{key!r} stands at positions {first} and {position}: name a block once in a call")
    return [
        GroupKeys(group, tuple(named), np.fromiter(named.values(), np.intp, len(named)))
        for group, named in found.items()
    ]
