"""``kvmoor simulate``: what it prints, what it refuses, and that it does so before the work."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvmoor
from kvmoor.cli import simulate_command
from kvmoor.cli.main import app

TRACE = str(Path(__file__).parents[1] / "data/traces/mooncake_synthetic_trace.jsonl.gz")
runner = CliRunner()


@pytest.fixture
def small_trace(tmp_path):
    """Write a trace in which two conversations come back by turns, over one day."""
    path = tmp_path / "small.jsonl"
    lines = []
    for turn in range(8):
        hashes = [f"{turn % 2}-{place}" for place in range(4 + turn)]
        lines.append({"time_s": turn * 12_342.857142857143, "block_size": 16, "num_tokens": 16 * len(hashes) + 5})
        lines[-1]["block_hashes"] = hashes
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def simulate(*arguments, width=120):
    done = runner.invoke(app, ["simulate", *map(str, arguments)], env={"COLUMNS": str(width)})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def test_the_report_has_a_table_bars_and_advice(small_trace):
    """Each capacity has a row with what it saves and writes, and a bar; the last line says what to buy."""
    done = simulate(small_trace, "--kv-bytes-per-token", 1000, "--capacity", "1MB", "--capacity", "80 blocks")
    assert (0, "") == (done.exit_code, done.stderr)
    text = " ".join(done.stdout.split())
    assert "small.jsonl: 8 requests, 1,000 tokens, 60 blocks of 16 tokens, 21 of them different, in 24.0 h" in text
    assert "A token takes 1 kB (given)." in text
    # 60 references, 21 unique blocks: 39 hits of 16 tokens; 21 blocks of 16 kB are written in the one day.
    assert "999 kB 62.4 % 100.0 % 624 336 kB 0" in text
    assert "1.31 MB 62.4 % 100.0 % 624 336 kB 0" in text
    assert "█" * 31 in text
    assert (
        "With lru the knee is at 999 kB: the smallest capacity tried that saves at least 95 % of what 1.31 MB" in text
    )


def test_json_is_one_object_and_nothing_else(small_trace):
    """With --json, stdout is one object that has all numbers, and nothing is said on stderr."""
    done = simulate(
        small_trace, "--json", "--kv-bytes-per-token", 1000, "--capacity", "15 blocks", "--capacity", "80 blocks"
    )
    report = json.loads(done.stdout)
    assert "" == done.stderr
    assert kvmoor.__version__ == report["kvmoor"]
    assert (8, 1000, 60, 21) == tuple(
        report["trace"][each] for each in ("requests", "tokens", "references", "unique_blocks")
    )
    assert (1000, 16_384) == (report["kv_bytes_per_token"], report["slot_nbytes"])
    small, large = report["results"]
    assert (15, 15 * 16_384) == (small["capacity_blocks"], small["capacity_nbytes"])
    assert 0 < small["hit_blocks"] < small["optimum_hit_blocks"] < large["hit_blocks"] == 39
    assert small["hit_blocks"] / small["optimum_hit_blocks"] == small["share_of_optimum"]
    assert 21 * 16_000 == pytest.approx(large["written_nbytes_a_day"])
    assert (0, 0) == (small["unreachable_blocks"], large["evicted_blocks"])
    assert {"lru": {"share": 0.95, "capacity_blocks": 80}} == report["knee"]
    assert "no knee is in sight" in report["advice"][0]


def test_capacities_are_a_ladder_by_default(small_trace):
    """Without --capacity, sizes double up to all blocks of the trace; without a model they are blocks."""
    report = json.loads(simulate(small_trace, "--json").stdout)
    assert [1, 2, 5, 10, 21] == [each["capacity_blocks"] for each in report["results"]]
    assert {None} == {each["written_nbytes_a_day"] for each in report["results"]}
    assert "21 blocks" in simulate(small_trace).stdout
    assert "written" not in simulate(small_trace).stdout


def test_policies_are_compared_side_by_side(small_trace):
    """Each policy has rows and advice of its own."""
    done = simulate(small_trace, "--policy", "lru", "--policy", "arc", "--policy", "lru", "--capacity", "12 blocks")
    text = " ".join(done.stdout.split())
    assert "lru 12 blocks" in text
    assert "arc 12 blocks" in text
    assert 2 == text.count("where the knee is takes several capacities to see")


def test_tiers_are_reported_side_by_side(small_trace):
    """With a device and a disk the table says what each tier finds and what is written; the advice, what one has."""
    done = simulate(
        *(small_trace, "--kv-bytes-per-token", 1000, "--device-memory", "10 blocks", "--disk", "1MB"),
        *("--store-when", "leaving", "--disk-admission", "second-reference"),
        *("--capacity", "5 blocks", "--capacity", "80 blocks"),
    )
    assert (0, "") == (done.exit_code, done.stderr)
    text = " ".join(done.stdout.split())
    assert "The device holds 164 kB; host memory stores what leaves it." in text
    assert "The disk holds 999 kB and takes what falls out of host memory, if it was referred to twice." in text
    headings = "host memory hit ratio of optimum device host disk to host a day to disk a day not written"
    assert headings in text
    # 39 hits of 16 tokens, 14 of them on the device; one of the 21 blocks never leaves it; nothing falls out of 80.
    assert "1.31 MB 62.4 % 100.0 % 22.4 % 40.0 % 0.0 % 320 kB 0 B 0 B" in text
    assert "█" * 11 + "▓" * 20 + " " in done.stdout
    assert "The device alone saves 22.4 %." in text


def test_tiers_in_json(small_trace):
    """With --json the tiers and the counts of each are there, next to all that is there without them."""
    arguments = [small_trace, "--json", "--capacity", "12 blocks", "--device-memory", "10 blocks", "--disk", "9 blocks"]
    report = json.loads(simulate(*arguments).stdout)
    assert {
        "device_blocks": 10,
        "device_nbytes": None,
        "disk_blocks": 9,
        "disk_nbytes": None,
        "store_when": "computed",
        "disk_admission": "all",
    } == report["tiers"]
    (result,) = report["results"]
    assert result["hit_blocks"] == sum(result["hit_blocks_by_tier"].values())
    assert result["hit_ratio"] == pytest.approx(sum(result["hit_ratio_by_tier"].values()))
    assert (
        {"device", "host", "disk"} == result["stored_blocks_by_tier"].keys() == result["evicted_blocks_by_tier"].keys()
    )
    assert {None} == set(result["written_nbytes_a_day_by_tier"].values())
    assert 0 == result["saved_disk_writes_blocks"]
    alone = json.loads(simulate(small_trace, "--json", "--capacity", "12 blocks").stdout)
    assert "tiers" not in alone
    assert set(alone) < set(report)


def test_a_host_that_cannot_help_is_said(small_trace):
    """Host memory no larger than the device, storing what is computed, and `device-lru` with that, get a note."""
    arguments = [small_trace, "--device-memory", "10 blocks", "--policy", "device-lru"]
    warnings = "try --store-when leaving", "device-lru is made for --store-when leaving"
    text = " ".join(simulate(*arguments, "--capacity", "10 blocks").stdout.split())
    assert all(warning in text for warning in warnings)
    text = " ".join(simulate(*arguments, "--capacity", "10 blocks", "--store-when", "leaving").stdout.split())
    assert not any(warning in text for warning in warnings)


def test_a_disk_needs_no_device(small_trace):
    """--disk alone puts a disk behind host memory; nothing is said of a device."""
    text = simulate(small_trace, "--disk", "30 blocks", "--capacity", "10 blocks").stdout
    assert "The disk holds 30 blocks and takes all that falls out of host memory." in text
    assert "device" not in text


@pytest.mark.parametrize("tiers", [[], ["--device-memory", "10 blocks", "--disk", "9 blocks"]])
def test_the_progress_bar_ends_at_its_end(small_trace, monkeypatch, tiers):
    """Each block of each replay moves the bar once."""
    bars = []
    make_bar = simulate_command._progress
    monkeypatch.setattr(simulate_command, "_progress", lambda: bars.append(make_bar()) or bars[-1])
    simulate(
        small_trace, *tiers, "--capacity", "3 blocks", "--capacity", "5 blocks", "--policy", "lru", "--policy", "arc"
    )
    (bar,) = bars
    assert [(60 * 2 * 2, 60 * 2 * 2)] == [(task.completed, task.total) for task in bar.tasks]


def test_a_model_config_gives_the_size_of_a_token(small_trace, tmp_path):
    """--model-config computes what --kv-bytes-per-token would say."""
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "dtype": "float16"})
    )
    report = json.loads(simulate(small_trace, "--json", "--model-config", config).stdout)
    assert 2 * 2 * 4 * 16 * 2 == report["kv_bytes_per_token"]
    both = simulate(small_trace, "--model-config", config, "--kv-bytes-per-token", 1)
    assert (2, "") == (both.exit_code, both.stdout)


def test_a_trace_without_reuse_is_said_to_have_none(tmp_path):
    """Where nothing comes back there is no knee, and no memory is advised."""
    path = tmp_path / "once.jsonl"
    path.write_text('{"time_s": 0, "block_size": 1, "token_ids": [1, 2, 3]}\n')
    text = " ".join(simulate(path).stdout.split())
    assert "none of these capacities saves anything" in text


def test_skipped_lines_are_counted(tmp_path, small_trace):
    """--skip-bad-lines goes on and says how many there were; without it the first one ends the command."""
    path = tmp_path / "mixed.jsonl"
    path.write_text(Path(small_trace).read_text() + "nonsense\n")
    assert f"kvmoor: {path}:9: is not JSON" in simulate(path).stderr
    assert "1 lines could not be used and were skipped." in simulate(path, "--skip-bad-lines").stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--capacity", "0"], "--capacity is '0'"),
        (["--capacity", "lots"], "--capacity is 'lots'"),
        (["--capacity", "0 blocks"], "--capacity is '0 blocks'"),
        (["--capacity", "8GiB"], "what a token takes is not known: give --kv-bytes-per-token or --model-config"),
        (["--capacity", "1kB", "--kv-bytes-per-token", "1000"], "holds no block: one of 16 tokens takes 16.4 kB"),
        (["--kv-bytes-per-token", "0"], "takes 0 bytes"),
        (["--model-config", "missing.json"], "missing.json cannot be read"),
        (["--policy", "lfu"], "no policy 'lfu': choose from lru"),
        (["--format", "csv"], "no trace format 'csv'"),
        (["--block-size", "0"], "block_size is 0"),
        (["--concurrency", "0"], "concurrency is 0.0"),
        (["--plot", "plot.txt"], "suffix '.txt': give one of .png, .svg"),
        (["--plot", "no/such/folder/plot.png"], "has no folder to be in"),
        (["--device-memory", "0"], "--device-memory is '0'"),
        (["--device-memory", "8GiB"], "--device-memory '8GiB' is in bytes, and what a token takes is not known"),
        (["--disk", "1kB", "--kv-bytes-per-token", "1000"], "--disk '1kB' holds no block"),
        (
            ["--device-memory", "5 blocks", "--store-when", "later"],
            "--store-when is 'later': choose from computed",
        ),
        (["--disk", "5 blocks", "--disk-admission", "some"], "--disk-admission is 'some': choose from all, second-ref"),
        (["--store-when", "leaving"], "give its --device-memory too"),
        (["--device-memory", "5 blocks", "--disk-admission", "all"], "give its size with --disk too"),
        (["--format", "mooncake"], "small.jsonl:1: has no field input_length"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(small_trace, arguments, complaint):
    """A bad option or trace is exit code 2 and one line on stderr that says what to do; nothing is printed."""
    done = simulate(small_trace, "--json", *arguments)
    assert (2, "") == (done.exit_code, done.stdout)
    assert complaint in done.stderr
    assert 1 == len(done.stderr.splitlines())


@pytest.mark.parametrize("option", ["--capacity", "--device-memory", "--disk"])
@pytest.mark.parametrize("size", ["8GiB", "x blocks"])
def test_bad_sizes_are_said_before_the_trace_is_read(option, size):
    """What no trace makes usable is refused without waiting for one."""
    assert option in simulate("missing.jsonl", option, size).stderr


def test_a_missing_matplotlib_is_said_before_the_trace_is_read(monkeypatch, tmp_path):
    """--plot without its package names the command that installs it, and does so at once."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = simulate(tmp_path / "missing.jsonl", "--plot", tmp_path / "plot.png")
    assert (2, "") == (done.exit_code, done.stdout)
    assert 'kvmoor: --plot needs matplotlib: pip install "kvmoor[plot]"\n' == done.stderr


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
@pytest.mark.parametrize(("name", "magic"), [("plot.png", b"\x89PNG"), ("plot.SVG", b"<?xml")])
def test_the_plot_is_written_as_its_suffix_says(small_trace, tmp_path, name, magic):
    """--plot writes a file of the type that its suffix names; in a process, since matplotlib keeps fonts open."""
    command = [sys.executable, "-m", "kvmoor", "simulate", small_trace, "--kv-bytes-per-token", "1000"]
    command += ["--device-memory", "10 blocks", "--plot", str(tmp_path / name)]
    subprocess.run(command, capture_output=True, check=True, timeout=100)
    assert (tmp_path / name).read_bytes().startswith(magic)


def test_the_command_runs_as_a_process():
    """A real trace through the real command: JSON on stdout, silence on stderr where nobody watches."""
    command = [sys.executable, "-m", "kvmoor", "simulate", TRACE, "--capacity", "40 blocks", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    (result,) = json.loads(done.stdout)["results"]
    assert (424, 4237, "") == (result["hit_blocks"], result["optimum_hit_blocks"], done.stderr)
