"""Measuring how to copy: what is chosen, what is kept, and that measuring always ends."""

import json
import os
import stat
import time

import pytest
from typer.testing import CliRunner

from cuda_rig import STORE, WAIT_S, CudaRig
from kvmoor.block_layout import BlockLayout, GroupLayout, TensorPages
from kvmoor.cli import bench_command
from kvmoor.cli.main import app
from kvmoor.devices.cuda import calibration
from kvmoor.devices.cuda import device as device_module
from kvmoor.devices.cuda.calibration import PAGE_NBYTES, THREAD_BLOCKS, Measurement, choose_strategy, page_class
from kvmoor.devices.cuda.copy_strategy import CopyStrategy
from kvmoor.devices.cuda.cuda_error import OUT_OF_MEMORY
from kvmoor.devices.device import Direction
from kvmoor.errors import DeviceError

KIB = 1024
MIB = 2**20
LARGE = 16 * MIB


@pytest.fixture(autouse=True)
def small(monkeypatch, request):
    """Measure few and small copies, which a fake GPU takes long enough for, and do not give up early."""
    if "of_a_machine" in request.node.name:
        return
    monkeypatch.setattr(calibration, "PAGE_NBYTES", (4 * KIB, 64 * KIB))
    monkeypatch.setattr(calibration, "TOTAL_NBYTES", (64 * KIB, 128 * KIB))
    monkeypatch.setattr(calibration, "DEADLINE_S", WAIT_S)
    monkeypatch.setattr(calibration, "_SLOW_S", WAIT_S)


@pytest.fixture
def rig():
    with CudaRig(auto=True) as rig:
        yield rig


def measured(store, load, engine):
    """Make up measurements: GB/s by thread blocks for each direction, and of the copy engine by page size."""
    found = []
    for direction, speeds in ((Direction.DEVICE_TO_HOST, store), (Direction.HOST_TO_DEVICE, load)):
        for page_nbytes in PAGE_NBYTES:
            ways = dict(speeds)
            if page_nbytes in engine:
                ways[0] = engine[page_nbytes]
            for total_nbytes in (2 * MIB, LARGE):
                factor = 1.0 if total_nbytes == LARGE else 0.1
                found += [
                    Measurement(direction.value, page_nbytes, total_nbytes, blocks, total_nbytes / speed / factor / 1e9)
                    for blocks, speed in ways.items()
                ]
    return found


SIZES = (64 * KIB, 256 * KIB, MIB, 2 * MIB)
H200_STORE = {2: 40.0, 4: 51.0, 8: 52.0, 16: 52.0}
H200_LOAD = {2: 28.0, 4: 44.0, 8: 50.5, 16: 51.0}


def test_fewest_thread_blocks_that_are_fast_of_a_machine():
    """The fewest thread blocks with 95 % of the best speed are chosen, in each direction by itself."""
    strategy = choose_strategy(measured(H200_STORE, H200_LOAD, dict.fromkeys(SIZES, 1.0)), 64 * KIB)
    assert (4, 8) == (strategy.store_thread_blocks, strategy.load_thread_blocks)

    slow_link = dict.fromkeys(THREAD_BLOCKS, 6.0)
    strategy = choose_strategy(measured(slow_link, slow_link, dict.fromkeys(SIZES, 1.0)), 64 * KIB)
    assert (2, 2) == (strategy.store_thread_blocks, strategy.load_thread_blocks)


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ((34.0, 49.0, 53.0, 54.5), MIB),
        ((51.0, 51.0, 51.0, 51.0), 64 * KIB),
        ((51.0, 40.0, 53.0, 54.5), MIB),
        ((34.0, 49.0, 49.0, 54.5), 2 * MIB),
        ((34.0, 49.0, 53.0, 40.0), None),
    ],
)
def test_copy_engine_from_where_it_stays_fast_of_a_machine(engine, expected):
    """The copy engine is used from the size on from which it is never slower than the kernel."""
    strategy = choose_strategy(measured(H200_STORE, H200_LOAD, dict(zip(SIZES, engine, strict=True))), 64 * KIB)
    assert expected == strategy.copy_engine_from_nbytes


