"""A key changes with everything that shapes the bytes of a block, and with nothing else."""

import pickle

import numpy as np
import pytest

from kvmoor.block_key import DIGEST_NBYTES, BlockKey, namespace_digest, prefix_block_keys
from kvmoor.errors import RequestError

NAMESPACE = namespace_digest({"model": "m", "dtype": "bfloat16"})


def keys_of(
    token_ids: object, tokens_per_block: int = 4, namespace: bytes = NAMESPACE, group: int = 0
) -> list[BlockKey]:
    return prefix_block_keys(
        token_ids,  # type: ignore[arg-type]
        tokens_per_block=tokens_per_block,
        namespace=namespace,
        group=group,
    )


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
    with pytest.raises(RequestError, match=f"has to be {DIGEST_NBYTES} bytes, found {found}: hash shorter keys"):
        BlockKey(digest)  # type: ignore[arg-type]


def test_negative_groups_are_refused() -> None:
    """A key belongs to a group that can exist."""
    with pytest.raises(RequestError, match="the group of a block key is -1"):
        BlockKey(bytes(32), -1)


def test_namespaces_differ_in_every_field() -> None:
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
        {"a": b"b\x01\x00\x00\x00\x00\x00\x00\x00c"},
    ]

    digests = [namespace_digest(each) for each in fields]

    assert len(fields) == len(set(digests))
    assert {DIGEST_NBYTES} == {len(digest) for digest in digests}


def test_the_order_of_fields_does_not_matter() -> None:
    """A namespace is a set of fields, however it was written down."""
    assert namespace_digest({"a": 1, "b": "x"}) == namespace_digest({"b": "x", "a": 1})


def test_digests_do_not_change_between_versions() -> None:
    """What one version stored the next one finds: these digests are part of the format."""
    assert "db57b44c3c6018b4" == namespace_digest({"model": "m", "rank": 1, "raw": b"\x00"}).hex()[:16]
    assert "b3e641bb130bc45b" == keys_of(range(8))[1].digest.hex()[:16]


def test_only_full_blocks_have_keys() -> None:
    """A last block that is not full has no key."""
    assert [0, 0, 1, 1, 2, 2] == [len(keys_of(range(count))) for count in (0, 3, 4, 7, 8, 11)]


def test_a_key_covers_everything_before_its_block() -> None:
    """Prompts share exactly the keys of their common beginning, in whole blocks."""
    prompt = list(range(100, 116))
    for position in range(16):
        changed = list(prompt)
        changed[position] = 7
        shared = [ours == theirs for ours, theirs in zip(keys_of(prompt), keys_of(changed), strict=True)]
        assert [block < position // 4 for block in range(4)] == shared


def test_keys_do_not_depend_on_where_the_prompt_was_cut() -> None:
    """A longer prompt has the keys of its beginning."""
    assert keys_of(range(8)) == keys_of(range(15))[:2]


def test_a_key_changes_with_all_that_shapes_the_block() -> None:
    """Namespace, group and block size each give other keys for the same tokens."""
    tokens = list(range(8))
    digests = {
        key.digest
        for keys in (
            keys_of(tokens),
            keys_of(tokens, namespace=namespace_digest({"model": "other"})),
            keys_of(tokens, group=1),
            keys_of(tokens, tokens_per_block=8),
        )
        for key in keys
    }

    assert 7 == len(digests)
    assert {1} == {key.group for key in keys_of(tokens, group=1)}


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "int64", "uint64", ">i4"])
def test_the_type_of_the_tokens_does_not_matter(dtype: str) -> None:
    """Lists, ranges and arrays of any integer type and stride give the same keys."""
    array = np.arange(100, 116).astype(dtype)

    assert keys_of(list(range(100, 116))) == keys_of(array) == keys_of(np.repeat(array, 2)[::2])


def test_large_token_ids_are_told_apart() -> None:
    """Ids are compared in 64 bits."""
    assert keys_of([2**63 - 1, 0, 0, 0]) != keys_of([2**31 - 1, 0, 0, 0])
    assert keys_of([2**32, 0, 0, 0]) != keys_of([0, 0, 0, 0])


@pytest.mark.parametrize(
    "token_ids",
    [[-1, 2], [1.0, 2.0], ["a"], [True, False], [[1, 2], [3, 4]], [[1], [2, 3]], [2**63], [2**64], [None]],
    ids=str,
)
def test_other_tokens_are_refused(token_ids: list[object]) -> None:
    """What is not one sequence of ids from 0 to 2**63 - 1 is refused."""
    with pytest.raises(RequestError, match=r"^token_ids (has shape|holds sequences of several lengths)"):
        keys_of(token_ids, tokens_per_block=1)


def test_blocks_without_tokens_are_refused() -> None:
    """A block holds at least one token, also for an empty prompt."""
    with pytest.raises(RequestError, match="tokens_per_block is 0: give 1 or more"):
        keys_of([], tokens_per_block=0)
