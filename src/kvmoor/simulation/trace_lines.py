"""What one line of each trace format means. Each function takes the JSON of a line; a bad one raises `BadLine`.

Only full blocks count: the hash of a last block that is not full is left out.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvmoor.block_key import DIGEST_NBYTES
from kvmoor.errors import RequestError
from kvmoor.key_builder import KeyBuilder, Namespace
from kvmoor.simulation.trace import FIRST, BadLine, Request, TraceBuilder

MAX_TOKENS: Final = 2**27
"""The longest prompt that is believed, in tokens: what is longer is a slip, and would only fill memory."""
_MAX_SESSION_BLOCKS: Final = 2**24
"""The largest block id inside a claude session that is believed; they are numbered from 1."""
_MOONCAKE_BLOCK_SIZE: Final = 512
_RAGPULSE_PARTS: Final = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")
"""The parts of a prompt in the order in which they stand in it."""
_NAMESPACE: Final = Namespace(model="kvmoor simulate", layout_fingerprint=bytes(DIGEST_NBYTES))  # there are no bytes
"""All prompts of a trace share one cache, so nothing has to tell their keys apart."""


class ParsedRequest(NamedTuple):
    """Say what a line holds."""

    request: Request
    block_size: int


class ParsedSession(NamedTuple):
    """Say what a line with several requests holds; there is at least one."""

    requests: Sequence[Request]
    block_size: int


def format_of(line: Mapping[str, Any]) -> str:
    """Return the name of the format that a line is of, or an empty text."""
    if "block_hashes" in line or "token_ids" in line:
        return "jsonl"
    if "hash_runs" in line:
        return "lmcache"
    if "requests" in line and "tool_tokens" in line:
        return "claude"
    if "hash_ids" in line:
        return "ragpulse" if isinstance(line["hash_ids"], dict) else "mooncake"
    return ""


def mooncake_request(line: Any, builder: TraceBuilder) -> ParsedRequest:
    """Read ``{"timestamp": ms, "input_length": n, "hash_ids": [...]}`` with blocks of 512 tokens."""
    num_tokens = _whole(line, "input_length")
    hashes = _full_blocks(_hashes(line, "hash_ids"), num_tokens, _MOONCAKE_BLOCK_SIZE)
    return ParsedRequest(
        Request(_seconds(line, "timestamp") / 1000, num_tokens, builder.number(hashes)), _MOONCAKE_BLOCK_SIZE
    )


def lmcache_request(line: Any, builder: TraceBuilder) -> ParsedRequest:
    """Read ``{"timestamp": ms, "input_length": n, "block_size": n, "hash_runs": [first, count, ...]}``."""
    num_tokens, block_size = _whole(line, "input_length"), _whole(line, "block_size", minimum=1)
    ids = _expand(_field(line, "hash_runs"), num_tokens // block_size)
    request = Request(_seconds(line, "timestamp") / 1000, num_tokens, builder.number(ids.tolist()))
    return ParsedRequest(request, block_size)


def ragpulse_length(line: Any) -> tuple[int, int]:
    """Read ``{"..._id": part, "token_length": n}``: how many tokens a part of a prompt has."""
    names = [name for name in line if name.endswith("_id")] if isinstance(line, dict) else []
    if len(names) != 1:
        raise BadLine("has to be an object with one field ..._id and token_length")
    return _whole(line, names[0]), _whole(line, "token_length")


def ragpulse_request(line: Any, builder: TraceBuilder, lengths: Mapping[int, int], block_size: int) -> ParsedRequest:
    """Read ``{"timestamp": "s", "hash_ids": {part: [id, ...], ...}}``; the prompt is the parts one after the other.

    `lengths` has the number of tokens of each id. A token is known by its part and its place in the part, so a block is
    known by the pieces of parts that it covers, and by the block in front of it.
    """
    ids = _field(line, "hash_ids")
    if not isinstance(ids, dict):
        raise BadLine("hash_ids has to be an object with a list of ids for each part of the prompt")
    time_s = _seconds(line, "timestamp")
    block = FIRST
    blocks: list[int] = []
    pieces: list[tuple[int, int, int]] = []  # part, first token of it, number of tokens: of the block that fills now
    num_tokens = num_filled = 0
    for name in _RAGPULSE_PARTS:
        for part in _hashes(ids, name) if name in ids else ():
            if not isinstance(part, int) or part not in lengths:
                raise BadLine(f"names part {part!r} in {name}, and no file says how many tokens it has")
            length, start = lengths[part], 0
            num_tokens += length
            if num_tokens > MAX_TOKENS:
                raise BadLine(f"has a prompt of more than {MAX_TOKENS} tokens")
            while start < length:
                taken = min(length - start, block_size - num_filled)
                pieces.append((part, start, taken))
                start += taken
                num_filled += taken
                if num_filled == block_size:
                    block = builder.number_of((block, tuple(pieces)))
                    blocks.append(block)
                    pieces, num_filled = [], 0
    return ParsedRequest(Request(time_s, num_tokens, np.array(blocks, np.int32)), block_size)


def claude_session(line: Any, builder: TraceBuilder) -> ParsedSession:
    """Read one session, ``requests`` being ``[time_s, input tokens, output tokens, [first, count, ...]]`` each.

    Block ids are local to a session. Tools of one length are taken as equal in all sessions, and so are system prompts
    of one length behind tools of one length: that is what such sessions share. Times count from the session's start.
    """
    block_size = _whole(line, "block_size", minimum=1)
    tool_tokens, system_tokens = _whole(line, "tool_tokens"), _whole(line, "system_tokens")
    num_tools, num_shared = tool_tokens // block_size, (tool_tokens + system_tokens) // block_size
    rows = _field(line, "requests")
    if not isinstance(rows, list) or not rows:
        raise BadLine("requests has to be a list with at least one request")
    parsed: list[tuple[float, int, NDArray[np.int64]]] = []
    for row in rows:
        if not isinstance(row, list) or len(row) < 4:
            raise BadLine("each request has to be [time_s, input tokens, output tokens, [first, count, ...]]")
        fields = {"time_s": row[0], "input tokens": row[1]}
        num_tokens = _whole(fields, "input tokens")
        ids = _expand(row[3], num_tokens // block_size, longer=True)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) <= _MAX_SESSION_BLOCKS:
            raise BadLine(f"has block ids outside 0 to {_MAX_SESSION_BLOCKS}: they are numbered from 1 in each session")
        parsed.append((_seconds(fields, "time_s"), num_tokens, ids))
    if any(later[0] < earlier[0] for earlier, later in pairwise(parsed)):
        raise BadLine("has requests out of order: the times of one session have to ascend")
    numbers = np.full(max((int(ids.max()) + 1 for _, _, ids in parsed if len(ids)), default=0), -1, np.int32)
    longest = max(len(ids) for _, _, ids in parsed)
    shared = builder.number(
        ("tools", tool_tokens, place) if place < num_tools else ("system", tool_tokens, system_tokens, place)
        for place in range(min(num_shared, longest))
    )
    requests = []
    for time_s, num_tokens, ids in parsed:
        at_home = np.arange(1, len(ids) + 1) == ids  # id i + 1 at place i
        at_home[len(shared) :] = False
        own = ids[~at_home]
        new = own[numbers[own] < 0]
        numbers[new] = builder.new_numbers(len(new))
        blocks = np.empty(len(ids), np.int32)
        blocks[~at_home] = numbers[own]
        blocks[at_home] = shared[np.flatnonzero(at_home)]
        requests.append(Request(time_s, num_tokens, blocks))
    return ParsedSession(requests, block_size)


def jsonl_request(line: Any, builder: TraceBuilder, default_block_size: int) -> ParsedRequest:
    """Read kvmoor's own format, described in docs/simulate.md: block hashes, or token ids."""
    block_size = _whole(line, "block_size", minimum=1) if "block_size" in line else default_block_size
    if "token_ids" in line:
        ids = _field(line, "token_ids")
        if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
            raise BadLine("token_ids has to be a list of whole numbers")
        try:
            keys = KeyBuilder(_NAMESPACE, tokens_per_block=block_size).prompt_keys(ids)
        except (RequestError, OverflowError) as error:
            raise BadLine(str(error)) from error
        num_tokens = len(ids)
        hashes: Sequence[Hashable] = keys.digests
    else:
        num_tokens = _whole(line, "num_tokens")
        hashes = _full_blocks(_hashes(line, "block_hashes"), num_tokens, block_size)
    return ParsedRequest(Request(_seconds(line, "time_s"), num_tokens, builder.number(hashes)), block_size)


