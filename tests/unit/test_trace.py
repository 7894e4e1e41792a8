"""Reading traces: what each format means, and what is said of lines and files that cannot be used."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from kvmoor.errors import CorruptDataError, RequestError, SettingsError
from kvmoor.simulation.trace import FIRST, BadLine, Request, TraceBuilder
from kvmoor.simulation.trace_files import FORMATS, ReaderOptions, read_trace

FOLDER = Path(__file__).parents[1] / "data/traces"
SKIP = ReaderOptions(skip_bad_lines=True)


def jsonl(hashes, *, time_s=0.0, block_size=4, **fields):
    """Make a line of kvmoor's own format: one full block for each letter."""
    return {
        "time_s": time_s,
        "block_size": block_size,
        "num_tokens": len(hashes) * block_size,
        "block_hashes": [hashes[: end + 1] for end in range(len(hashes))],
        **fields,
    }


def session(*requests, tool_tokens=128, system_tokens=64):
    """Make a line of a claude trace; each request is (time, number of blocks, runs)."""
    rows = [[time_s, num_blocks * 64, 10, runs] for time_s, num_blocks, runs in requests]
    return {"id": "s", "block_size": 64, "tool_tokens": tool_tokens, "system_tokens": system_tokens, "requests": rows}


@pytest.fixture
def write(tmp_path):
    """Write lines, JSON or as they are, and return the file."""

    def write_lines(*lines, name="trace.jsonl"):
        path = tmp_path / name
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return path

    return write_lines


def blocks_of(trace):
    return [request.blocks.tolist() for request in trace.requests]


def test_equal_prefixes_are_equal_blocks(write):
    """Blocks get numbers in the order in which they are met, and each knows the one in front of it."""
    trace = read_trace(write(jsonl("ab"), jsonl("ac", time_s=1.5), jsonl("", time_s=2)))
    assert [[0, 1], [0, 2], []] == blocks_of(trace)
    assert [FIRST, 0, 0] == trace.predecessors.tolist()
    assert (4, 3, 4, 16, 2.0) == (
        trace.block_size,
        trace.num_unique_blocks,
        trace.num_references,
        trace.num_tokens,
        trace.duration_s,
    )


def test_token_ids_are_hashed_with_all_before_them(write):
    """Prompts of token ids share the full blocks of their common beginning, and no block that only looks alike."""
    lines = [{"time_s": 0, "block_size": 2, "token_ids": ids} for ids in ([1, 2, 3, 4, 5], [1, 2, 3, 9], [3, 4])]
    trace = read_trace(write(*lines))
    assert [[0, 1], [0, 2], [3]] == blocks_of(trace)
    assert [5, 4, 2] == [request.num_tokens for request in trace.requests]


def test_a_last_block_that_is_not_full_does_not_count(write):
    """A hash for the rest of a prompt may be there or not: only full blocks are read."""
    rest = jsonl("abc", num_tokens=10)
    trace = read_trace(write(rest, {**rest, "block_hashes": ["a", "ab"]}))
    assert [[0, 1], [0, 1]] == blocks_of(trace)


def test_the_block_size_may_come_from_the_reader(write):
    """A line that does not say its block size has the one of the options."""
    line = {"time_s": 0, "num_tokens": 64, "block_hashes": [7, 8]}
    assert 32 == read_trace(write(line), options=ReaderOptions(block_size=32)).block_size


def test_the_example_of_the_docs_is_a_trace(write):
    """The lines that docs/simulate.md shows are read as it says."""
    page = (Path(__file__).parents[2] / "docs/simulate.md").read_text()
    lines = page.partition("```json\n")[2].partition("```")[0]
    assert [[0, 1], []] == blocks_of(read_trace(write(lines)))


