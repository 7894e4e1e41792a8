"""What identifies the content of a block.

A key is content: a hash over everything that shapes the bytes of a block. Two blocks with one key hold the same bytes;
whatever could make them differ (model, dtype, geometry, adapter, salt) has to be in the namespace.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from blake3 import blake3

from kvmoor.errors import RequestError

DIGEST_NBYTES: Final = 32
_FORMAT: Final = b"kvmoor-key-1"


@dataclass(frozen=True, slots=True)
class BlockKey:
    """Identify one block: a 32-byte digest of its content, and the group whose bytes it holds.

    Raises `RequestError` for a digest of another length or a negative group.
    """

    digest: bytes
    group: int = 0

    def __post_init__(self) -> None:
        digest: object = self.digest  # not every caller checks types
        if not isinstance(digest, bytes) or len(digest) != DIGEST_NBYTES:
            found = f"{len(digest)} bytes" if isinstance(digest, bytes) else type(digest).__name__
            raise RequestError(
                f"the digest of a block key has to be {DIGEST_NBYTES} bytes, found {found}: "
                "hash shorter keys, for example with block_key.namespace_digest"
            )
        group: object = self.group
        if not isinstance(group, int) or isinstance(group, bool) or group < 0:
            raise RequestError(f"the group of a block key is {group!r}: give the number of a group of the layout")

    def __repr__(self) -> str:
        return f"BlockKey({self.digest[:4].hex()}..., group={self.group})"


def namespace_digest(fields: Mapping[str, str | int | bytes]) -> bytes:
    """Hash named fields into 32 bytes that no other set of fields gives.

    Each name and value is written with its length in front, and each value with its type, so that neither moving
    a character from one field to the next nor writing 1 as "1" can collide. The order of the fields does not matter.
    """
    hasher = blake3(_FORMAT)
    for name in sorted(fields):
        value: object = fields[name]  # not every caller checks types
        if isinstance(value, bytes):
            tag, data = b"b", value
        elif isinstance(value, str):
            tag, data = b"s", value.encode()
        elif isinstance(value, int) and not isinstance(value, bool):
            tag, data = b"i", str(value).encode()
        else:
            raise RequestError(f"field {name!r} of a namespace is {value!r}: give text, a whole number or bytes")
        for part in (name.encode(), tag, data):
            hasher.update(len(part).to_bytes(8, "little"))
            hasher.update(part)
    return hasher.digest()


def prefix_block_keys(
    token_ids: Sequence[int], *, tokens_per_block: int, namespace: bytes, group: int = 0
) -> list[BlockKey]:
    """Hash each full block of a prompt together with everything before it.

    `token_ids` holds ints in ``[0, 2**63)``; a last block that is not full gets no key. `namespace` is a digest
    of all else that shapes the bytes (see `namespace_digest`). Block i's key covers all tokens before block i + 1.
    """
    if tokens_per_block < 1:
        raise RequestError(f"tokens_per_block is {tokens_per_block}: give 1 or more")
    salt: object = namespace  # not every caller checks types
    if not isinstance(salt, bytes) or not salt:
        raise RequestError(f"the namespace is {salt!r}: give a digest of all that shapes the bytes (namespace_digest)")
    try:
        ids = np.asarray(token_ids)
    except ValueError as error:
        raise RequestError("token_ids holds sequences of several lengths: give one sequence of token ids") from error
    if ids.size == 0:
        return []
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or int(ids.min()) < 0 or int(ids.max()) >= 2**63:
        raise RequestError(
            f"token_ids has shape {ids.shape} and type {ids.dtype}: give a sequence of whole numbers from 0 up"
        )
    rows = ids[: ids.size // tokens_per_block * tokens_per_block].astype("<i8").reshape(-1, tokens_per_block)
    keys = []
    parent = namespace_digest({"namespace": namespace, "tokens_per_block": tokens_per_block, "group": group})
    for row in rows:
        parent = blake3(parent + row.tobytes()).digest()
        keys.append(BlockKey(parent, group))
    return keys
