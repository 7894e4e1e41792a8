"""The piece tables of layouts, put on the device once and shared by all queues."""

import ctypes
import threading
from dataclasses import dataclass

from kvmoor.block_layout import GroupLayout
from kvmoor.devices.cuda.context import CudaContext
from kvmoor.devices.cuda.holdings import Holdings
from kvmoor.devices.cuda.piece_table import PieceTable, build_piece_table
from kvmoor.process_end import register


@dataclass(frozen=True, slots=True, eq=False)
class DeviceTable:
    """A piece table on the device at `address`; it is there once the event `uploaded` (its handle) is reached."""

    group: GroupLayout
    table: PieceTable
    address: int
    uploaded: int


class DeviceTables:
    """Upload the piece tables of groups, each once for a size of pieces. Any thread may call; never blocks.

    They are uploaded on a stream of their own, on which nothing waits for the engine, and stay as long as the device.
    """

    def __init__(self, context: CudaContext, holdings: Holdings) -> None:
        self._context = context
        self._driver = context.driver
        self._holdings = holdings
        self._lock = threading.Lock()  # guards all below, and is held while a table is built
        self._stream = 0
        self._tables: dict[tuple[int, int], DeviceTable] = {}  # by id of the group, which the table keeps alive
        register(self, forked=self._forked)

    def _forked(self) -> None:
        """Be free in a forked child, where it is of no use."""
        self._lock = threading.Lock()

    def find(self, group: GroupLayout, piece_nbytes: int) -> DeviceTable:
        """Return the table of a group, which has to have tensors; what copies has to wait for its `uploaded`.

        Raises `LayoutError` for a group that is too large for one, and `DeviceError` if there is no memory for it.
        """
        with self._lock:
            key = id(group), piece_nbytes
            if key not in self._tables:
                self._tables[key] = self._upload(group, build_piece_table(group, piece_nbytes))
            return self._tables[key]

    def is_idle(self) -> bool:
        """Say whether every upload is over. Raises `DeviceError` if the device failed."""
        with self._lock, self._context.relaxed():
            return all(self._driver.event_query(table.uploaded) for table in self._tables.values())

    def forget(self) -> None:
        """Drop the tables; their memory is about to be given back."""
        with self._lock:
            self._tables.clear()

    def _upload(self, group: GroupLayout, table: PieceTable) -> DeviceTable:
        if not self._stream:
            self._stream = self._holdings.open_stream()
        address = self._holdings.device_memory(table.nbytes)
        # From page-locked memory, or the driver could wait for the stream before it takes the bytes.
        source = self._holdings.host_memory(table.nbytes)
        ctypes.memmove(source, table.pieces.ctypes.data, table.nbytes)
        uploaded = self._holdings.open_event()
        with self._context.relaxed():
            self._driver.copy_async(address, source, table.nbytes, self._stream)
            self._driver.event_record(uploaded, self._stream)
        return DeviceTable(group, table, address, uploaded)
