"""Which addresses a GPU can reach, for the fake driver: device memory is host memory here, so addresses are real."""

import ctypes
import mmap
from dataclasses import dataclass

import numpy as np

from kvmoor.devices.cuda.cuda_error import ILLEGAL_ADDRESS

_LIBC = ctypes.CDLL(None, use_errno=True)
_SMALL_NBYTES = 2 * 2**20
_SMALL_SKEW_NBYTES = 1024
_POISON = 0xDD
"""What freed memory holds: nothing that a test writes on purpose."""


class DeviceFault(Exception):  # noqa: N818 - as a GPU calls it
    """What stops the GPU: raised by work that runs on the fake, among it a fake kernel."""

    def __init__(self, message, code=ILLEGAL_ADDRESS):
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, eq=False)
class Region:
    """A run of addresses that a GPU reaches.

    `kind`: ``"device"`` and ``"host"`` (allocated by kvmoor), ``"registered"``, ``"engine"`` (the engine's on the GPU).
    """

    kind: str
    address: int
    nbytes: int
    ordinal: int
    read_only: bool = False

    @property
    def end(self):
        return self.address + self.nbytes


def new_memory(nbytes):
    """Return the address of new memory on a page boundary, and what keeps it alive."""
    owner = mmap.mmap(-1, nbytes)
    return ctypes.addressof(ctypes.c_char.from_buffer(owner)), owner


def bytes_at(address, nbytes):
    """Return memory as a uint8 array, which does not keep it alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def is_mapped(address, nbytes):
    """Say whether every page of a range is mapped into this process."""
    start = address - address % mmap.PAGESIZE
    arguments = ctypes.c_void_p(start), ctypes.c_size_t(address + nbytes - start), ctypes.c_int(1)  # MS_ASYNC
    return _LIBC.msync(*arguments) == 0


class FakeMemory:
    """The memory that GPUs reach. Nothing is ever unmapped, so that late accesses are seen rather than fatal."""

    def __init__(self):
        self._regions = {}  # by kind and address
        self._owners = []  # keeps all memory ever handed out

    def allocate(self, kind, nbytes, ordinal):
        # As the driver does: what is smaller than 2 MiB is cut from larger pieces, and begins on no page.
        skew = _SMALL_SKEW_NBYTES if kind == "host" and nbytes < _SMALL_NBYTES else 0
        address, owner = new_memory(nbytes + skew)
        address += skew
        self._owners.append(owner)
        self._regions[kind, address] = Region(kind, address, nbytes, ordinal)
        return address

    def add(self, region, owner=None):
        self._regions[region.kind, region.address] = region
        self._owners.append(owner)

    def remove(self, kind, address):
        """Forget a region and return it, None if there is none that begins there."""
        region = self._regions.pop((kind, address), None)
        if region is not None and kind != "registered":
            bytes_at(region.address, region.nbytes)[:] = _POISON
        return region

    def find(self, address):
        """Return the region around an address, None if there is none."""
        for region in self._regions.values():
            if region.address <= address < region.end:
                return region
        return None

    def overlapping(self, address, nbytes):
        return [region for region in self._regions.values() if region.address < address + nbytes > address < region.end]

    def of_kind(self, kind):
        return [region for region in self._regions.values() if region.kind == kind]

    def problem(self, address, nbytes, *, write):
        """Return what is wrong with one access of the copy engine, or nothing."""
        region = self.find(address)
        if region is None:
            return f"{address:#x} is neither device memory nor page-locked"
        if address + nbytes > region.end:
            return (
                f"{nbytes} bytes from {address:#x} leave the {region.kind} range of {region.nbytes} bytes they begin in"
            )
        if write and region.read_only:
            return f"{address:#x} is registered for reading only"
        return ""

    def touch(self, address, nbytes, *, write):
        """Raise `DeviceFault` unless a kernel can read, or write, all these bytes; it may cross from range to range."""
        end = address + nbytes
        while address < end:
            region = self.find(address)
            if region is None or (write and region.read_only):
                verb = "writes" if write else "reads"
                raise DeviceFault(f"a kernel {verb} {address:#x}, which it cannot reach so")
            address = region.end