def test_page_class_of_a_machine():
    """A layout is judged by the page size that most of its bytes are in, not by its small side tables."""

    def layout(*page_nbytes):
        tensors = (TensorPages(2**40 + i * 2**32, 4, nbytes, nbytes) for i, nbytes in enumerate(page_nbytes))
        return BlockLayout((GroupLayout(tuple(tensors), 1),))

    assert 64 * KIB == page_class(None)
    assert 64 * KIB == page_class(layout(64, 64, 64, 64, 100 * KIB))
    assert 4 * KIB == page_class(layout(100, 200))
    assert 2 * MIB == page_class(layout(5 * MIB, 4 * KIB, 4 * KIB))
    assert 16 * KIB == page_class(layout(16 * KIB, 16 * KIB))


def test_measuring_tries_everything_and_is_kept(rig, tmp_path):
    """A device that calibrates measures each way once; the next device on this GPU uses that and measures nothing."""
    device = rig.open(strategy="calibrate", cache_dir=tmp_path)
    blocks = rig.blocks()
    device.check_layout(blocks.layout())
    strategy = device.strategy
    before = rig.fake.num_calls("launch")
    assert before > 0
    device.open_copy_queue("store", STORE)
    assert before == rig.fake.num_calls("launch")
    assert device.close(WAIT_S)
    rig.assert_clean()

    for option in ("calibrate", None):
        again = rig.open(strategy=option, cache_dir=tmp_path)
        again.check_layout(blocks.layout())
        assert strategy == again.strategy
    assert before == rig.fake.num_calls("launch")
    (file,) = (tmp_path / "calibration").iterdir()
    content = json.loads(file.read_text())
    assert len(content["measurements"]) == 2 * (4 * 2 * 2 + 2)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_nothing_is_measured_unasked(rig, tmp_path):
    """Without calibration a device uses the defaults, at once, and with a strategy that one."""
    assert CopyStrategy() == _strategy_used(rig.open(strategy=None, cache_dir=tmp_path))
    chosen = CopyStrategy(store_thread_blocks=7)
    assert chosen == _strategy_used(rig.open(strategy=chosen, cache_dir=tmp_path))
    assert 0 == rig.fake.num_calls("launch")


def _strategy_used(device):
    device.open_copy_queue("store", STORE)
    return device.strategy


def _damage(file):
    file.write_bytes(file.read_bytes()[:-40])


def _change_key(file):
    content = json.loads(file.read_text())
    content["key"]["uuid"] = "another GPU"
    file.write_text(json.dumps(content))


def _leave_out(file):
    content = json.loads(file.read_text())
    content["measurements"].pop()
    file.write_text(json.dumps(content))


def _let_others_write(file):
    file.chmod(0o622)


def _make_link(file):
    file.rename(file.with_name("elsewhere"))
    file.symlink_to(file.with_name("elsewhere"))


@pytest.mark.parametrize("spoil", [_damage, _change_key, _leave_out, _let_others_write, _make_link, os.unlink])
def test_a_calibration_that_is_of_no_use_is_made_again(rig, tmp_path, spoil):
    """A file that is torn, for another GPU, incomplete or writable by others is not used, and is replaced."""
    _strategy_used(rig.open(strategy="calibrate", cache_dir=tmp_path))
    before = rig.fake.num_calls("launch")
    file = next((tmp_path / "calibration").iterdir())
    spoil(file)

    assert CopyStrategy() == _strategy_used(rig.open(strategy=None, cache_dir=tmp_path))
    assert before == rig.fake.num_calls("launch")
    _strategy_used(rig.open(strategy="calibrate", cache_dir=tmp_path))
    assert 2 * before == rig.fake.num_calls("launch")
    _strategy_used(rig.open(strategy="calibrate", cache_dir=tmp_path))
    assert 2 * before == rig.fake.num_calls("launch")


