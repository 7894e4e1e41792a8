"""Copies and the engine's kernels in the order that was promised, proved by holding streams, never by sleeping."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from device_blocks import content_keys
from gpu_layouts import GpuBlocks, finish
from gpu_rig import WAIT_S, Gpu, Latch
from kvmoor.block_layout import BlockLayout
from kvmoor.devices.device import Direction
from kvmoor.offloader import Offloader
from kvmoor.transfer_messages import Outcome

pytestmark = pytest.mark.gpu

STORE, LOAD = Direction.DEVICE_TO_HOST, Direction.HOST_TO_DEVICE
SHORT_S = 0.05  # for what must not happen, where a method with a deadline is asked


@contextmanager
def held(gpu: Gpu, stream: Any) -> Iterator[Latch]:
    """Hold a stream, and let go of it whatever happens."""
    latch = gpu.hold(stream)
    try:
        yield latch
    finally:
        latch.release()
        gpu.wait_until(stream.query, "the held stream")


@contextmanager
def opened(gpu: Gpu, **options: Any) -> Iterator[Any]:
    """Open a device and close it; nothing may be left running."""
    device = gpu.open_device(**options)
    try:
        yield device
    finally:
        assert device.close(WAIT_S)


@pytest.mark.parametrize("stream_kind", ["a stream of its own", "the default stream"])
@pytest.mark.parametrize("copy_engine_from_nbytes", [1, 2**40])
def test_a_store_takes_what_a_late_kernel_writes(gpu: Gpu, stream_kind: str, copy_engine_from_nbytes: int) -> None:
    """A store queued before the kernel that writes its blocks has run copies what that kernel wrote (B25)."""
    from kvmoor.devices.cuda.copy_strategy import CopyStrategy

    torch = gpu.torch
    own = stream_kind == "a stream of its own"
    stream = torch.cuda.Stream() if own else torch.cuda.default_stream()
    with opened(gpu, strategy=CopyStrategy(copy_engine_from_nbytes=copy_engine_from_nbytes)) as device:
        blocks = GpuBlocks.regular(gpu, page_nbytes=32 * 1024, num_tensors=4, num_blocks=32)
        store, _ = blocks.open_queues(device)
        with held(gpu, stream) as latch, torch.cuda.stream(stream):
            blocks.tensor.fill_(0x5A)  # runs after the latch
            store.enqueue([blocks.copies(range(32), range(32))], 1, device.record_event())
            assert not store.wait_completed(1, SHORT_S)
            assert store.completed() == 0
            np.testing.assert_array_equal(blocks.slot_image, blocks.slots)
            latch.release()
            finish(store, 1)
        blocks.device_image[:] = 0x5A
        blocks.expect(STORE, range(32), range(32))
        blocks.assert_as_expected("after the late kernel")


def test_a_load_spares_what_a_late_kernel_reads(gpu: Gpu) -> None:
    """A load queued behind a kernel that has still to read its blocks waits for it (B26)."""
    torch = gpu.torch
    stream = torch.cuda.Stream()
    with opened(gpu) as device:
        blocks = GpuBlocks.regular(gpu, page_nbytes=32 * 1024, num_tensors=4, num_blocks=32)
        _, load = blocks.open_queues(device)
        old, read = blocks.device_image.copy(), torch.empty_like(blocks.tensor)
        with held(gpu, stream) as latch, torch.cuda.stream(stream):
            read.copy_(blocks.tensor)
            load.enqueue([blocks.copies(range(32), range(32))], 1, device.record_event())
            assert not load.wait_completed(1, SHORT_S)
            latch.release()
            finish(load, 1)
            gpu.wait_until(stream.query, "the reader")
        np.testing.assert_array_equal(old, read.cpu().numpy())
        blocks.expect(LOAD, range(32), range(32))
        blocks.assert_as_expected("after the reader")


def test_a_load_overlaps_the_forward_of_its_own_step(gpu: Gpu) -> None:
    """A load that waits for an event from before the forward is over while the forward still runs."""
    torch = gpu.torch
    stream = torch.cuda.Stream()
    with opened(gpu) as device, torch.cuda.stream(stream):
        blocks = GpuBlocks.regular(gpu, page_nbytes=32 * 1024, num_tensors=4, num_blocks=32)
        _, load = blocks.open_queues(device)
        blocks.tensor.fill_(7)
        event = device.record_event()
        with held(gpu, stream):  # the forward
            load.enqueue([blocks.copies(range(32), range(32))], 1, event)
            finish(load, 1)
            assert not stream.query()
        blocks.device_image[:] = 7
        blocks.expect(LOAD, range(32), range(32))
        blocks.assert_as_expected("beside the forward")


def test_an_expedited_load_does_not_wait_for_others(gpu: Gpu) -> None:
    """While one load waits for a held stream, an expedited one of the same offloader arrives."""
    torch = gpu.torch
    stream = torch.cuda.Stream()
    cache = torch.randint(0, 256, (2, 16, 8192), dtype=torch.uint8, device="cuda")
    layout = BlockLayout.from_tensors([cache], block_axis=1, tokens_per_block=16)
    keys = content_keys(*range(8))
    device = gpu.open_device()
    with Offloader(layout, host_memory="64MiB", device=device, pin="eager") as offloader:
        offloader.wait([offloader.submit_store(keys, range(8)).job_id], WAIT_S)
        with torch.cuda.stream(stream):
            early = device.record_event()
            with held(gpu, stream):
                late = offloader.submit_load(offloader.match(keys[:4]), range(8, 12))
                soon = offloader.submit_load(offloader.match(keys[4:]), range(12, 16), wait_for=early, expedited=True)
                offloader.wait([soon], WAIT_S)
                assert not stream.query()
                ended = [result.job_id for result in offloader.poll_results()]
                assert soon in ended
                assert late not in ended
        offloader.wait([late], WAIT_S)
        assert torch.equal(cache[:, :8], cache[:, 8:])


def test_a_kernel_on_another_stream_waits_for_a_load(gpu: Gpu) -> None:
    """A stream that is ordered after a load reads what the load brought, however late that comes."""
    torch = gpu.torch
    engine, other = torch.cuda.Stream(), torch.cuda.Stream()
    with opened(gpu) as device:
        blocks = GpuBlocks.regular(gpu, page_nbytes=32 * 1024, num_tensors=4, num_blocks=32)
        _, load = blocks.open_queues(device)
        read = torch.empty_like(blocks.tensor)
        with held(gpu, engine) as latch:
            with torch.cuda.stream(engine):
                load.enqueue([blocks.copies(range(32), range(32))], 1, device.record_event())
            load.order_after(other, 1)
            with torch.cuda.stream(other):
                read.copy_(blocks.tensor)
            assert not other.query()
            latch.release()
            gpu.wait_until(other.query, "the kernel behind the load")
        finish(load, 1)
        blocks.expect(LOAD, range(32), range(32))
        np.testing.assert_array_equal(blocks.device_image, read.cpu().numpy())


@pytest.mark.parametrize(("nbytes", "rounds"), [(2**19, 300), (2**23, 100), (2**25, 30), (2**27, 10)])
def test_all_bytes_are_there_when_the_number_is_seen(gpu: Gpu, nbytes: int, rounds: int) -> None:
    """Whoever sees a store's number in host memory sees every byte of it, without another call."""
    page_nbytes = 64 * 1024
    with opened(gpu) as device:
        blocks = GpuBlocks.regular(gpu, page_nbytes=page_nbytes, num_tensors=8, num_blocks=nbytes // page_nbytes // 8)
        store, _ = blocks.open_queues(device)
        order = np.random.default_rng(0).permutation(blocks.num_blocks)
        whole = blocks.slots[:, : blocks.group.block_nbytes]
        for number in range(1, rounds + 1):
            blocks.tensor.fill_(number % 251)
            store.enqueue([blocks.copies(order, order)], number, device.record_event())
            deadline = time.monotonic() + WAIT_S
            while store.completed() < number:
                assert time.monotonic() < deadline
            assert (whole == number % 251).all(), f"copy {number} was not whole when its number was seen"


def test_an_engine_that_never_waits_gets_its_own_bytes_back(gpu: Gpu) -> None:
    """Hundreds of steps that store what they just computed and load it again, on the engine's stream, never mix."""
    torch = gpu.torch
    stream = torch.cuda.Stream()
    cache = torch.zeros((4, 64, 16 * 1024), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    layout = BlockLayout.from_tensors([cache], block_axis=1, tokens_per_block=16)
    with (
        torch.cuda.stream(stream),
        Offloader(layout, host_memory="128MiB", device=gpu.open_device(), pin="eager") as offloader,
    ):
        for step in range(300):
            ids = [(4 * step + offset) % 32 for offset in range(4)]
            keys = content_keys(*(1000 * step + offset for offset in range(4)))
            cache[:, ids] = step % 250 + 1
            stored = offloader.submit_store(keys, ids)
            offloader.wait([stored.job_id], WAIT_S)
            cache[:, ids] = 0
            match = offloader.match(keys)
            assert match.num_blocks == 4
            job = offloader.submit_load(match, [each + 32 for each in ids])
            offloader.wait([job], WAIT_S)
            assert (cache[:, [each + 32 for each in ids]] == step % 250 + 1).all(), f"step {step}"
        outcomes = {result.outcome for result in offloader.poll_results()}
        assert {Outcome.DONE} == outcomes