def test_plain_and_gzipped_files_read_alike(tmp_path):
    """Whether a file is gzipped is told from its bytes, not from its name."""
    lines = "".join(json.dumps(jsonl("ab" * n, time_s=n)) + "\n\n" for n in range(4)).encode()
    (tmp_path / "plain.gz").write_bytes(lines)
    (tmp_path / "zipped").write_bytes(gzip.compress(lines))
    plain, zipped = (read_trace(tmp_path / name) for name in ("plain.gz", "zipped"))
    assert blocks_of(plain) == blocks_of(zipped)
    assert 4 == len(plain.requests)


def test_requests_are_sorted_by_time(write):
    """Requests out of order are sorted and counted; those of one time stay in the order of the file."""
    lines = [jsonl(letter, time_s=time_s) for letter, time_s in (("a", 5), ("b", 1), ("c", 5), ("d", 1))]
    trace = read_trace(write(*lines))
    assert [[1], [3], [0], [2]] == blocks_of(trace)
    assert 2 == trace.num_out_of_order


@pytest.mark.parametrize(
    ("name", "requests", "unique"),
    [("lmcache_agent_blocks_rle", 1619, 39116), ("mooncake_synthetic_trace", 3993, 40148)],
)
def test_shared_traces_are_recognized(name, requests, unique):
    """The format of a trace is told from its first line, and its blocks are those it is known to have."""
    trace = read_trace(FOLDER / f"{name}.jsonl.gz")
    assert (requests, unique, 0) == (len(trace.requests), trace.num_unique_blocks, trace.num_out_of_order)


def test_mooncake_times_are_milliseconds(write):
    """Mooncake blocks have 512 tokens, and its times are in milliseconds."""
    trace = read_trace(write({"timestamp": 1500, "input_length": 1100, "output_length": 1, "hash_ids": [4, 5, 6]}))
    assert ([[0, 1]], 512, 1.5) == (blocks_of(trace), trace.block_size, trace.requests[0].time_s)


def test_runs_of_ids_are_written_out(write):
    """The runs of an lmcache trace are first and count by turns."""
    lines = [
        {"timestamp": 0, "input_length": 70, "block_size": 16, "hash_runs": runs} for runs in ([0, 4], [0, 2, 9, 2])
    ]
    assert [[0, 1, 2, 3], [0, 1, 4, 5]] == blocks_of(read_trace(write(*lines)))


@pytest.fixture
def ragpulse(write):
    """Write a RAGPulse trace with the files that belong to it."""
    names = ("1_sys_prompt", "2_passages", "3_history", "4_user_input", "5_web_search")
    for number, name in enumerate(names, start=1):
        write({"some_id": number, "token_length": 3}, name=f"ragpulse_{name}_trace.jsonl")

    def write_trace(*requests):
        lines = [{"timestamp": str(time_s), "hash_ids": ids, "session_id": "s"} for time_s, ids in requests]
        return write(*lines, name="ragpulse_0_trace_trace.jsonl")

    return write_trace


def test_ragpulse_prompts_are_their_parts_in_order(ragpulse):
    """A prompt is its parts one after the other; blocks are equal if they and all before cover equal pieces."""
    first = {"user_input": [4], "sys_prompt": [1], "history": [3]}  # tokens 1 1 1 3 3 3 4 4 4
    trace = read_trace(ragpulse((9, first), (3, {**first, "history": [2]})), options=ReaderOptions(block_size=2))
    assert [[0, 4, 5, 6], [0, 1, 2, 3]] == blocks_of(trace)
    assert ([9, 9], 1) == ([request.num_tokens for request in trace.requests], trace.num_out_of_order)


def test_ragpulse_needs_its_other_files(ragpulse, tmp_path):
    """A part whose length no file says is a bad line; a file that is missing is named, and so is a wrong one."""
    path = ragpulse((0, {"sys_prompt": [77]}))
    with pytest.raises(RequestError, match=r"0_trace_trace.jsonl:1: names part 77 in sys_prompt"):
        read_trace(path)
    with pytest.raises(RequestError, match="give its file 0_trace"):
        read_trace(tmp_path / "ragpulse_2_passages_trace.jsonl", "ragpulse")
    (tmp_path / "ragpulse_3_history_trace.jsonl").unlink()
    with pytest.raises(RequestError, match=r"3_history_trace.jsonl cannot be read: No such file"):
        read_trace(path)