def test_another_gpu_is_measured_by_itself(tmp_path):
    """What was measured on one GPU decides nothing for the next one."""
    with CudaRig(auto=True, num_devices=2) as rig:
        for ordinal in (0, 1):
            before = rig.fake.num_calls("launch")
            _strategy_used(rig.open(ordinal=ordinal, strategy="calibrate", cache_dir=tmp_path))
            assert before < rig.fake.num_calls("launch")
        assert 2 == len(list((tmp_path / "calibration").iterdir()))


def test_a_cache_that_cannot_be_written_is_done_without(rig, tmp_path):
    """Without a usable folder the measurements serve this device only."""
    (tmp_path / "file").write_text("")
    device = rig.open(strategy="calibrate", cache_dir=tmp_path / "file")

    _strategy_used(device)

    assert rig.fake.num_calls("launch") > 0
    assert device.close(WAIT_S)
    rig.assert_clean()


def test_a_gpu_that_hangs_is_not_waited_for(tmp_path, monkeypatch, caplog):
    """Measuring is given up at its deadline, and the defaults are used; what it left running keeps the device."""
    monkeypatch.setattr(calibration, "DEADLINE_S", 0.1)
    with CudaRig() as rig:
        device = rig.open(strategy="calibrate", cache_dir=tmp_path)
        started = time.monotonic()
        assert CopyStrategy() == _strategy_used(device)
        assert time.monotonic() - started < WAIT_S / 2
        assert "defaults" in caplog.text
        assert not (tmp_path / "calibration").exists()
        assert not device.close(0.0)
        rig.fake.check()

        rig.fake.run_all()
        assert device.close(WAIT_S)
        rig.assert_clean()


def test_no_memory_to_measure_with_is_no_reason_to_fail(rig, tmp_path):
    """If the buffers cannot be had, the defaults are used."""
    device = rig.open(strategy="calibrate", cache_dir=tmp_path)
    rig.fake.fail("launch", at=0, code=OUT_OF_MEMORY)

    assert CopyStrategy() == _strategy_used(device)
    assert device.close(WAIT_S)
    rig.assert_clean()


def test_measuring_disturbs_no_capture(rig, tmp_path):
    """An engine that captures a graph on the same thread keeps its graph."""
    device = rig.open(strategy="calibrate", cache_dir=tmp_path)
    with rig.fake.capturing() as capture:
        _strategy_used(device)

    assert not capture.lost
    rig.fake.check()


def test_the_command_prints_and_keeps_what_it_measured(rig, tmp_path, monkeypatch):
    """`kvmoor bench copies` shows a table for each direction and what was chosen, which later devices use."""
    monkeypatch.setattr(device_module, "Driver", lambda: rig.fake)
    monkeypatch.setattr(bench_command, "cache_directory", lambda: tmp_path)

    done = CliRunner().invoke(app, ["bench", "copies"], env={"COLUMNS": "160"})

    assert 0 == done.exit_code, done.output
    for text in (
        "Fake GPU 0",
        "device to host",
        "host to device",
        "16 thread blocks",
        "copy engine",
        "64 KiB",
        "4 KiB",
    ):
        assert text in done.stdout
    before = rig.fake.num_calls("launch")
    _strategy_used(rig.open(strategy="calibrate", cache_dir=tmp_path))
    assert before == rig.fake.num_calls("launch")


def test_the_command_prints_json(rig, tmp_path, monkeypatch):
    """With --json stdout is one object with every measurement."""
    monkeypatch.setattr(device_module, "Driver", lambda: rig.fake)
    monkeypatch.setattr(bench_command, "cache_directory", lambda: tmp_path)

    done = CliRunner().invoke(app, ["bench", "copies", "--json"])

    report = json.loads(done.stdout)
    assert "Fake GPU 0" == report["gpu"]
    assert {"4096", "65536"} == set(report["strategies"])
    assert all(each["gb_per_s"] > 0 for each in report["measurements"])


def test_the_command_says_what_is_missing(monkeypatch):
    """On a machine without a GPU the command ends with one line and code 2."""

    def missing():
        raise DeviceError("no GPU is visible")

    monkeypatch.setattr(device_module, "Driver", missing)

    done = CliRunner().invoke(app, ["bench", "copies"])

    assert 2 == done.exit_code
    assert "kvmoor: no GPU is visible\n" == done.stderr
