"""A key is a value, and fields are hashed so that no two sets of them have one digest."""

import pickle
from enum import Enum, StrEnum

import pytest

from kvmoor.block_key import DIGEST_NBYTES, BlockKey, BlockKeys, digest_fields
from kvmoor.errors import RequestError


def test_keys_are_values() -> None:
    """Two keys of one digest and group are one key, also after a journey between processes."""
    key = BlockKey(bytes(range(32)), 3)

    assert key == BlockKey(bytes(range(32)), 3)
    assert 1 == len({key, BlockKey(bytes(range(32)), 3)})
    assert key == pickle.loads(pickle.dumps(key))
    assert key != BlockKey(bytes(range(32)), 2)
    assert "BlockKey(00010203..., group=3)" == repr(key)
    with pytest.raises(AttributeError):
        key.group = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("digest", "found"),
    [
        (b"", "0 bytes"),
        (bytes(31), "31 bytes"),
        (bytes(33), "33 bytes"),
        ("a" * 32, "str"),
        (bytearray(32), "bytearray"),
    ],
)
def test_other_digests_are_refused(digest: object, found: str) -> None:
    """A digest that is not 32 bytes is refused with what was found."""
    with pytest.raises(RequestError, match=f"has to be {DIGEST_NBYTES} bytes, found {found}: hash keys of an engine"):
        BlockKey(digest)  # type: ignore[arg-type]


def test_negative_groups_are_refused() -> None:
    """A key belongs to a group that can exist."""
    with pytest.raises(RequestError, match="the group of a block key is -1"):
        BlockKey(bytes(32), -1)


def test_fields_differ_in_everything() -> None:
    """Changing one name, value or type, or moving a character between fields, gives another digest (B32)."""
    fields: list[dict[str, str | int | bytes]] = [
        {},
        {"model": "m"},
        {"model": "n"},
        {"mode": "lm"},
        {"modelm": ""},
        {"model": "m", "rank": 1},
        {"model": "m", "rank": "1"},
        {"model": "m", "rank": b"1"},
        {"model": "m", "rank": 11},
        {"model": "m1", "rank": 1},
        {"model": "m", "rank": -1},
        {"a": "b", "c": "d"},
        {"a": "bc", "": "d"},
        {"a": "bcd"},
        {"a": "\ud800"},  # as in the name of a file that is not UTF-8
        {"a": "\udc00"},
        {"a": "\ud800\udc00"},
        {"a": "\U00010000"},
        {"a": b"b\x01\x00\x00\x00\x00\x00\x00\x00c"},
    ]

    digests = [digest_fields(each) for each in fields]

    assert len(fields) == len(set(digests))
    assert {DIGEST_NBYTES} == {len(digest) for digest in digests}


def test_the_order_of_fields_does_not_matter() -> None:
    """Fields are a set, however it was written down."""
    assert digest_fields({"a": 1, "b": "x"}) == digest_fields({"b": "x", "a": 1})


def test_digests_do_not_change_between_versions() -> None:
    """What one version stored the next one finds: these digests are part of the format."""
    assert "db57b44c3c6018b4" == digest_fields({"model": "m", "rank": 1, "raw": b"\x00"}).hex()[:16]


def test_members_of_an_enumeration_count_with_their_value() -> None:
    """What is a whole number or a text counts as that, by whatever name it goes in the program."""

    class Rank(int, Enum):
        FIRST = 1

    class Engine(StrEnum):
        OURS = "e"

    assert digest_fields({"a": Rank.FIRST, "b": Engine.OURS}) == digest_fields({"a": 1, "b": "e"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"a": None}, "field 'a' is None: give text, a whole number or bytes"),
        ({"a": True}, "field 'a' is True"),
        ({"a": 1.0}, "field 'a' is 1.0"),
        ({"a": ("b",)}, "field 'a' is"),
        ({"a": 1, 2: 1}, "a field is named 2: give its name as text"),
        ({b"a": 1}, "a field is named b'a'"),
    ],
    ids=str,
)
def test_other_fields_are_refused(fields: dict[str, int], message: str) -> None:
    """A value without one way to write it down is refused by the name of its field, and so is a name."""
    with pytest.raises(RequestError, match=message):
        digest_fields(fields)


def digests_of(count: int) -> list[bytes]:
    return [digest_fields({"block": number}) for number in range(count)]


def test_block_keys_are_a_sequence_of_keys() -> None:
    """Keys of a prompt read as a sequence of `BlockKey`, and every slice is one as well."""
    digests = digests_of(5)
    keys = BlockKeys(iter(digests), 2)
    listed = [BlockKey(digest, 2) for digest in digests]

    assert listed == list(keys) == [keys[place] for place in range(-5, 0)]
    assert tuple(digests) == keys.digests
    assert (5, 0) == (len(keys), len(keys[5:]))
    assert listed[1::2] == list(keys[1::2])
    assert (BlockKeys, 2) == (type(keys[1:3]), keys[1:3].group)
    assert listed[3] in keys
    assert BlockKey(digests[3], 1) not in keys
    assert digests[3] not in keys
    assert "<5 keys of group 2>" == repr(keys)
    with pytest.raises(IndexError):
        keys[5]


def test_block_keys_are_values() -> None:
    """Keys equal the same keys in any sequence, also after a journey between processes; no keys equal no keys."""
    keys = BlockKeys(digests_of(3), 1)

    assert keys == BlockKeys(digests_of(3), 1) == BlockKeys(digests_of(4), 1)[:3] == pickle.loads(pickle.dumps(keys))
    assert list(keys) == keys == tuple(keys)
    assert BlockKeys((), 1) == BlockKeys((), 2) == []
    for other in (
        BlockKeys(digests_of(3), 2),
        BlockKeys(digests_of(3)[::-1], 1),
        BlockKeys(digests_of(4), 1),
        list(keys)[:2],
        [*keys, keys[0]],
        list(keys.digests),
        None,
    ):
        assert keys != other


@pytest.mark.parametrize(
    ("digests", "group", "message"),
    [
        ([bytes(32), bytes(31)], 0, "found 31 bytes"),
        ([bytes(32), bytearray(range(32))], 0, "found bytearray"),
        (["a" * 32], 0, "found str"),
        (bytes(32), 0, "found int"),
        (7, 0, "digests are a int: give a sequence of bytes"),
        ([bytes(32)], -1, "the group of a block key is -1"),
        ([], -1, "the group of a block key is -1"),
        ([bytes(32)], True, "the group of a block key is True"),
        ([bytes(32), bytes(range(32)), bytes(32)], 0, "stands at positions 0 and 2: name a block once"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_other_block_keys_are_refused(digests: object, group: int, message: str) -> None:
    """What is no sequence of different digests of a group is refused, with what was found and where."""
    with pytest.raises(RequestError, match=message):
        BlockKeys(digests, group)  # type: ignore[arg-type]