def test_sessions_share_tools_and_system_prompts_of_equal_length(write):
    """Sessions have blocks of their own, but for tools of one length and system prompts of one length behind them."""
    lines = [
        session((0, 4, [1, 4]), (5, 4, [1, 3, 9, 1])),
        session((0, 4, [1, 4])),
        session((0, 4, [1, 4]), system_tokens=128),
        session((0, 4, [1, 1, 20, 3])),
    ]
    trace = read_trace(write(*lines), options=ReaderOptions(concurrency=1e9))
    by_length = sorted(blocks_of(trace))
    first = [by_length[0][0], by_length[0][1]]
    assert [first] * 4 == [blocks[:2] for blocks in by_length[:4]]
    assert [first[0]] == by_length[4][:1]
    assert 3 == len({blocks[2] for blocks in by_length})  # system prompt of 1 block, of 2 blocks, and none
    assert 5 == len({blocks[3] for blocks in by_length})
    assert trace.num_references == sum(map(len, by_length)) == 20


def test_session_starts_are_drawn_from_the_seed(write):
    """One seed gives one order of requests, another one another; times inside a session stay as they are."""
    path = write(*[session((0, 1, [1, 1]), (100, 1, [1, 1])) for _ in range(8)])

    def times_with(**options):
        return [request.time_s for request in read_trace(path, options=ReaderOptions(**options)).requests]

    times = times_with(seed=1, concurrency=2)
    assert times == sorted(times) == times_with(seed=1, concurrency=2)
    assert times != times_with(seed=2, concurrency=2)
    assert all(any(abs(later - time - 100) < 1e-6 for later in times) for time in times[:1])
    assert times_with(seed=1, concurrency=0.5)[-1] > times[-1]
    assert 0 == read_trace(path).num_out_of_order


GOOD = jsonl("ab")
BAD_LINES = {
    "no JSON": ('{"time_s": 0,', "is not JSON"),
    "not UTF-8 text": ('"\\ud800', "is not JSON"),
    "no object": ("[1, 2]", "is a JSON list: each line has to be an object"),
    "too deep": ("[" * 100_000, "is not JSON"),
    "no time": ({"num_tokens": 4, "block_size": 4, "block_hashes": ["a"]}, "has no field time_s: found num_tokens"),
    "no hashes": ({"time_s": 0, "num_tokens": 4, "block_size": 4}, "has no field block_hashes"),
    "a time that is none": (jsonl("ab", time_s="noon"), "time_s is 'noon': it has to be a finite number"),
    "a time without end": ('{"time_s": NaN, "num_tokens": 0, "block_size": 4, "block_hashes": []}', "time_s is nan"),
    "a length below 0": (jsonl("ab", num_tokens=-8), "num_tokens is -8"),
    "a length that is a truth": (jsonl("", num_tokens=True), "num_tokens is True"),
    "an endless prompt": (jsonl("ab", num_tokens=10**15), "num_tokens is 1000000000000000"),
    "blocks of no tokens": ({**jsonl("ab"), "block_size": 0}, "block_size is 0: it has to be a whole number from 1"),
    "too few hashes": (
        jsonl("ab", num_tokens=12),
        "has 2 hashes for 12 tokens in blocks of 4, which are 3 full blocks",
    ),
    "too many hashes": (jsonl("abcd", num_tokens=12), "has 4 hashes for 12 tokens"),
    "hashes of a wrong type": (jsonl("ab", block_hashes=["a", 1.5]), "has to be a list of whole numbers or texts"),
    "another block size": (jsonl("ab", block_size=8), "has blocks of 8 tokens, the lines before have blocks of 4"),
    "a block twice": (jsonl("ab", block_hashes=["a", "a"]), "names a block twice in one prompt"),
    "a new block twice": (jsonl("ab", block_hashes=["x", "x"]), "names a block twice in one prompt"),
    "a block further back": (jsonl("ab", block_hashes=["q", "ab"]), "block 1 stands behind another block than before"),
    "a block further in front": (jsonl("ab", block_hashes=["ab", "q"]), "block 0 stands behind another block"),
    "token ids below 0": ({"time_s": 0, "block_size": 4, "token_ids": [1, 2, 3, -4]}, "whole numbers from 0 up"),
    "token ids that are too large": ({"time_s": 0, "block_size": 1, "token_ids": [2**70]}, "whole numbers"),
    "token ids of a wrong type": ({"time_s": 0, "block_size": 1, "token_ids": ["a"]}, "a list of whole numbers"),
}


