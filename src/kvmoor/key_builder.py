"""How keys are made: everything that shapes the bytes of a block is hashed, as fields that cannot be mistaken.

    Namespace    model, revision, weights epoch, layout, parallel sizes, ...                                -> digest
    root         namespace, tokens per block, group, adapter, cache salt, whose hashes                      -> digest
    prompt key   hash(key of the block before, or root | token ids of the block | multimodal items in it)
    engine key   hash(root | type | length | the engine's hash)

Fields carry their names, types and lengths (`block_key.digest_fields`), and one that is absent is not one that is
empty. The messages of prompt and engine keys need less: the digest in front says what all else is, lengths included.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, Self

import numpy as np
from blake3 import blake3

from kvmoor.block_key import DIGEST_NBYTES, BlockKeys, digest_fields, tag_value
from kvmoor.errors import RequestError

_FORMAT: Final = 1
"""Of everything in this file. Another number gives other keys for all blocks, in every tier."""
_TOKEN_NBYTES: Final = 8


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """Name everything that shapes the bytes of blocks and is the same for all prompts of an engine.

    `layout_fingerprint` is that of the `BlockLayout`; with several ranks, a digest of all of theirs. `weights_epoch`
    changes whenever the weights do while `model` and `revision` stay: no two sets of weights may have one number, also
    not after a restart if blocks outlive the process. `parallel_sizes` are those that change which bytes a rank holds
    (``{"tensor": 4}``); `extra` is what else counts, such as the attention backend. Raises `RequestError` for a name
    that is empty or a value of another type.
    """

    model: str
    layout_fingerprint: bytes
    revision: str | None = None
    weights_epoch: int = 0
    parallel_sizes: Mapping[str, int] = field(default_factory=dict, hash=False)
    extra: Mapping[str, str | int | bytes] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        model: object = self.model  # not every caller checks types
        fingerprint: object = self.layout_fingerprint
        if not isinstance(model, str) or not model:
            raise RequestError(f"the model is {model!r}: give the name that tells it from every other model")
        if not isinstance(fingerprint, bytes) or len(fingerprint) != DIGEST_NBYTES:
            raise RequestError(f"the layout fingerprint is {fingerprint!r}: give BlockLayout.fingerprint")
        _check_text(revision=self.revision)
        _check_whole("weights_epoch", self.weights_epoch, at_least=0)
        for name, fields in (("parallel_sizes", self.parallel_sizes), ("extra", self.extra)):
            given: object = fields
            if not isinstance(given, Mapping):
                raise RequestError(f"{name} is {given!r}: give a dictionary of names and values")
        for name, size in self.parallel_sizes.items():
            _check_whole(f"parallel size {name!r}", size, at_least=1)
        # What the caller changes later in its own dictionaries is not part of this namespace.
        object.__setattr__(self, "parallel_sizes", dict(self.parallel_sizes))
        object.__setattr__(self, "extra", dict(self.extra))
        self.digest()  # refuses what cannot be hashed

    def digest(self) -> bytes:
        """Return 32 bytes that no other namespace has."""
        return digest_fields(
            {
                "format": _FORMAT,
                "model": self.model,
                "layout_fingerprint": self.layout_fingerprint,
                "weights_epoch": self.weights_epoch,
                "parallel_sizes": digest_fields(self.parallel_sizes),
                "extra": digest_fields(self.extra),
                **_present(revision=self.revision),
            }
        )

    def next_epoch(self) -> Self:
        """Return the namespace after a change of the weights: no key of it is one of this namespace."""
        return replace(self, weights_epoch=self.weights_epoch + 1)


@dataclass(frozen=True, slots=True)
class MultimodalItem:
    """Say what stands at the placeholder tokens of one image, sound or video of a prompt.

    `content_hash` is the engine's hash over content and preprocessing; `first_token` counts from the beginning of the
    prompt. Raises `RequestError` for an empty hash, and for what is no range of tokens.
    """

    content_hash: bytes | str
    first_token: int
    num_tokens: int

    def __post_init__(self) -> None:
        content_hash: object = self.content_hash  # not every caller checks types
        if not isinstance(content_hash, bytes | str) or not content_hash:
            raise RequestError(f"the hash of a multimodal item is {content_hash!r}: give the engine's hash of it")
        _check_whole("first_token", self.first_token, at_least=0)
        _check_whole("num_tokens", self.num_tokens, at_least=1)


class KeyBuilder:
    """Make the keys of blocks of `tokens_per_block` tokens in one namespace.

    An engine whose groups have blocks of several sizes has one builder for each size. After `Namespace.next_epoch` it
    makes a new builder, and no key of the old one is found again. Immutable; any thread may call it.

    `adapter` and `cache_salt` are fields of their own: None is a prompt without one, and "" one that is named so.
    """

    def __init__(self, namespace: Namespace, *, tokens_per_block: int) -> None:
        given: object = namespace  # not every caller checks types
        if not isinstance(given, Namespace):
            raise RequestError(f"the namespace is {given!r}: give a Namespace")
        _check_whole("tokens_per_block", tokens_per_block, at_least=1)
        self.namespace = namespace
        self.tokens_per_block = tokens_per_block
        self._namespace_digest = namespace.digest()
        # Of prompts without adapter and salt, by who hashed and group: an engine may ask for one key at a time.
        self._plain_roots: dict[tuple[str, int], bytes] = {}

    def prompt_keys(
        self,
        token_ids: Any,
        *,
        group: int = 0,
        adapter: str | None = None,
        cache_salt: str | None = None,
        multimodal: Iterable[MultimodalItem] = (),
    ) -> BlockKeys:
        """Hash each full block of a prompt together with everything before it.

        `token_ids` are ints in ``[0, 2**63)``, in a sequence or an array; a last block that is not full has no key. An
        item of `multimodal` counts from the first block that it overlaps: blocks before it have the keys of a prompt
        without it. It may reach beyond the tokens, or stand behind them, as those of a prompt that was cut do. Raises
        `RequestError` for anything else.
        """
        prompt = self.growing_prompt(group=group, adapter=adapter, cache_salt=cache_salt)
        return prompt.append(token_ids, multimodal=multimodal)

    def growing_prompt(
        self, *, group: int = 0, adapter: str | None = None, cache_salt: str | None = None
    ) -> "GrowingPrompt":
        """Return an empty prompt to append tokens to, whose keys are those of `prompt_keys` for all of them."""
        root = self._root("prompt", group, adapter, cache_salt)
        return GrowingPrompt(root, self.tokens_per_block, group)

    def engine_keys(
        self,
        hashes: Iterable[bytes | str | int],
        *,
        group: int = 0,
        adapter: str | None = None,
        cache_salt: str | None = None,
    ) -> BlockKeys:
        """Make keys of an engine's own hashes of blocks, each of which covers everything before its block.

        A hash may be bytes or text of any length, or a whole number. What an engine's hashes cover already, as the
        adapter, need not be given again. Raises `RequestError` for an empty hash, one that is named twice, and other
        types.
        """
        given: object = hashes  # not every caller checks types
        if isinstance(given, bytes | bytearray | memoryview | str) or not isinstance(given, Iterable):
            raise RequestError(f"the hashes are {given!r}: give a sequence, with one hash for each block")
        root = self._root("engine", group, adapter, cache_salt)
        fronts: dict[int, bytes] = {}  # of bytes, by their length: an engine's hashes mostly have one
        digests = []
        for value in hashes:
            if type(value) is bytes and (front := fronts.get(len(value))) is not None:
                digests.append(blake3(front + value).digest())
                continue
            tag, data = tag_value("hash", value)
            if not data:
                raise RequestError(f"hash {len(digests)} of the engine is empty: give one for each block")
            front = root + tag + len(data).to_bytes(8, "little")
            if tag == b"b":
                fronts[len(data)] = front
            digests.append(blake3(front + data).digest())
        return BlockKeys(digests, group)

    def __repr__(self) -> str:
        namespace = self.namespace
        return f"<KeyBuilder of {namespace.model!r}, epoch {namespace.weights_epoch}: {self.tokens_per_block} tokens>"

    def _root(
        self, hashed_by: Literal["prompt", "engine"], group: int, adapter: str | None, cache_salt: str | None
    ) -> bytes:
        is_plain = adapter is None and cache_salt is None
        if is_plain and type(group) is int and (root := self._plain_roots.get((hashed_by, group))) is not None:
            return root
        _check_text(adapter=adapter, cache_salt=cache_salt)
        _check_whole("group", group, at_least=0)
        root = digest_fields(
            {
                "namespace": self._namespace_digest,
                "tokens_per_block": self.tokens_per_block,
                "hashed_by": hashed_by,
                "group": group,
                **_present(adapter=adapter, cache_salt=cache_salt),
            }
        )
        if is_plain:
            self._plain_roots[hashed_by, group] = root
        return root


class GrowingPrompt:
    """Make the keys of a prompt as it grows, so that each block is hashed once. `KeyBuilder.growing_prompt` begins one.

    Not thread-safe.
    """

    def __init__(self, root: bytes, tokens_per_block: int, group: int) -> None:
        self._last = root  # the digest of the last full block
        self._tokens_per_block = tokens_per_block
        self._group = group
        self._digests: list[bytes] = []
        self._rest = b""  # tokens behind the last full block, as they are hashed
        self._items: list[MultimodalItem] = []  # those that count in blocks to come

    @property
    def keys(self) -> BlockKeys:
        """Return the keys of all full blocks."""
        return BlockKeys(self._digests, self._group)

    @property
    def num_tokens(self) -> int:
        """Return how many tokens were appended, those behind the last full block included."""
        return len(self._digests) * self._tokens_per_block + len(self._rest) // _TOKEN_NBYTES

    def append(self, token_ids: Any, *, multimodal: Iterable[MultimodalItem] = ()) -> BlockKeys:
        """Append tokens, and return the keys of the blocks that they filled.

        Items have to come before or with the tokens that they stand for; their places count from the beginning of the
        prompt. Raises `RequestError` as `KeyBuilder.prompt_keys` does, and then nothing was appended.
        """
        items = self._items + self._checked(multimodal)
        data = self._rest + _token_bytes(token_ids)
        size = self._tokens_per_block
        row_nbytes = size * _TOKEN_NBYTES
        begin = len(self._digests)
        end = begin + len(data) // row_nbytes
        # One length or the other: a row, or a row and a digest. The root holds the length of a row.
        item_digests = _item_digests(items, size, begin, end)
        parent = self._last
        digests = []
        for block in range(begin, end):
            place = (block - begin) * row_nbytes
            parent = blake3(parent + data[place : place + row_nbytes] + item_digests.get(block, b"")).digest()
            digests.append(parent)
        keys = BlockKeys(digests, self._group)
        self._last = parent
        self._digests += digests
        self._rest = data[(end - begin) * row_nbytes :]
        self._items = [item for item in items if item.first_token + item.num_tokens > end * size]
        return keys

    def __repr__(self) -> str:
        return f"<GrowingPrompt of {self.num_tokens} tokens: {len(self._digests)} keys of group {self._group}>"

    def _checked(self, multimodal: Iterable[MultimodalItem]) -> list[MultimodalItem]:
        items = list(multimodal)
        given: Sequence[object] = items  # not every caller checks types
        for item in given:
            if not isinstance(item, MultimodalItem):
                raise RequestError(f"a multimodal item is {item!r}: give a MultimodalItem")
            num_keyed = len(self._digests) * self._tokens_per_block
            if item.first_token < num_keyed:
                raise RequestError(
                    f"a multimodal item begins at token {item.first_token}, and the first {num_keyed} tokens have "
                    "their keys: give it no later than these tokens"
                )
        return items


def _item_digests(items: Sequence[MultimodalItem], size: int, begin: int, end: int) -> dict[int, bytes]:
    """Return a digest of the items in each block from `begin` to `end` that has some, in whatever order they came."""
    fields_of: dict[int, dict[str, str | int | bytes]] = {}
    for item in sorted(items, key=_place_and_content):
        first = max(begin, item.first_token // size)
        last = min(end - 1, (item.first_token + item.num_tokens - 1) // size)
        for block in range(first, last + 1):
            fields = fields_of.setdefault(block, {})
            number = len(fields) // 3
            fields[f"{number}.content_hash"] = item.content_hash
            fields[f"{number}.first_token"] = item.first_token
            fields[f"{number}.num_tokens"] = item.num_tokens
    return {block: digest_fields(fields) for block, fields in fields_of.items()}


def _place_and_content(item: MultimodalItem) -> tuple[int, int, tuple[bytes, bytes]]:
    return item.first_token, item.num_tokens, tag_value("content_hash", item.content_hash)


def _token_bytes(token_ids: Any) -> bytes:
    """Return token ids as 64-bit little-endian numbers, whatever integers they came as."""
    try:
        ids = np.asarray(token_ids)
    except (TypeError, ValueError) as error:
        raise RequestError(
            f"token_ids cannot be read ({error}): give one sequence of token ids in host memory"
        ) from error
    if ids.ndim == 1 and not ids.size:
        return b""
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or int(ids.min()) < 0 or int(ids.max()) >= 2**63:
        raise RequestError(
            f"token_ids has shape {ids.shape} and type {ids.dtype}: give a sequence of whole numbers from 0 up"
        )
    return ids.astype("<i8").tobytes()


def _present(**fields: str | None) -> dict[str, str]:
    """Return those fields that are there: an absent one is not even named, so that it differs from an empty one."""
    return {name: value for name, value in fields.items() if value is not None}


def _check_text(**fields: object) -> None:
    for name, value in fields.items():
        if value is not None and not isinstance(value, str):
            raise RequestError(f"{name} is {value!r}: give text, or None if there is none")


def _check_whole(name: str, value: object, *, at_least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{name} is {value!r}: give a whole number")
    if value < at_least:
        raise RequestError(f"{name} is {value}: give {at_least} or more")
