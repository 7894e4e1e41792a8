"""A key changes with everything that shapes the bytes of a block, and with nothing else."""

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvmoor.block_key import DIGEST_NBYTES, BlockKeys
from kvmoor.errors import RequestError
from kvmoor.key_builder import KeyBuilder, MultimodalItem, Namespace

NAMESPACE = Namespace(model="m", layout_fingerprint=bytes(range(32)))


def keys_of(token_ids: Any, tokens_per_block: int = 4, namespace: Namespace = NAMESPACE, **fields: Any) -> BlockKeys:
    return KeyBuilder(namespace, tokens_per_block=tokens_per_block).prompt_keys(token_ids, **fields)


def engine_keys_of(hashes: Any, **fields: Any) -> BlockKeys:
    return KeyBuilder(NAMESPACE, tokens_per_block=4).engine_keys(hashes, **fields)


def shared_by(ours: BlockKeys, theirs: BlockKeys) -> list[bool]:
    return [mine == other for mine, other in zip(ours.digests, theirs.digests, strict=True)]


# Namespaces.


def test_namespaces_differ_in_every_field() -> None:
    """Changing one field of a namespace changes its digest, and leaving it out is not making it empty (B32)."""
    namespaces = [
        NAMESPACE,
        replace(NAMESPACE, model="n"),
        replace(NAMESPACE, layout_fingerprint=bytes(32)),
        replace(NAMESPACE, revision=""),
        replace(NAMESPACE, revision="1"),
        replace(NAMESPACE, weights_epoch=1),
        replace(NAMESPACE, parallel_sizes={"tensor": 1}),
        replace(NAMESPACE, parallel_sizes={"tensor": 2}),
        replace(NAMESPACE, parallel_sizes={"pipeline": 2}),
        replace(NAMESPACE, extra={"tensor": 2}),
        replace(NAMESPACE, extra={"revision": "1"}),
        replace(NAMESPACE, extra={"weights_epoch": 1}),
        replace(NAMESPACE, extra={"model": "n"}),
        replace(NAMESPACE, extra={"": b""}),
        replace(NAMESPACE, extra={"": ""}),
    ]

    assert len(namespaces) == len({namespace.digest() for namespace in namespaces})
    assert {DIGEST_NBYTES} == {len(namespace.digest()) for namespace in namespaces}


def test_namespaces_are_values() -> None:
    """Equal namespaces are one, in whatever order their fields came and also after a journey between processes."""
    ours = replace(NAMESPACE, extra={"a": 1, "b": 2})
    theirs = replace(NAMESPACE, extra={"b": 2, "a": 1})

    assert ours == theirs == pickle.loads(pickle.dumps(ours))
    assert ours.digest() == theirs.digest()
    assert 1 == len({ours, theirs})


def test_namespaces_do_not_follow_the_callers_dictionary() -> None:
    """What becomes of a dictionary after it was passed does not change a namespace."""
    extra: dict[str, str | int | bytes] = {"a": 1}
    sizes = {"tensor": 2}
    namespace = replace(NAMESPACE, extra=extra, parallel_sizes=sizes)
    digest = namespace.digest()
    extra["a"] = 2
    sizes.clear()

    assert digest == namespace.digest()


def test_a_new_epoch_has_other_keys() -> None:
    """After a change of the weights no key of before is found, and all else of the namespace is as it was (B37)."""
    new = NAMESPACE.next_epoch()

    assert replace(NAMESPACE, weights_epoch=1) == new
    assert [False, False] == shared_by(keys_of(range(8)), keys_of(range(8), namespace=new))
    assert 2 == new.next_epoch().weights_epoch


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": ""}, "the model is '': give the name"),
        ({"model": None}, "the model is None"),
        ({"layout_fingerprint": b""}, "the layout fingerprint is b'': give BlockLayout.fingerprint"),
        ({"layout_fingerprint": "a" * 32}, "the layout fingerprint is 'aaa"),
        ({"revision": 1}, "revision is 1: give text, or None"),
        ({"weights_epoch": -1}, "weights_epoch is -1: give 0 or more"),
        ({"weights_epoch": True}, "weights_epoch is True: give a whole number"),
        ({"weights_epoch": "1"}, "weights_epoch is '1': give a whole number"),
        ({"parallel_sizes": {"tensor": 0}}, "parallel size 'tensor' is 0: give 1 or more"),
        ({"parallel_sizes": {"tensor": 2.0}}, "parallel size 'tensor' is 2.0: give a whole number"),
        ({"parallel_sizes": {1: 1}}, "a field is named 1: give its name as text"),
        ({"parallel_sizes": 4}, "parallel_sizes is 4: give a dictionary"),
        ({"extra": {"a": None}}, "field 'a' is None: give text, a whole number or bytes"),
        ({"extra": [("a", 1)]}, "extra is .*: give a dictionary"),
    ],
    ids=str,
)
def test_other_namespaces_are_refused(fields: dict[str, Any], message: str) -> None:
    """A name that is empty, or a value that is of another type, is refused when the namespace is made."""
    with pytest.raises(RequestError, match=message):
        replace(NAMESPACE, **fields)


