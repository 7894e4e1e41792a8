"""What a user of the facade may rely on: bytes come back whole, or they do not come back."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from device_blocks import DeviceBlocks, content_key, content_keys
from kvmoor.block_layout import BlockLayout, GroupLayout, TensorPages
from kvmoor.devices.cpu import CpuDevice
from kvmoor.errors import ClosedError, LayoutError, NoRoomError, RequestError, SettingsError
from kvmoor.offloader import Offloader
from kvmoor.offloader_results import TransferResult
from kvmoor.transfer_messages import Outcome

WAIT_S = 20.0


@pytest.fixture
def device_blocks() -> DeviceBlocks:
    return DeviceBlocks()


@pytest.fixture
def offloader(device_blocks: DeviceBlocks) -> Iterator[Offloader]:
    with Offloader(device_blocks.layout(), host_memory=8 * 4096, device=CpuDevice()) as offloader:
        yield offloader
        offloader._coordinator.check_invariants()


def store(offloader: Offloader, device_blocks: DeviceBlocks, *numbers: int) -> TransferResult:
    """Fill device blocks 0, 1, ... with contents and store them."""
    for block_id, number in enumerate(numbers):
        device_blocks.fill(block_id, number)
    submission = offloader.submit_store(content_keys(*numbers), range(len(numbers)))
    assert submission.job_id is not None, submission
    offloader.wait([submission.job_id], WAIT_S)
    (result,) = offloader.poll_results()
    return result


def load(offloader: Offloader, numbers: list[int], block_ids: list[int]) -> TransferResult:
    """Load what matches into the first of `block_ids`."""
    match = offloader.match(content_keys(*numbers))
    job_id = offloader.submit_load(match, block_ids[: match.num_blocks])
    offloader.wait([job_id], WAIT_S)
    (result,) = offloader.poll_results()
    return result


def test_blocks_come_back_whole(offloader: Offloader, device_blocks: DeviceBlocks) -> None:
    """What was stored from one set of device blocks is byte for byte what is loaded into another."""
    stored = store(offloader, device_blocks, 1, 2, 3)
    device_blocks.poison()

    loaded = load(offloader, [1, 2, 3], [9, 4, 7])

    assert (Outcome.DONE, 3, 3 * 1536) == (stored.outcome, stored.num_blocks, stored.nbytes)
    assert (Outcome.DONE, 3, 3 * 1536) == (loaded.outcome, loaded.num_blocks, loaded.nbytes)
    for block_id, number in ((9, 1), (4, 2), (7, 3)):
        np.testing.assert_array_equal(device_blocks.pattern(number), device_blocks.content(block_id))
    assert (device_blocks.content(0) == 0xEE).all()


def test_a_stream_computes_with_blocks_whose_load_it_waits_for(device_blocks: DeviceBlocks) -> None:
    """Work queued after `order_after` finds the blocks loaded; jobs that are over, or None, hold up nothing."""
    device = CpuDevice()
    stream, other = device.open_stream("engine"), device.open_stream("other")
    with Offloader(device_blocks.layout(), host_memory="64KiB", device=device) as offloader:
        store(offloader, device_blocks, 1)
        device_blocks.poison()
        latch = other.latch()
        job_id = offloader.submit_load(offloader.match(content_keys(1)), [9], wait_for=other.record_event())
        offloader.order_after(job_id, stream)
        found: list[np.ndarray] = []
        stream.submit(lambda: found.append(device_blocks.content(9).copy()))
        event = stream.record_event()
        assert not event.wait(0.02)
        with pytest.raises(RequestError, match="no stream of a CPU device"):
            offloader.order_after(job_id, "cuda:0")
        latch.release()
        assert event.wait(WAIT_S)

        np.testing.assert_array_equal(device_blocks.pattern(1), found[0])
        offloader.wait([job_id], WAIT_S)
        offloader.poll_results()
        for over in (job_id, None):
            offloader.order_after(over, stream)


def test_a_stored_block_is_seen_only_after_its_copy(device_blocks: DeviceBlocks) -> None:
    """Between submission and the end of the copy a block cannot be matched."""
    device = CpuDevice()
    stream = device.open_stream("engine")
    with Offloader(device_blocks.layout(), host_memory="64KiB", device=device) as offloader:
        latch = threading.Event()
        stream.submit(latch.wait)
        submission = offloader.submit_store(content_keys(1), [0], wait_for=stream.record_event())
        assert submission.job_id is not None
        with offloader.match(content_keys(1)) as match:
            assert 0 == match.num_blocks
        latch.set()
        offloader.wait([submission.job_id], WAIT_S)
        with offloader.match(content_keys(1)) as match:
            assert 1 == match.num_blocks


def test_known_blocks_are_not_copied_again(offloader: Offloader, device_blocks: DeviceBlocks) -> None:
    """Storing blocks that are there already copies only the new ones, from the right device blocks."""
    store(offloader, device_blocks, 1, 2)
    device_blocks.fill(5, 3)

    submission = offloader.submit_store(content_keys(1, 2, 3), [0, 1, 5])
    assert submission.job_id is not None
    offloader.wait([submission.job_id], WAIT_S)
    offloader.poll_results()
    load(offloader, [1, 2, 3], [10, 11, 12])

    assert (1, 2, "") == (submission.num_submitted, submission.num_known, submission.declined)
    for block_id, number in ((10, 1), (11, 2), (12, 3)):
        np.testing.assert_array_equal(device_blocks.pattern(number), device_blocks.content(block_id))


def test_a_match_is_the_longest_ready_prefix(offloader: Offloader, device_blocks: DeviceBlocks) -> None:
    """A match ends before the first block that is missing, and `keep` shortens it further."""
    store(offloader, device_blocks, 1, 2, 4)

    with offloader.match(content_keys(1, 2, 3, 4)) as match:
        assert tuple(content_keys(1, 2)) == match.keys
        match.keep(1)
        assert tuple(content_keys(1)) == match.keys


def test_a_matched_block_is_not_evicted(offloader: Offloader, device_blocks: DeviceBlocks) -> None:
    """While a match is held, a store that would need its slots is declined and changes nothing."""
    store(offloader, device_blocks, 1, 2, 3, 4, 5, 6, 7, 8)

    with offloader.match(content_keys(1, 2)):
        declined = offloader.submit_store(content_keys(*range(11, 18)), range(7))
        accepted = offloader.submit_store(content_keys(*range(21, 27)), range(6))

    assert (None, 0) == (declined.job_id, declined.num_submitted)
    assert "raise host_memory" in declined.declined
    assert accepted.job_id is not None
    assert (6, 7) == (offloader.statistics().blocks.evicted, offloader.statistics().blocks.declined)
    offloader.wait([accepted.job_id], WAIT_S)


def test_the_end_of_a_prompt_is_evicted_first(offloader: Offloader, device_blocks: DeviceBlocks) -> None:
    """Making room eats a prompt from its end, so that what is left is a usable prefix."""
    store(offloader, device_blocks, 1, 2, 3, 4, 5, 6, 7, 8)

    store(offloader, device_blocks, 21, 22, 23)

    with offloader.match(content_keys(1, 2, 3, 4, 5, 6, 7, 8)) as match:
        assert tuple(content_keys(1, 2, 3, 4, 5)) == match.keys


def test_blocks_of_several_device_blocks(device_blocks: DeviceBlocks) -> None:
    """A block of two device blocks is stored and loaded whole, into any two device blocks."""
    layout = device_blocks.layout(tokens_per_block=32, blocks_per_chunk=2)
    for block_id in range(4):
        device_blocks.fill(block_id, block_id)
    with Offloader(layout, host_memory="64KiB", device=CpuDevice()) as offloader:
        submission = offloader.submit_store(content_keys(1, 2), [3, 0, 1, 2])
        assert submission.job_id is not None
        offloader.wait([submission.job_id], WAIT_S)
        device_blocks.poison()
        match = offloader.match(content_keys(1, 2))
        offloader.wait([offloader.submit_load(match, [10, 11, 13, 12])], WAIT_S)

    for block_id, number in ((10, 3), (11, 0), (13, 1), (12, 2)):
        np.testing.assert_array_equal(device_blocks.pattern(number), device_blocks.content(block_id))


def test_several_groups_in_one_job() -> None:
    """Groups of different geometry travel in one store and one load, also one that has no tensors here."""
    full = DeviceBlocks(num_blocks=8, page_nbytes=700, num_tensors=2, seed=1)
    window = DeviceBlocks(num_blocks=6, page_nbytes=96, num_tensors=1, seed=2)
    layout = BlockLayout(
        (
            full.layout().groups[0],
            window.layout(tokens_per_block=32, blocks_per_chunk=2).groups[0],
            GroupLayout((), tokens_per_block=16),
        )
    )
    keys = [content_key(0, 0), content_key(0, 1), content_key(0, 2), content_key(1, 0)]
    full.fill(3, 3)
    full.fill(4, 4)
    window.fill(2, 2)
    window.fill(5, 5)
    with Offloader(layout, host_memory="64KiB", device=CpuDevice()) as offloader:
        submission = offloader.submit_store(keys, [3, 5, 2, 77, 4])
        assert submission.job_id is not None
        offloader.wait([submission.job_id], WAIT_S)
        full.poison()
        window.poison()
        match = offloader.match(keys)
        assert 4 == match.num_blocks
        offloader.wait([offloader.submit_load(match, [0, 1, 0, 78, 7])], WAIT_S)

    np.testing.assert_array_equal(full.pattern(3), full.content(0))
    np.testing.assert_array_equal(full.pattern(4), full.content(7))
    np.testing.assert_array_equal(window.pattern(5), window.content(1))
    np.testing.assert_array_equal(window.pattern(2), window.content(0))


def test_reset_forgets_everything_at_once(device_blocks: DeviceBlocks) -> None:
    """After a reset neither a stored block nor one whose store was in flight can be matched (B37)."""
    device = CpuDevice()
    stream = device.open_stream("engine")
    with Offloader(device_blocks.layout(), host_memory="64KiB", device=device) as offloader:
        store(offloader, device_blocks, 1)
        latch = threading.Event()
        stream.submit(latch.wait)
        submission = offloader.submit_store(content_keys(2), [0], wait_for=stream.record_event())
        assert submission.job_id is not None
        offloader.reset()
        latch.set()
        offloader.wait([submission.job_id], WAIT_S)
        offloader.poll_results()

        for number in (1, 2):
            with offloader.match(content_keys(number)) as match:
                assert 0 == match.num_blocks
        offloader._coordinator.check_invariants()
        assert 0 == offloader.statistics().blocks.writing


@pytest.mark.parametrize(
    ("numbers", "block_ids", "message"),
    [
        ([], [], "no blocks were given"),
        ([1, 1], [0, 1], "name a block once"),
        ([1, 2], [0, 0], "is named twice"),
        ([1], [16], "device block 16 of group 0 does not exist: ids go from 0 to 15"),
        ([1], [-1], "device block -1"),
        ([1, 2], [0], "2 blocks need 2 device block ids, found 1"),
    ],
)
def test_bad_stores_change_nothing(
    offloader: Offloader, device_blocks: DeviceBlocks, numbers: list[int], block_ids: list[int], message: str
) -> None:
    """A store that cannot be done is refused before anything is evicted, reserved or copied."""
    store(offloader, device_blocks, 11, 12, 13, 14, 15, 16, 17, 18)
    before = offloader.statistics()

    with pytest.raises(RequestError, match=message):
        offloader.submit_store(content_keys(*numbers), block_ids)

    assert before.blocks == offloader.statistics().blocks
    assert before.transfers.done == offloader.statistics().transfers.done


def test_a_key_of_an_unknown_group_is_refused(offloader: Offloader) -> None:
    """A key of a group that the layout does not have is refused by store and match alike."""
    with pytest.raises(RequestError, match="group 3 does not exist"):
        offloader.submit_store([content_key(1, 3)], [0])
    with pytest.raises(RequestError, match="a group that does not exist"):
        offloader.match([content_key(1, 3)])


def test_a_refused_load_leaves_the_match(offloader: Offloader, device_blocks: DeviceBlocks) -> None:
    """A load with bad block ids is refused, and the same match can be loaded with good ones, once."""
    store(offloader, device_blocks, 1, 2)
    match = offloader.match(content_keys(1, 2))

    with pytest.raises(RequestError, match="named twice"):
        offloader.submit_load(match, [5, 5])
    job_id = offloader.submit_load(match, [5, 6])
    with pytest.raises(RequestError, match="match the keys anew"):
        offloader.submit_load(match, [7, 8])

    offloader.wait([job_id], WAIT_S)
    np.testing.assert_array_equal(device_blocks.pattern(2), device_blocks.content(6))


def test_an_empty_match_cannot_be_loaded(offloader: Offloader) -> None:
    """Loading nothing is a mistake of the caller and says so."""
    with (
        offloader.match(content_keys(1)) as match,
        pytest.raises(RequestError, match="a match that is not empty"),
    ):
        offloader.submit_load(match, [])


def test_a_closed_offloader_refuses_work(device_blocks: DeviceBlocks) -> None:
    """After close every call that would begin something raises ClosedError; results can still be read."""
    offloader = Offloader(device_blocks.layout(), host_memory="64KiB", device=CpuDevice())
    store(offloader, device_blocks, 1)
    match = offloader.match(content_keys(1))

    report = offloader.close()

    assert (True, tuple(content_keys(1))) == (report.worker.graceful, report.unresolved_keys)
    assert offloader.closed
    for call in (
        lambda: offloader.submit_store(content_keys(2), [0]),
        lambda: offloader.match(content_keys(1)),
        lambda: offloader.submit_load(match, [0]),
    ):
        with pytest.raises(ClosedError):
            call()
    assert [] == offloader.poll_results()
    assert report.worker == offloader.close().worker
    match.release()
    assert () == offloader.close().unresolved_keys


def test_results_of_jobs_that_ended_during_close_are_kept(device_blocks: DeviceBlocks) -> None:
    """A job that close waited for is reported by poll_results afterwards."""
    offloader = Offloader(device_blocks.layout(), host_memory="64KiB", device=CpuDevice())
    submission = offloader.submit_store(content_keys(1), [0])
    offloader.close()

    assert [(submission.job_id, Outcome.DONE)] == [(r.job_id, r.outcome) for r in offloader.poll_results()]


@pytest.mark.parametrize("host_memory", [0, -1, "", "12 parsecs", "-3GiB", True, "4095"])
def test_bad_sizes_are_refused(device_blocks: DeviceBlocks, host_memory: int | str) -> None:
    """A size that is none, or that holds not even one slot, is refused by name before anything is opened."""
    with pytest.raises(SettingsError, match="host_memory"):
        Offloader(device_blocks.layout(), host_memory=host_memory, device=CpuDevice())


def test_more_memory_than_there_is_is_refused(device_blocks: DeviceBlocks) -> None:
    """An arena larger than memory is refused with both numbers and the remedy, before anything is allocated."""
    with pytest.raises(NoRoomError, match=r"10 TB.*lower host_memory"):
        Offloader(device_blocks.layout(), host_memory=10**13, device=CpuDevice())


def test_tensors_on_another_device_are_refused(device_blocks: DeviceBlocks) -> None:
    """The CPU device refuses a layout whose tensors it cannot reach, and nothing stays open."""
    layout = BlockLayout(device_blocks.layout().groups, on_host=False)

    with pytest.raises(LayoutError):
        Offloader(layout, host_memory="64KiB", device=CpuDevice())


def test_the_plan_is_known_before_memory(device_blocks: DeviceBlocks, offloader: Offloader) -> None:
    """The plan tells bytes, slots and tokens, and holds no more than was asked for."""
    assert (8 * 4096, 8, 8 * 16) == (
        offloader.plan.nbytes,
        offloader.plan.groups[0].num_slots,
        offloader.plan.groups[0].num_tokens,
    )


def test_explicit_addresses_serve_as_well(device_blocks: DeviceBlocks) -> None:
    """A layout made of plain addresses, with padding between pages, moves exactly the described bytes."""
    array = np.zeros((6, 1000), dtype=np.uint8)
    array[:] = np.arange(6, dtype=np.uint8)[:, None] + 1
    pages = TensorPages(array.ctypes.data + 100, num_blocks=6, block_stride=1000, page_nbytes=300)
    layout = BlockLayout((GroupLayout((pages,), tokens_per_block=4, tensor_owners=(array,)),))
    with Offloader(layout, host_memory="64KiB", device=CpuDevice()) as offloader:
        submission = offloader.submit_store(content_keys(1), [2])
        assert submission.job_id is not None
        offloader.wait([submission.job_id], WAIT_S)
        offloader.wait([offloader.submit_load(offloader.match(content_keys(1)), [5])], WAIT_S)

    expected = np.full(1000, 6, dtype=np.uint8)
    expected[100:400] = 3
    np.testing.assert_array_equal(expected, array[5])
