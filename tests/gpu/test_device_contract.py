"""The CUDA device keeps the promises of `Device` on a real GPU, whatever copies: the kernel or the copy engine."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from gpu_rig import WAIT_S, Gpu, Latch, host_bytes
from kvmoor.devices.device import Device
from kvmoor.testing import DeviceContract
from kvmoor.testing.device_contract import Bytes, EngineStream

pytestmark = pytest.mark.gpu


class CudaEngine:
    """An engine that computes on a stream of torch's."""

    def __init__(self, gpu: Gpu, device: Any) -> None:
        self._gpu = gpu
        self._latches: list[Latch] = []
        self._stream = gpu.torch.cuda.Stream()
        device.use_stream(self._stream)

    @property
    def stream(self) -> object:
        """Return what copies can be waited for on."""
        return self._stream

    def hold(self) -> Callable[[], None]:
        self._latches.append(self._gpu.hold(self._stream))
        return self._latches[-1].release

    def write(self, address: int, data: Bytes) -> None:
        source = self._gpu.host_memory(data.nbytes)
        host_bytes(source, data.nbytes)[:] = data
        self._gpu.driver.copy_async(address, source, data.nbytes, self._stream.cuda_stream)

    def read(self, address: int, nbytes: int) -> Callable[[], Bytes]:
        found = self._gpu.host_memory(nbytes)
        self._gpu.driver.copy_async(found, address, nbytes, self._stream.cuda_stream)
        event = self._gpu.torch.cuda.Event()
        event.record(self._stream)

        def result() -> Bytes:
            self._gpu.wait_until(event.query, "the engine's read")
            return host_bytes(found, nbytes).copy()

        return result

    def close(self) -> None:
        for latch in self._latches:
            latch.release()
        self._gpu.wait_until(self._stream.query, "the end of the engine's work")


class CudaContract(DeviceContract):
    @pytest.fixture(autouse=True)
    def _use(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.tensors: list[Any] = []

    def open_device(self) -> Device:
        return self.gpu.open_device()

    def open_engine(self, device: Device) -> EngineStream:
        return CudaEngine(self.gpu, device)

    def stream_of(self, engine: EngineStream) -> object:
        assert isinstance(engine, CudaEngine)
        return engine.stream

    def allocate_device(self, nbytes: int) -> int:
        self.tensors.append(self.gpu.tensor(nbytes))
        return self.tensors[-1].data_ptr()

    def allocate_host(self, nbytes: int) -> int:
        return self.gpu.host_memory(nbytes)

    def write_device(self, address: int, data: Bytes) -> None:
        self.gpu.write(address, data)

    def read_device(self, address: int, nbytes: int) -> Bytes:
        return self.gpu.read(address, nbytes)

    def test_an_idle_engine_has_no_event_to_wait_for(self) -> None:
        """Once the work of the engine's stream is over, its event is done as soon as the GPU has come to it."""
        device = self.open_device()
        engine = CudaEngine(self.gpu, device)
        engine.read(self.allocate_device(16), 16)()
        self.gpu.wait_until(device.record_event().is_done, "an event behind nothing")
        engine.close()
        assert device.close(WAIT_S)


class TestDefaultStrategy(CudaContract):
    pass


class TestKernelOnly(CudaContract):
    def open_device(self) -> Device:
        return self.gpu.open_device(strategy=strategy(copy_engine_from_nbytes=2**40))


class TestCopyEngineForAll(CudaContract):
    """Every run goes to the copy engine, so its order and its completion number are what is tested."""

    def open_device(self) -> Device:
        return self.gpu.open_device(strategy=strategy(copy_engine_from_nbytes=1))


class TestRingForAll(CudaContract):
    """Every job goes through the ring in device memory."""

    @pytest.fixture(autouse=True)
    def _short_jobs_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from kvmoor.devices.cuda import gathering

        monkeypatch.setattr(gathering, "SHORTEST_JOB_NBYTES", 1)

    def open_device(self) -> Device:
        return self.gpu.open_device(strategy=strategy(gather_from_nbytes=1))


def strategy(**changes: int) -> Any:
    from kvmoor.devices.cuda.copy_strategy import CopyStrategy

    return CopyStrategy(**changes)


def test_a_device_says_what_it_is(gpu: Gpu) -> None:
    """The device carries the name that the driver gives the GPU, and it has a registrar."""
    device = gpu.open_device()
    try:
        assert gpu.torch.cuda.get_device_name() == device.name
        assert device.registrar is not None
        assert device.broken == ""
    finally:
        assert device.close(WAIT_S)


def test_a_first_copy_does_not_wait_for_a_busy_engine(gpu: Gpu) -> None:
    """The first job of a fresh device runs while a kernel holds the engine's stream: nothing is loaded late."""
    from gpu_layouts import GpuBlocks

    blocks = GpuBlocks.regular(gpu, page_nbytes=4096, num_tensors=2, num_blocks=8)
    device = gpu.open_device()
    stream = gpu.torch.cuda.Stream()
    latch = gpu.hold(stream)
    try:
        begin = time.monotonic()
        queues = blocks.open_queues(device)
        for queue in queues:
            queue.enqueue([blocks.copies(range(8), range(8))], 1, None)
            assert queue.wait_completed(1, WAIT_S)
        assert not stream.query(), "the kernel that held the stream gave up, so something had waited for it"
        assert time.monotonic() - begin < 5.0
    finally:
        latch.release()
        gpu.wait_until(stream.query, "the held stream")
        assert device.close(WAIT_S)
