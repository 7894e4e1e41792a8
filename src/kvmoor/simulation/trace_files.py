"""Read trace files, plain or gzipped: whatever is wrong with one is said with file and line."""

import gzip
import json
import random
import zlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from kvmoor.errors import CorruptDataError, RequestError, SettingsError
from kvmoor.simulation import trace_lines
from kvmoor.simulation.trace import BadLine, Trace, TraceBuilder
from kvmoor.simulation.trace_lines import ParsedRequest

_GZIP_MAGIC: Final = b"\x1f\x8b"
_RAGPULSE_TRACE: Final = "0_trace"
_RAGPULSE_LENGTHS: Final = ("1_sys_prompt", "2_passages", "3_history", "4_user_input", "5_web_search")


@dataclass(frozen=True, slots=True)
class ReaderOptions:
    """Say how to read a trace; what a format has no use for is ignored."""

    skip_bad_lines: bool = False
    """Count lines that cannot be used, and go on; otherwise the first of them is an error."""
    block_size: int = 16
    """Tokens in a block, for formats that leave it open: ragpulse, and jsonl lines that do not say it."""
    concurrency: float = 40.0
    """For claude: how many sessions run at once on average; the source has no start times, so they are drawn."""
    seed: int = 1
    """For claude: the seed of the drawn start times."""

    def __post_init__(self) -> None:
        if not 1 <= self.block_size <= trace_lines.MAX_TOKENS:
            raise SettingsError(f"block_size is {self.block_size}: give 1 or more tokens")
        if not 0 < self.concurrency < float("inf"):
            raise SettingsError(f"concurrency is {self.concurrency}: give a number above 0")


def read_trace(path: Path, format_name: str = "auto", options: ReaderOptions | None = None) -> Trace:
    """Read a trace. The format "auto" is told from the first line; `FORMATS` has the others.

    Raises `RequestError` for a file that cannot be read, holds no requests or holds a line that cannot be used, and
    `CorruptDataError` for a gzip file that is cut off or damaged.
    """
    if format_name == "auto":
        format_name = _recognize(path)
    if format_name not in FORMATS:
        raise SettingsError(f"there is no trace format {format_name!r}: choose from auto, {', '.join(FORMATS)}")
    return FORMATS[format_name](path, options or ReaderOptions())


def _read_mooncake(path: Path, options: ReaderOptions) -> Trace:
    return _read_lines(path, options, trace_lines.mooncake_request)


def _read_ragpulse(path: Path, options: ReaderOptions) -> Trace:
    """Read the trace and, from the files beside it, how many tokens each part of a prompt has."""
    if _RAGPULSE_TRACE not in path.name:
        raise RequestError(f"{path} is no RAGPulse trace: give its file {_RAGPULSE_TRACE}, with files 1 to 5 beside it")
    lengths: dict[int, int] = {}

    def note_length(line: Any) -> None:
        part, num_tokens = trace_lines.ragpulse_length(line)
        lengths[part] = num_tokens

    for part in _RAGPULSE_LENGTHS:
        # A length that cannot be read would change every prompt that needs it, so these lines are never skipped.
        _each_line(path.with_name(path.name.replace(_RAGPULSE_TRACE, part)), note_length, skip_bad_lines=False)
    return _read_lines(
        path, options, lambda line, builder: trace_lines.ragpulse_request(line, builder, lengths, options.block_size)
    )


def _read_lmcache(path: Path, options: ReaderOptions) -> Trace:
    return _read_lines(path, options, trace_lines.lmcache_request)


def _read_claude(path: Path, options: ReaderOptions) -> Trace:
    """Read sessions, and draw when each of them starts."""
    builder = TraceBuilder(path.name)
    sessions: list[tuple[int, float]] = []  # number of requests, time from the first to the last

    def take(line: Any) -> None:
        requests, block_size = trace_lines.claude_session(line, builder)
        builder.add(requests, block_size)
        sessions.append((len(requests), requests[-1].time_s))

    num_skipped = _each_line(path, take, skip_bad_lines=options.skip_bad_lines)
    draw = random.Random(options.seed)  # noqa: S311, it has to be repeatable, not secret
    window_s = sum(last_s for _, last_s in sessions) / options.concurrency
    shifts: list[float] = []
    for num_requests, _ in sessions:
        shifts += [draw.uniform(0, window_s)] * num_requests
    builder.shift_times(shifts)
    # Within the file every session starts at 0; that says nothing about order.
    return replace(builder.finish(num_skipped_lines=num_skipped), num_out_of_order=0)


def _read_jsonl(path: Path, options: ReaderOptions) -> Trace:
    return _read_lines(
        path, options, lambda line, builder: trace_lines.jsonl_request(line, builder, options.block_size)
    )


FORMATS: Final[Mapping[str, Callable[[Path, ReaderOptions], Trace]]] = MappingProxyType(
    {
        "mooncake": _read_mooncake,
        "ragpulse": _read_ragpulse,
        "lmcache": _read_lmcache,
        "claude": _read_claude,
        "jsonl": _read_jsonl,
    }
)
"""The readers by the name of their format."""


def _recognize(path: Path) -> str:
    """Tell the format from the fields of the first line that is JSON."""
    fields: set[str] = set()
    found = ""

    def look(line: Any) -> None:
        nonlocal found
        if isinstance(line, dict) and not fields:
            fields.update(line)
            found = trace_lines.format_of(line)
            raise _Recognized

    with suppress(_Recognized):
        _each_line(path, look, skip_bad_lines=True)
    if not found:
        seen = f"its first object has {', '.join(sorted(map(repr, fields)))}" if fields else "it holds no JSON object"
        raise RequestError(f"{path}: the format is not recognized, {seen}: choose from {', '.join(FORMATS)}")
    return found


class _Recognized(Exception):  # noqa: N818, it ends the reading of a file, and is no error
    pass


def _read_lines(path: Path, options: ReaderOptions, parse: Callable[[Any, TraceBuilder], ParsedRequest]) -> Trace:
    """Read a file with one request a line."""
    builder = TraceBuilder(path.name)

    def take(line: Any) -> None:
        request, block_size = parse(line, builder)
        builder.add([request], block_size)

    num_skipped = _each_line(path, take, skip_bad_lines=options.skip_bad_lines)
    return builder.finish(num_skipped_lines=num_skipped)


def _each_line(path: Path, take: Callable[[Any], None], *, skip_bad_lines: bool) -> int:
    """Hand the JSON of each line to `take`, and return how many lines it or the JSON reader found bad.

    Empty lines do not count as lines. A damaged file is an error even where bad lines are skipped.
    """
    num_bad = number = 0
    try:
        with path.open("rb") as raw:
            zipped = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            raw.seek(0)
            with gzip.open(raw) if zipped else nullcontext(raw) as lines:
                for number, line in enumerate(lines, start=1):
                    if line.isspace():
                        continue
                    try:
                        take(_parse_json(line))
                    except BadLine as error:
                        if not skip_bad_lines:
                            raise RequestError(f"{path}:{number}: {error}") from error
                        num_bad += 1
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise CorruptDataError(
            f"{path}:{number + 1}: the gzip data is cut off or damaged here ({error}): fetch the file again"
        ) from error
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror or error}") from error
    return num_bad


def _parse_json(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadLine(f"is not JSON: {error}") from error
