"""What identifies the content of a block.

A key is content: a hash over everything that shapes the bytes of a block. Two blocks with one key hold the same bytes;
whatever could make them differ has to be in the key. `key_builder` is where keys are made.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import eq
from typing import Any, Final, Self, overload

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
                "hash keys of an engine with KeyBuilder.engine_keys"
            )
        group: object = self.group
        if not isinstance(group, int) or isinstance(group, bool) or group < 0:
            raise RequestError(f"the group of a block key is {group!r}: give the number of a group of the layout")

    def __repr__(self) -> str:
        return f"BlockKey({self.digest[:4].hex()}..., group={self.group})"


class BlockKeys(Sequence[BlockKey]):
    """The keys of blocks of one group, in the order of the prompt: checked once, and not an object for each key.

    A prompt has thousands of blocks and is looked up at every step, so calls that take keys are fastest with this. It
    is immutable, its slices are `BlockKeys` too, and it equals every list or tuple of the same keys.

    Raises `RequestError` for a digest that is not 32 bytes, for one that is named twice, and for a negative group.
    """

    __slots__ = ("digests", "group")

    digests: tuple[bytes, ...]
    group: int

    def __init__(self, digests: Iterable[bytes], group: int = 0) -> None:
        try:
            self.digests = tuple(digests)
        except TypeError as error:
            raise RequestError(f"digests are a {type(digests).__name__}: give a sequence of bytes") from error
        self.group = group
        uniform = set(map(type, self.digests)) <= {bytes} and set(map(len, self.digests)) <= {DIGEST_NBYTES}
        if not uniform or type(group) is not int or group < 0:
            for digest in self.digests or (bytes(DIGEST_NBYTES),):
                BlockKey(digest, group)  # says which of them is wrong, and how
        if len(set(self.digests)) != len(self.digests):
            raise RequestError(_named_twice(self))

    def __len__(self) -> int:
        return len(self.digests)

    @overload
    def __getitem__(self, position: int) -> BlockKey: ...
    @overload
    def __getitem__(self, position: slice) -> Self: ...
    def __getitem__(self, position: int | slice) -> BlockKey | Self:
        if isinstance(position, slice):
            return self._of(self.digests[position], self.group)
        return BlockKey(self.digests[position], self.group)

    def __iter__(self) -> Iterator[BlockKey]:
        return (BlockKey(digest, self.group) for digest in self.digests)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, BlockKey) and key.group == self.group and key.digest in self.digests

    def __eq__(self, other: object) -> bool:
        if isinstance(other, BlockKeys):
            return self.digests == other.digests and (self.group == other.group or not self.digests)
        return isinstance(other, list | tuple) and len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]  # it equals tuples of the same keys, which have another hash

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.digests, self.group)

    def __repr__(self) -> str:
        return f"<{len(self.digests)} keys of group {self.group}>"

    @classmethod
    def _of(cls, digests: tuple[bytes, ...], group: int) -> Self:
        """Return keys of digests that were checked before."""
        keys = cls.__new__(cls)
        keys.digests, keys.group = digests, group
        return keys


def _named_twice(keys: Sequence[BlockKey]) -> str:
    first_at: dict[BlockKey, int] = {}
    for position, key in enumerate(keys):
        first = first_at.setdefault(key, position)
        if first != position:
            return f"{key!r} stands at positions {first} and {position}: name a block once in a call"
    raise AssertionError("no key is named twice")


def digest_fields(fields: Mapping[str, str | int | bytes]) -> bytes:
    """Hash named fields into 32 bytes that no other set of fields gives.

    Each name and value is written with its length in front, and each value with its type, so that neither moving
    a character from one field to the next nor writing 1 as "1" can collide. A field that is left out is not one that is
    empty. The order of the fields does not matter. Raises `RequestError` for other names and values.
    """
    hasher = blake3(_FORMAT)
    names: Iterable[object] = fields  # not every caller checks types
    for name in names:
        if not isinstance(name, str):
            raise RequestError(f"a field is named {name!r}: give its name as text")
    for name in sorted(fields):
        tag, data = tag_value(name, fields[name])
        for part in (encode_text(name), tag, data):
            hasher.update(len(part).to_bytes(8, "little"))
            hasher.update(part)
    return hasher.digest()


_MAX_BITS: Final = 4096
"""More than any digest has; Python refuses to write out much longer ones."""


def tag_value(name: str, value: object) -> tuple[bytes, bytes]:
    """Return the type of a value as one byte, and its bytes; `name` is for the `RequestError` of another type."""
    if isinstance(value, bytes):
        return b"b", value
    if isinstance(value, str):
        return b"s", encode_text(value)
    if isinstance(value, int) and not isinstance(value, bool):
        if value.bit_length() > _MAX_BITS:
            raise RequestError(f"field {name!r} is a whole number of {value.bit_length()} bits: give text or bytes")
        return b"i", str(int(value)).encode()  # int: a member of an enumeration counts with its value
    raise RequestError(f"field {name!r} is {value!r}: give text, a whole number or bytes")


def encode_text(text: str) -> bytes:
    """Encode any text, also the lone surrogates in names of files that are not UTF-8."""
    return text.encode(errors="surrogatepass")