# Prompts.


def test_keys_do_not_change_between_versions() -> None:
    """What one version stored the next one finds: these digests are part of the format."""
    namespace = replace(NAMESPACE, revision="r", parallel_sizes={"tensor": 2}, extra={"a": 1})
    builder = KeyBuilder(namespace, tokens_per_block=4)
    fields: dict[str, Any] = {"group": 1, "adapter": "a", "cache_salt": "s"}
    keys = builder.prompt_keys(range(8), multimodal=[MultimodalItem(b"h", 5, 1)], **fields)

    assert ["30dd17d703786e1c", "ce86a0bbaf9a12be"] == [digest.hex()[:16] for digest in keys.digests]
    hashed = builder.engine_keys([b"h", "h", 7], **fields)
    assert ["667d98bd2a3324fc", "ef6dc073d7bb9134", "f67c856e185b611d"] == [
        digest.hex()[:16] for digest in hashed.digests
    ]


def test_only_full_blocks_have_keys() -> None:
    """A last block that is not full has no key."""
    assert [0, 0, 1, 1, 2, 2] == [len(keys_of(range(count))) for count in (0, 3, 4, 7, 8, 11)]


def test_a_key_covers_everything_before_its_block() -> None:
    """Prompts share exactly the keys of their common beginning, in whole blocks."""
    prompt = list(range(100, 116))
    for position in range(16):
        changed = list(prompt)
        changed[position] = 7
        assert [block < position // 4 for block in range(4)] == shared_by(keys_of(prompt), keys_of(changed))


def test_keys_do_not_depend_on_where_the_prompt_was_cut() -> None:
    """A longer prompt has the keys of its beginning."""
    assert keys_of(range(8)) == keys_of(range(15))[:2]


def test_a_key_changes_with_all_that_shapes_the_block() -> None:
    """Namespace, group, block size, adapter and salt each give other keys for the same tokens, also empty ones."""
    tokens = list(range(8))
    digests = {
        key.digest
        for keys in (
            keys_of(tokens),
            keys_of(tokens, namespace=replace(NAMESPACE, model="other")),
            keys_of(tokens, group=1),
            keys_of(tokens, tokens_per_block=8),
            keys_of(tokens, adapter=""),
            keys_of(tokens, cache_salt=""),
            keys_of(tokens, adapter="", cache_salt=""),
            keys_of(tokens, adapter="ab"),
            keys_of(tokens, cache_salt="ab"),
            keys_of(tokens, adapter="a", cache_salt="b"),
            keys_of(tokens, adapter="b", cache_salt="a"),
        )
        for key in keys
    }

    assert 2 * 11 - 1 == len(digests)
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


class OnAnotherDevice:
    """A tensor of a GPU, which numpy may not read."""

    def __array__(self, *args: object, **options: object) -> np.ndarray:
        raise TypeError("copy the tensor to host memory first")

    def __repr__(self) -> str:
        return "a tensor of a GPU"  # no address: the test has one name in all runs


@pytest.mark.parametrize(
    "token_ids",
    [
        [-1, 2],
        [1.0, 2.0],
        ["a"],
        [True, False],
        [[1, 2], [3, 4]],
        [[]],
        [[1], [2, 3]],
        [2**63],
        [2**64],
        [None],
        None,
        7,
        "12",
        OnAnotherDevice(),
    ],
    ids=repr,
)
def test_other_tokens_are_refused(token_ids: object) -> None:
    """What is not one sequence of ids from 0 to 2**63 - 1 is refused."""
    with pytest.raises(RequestError, match=r"^token_ids (has shape|cannot be read)"):
        keys_of(token_ids, tokens_per_block=1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"group": -1}, "group is -1: give 0 or more"),
        ({"group": True}, "group is True: give a whole number"),
        ({"group": None}, "group is None: give a whole number"),
        ({"adapter": 1}, "adapter is 1: give text, or None"),
        ({"cache_salt": b"s"}, "cache_salt is b's': give text, or None"),
    ],
    ids=str,
)
def test_other_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    """A field of another type is refused in every way to make keys, also for no blocks."""
    builder = KeyBuilder(NAMESPACE, tokens_per_block=4)
    for make in (
        lambda: builder.prompt_keys([], **fields),
        lambda: builder.engine_keys([], **fields),
        lambda: builder.growing_prompt(**fields),
    ):
        with pytest.raises(RequestError, match=message):
            make()