@pytest.mark.parametrize(("line", "complaint"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_refused_with_its_place_or_skipped(write, line, complaint):
    """The first bad line is an error with file and line; if they are skipped, nothing of one is left in the trace."""
    path = write(GOOD, "", line, jsonl("abc"))
    with pytest.raises(RequestError) as refused:
        read_trace(path, "jsonl")
    assert str(refused.value).startswith(f"{path}:3: ")
    assert complaint in str(refused.value)
    skipped = read_trace(path, "jsonl", SKIP)
    assert 1 == skipped.num_skipped_lines
    assert [[0, 1], [0, 1, 2]] == blocks_of(skipped)
    assert [FIRST, 0, 1] == skipped.predecessors.tolist()


RUNS = {
    "odd": ([0], "have to be [first, count"),
    "texts": (["0", "4"], "have to be [first, count"),
    "below 0": ([-1, 4], "a number below 0"),
    "count below 0": ([0, -4], "a number below 0"),
    "far too many": ([0, 10**14], "far too large"),
    "too few": ([0, 3], "has 3 block ids, and its tokens fill 4 blocks"),
    "too many": ([0, 5], "has 5 block ids, and its tokens fill 4 blocks"),
}


@pytest.mark.parametrize(("runs", "complaint"), RUNS.values(), ids=RUNS)
def test_bad_runs_are_refused_before_they_are_written_out(write, runs, complaint):
    """Runs that do not fit the prompt are a bad line, however large they claim to be."""
    path = write({"timestamp": 0, "input_length": 64, "block_size": 16, "hash_runs": runs})
    with pytest.raises(RequestError, match=r":1: ") as refused:
        read_trace(path)
    assert complaint in str(refused.value)


SESSIONS = {
    "no requests": (session(), "at least one request"),
    "a request that is short": ({**session((0, 1, [1, 1])), "requests": [[0, 64]]}, "each request has to be"),
    "requests out of order": (session((5, 1, [1, 1]), (4, 1, [1, 1])), "requests out of order"),
    "a huge id": (session((0, 1, [10**12, 1])), "block ids outside 0 to"),
    "too few ids": (session((0, 5, [1, 4])), "has 4 block ids, and its tokens fill 5 blocks"),
    "a block twice": (session((0, 3, [1, 3]), (1, 5, [1, 4, 4, 1])), "names a block twice"),
    "a block behind another": (session((0, 4, [1, 4]), (1, 4, [1, 2, 4, 1, 3, 1])), "stands behind another block"),
}


@pytest.mark.parametrize(("line", "complaint"), SESSIONS.values(), ids=SESSIONS)
def test_a_bad_session_is_left_out_as_a_whole(write, line, complaint):
    """A session with a bad request is refused with its place; skipped, none of its requests and blocks are left."""
    path = write(session((0, 4, [1, 4])), line, session((0, 4, [1, 4])))
    with pytest.raises(RequestError, match=r":2: ") as refused:
        read_trace(path)
    assert complaint in str(refused.value)
    trace = read_trace(path, options=SKIP)
    assert (2, 5, 1) == (len(trace.requests), trace.num_unique_blocks, trace.num_skipped_lines)
    assert {FIRST, *range(5)} >= set(trace.predecessors.tolist())


@pytest.mark.parametrize("cut", [30, -12, -4])
def test_a_gzip_file_that_is_cut_off_is_an_error_with_its_line(tmp_path, cut):
    """A file that ends too early is damaged, even where bad lines are skipped; the error says where."""
    lines = "".join(json.dumps(jsonl("abc"[: n % 4], time_s=n)) + "\n" for n in range(500)).encode()
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(gzip.compress(lines)[:cut])
    for options in (ReaderOptions(), SKIP):
        with pytest.raises(CorruptDataError, match=r"cut.jsonl.gz:\d+: the gzip data is cut off or damaged"):
            read_trace(path, "jsonl", options)


def test_a_damaged_gzip_file_is_an_error(tmp_path):
    """Bytes that changed are found by gzip's own check, or make no JSON; neither ends in a traceback."""
    whole = bytearray(gzip.compress("".join(json.dumps(jsonl("ab")) + "\n" for _ in range(99)).encode()))
    for place in range(10, len(whole), 7):
        damaged = bytearray(whole)
        damaged[place] ^= 0x55
        (tmp_path / "damaged.gz").write_bytes(damaged)
        with pytest.raises((CorruptDataError, RequestError), match=r"damaged.gz:\d+: "):
            read_trace(tmp_path / "damaged.gz", "jsonl")


@pytest.mark.parametrize("format_name", [*FORMATS, "auto"])
def test_an_empty_file_is_an_error(write, format_name):
    """A file without a single request cannot be replayed, and the error says so."""
    for number, name in enumerate(("1_sys_prompt", "2_passages", "3_history", "4_user_input", "5_web_search")):
        write({"some_id": number, "token_length": 3}, name=f"{name}.jsonl")
    with pytest.raises(RequestError, match="holds no"):
        read_trace(write("", name="0_trace.jsonl"), format_name)


def test_blocks_of_skipped_lines_leave_no_gap(write):
    """The numbers of blocks that only a skipped line named are given to others, and predecessors follow."""
    trace = read_trace(write(jsonl("xyz", block_hashes=["x", "y", "y"]), jsonl("abc")), options=SKIP)
    assert ([[0, 1, 2]], [FIRST, 0, 1]) == (blocks_of(trace), trace.predecessors.tolist())


def test_a_file_of_bad_lines_only_is_an_error(write):
    """Skipping has its end where nothing is left."""
    with pytest.raises(RequestError, match="holds no requests, and 2 lines that were skipped"):
        read_trace(write("{", "{}"), "jsonl", SKIP)


def test_files_that_cannot_be_read_are_named(tmp_path):
    """A file that is missing, or is a folder, is an error that names it."""
    for path in (tmp_path / "missing.jsonl", tmp_path):
        with pytest.raises(RequestError, match=f"{path} cannot be read"):
            read_trace(path)


def test_formats_that_are_not_known_are_refused(write):
    """A line of no known format, and the name of no format, are errors that list those there are."""
    with pytest.raises(RequestError, match="its first object has 'prompt': choose from mooncake, ragpulse"):
        read_trace(write({"prompt": "hello"}))
    with pytest.raises(SettingsError, match="'csv': choose from auto, mooncake"):
        read_trace(write(GOOD), "csv")


@pytest.mark.parametrize("options", [{"block_size": 0}, {"concurrency": 0.0}, {"concurrency": float("nan")}])
def test_options_without_a_meaning_are_refused(options):
    """A block without tokens and a concurrency of nothing are refused before any file is read."""
    with pytest.raises(SettingsError, match=next(iter(options))):
        ReaderOptions(**options)


def test_a_refused_line_leaves_the_builder_as_it_was():
    """Requests are added all or none: what a bad line claimed about its blocks does not bind the next."""
    builder = TraceBuilder("made up")
    a, b, c = builder.number("abc")
    good = Request(0.0, 3, np.array([a, b, c], np.int32))
    with pytest.raises(BadLine):
        builder.add([Request(0.0, 2, np.array([c, b], np.int32)), Request(0.0, 2, np.array([b, b], np.int32))], 1)
    builder.add([good], 1)
    assert [FIRST, 0, 1] == builder.finish().predecessors.tolist()