def _field(line: Any, name: str) -> Any:
    if not isinstance(line, dict):
        raise BadLine(f"is a JSON {type(line).__name__}: each line has to be an object")
    if name not in line:
        raise BadLine(f"has no field {name}: found {', '.join(line) or 'no field at all'}")
    return line[name]


def _whole(line: Any, name: str, *, minimum: int = 0) -> int:
    value = _field(line, name)
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= MAX_TOKENS:
        raise BadLine(f"{name} is {_short(value)}: it has to be a whole number from {minimum} to {MAX_TOKENS}")
    return value


def _seconds(line: Any, name: str) -> float:
    value = _field(line, name)
    try:
        if isinstance(value, int | float | str) and not isinstance(value, bool) and math.isfinite(float(value)):
            return float(value)
    except (ValueError, OverflowError):
        pass
    raise BadLine(f"{name} is {_short(value)}: it has to be a finite number")


def _hashes(line: Any, name: str) -> list[int | str]:
    value = _field(line, name)
    if not isinstance(value, list) or not set(map(type, value)) <= {int, str}:
        raise BadLine(f"{name} has to be a list of whole numbers or texts")
    return value


def _full_blocks(hashes: list[int | str], num_tokens: int, block_size: int) -> list[int | str]:
    """Leave out the hash of a last block that is not full."""
    num_full = num_tokens // block_size
    if not num_full <= len(hashes) <= -(-num_tokens // block_size):
        raise BadLine(
            f"has {len(hashes)} hashes for {num_tokens} tokens in blocks of {block_size}, which are {num_full} full "
            "blocks: give one hash for each full block, and at most one for the rest"
        )
    return hashes[:num_full]


def _expand(runs: Any, num_blocks: int, *, longer: bool = False) -> NDArray[np.int64]:
    """Write out the first `num_blocks` ids of ``[first, count, first, count, ...]``; `longer` allows for more."""
    if not isinstance(runs, list) or len(runs) % 2 or not set(map(type, runs)) <= {int}:
        raise BadLine("the runs of block ids have to be [first, count, first, count, ...]")
    firsts, counts = runs[::2], runs[1::2]
    if any(not 0 <= first < 2**62 for first in firsts) or any(not 0 <= count <= MAX_TOKENS for count in counts):
        raise BadLine("a run of block ids has a number below 0, or one that is far too large")
    if sum(counts) < num_blocks or (sum(counts) > num_blocks and not longer):
        raise BadLine(f"has {sum(counts)} block ids, and its tokens fill {num_blocks} blocks")
    pieces = []
    left = num_blocks
    for first, count in zip(firsts, counts, strict=True):
        taken = min(count, left)
        pieces.append(np.arange(first, first + taken, dtype=np.int64))
        left -= taken
    return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