def test_blocks_without_tokens_are_refused() -> None:
    """A block holds at least one token."""
    with pytest.raises(RequestError, match="tokens_per_block is 0: give 1 or more"):
        KeyBuilder(NAMESPACE, tokens_per_block=0)


def test_a_namespace_has_to_be_one() -> None:
    """A digest, which says nothing about what went into it, is no namespace."""
    with pytest.raises(RequestError, match="give a Namespace"):
        KeyBuilder(NAMESPACE.digest(), tokens_per_block=4)  # type: ignore[arg-type]


# Multimodal items.


@pytest.mark.parametrize(
    ("first_token", "num_tokens", "shared"),
    [(0, 1, 0), (3, 1, 0), (4, 1, 1), (7, 1, 1), (7, 2, 1), (5, 9, 1), (15, 1, 3), (15, 9, 3), (16, 1, 4), (99, 1, 4)],
)
def test_an_item_counts_from_the_first_block_that_it_overlaps(first_token: int, num_tokens: int, shared: int) -> None:
    """Blocks in front of an image are shared with prompts without it, and its blocks and those behind it are not."""
    with_item = keys_of(range(16), multimodal=[MultimodalItem(b"image", first_token, num_tokens)])

    assert [block < shared for block in range(4)] == shared_by(keys_of(range(16)), with_item)


def test_an_item_counts_with_content_place_and_size() -> None:
    """The same placeholder tokens with another image, at another place or of another size, have other keys."""
    base = MultimodalItem(b"a", 5, 2)
    items = [
        (base,),
        (replace(base, content_hash=b"b"),),
        (replace(base, content_hash="a"),),
        (replace(base, first_token=4),),
        (replace(base, num_tokens=1),),
        (base, MultimodalItem(b"b", 7, 1)),
        (base, base),
        (MultimodalItem(b"a", 5, 1), MultimodalItem(b"a", 6, 1)),
    ]
    digests = {keys_of(range(8), multimodal=each).digests[1] for each in items}

    assert len(items) == len(digests)
    assert 1 == len({keys_of(range(8), multimodal=each).digests[0] for each in items})


def test_the_order_of_items_does_not_matter() -> None:
    """Items have places, and are not told apart by when they were named."""
    items = [
        MultimodalItem(b"a", 5, 2),
        MultimodalItem("a", 5, 2),
        MultimodalItem(b"b", 2, 9),
        MultimodalItem("c", 0, 1),
    ]

    assert keys_of(range(12), multimodal=items) == keys_of(range(12), multimodal=reversed(items))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((b"", 0, 1), "the hash of a multimodal item is b'': give the engine's hash of it"),
        (("", 0, 1), "the hash of a multimodal item is ''"),
        ((7, 0, 1), "the hash of a multimodal item is 7"),
        ((b"a", -1, 1), "first_token is -1: give 0 or more"),
        ((b"a", 0, 0), "num_tokens is 0: give 1 or more"),
        ((b"a", 0.0, 1), "first_token is 0.0: give a whole number"),
    ],
    ids=str,
)
def test_other_items_are_refused(fields: tuple[Any, Any, Any], message: str) -> None:
    """An item without content or place is refused when it is made."""
    with pytest.raises(RequestError, match=message):
        MultimodalItem(*fields)


def test_items_have_to_be_items() -> None:
    """A bare hash, which has no place, is refused."""
    with pytest.raises(RequestError, match="a multimodal item is b'a': give a MultimodalItem"):
        keys_of(range(8), multimodal=[b"a"])


# Prompts that grow.


def test_a_growing_prompt_returns_the_keys_of_filled_blocks() -> None:
    """Each append returns the keys of the blocks that it filled, and all of them are those of the whole prompt."""
    prompt = KeyBuilder(NAMESPACE, tokens_per_block=4).growing_prompt(group=1, adapter="a", cache_salt="s")
    whole = keys_of(range(11), group=1, adapter="a", cache_salt="s")
    returned = [prompt.append(range(begin, end)) for begin, end in ((0, 0), (0, 3), (3, 5), (5, 7), (7, 11))]

    assert [whole[:0], whole[:0], whole[:1], whole[1:1], whole[1:]] == returned
    assert (whole, 11) == (prompt.keys, prompt.num_tokens)
    assert "<GrowingPrompt of 11 tokens: 2 keys of group 1>" == repr(prompt)


