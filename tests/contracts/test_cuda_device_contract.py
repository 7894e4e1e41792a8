"""The CUDA device keeps the promises of `Device`, as far as a driver without a GPU can tell."""

from collections.abc import Callable, Iterator

import pytest

from cuda_rig import ENGINE, ENGINE_ONLY, KERNEL_ONLY, CudaRig
from kvmoor.devices.cuda.copy_strategy import CopyStrategy
from kvmoor.devices.device import Device
from kvmoor.testing import DeviceContract
from kvmoor.testing.device_contract import Bytes, EngineStream


class FakeEngine:
    """An engine that computes on a stream of the fake GPU."""

    def __init__(self, contract: "CudaContract", device: Device) -> None:
        self._contract = contract
        self._fake = contract.rig.fake
        self._device = device

    def hold(self) -> Callable[[], None]:
        self._fake.hang(ENGINE)
        return lambda: self._fake.release(ENGINE)

    def write(self, address: int, data: Bytes) -> None:
        self._fake.enqueue(ENGINE, lambda: self._contract.write_device(address, data))

    def read(self, address: int, nbytes: int) -> Callable[[], Bytes]:
        found: list[Bytes] = []
        self._fake.enqueue(ENGINE, lambda: found.append(self._contract.read_device(address, nbytes)))
        return lambda: found[0]

    def close(self) -> None:
        self._fake.release(ENGINE)


class CudaContract(DeviceContract):
    strategy = KERNEL_ONLY
    writes_numbers = True
    copy_batch_available = True

    @pytest.fixture(autouse=True)
    def _gpu(self) -> Iterator[None]:
        # Work runs as soon as it can, so that the point of an event is reached by the time that it is asked for.
        with CudaRig(auto=True, copy_batch_available=self.copy_batch_available) as self.rig:
            self.rig.fake.attributes["CAN_USE_64_BIT_STREAM_MEM_OPS"] = int(self.writes_numbers)
            yield
            self.rig.fake.check()

    def open_device(self) -> Device:
        return self.rig.open(strategy=self.strategy)

    def open_engine(self, device: Device) -> EngineStream:
        return FakeEngine(self, device)

    def stream_of(self, engine: EngineStream) -> object:
        return ENGINE

    def allocate_device(self, nbytes: int) -> int:
        return self.rig.fake.device_bytes(nbytes).ctypes.data

    def allocate_host(self, nbytes: int) -> int:
        address = super().allocate_host(nbytes)
        self.rig.fake.host_register(address, nbytes, False)
        return address


class TestPageKernel(CudaContract):
    pass


class TestCopyEngine(CudaContract):
    strategy = ENGINE_ONLY


class TestBothWays(CudaContract):
    strategy = CopyStrategy(2, 3, copy_engine_from_nbytes=8192)


class TestOldDriver(CudaContract):
    """A driver without batch copies and a GPU whose streams write no numbers."""

    strategy = ENGINE_ONLY
    writes_numbers = False
    copy_batch_available = False


class TestBulkKernel(CudaContract):
    strategy = CopyStrategy(copy_engine_from_nbytes=None, store_kernel="bulk", load_kernel="rows4")
