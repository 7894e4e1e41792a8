"""Keys are equal if and only if everything that shapes the block is.

Two calls are drawn that differ in little: in one field, or in where one text ends and the next begins. All keys of both
are described in plain values, and descriptions and digests have to correspond one to one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from itertools import pairwise, product
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, given, settings

from kvmoor.key_builder import KeyBuilder, MultimodalItem, Namespace

# Characters that a joiner might put between fields, and few of them, so that many texts are nearly equal.
TEXTS = st.text("ab1/:\0", max_size=3)
HASHES = st.one_of(TEXTS.map(str.encode), TEXTS, st.integers(-1, 11)).filter(lambda each: each not in {"", b""})
TOKENS = st.sampled_from([0, 1, 11, 256, 2**32, 2**63 - 1])
ITEMS = st.builds(
    MultimodalItem,
    content_hash=HASHES.filter(lambda each: not isinstance(each, int)),
    first_token=st.integers(0, 5),
    num_tokens=st.integers(1, 5),
)


@dataclass(frozen=True)
class Call:
    """Everything that is said about a prompt and its blocks."""

    model: str
    revision: str | None
    weights_epoch: int
    layout_fingerprint: bytes
    parallel_sizes: dict[str, int]
    extra: dict[str, str | int | bytes]
    tokens_per_block: int
    group: int
    adapter: str | None
    cache_salt: str | None
    token_ids: list[int]
    multimodal: list[MultimodalItem]
    engine_hashes: list[bytes | str | int]


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "model": TEXTS.filter(bool),
    "revision": st.none() | TEXTS,
    "weights_epoch": st.integers(0, 11),
    "layout_fingerprint": st.sampled_from([bytes(32), bytes(31) + b"\1", b"a" * 32]),
    "parallel_sizes": st.dictionaries(TEXTS, st.sampled_from([1, 2, 11]), max_size=2),
    "extra": st.dictionaries(TEXTS, TEXTS | TEXTS.map(str.encode) | st.integers(-1, 11), max_size=2),
    "tokens_per_block": st.integers(1, 3),
    "group": st.sampled_from([0, 1, 11]),
    "adapter": st.none() | TEXTS,
    "cache_salt": st.none() | TEXTS,
    "token_ids": st.lists(TOKENS, min_size=1, max_size=7),
    "multimodal": st.lists(ITEMS, max_size=3),
    "engine_hashes": st.lists(HASHES, max_size=3, unique_by=lambda each: (type(each), each)),
}
CALLS = st.builds(Call, **FIELDS)
TEXT_FIELDS = ("model", "revision", "adapter", "cache_salt")


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Call, Call]:
    """Draw two calls that differ in one field or two, or only in what careless hashing does not see."""
    first = draw(CALLS)
    change = draw(st.sampled_from(["nothing", *ALMOST_NOTHING, *ALMOST_NOTHING, *FIELDS]), label="change")
    if change in ALMOST_NOTHING:
        return ALMOST_NOTHING[change](draw, first)
    if change == "nothing":
        return first, first
    other = draw(st.sampled_from([change, *FIELDS]))
    return first, replace(first, **{name: draw(FIELDS[name]) for name in {change: 0, other: 0}})


def move_a_border(draw: st.DrawFn, call: Call) -> tuple[Call, Call]:
    left, right = draw(st.permutations(TEXT_FIELDS))[:2]
    joined = (getattr(call, left) or "") + (getattr(call, right) or "")
    border = draw(st.integers(0, len(joined)))
    moved = {left: joined[:border], right: joined[border:]}
    return call, replace(call, **{**moved, "model": moved.get("model", call.model) or "a"})


def swallow_a_field(draw: st.DrawFn, call: Call) -> tuple[Call, Call]:
    """Make the salt part of the adapter, with its name and its type."""
    first = replace(call, adapter=draw(TEXTS), cache_salt=draw(TEXTS))
    return first, replace(first, adapter=f"{first.adapter}cache_salts{first.cache_salt}", cache_salt=None)


def change_types(draw: st.DrawFn, call: Call) -> tuple[Call, Call]:
    first = replace(call, engine_hashes=[draw(HASHES)])
    return first, replace(
        first,
        extra={name: retyped(value) for name, value in call.extra.items()},
        engine_hashes=[retyped(value) for value in first.engine_hashes],
    )


def retyped(value: str | int | bytes) -> str | bytes:
    return value.decode() if isinstance(value, bytes) else value.encode() if isinstance(value, str) else str(value)


def change_the_order(draw: st.DrawFn, call: Call) -> tuple[Call, Call]:
    items = draw(st.lists(ITEMS, min_size=2, max_size=3))
    return replace(call, multimodal=items), replace(call, multimodal=draw(st.permutations(items)))


def change_an_item(draw: st.DrawFn, call: Call) -> tuple[Call, Call]:
    item, other = draw(ITEMS), draw(ITEMS)
    name = draw(st.sampled_from(["content_hash", "first_token", "num_tokens"]))
    changed = replace(item, **{name: getattr(other, name)})
    return replace(call, multimodal=[item]), replace(call, multimodal=[changed])


ALMOST_NOTHING: dict[str, Callable[[st.DrawFn, Call], tuple[Call, Call]]] = {
    "border": move_a_border,
    "swallow": swallow_a_field,
    "types": change_types,
    "order": change_the_order,
    "item": change_an_item,
}


def described_keys(call: Call, digests_of: Callable[[Call], Sequence[bytes]]) -> Iterator[tuple[Any, bytes]]:
    """Yield what shapes each block, as plain values, with the digest of its key."""
    shared = (
        call.model,
        call.revision,
        call.weights_epoch,
        call.layout_fingerprint,
        frozenset(call.parallel_sizes.items()),
        frozenset((name, type(value), value) for name, value in call.extra.items()),
        call.tokens_per_block,
        call.group,
        call.adapter,
        call.cache_salt,
    )
    descriptions: list[Any] = []
    for block in range(len(call.token_ids) // call.tokens_per_block):
        end = (block + 1) * call.tokens_per_block
        items = sorted(
            (item.first_token, item.num_tokens, type(item.content_hash).__name__, str(item.content_hash))
            for item in call.multimodal
            if item.first_token < end
        )
        descriptions.append((shared, "prompt", tuple(call.token_ids[:end]), tuple(items)))
    descriptions += [(shared, "engine", type(value), value) for value in call.engine_hashes]
    yield from zip(descriptions, digests_of(call), strict=True)


def kvmoor_digests(call: Call) -> Sequence[bytes]:
    namespace = Namespace(
        model=call.model,
        revision=call.revision,
        weights_epoch=call.weights_epoch,
        layout_fingerprint=call.layout_fingerprint,
        parallel_sizes=call.parallel_sizes,
        extra=call.extra,
    )
    builder = KeyBuilder(namespace, tokens_per_block=call.tokens_per_block)
    said: dict[str, Any] = {"group": call.group, "adapter": call.adapter, "cache_salt": call.cache_salt}
    prompt = builder.prompt_keys(call.token_ids, multimodal=call.multimodal, **said)
    engine = builder.engine_keys(call.engine_hashes, **said)
    assert {call.group} >= {key.group for keys in (prompt, engine) for key in keys}
    return prompt.digests + engine.digests


def assert_one_to_one(pair: tuple[Call, Call], digests_of: Callable[[Call], Sequence[bytes]]) -> None:
    both = {described for call in pair for described in described_keys(call, digests_of)}

    assert len(both) == len({description for description, _ in both}), "one block has two keys"
    assert len(both) == len({digest for _, digest in both}), "two blocks have one key"


@settings(max_examples=500, deadline=None, print_blob=True)
@given(pairs())
def test_keys_are_equal_if_and_only_if_all_fields_are(pair: tuple[Call, Call]) -> None:
    """No two blocks that differ in a field have one key, and no block has two (B32)."""
    assert_one_to_one(pair, kvmoor_digests)


def joined_digests(call: Call, *, between: str, omit: str = "", order: str = "kept", types: bool = True) -> list[bytes]:
    """Make keys as one should not: join what is said about a block, and hash that."""
    write = repr if types else str
    said = {each.name: getattr(call, each.name) for each in fields(Call)}
    said |= {name: sorted(said[name].items()) for name in ("parallel_sizes", "extra")}
    tokens, items, hashes = (said.pop(name) for name in ("token_ids", "multimodal", "engine_hashes"))
    if order == "sorted":
        items = sorted(items, key=repr)
    said.pop(omit, None)
    front = [write(value) if types or value is not None else "" for value in said.values()]
    blocks: list[list[Any]] = []
    for block in range(len(tokens) // call.tokens_per_block):
        end = (block + 1) * call.tokens_per_block
        inside = [item for item in items if item.first_token < end]
        blocks.append(["prompt", tokens[:end], *([] if omit == "multimodal" else inside)])
    blocks += [["engine", value] for value in hashes]
    return [sha256(between.join([*front, *map(write, block)]).encode()).digest() for block in blocks]


def assert_found_out(digests_of: Callable[[Call], Sequence[bytes]], message: str) -> None:
    """Run the property over keys that are made in another way, and expect it to fail."""

    # Nobody reads the example, so it is not made small.
    @settings(max_examples=2000, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    @given(pairs())
    def check(pair: tuple[Call, Call]) -> None:
        assert_one_to_one(pair, digests_of)

    with pytest.raises(AssertionError, match=message):
        check()


@pytest.mark.parametrize("between", ["", "/", "\0"], ids=repr)
def test_the_property_finds_out_a_joiner(between: str) -> None:
    """Fields that are only joined collide, whatever stands between them, and the property sees it."""
    assert_found_out(lambda call: joined_digests(call, between=between, order="sorted", types=False), "two blocks")


@pytest.mark.parametrize(
    "omitted", [each.name for each in fields(Call) if each.name not in {"token_ids", "engine_hashes"}]
)
def test_the_property_finds_out_a_field_that_is_left_out(omitted: str) -> None:
    """Keys without one of the fields collide, and the property sees it for each of them."""
    assert_found_out(
        lambda call: joined_digests(call, between="/", omit=omitted, order="sorted"), "two blocks have one key"
    )


def test_the_property_finds_out_an_order_that_counts() -> None:
    """Keys that depend on the order of the items name one block twice, and the property sees it."""
    assert_found_out(lambda call: joined_digests(call, between="/"), "one block has two keys")


def test_the_property_accepts_what_is_right() -> None:
    """Keys joined of quoted and typed fields do not collide, so the checks above find what they are meant to find."""

    @settings(max_examples=500, deadline=None, database=None, derandomize=True)
    @given(pairs())
    def check(pair: tuple[Call, Call]) -> None:
        assert_one_to_one(pair, lambda call: joined_digests(call, between="/", order="sorted"))

    check()


@settings(max_examples=200, deadline=None, print_blob=True)
@given(CALLS, st.data())
def test_a_longer_prompt_begins_with_the_keys_of_a_shorter_one(call: Call, data: st.DataObject) -> None:
    """Wherever a prompt is cut, its keys are the first ones of the whole, with all items or those of its tokens."""
    builder = KeyBuilder(
        Namespace(model=call.model, layout_fingerprint=call.layout_fingerprint), tokens_per_block=call.tokens_per_block
    )
    cut = data.draw(st.integers(0, len(call.token_ids)), label="cut")
    whole = builder.prompt_keys(call.token_ids, multimodal=call.multimodal)
    short = builder.prompt_keys(call.token_ids[:cut], multimodal=call.multimodal)
    begun = [item for item in call.multimodal if item.first_token < cut]

    assert whole[: len(short)] == short == builder.prompt_keys(call.token_ids[:cut], multimodal=begun)
    assert cut // call.tokens_per_block == len(short)


@settings(max_examples=200, deadline=None, print_blob=True)
@given(CALLS, st.lists(st.integers(0, 7), max_size=4), st.data())
def test_a_prompt_grows_to_the_same_keys(call: Call, cuts: list[int], data: st.DataObject) -> None:
    """However a prompt is cut into pieces, and whenever its items are named in time, it has the keys of the whole."""
    builder = KeyBuilder(
        Namespace(model=call.model, layout_fingerprint=call.layout_fingerprint), tokens_per_block=call.tokens_per_block
    )
    borders = sorted({0, len(call.token_ids), *(min(cut, len(call.token_ids)) for cut in cuts)})
    prompt = builder.growing_prompt()
    waiting = list(call.multimodal)
    digests: list[bytes] = []
    for begin, end in pairwise(borders):
        named, later = [], []
        for item in waiting:  # one by one: two items may be equal
            is_named = item.first_token < end or data.draw(st.booleans(), label="name early")
            (named if is_named else later).append(item)
        waiting = later
        digests += prompt.append(call.token_ids[begin:end], multimodal=named).digests

    assert builder.prompt_keys(call.token_ids, multimodal=call.multimodal) == prompt.keys
    assert tuple(digests) == prompt.keys.digests
    assert len(call.token_ids) == prompt.num_tokens


def test_every_field_of_small_sets_is_told_apart() -> None:
    """All combinations of absent, empty and two names in four fields have keys of their own."""
    names = (None, "", "a", "aa")
    base = Namespace(model="m", layout_fingerprint=bytes(32))
    digests = {
        KeyBuilder(replace(base, revision=revision, extra={} if extra is None else {"x": extra}), tokens_per_block=1)
        .prompt_keys([0], adapter=adapter, cache_salt=cache_salt)
        .digests[0]
        for revision, extra, adapter, cache_salt in product(names, repeat=4)
    }

    assert 4**4 == len(digests)