def test_an_item_that_is_appended_counts_as_if_it_had_been_there() -> None:
    """Items may come before, or with, their tokens, or when these have begun to fill a block."""
    first, second = MultimodalItem(b"a", 5, 7), MultimodalItem(b"b", 13, 2)
    whole = keys_of(range(16), multimodal=[first, second])
    for first_with, second_with in ((0, 0), (0, 1), (1, 2), (0, 2)):
        prompt = KeyBuilder(NAMESPACE, tokens_per_block=4).growing_prompt()
        for number, (begin, end) in enumerate(((0, 6), (6, 13), (13, 16))):
            items = [item for item, at in ((first, first_with), (second, second_with)) if at == number]
            if number == 1 and first_with == 1:
                with pytest.raises(RequestError, match="begins at token 3, and the first 4 tokens have their keys"):
                    prompt.append(range(begin, end), multimodal=[MultimodalItem(b"c", 3, 4)])
            prompt.append(range(begin, end), multimodal=items)

        assert whole == prompt.keys


def test_a_refused_append_changes_nothing() -> None:
    """After tokens or items were refused the prompt goes on as if they had not been given."""
    prompt = KeyBuilder(NAMESPACE, tokens_per_block=4).growing_prompt()
    prompt.append(range(6))
    for tokens, items in (([1.5], [MultimodalItem(b"a", 6, 1)]), ([1, 2], [MultimodalItem(b"a", 6, 1), None])):
        with pytest.raises(RequestError):
            prompt.append(tokens, multimodal=items)
    prompt.append(range(6, 12))

    assert keys_of(range(12)) == prompt.keys


# Hashes of an engine.


def test_engine_hashes_differ_in_type_and_value() -> None:
    """Hashes of any length and type are told apart, and so are they from tokens and from other fields."""
    hashes: list[bytes | str | int] = [b"1", "1", 1, b"11", 11, -1, bytes(1), bytes(2), bytes(32), bytes(64), 2**200, 0]
    others = [{"group": 1}, {"adapter": ""}, {"adapter": "a"}, {"cache_salt": ""}, {"cache_salt": "a"}]
    digests = [*engine_keys_of(hashes).digests, *keys_of([0] * 48).digests]
    for fields in others:
        digests += engine_keys_of([b"1"], **fields).digests

    assert len(hashes) + 12 + len(others) == len(set(digests))
    assert 3 == engine_keys_of([b"1"], group=3).group


def test_engine_hashes_are_not_taken_for_tokens() -> None:
    """A hash that an engine could choose so that it is hashed as the tokens of a prompt has another key."""
    data = b"7 bytes"
    token_ids = np.frombuffer(b"b" + len(data).to_bytes(8, "little") + data, "<i8")
    builder = KeyBuilder(NAMESPACE, tokens_per_block=2)

    assert builder.prompt_keys(token_ids) != builder.engine_keys([data])


def test_engine_hashes_stand_for_themselves() -> None:
    """A key of an engine's hash does not depend on the hashes around it, nor on the kind of sequence."""
    hashes = [bytes([number]) * 32 for number in range(5)]
    keys = engine_keys_of(hashes)

    assert list(keys) == [key for each in hashes for key in engine_keys_of([each])]
    assert keys == engine_keys_of(iter(hashes))
    assert engine_keys_of([]) == BlockKeys(())


@pytest.mark.parametrize(
    ("hashes", "message"),
    [
        ([b"a", b""], "hash 1 of the engine is empty"),
        ([""], "hash 0 of the engine is empty"),
        ([None], "field 'hash' is None: give text, a whole number or bytes"),
        ([True], "field 'hash' is True"),
        ([1.5], "field 'hash' is 1.5"),
        ([b"a", b"b", b"a"], "stands at positions 0 and 2: name a block once"),
        (b"abc", "the hashes are b'abc': give a sequence, with one hash for each block"),
        ("abc", "the hashes are 'abc'"),
        (bytearray(b"abc"), "the hashes are bytearray"),
        (7, "the hashes are 7"),
        (None, "the hashes are None"),
    ],
    ids=str,
)
def test_other_engine_hashes_are_refused(hashes: object, message: str) -> None:
    """A hash that is empty, named twice or of another type is refused, and so is one hash for a sequence of them."""
    with pytest.raises(RequestError, match=message):
        engine_keys_of(hashes)


def test_a_builder_says_whose_keys_it_makes() -> None:
    """A log line names model, epoch and block size."""
    assert "<KeyBuilder of 'm', epoch 0: 4 tokens>" == repr(KeyBuilder(NAMESPACE, tokens_per_block=4))
