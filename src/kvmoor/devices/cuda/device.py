"""A GPU that an engine computes on: its copy queues, its page-locked memory, and an end that always comes.

    with CudaDevice(current_stream=torch.cuda.current_stream) as device:
        device.check_layout(layout)
        store = device.open_copy_queue("store", Direction.DEVICE_TO_HOST)
        store.enqueue(copies, 1, device.record_event())

Nothing that the device opened is given back before `close` has proven that nothing of it runs: to free memory blocks
behind a stream that hangs. Where that is not proven, everything stays until the process ends, and no call is made that
could block.
"""

import logging
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

from kvmoor.block_layout import BlockLayout
from kvmoor.devices.cuda.calibration import Calibration, Measurement, measure_copies
from kvmoor.devices.cuda.completion import COMPLETION_NBYTES, CompletionMemory
from kvmoor.devices.cuda.context import CudaContext
from kvmoor.devices.cuda.copy_queue import CudaCopyQueue
from kvmoor.devices.cuda.copy_strategy import CopyStrategy
from kvmoor.devices.cuda.cuda_error import OUT_OF_MEMORY, CudaError
from kvmoor.devices.cuda.device_tables import DeviceTables
from kvmoor.devices.cuda.driver import Driver
from kvmoor.devices.cuda.engine_marks import CurrentStream, EngineMarks
from kvmoor.devices.cuda.freeing import keep_until_exit
from kvmoor.devices.cuda.gathering import GatheringSubmission, may_gather
from kvmoor.devices.cuda.holdings import Holdings
from kvmoor.devices.cuda.job_submission import TICKET_NBYTES, JobSubmission
from kvmoor.devices.cuda.page_kernels import PageKernels
from kvmoor.devices.cuda.registered_ranges import RangeRegistrar
from kvmoor.devices.cuda.registrar import CudaRegistrar
from kvmoor.devices.cuda.streams import CudaEvent, EventPool
from kvmoor.devices.device import Direction
from kvmoor.errors import BusyError, ClosedError, DeviceError, LayoutError, NoRoomError
from kvmoor.process_end import is_leaving, register

_log = logging.getLogger("kvmoor")

_PCI_DEVICES: Final = Path("/sys/bus/pci/devices")
_EXIT_TIMEOUT_S: Final = 5.0
"""How long leaving a ``with`` block waits for copies. Guessed: as long as `Offloader.close`."""
_FREE_TIMEOUT_S: Final = 5.0
"""How long `free_staging` waits for the driver. It takes 0.1 s a GB unless something hangs (H200)."""
_POLL_S: Final = 0.001


class CudaDevice:
    """Copy between tensors on one GPU and slots in page-locked host memory. A `Device`; owns the queues it opens.

    Works in the context that is current on the calling thread, or in that of GPU `ordinal`. `current_stream` is the
    engine's stream, or a function that returns it (``torch.cuda.current_stream``), in any form that
    `engine_stream_handle` takes. `strategy`: None for what was measured on this GPU before, or else the defaults;
    "calibrate" to measure at the first `check_layout` or `open_copy_queue` if it was not, which takes less than a
    second. `most_ring_nbytes` lowers `gather_ring_nbytes` of what is so found. `cache_dir` is where measurements and
    compiled code are kept (None: nowhere). Raises `DeviceError` without a usable GPU, `MissingDependencyError` without
    bindings.
    """

    def __init__(
        self,
        *,
        ordinal: int | None = None,
        current_stream: CurrentStream = None,
        strategy: CopyStrategy | Literal["calibrate"] | None = None,
        most_ring_nbytes: int | None = None,
        driver: Driver | None = None,
        cache_dir: Path | None = None,
    ) -> None:
        self._driver = driver or Driver()
        self._context = CudaContext(self._driver, ordinal)
        self._holdings = Holdings(self._context)
        self._strategy = strategy
        self._most_ring_nbytes = most_ring_nbytes
        try:
            self._name = self._driver.device_name(self._context.device)
            attribute = partial(self._driver.device_attribute, self._context.device)
            self._writes_numbers = bool(attribute("CAN_USE_64_BIT_STREAM_MEM_OPS"))
            self._events = EventPool(self._context)
            self._tables = DeviceTables(self._context, self._holdings)
            self._calibration = Calibration(self._driver, self._context, cache_dir and cache_dir / "calibration")
            self._kernels = PageKernels(self._context, self._holdings, cache_dir and cache_dir / "cubin")
            # Now, while the engine is at rest: what is loaded or allocated later may have to wait for it.
            self._holdings.take_reserve()
            for direction in Direction:
                self._kernels.find(self.strategy.variant(direction))
        except BaseException:
            self._holdings.give_back(_FREE_TIMEOUT_S, and_then=self._context.release)
            raise
        self._registrar = RangeRegistrar(CudaRegistrar(self._context), on_empty=self._release_if_unused)
        self._engine = EngineMarks(self._events, current_stream)
        self._queues: list[CudaCopyQueue] = []
        self._rings_to_open: set[Direction] = set()
        self._staging_nbytes: dict[int, int] = {}  # by address; single operations on it are safe from any thread
        self._close_lock = threading.Lock()  # held by the one thread that closes
        self._closed = self._given_back = self._released = self._kept = self._inherited = False
        register(self, forked=self._forked)

    def _forked(self) -> None:
        """Be closed in a forked child, where nothing of CUDA works."""
        self._close_lock = threading.Lock()
        self._closed = self._inherited = True

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            message = f"{self!r} was never closed: what it holds stays until the process ends"
            warnings.warn(message, ResourceWarning, source=self, stacklevel=2)

    def __repr__(self) -> str:
        state = ", closed" if self._closed else f", broken: {self.broken}" if self.broken else ""
        return f"<CudaDevice {self._context.ordinal}, {self._name}{state}>"

    @property
    def name(self) -> str:
        """Return the name of the GPU."""
        return self._name

    @property
    def ordinal(self) -> int:
        """Return the number of the GPU in this process."""
        return self._context.ordinal

    @property
    def registrar(self) -> RangeRegistrar:
        """Return what page-locks host memory for the GPU. It goes on working after `close`."""
        return self._registrar

    @property
    def numa_node(self) -> int | None:
        """Return the NUMA node that the GPU is attached to; None if the system does not tell."""
        with suppress(OSError, ValueError, DeviceError):
            bus_id = self._driver.pci_bus_id(self._context.device)
            node = int((_PCI_DEVICES / bus_id / "numa_node").read_text(encoding="ascii"))
            return node if node >= 0 else None
        return None

    @property
    def broken(self) -> str:
        """Return why the GPU is of no use to this process any more, or an empty string."""
        return "" if self._inherited else self._driver.broken

    @property
    def strategy(self) -> CopyStrategy:
        """Return how queues that are opened now copy."""
        return self._strategy if isinstance(self._strategy, CopyStrategy) else CopyStrategy()

    def check_layout(self, layout: BlockLayout) -> None:
        """Raise `LayoutError` unless the tensors lie on this GPU; make ready what their copies need.

        If long jobs of theirs go by way of a ring in device memory (`gathering`), the next queue of each direction
        takes its ring when it is opened, and any other with its first such job. Raises `DeviceError` if what they need
        cannot be had: memory for tables, a compiler.
        """
        self._check_open("layout to be checked")
        for index, group in enumerate(layout.groups):
            for number, tensor in enumerate(group.tensors):
                last = tensor.base + (tensor.num_blocks - 1) * tensor.block_stride + tensor.page_nbytes - 1
                for address in (tensor.base, last):
                    self._check_address(address, f"tensor {number} of group {index}")
        self._settle_strategy(layout)
        for direction in Direction:
            variant = self.strategy.variant(direction)
            self._kernels.find(variant)
            for group in layout.groups:
                if group.tensors:
                    self._tables.find(group, variant.piece_nbytes)
                if may_gather(self.strategy, group):
                    self._rings_to_open.add(direction)

    def open_copy_queue(self, name: str, direction: Direction) -> CudaCopyQueue:
        """Open a queue on a stream of its own. Raises `DeviceError` with nothing left to close."""
        self._check_open("copy queue")
        if any(queue.name == name for queue in self._queues):
            raise BusyError(f"{self!r} has a queue {name!r} already: give each owner a device of its own")
        self._settle_strategy(None)
        opens_ring = direction in self._rings_to_open
        self._rings_to_open.discard(direction)
        return self._open_queue(name, direction, self.strategy, opens_ring=opens_ring)

    def prepare_thread(self) -> None:
        """Make the context current on the calling thread, and its calls harmless to whoever captures a graph."""
        self._context.prepare_thread()

    def allocate_staging(self, nbytes: int) -> int:
        """Return the address of new page-locked memory from the driver's own allocator."""
        self._check_open("piece of staging memory")
        try:
            address = self._holdings.lend_host_memory(nbytes)
        except CudaError as error:
            if error.code == OUT_OF_MEMORY:
                raise NoRoomError(f"{nbytes} bytes of page-locked staging memory cannot be had: {error}") from error
            raise
        self._staging_nbytes[address] = nbytes
        return address

    def free_staging(self, address: int) -> None:
        """Give memory of `allocate_staging` back, also after `close`.

        Waits for the driver for 5 s at most; a driver that is held up frees it later. What a device that could not be
        closed may still touch stays, as does everything once the process is ending or the GPU failed.
        """
        nbytes = self._staging_nbytes.pop(address)
        if self._inherited or self._kept or self.broken or is_leaving():
            return
        if not self._holdings.free_host_memory(address, _FREE_TIMEOUT_S):
            _log.warning("%d bytes of staging memory are not free after %g s: the GPU is busy", nbytes, _FREE_TIMEOUT_S)
        self._release_if_unused()

    @property
    def staging_nbytes(self) -> int:
        """Return how much staging memory was not given back yet."""
        return sum(self._staging_nbytes.copy().values())

    def measure_copies(self, timeout_s: float, on_step: Callable[[], None] = lambda: None) -> list[Measurement]:
        """Measure all ways to copy, as calibration does, and keep the result for later devices on this GPU.

        On an idle GPU it takes less than a second. `on_step` is called after each measurement. Raises
        `DeviceError` at the deadline.
        """
        self._check_open("measurement")
        deadline = time.monotonic() + timeout_s
        measurements = measure_copies(self._holdings, self._open_queue, deadline=deadline, on_step=on_step)
        self._calibration.keep(measurements)
        return measurements

    def use_stream(self, stream: CurrentStream) -> None:
        """Make `stream` the engine's current one, or what is asked for it, for `record_event`."""
        self._engine.use_stream(stream)

    def record_event(self, stream: object | None = None) -> CudaEvent:
        """Mark the present end of a stream of the engine's, by default of its current one. Takes some us.

        An engine that loads marks its stream so immediately before the forward of the step that needs the blocks, and
        the load waits for that instead of for the forward. Raises `SettingsError` if the device was not told which
        stream the engine computes on, and `DeviceError` while the stream captures a graph.
        """
        self._check_open("event")
        return self._engine.record(stream)

    def close(self, timeout_s: float) -> bool:
        """Close all queues and give back what the device holds.

        Return whether that is done: nothing of kvmoor's runs on the GPU any more, and freeing memory did not block.
        Then the registrar still works, and staging memory can be freed. Otherwise everything stays until the process
        ends, or until another call finds that it can be given back. Ends by the deadline either way.
        """
        deadline = time.monotonic() + timeout_s
        self._closed = True
        if not self._close_lock.acquire(timeout=max(0.0, timeout_s)):
            return False
        try:
            if self._inherited or self._given_back:
                if not (self._inherited or self._released):
                    self._events.close()  # of those that somebody held until now
                return True
            if not self._is_proven_idle(deadline):
                if not self._kept:
                    self._kept = True
                    keep_until_exit(self)
                return False
            self._kept = False
            self._given_back = self._give_back(deadline)
        finally:
            self._close_lock.release()
        self._release_if_unused()
        return self._given_back

    @property
    def closed(self) -> bool:
        """Say whether `close` was called."""
        return self._closed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self.close(_EXIT_TIMEOUT_S):
            _log.warning("%r is not proven idle after %g s: what it holds stays", self, _EXIT_TIMEOUT_S)

    def _open_queue(
        self, name: str, direction: Direction, strategy: CopyStrategy, *, opens_ring: bool = False
    ) -> CudaCopyQueue:
        functions = self._kernels.find(strategy.variant(direction))
        stream = self._holdings.open_stream()
        completion = CompletionMemory(self._holdings.host_memory(COMPLETION_NBYTES))
        ticket_address = self._holdings.device_memory(TICKET_NBYTES)
        with self._context.relaxed():
            direct = JobSubmission(
                self._driver,
                stream,
                direction,
                strategy=strategy,
                functions=functions,
                tables=self._tables,
                completion=completion,
                ticket_address=ticket_address,
                writes_numbers=self._writes_numbers,
                range_starts=lambda: self._registrar.starts,
            )
            submission: JobSubmission | GatheringSubmission = direct
            if strategy.gather_from_nbytes is not None and self._writes_numbers:
                submission = GatheringSubmission(
                    self._driver,
                    self._holdings,
                    direct,
                    direction,
                    copy_stream=self._holdings.open_stream(),
                    strategy=strategy,
                    completion=completion,
                    range_starts=lambda: self._registrar.starts,
                )
                if opens_ring:
                    submission.open_ring()
        queue = CudaCopyQueue(name, self._context, stream, completion, submission, self._events)
        self._queues.append(queue)
        return queue

    def _settle_strategy(self, layout: BlockLayout | None) -> None:
        """Decide how to copy, if that was left to the device, before the first queue is opened."""
        if isinstance(self._strategy, CopyStrategy):
            return
        found = self._calibration.find(layout)
        if found is None and self._strategy == "calibrate":
            self._calibration.measure(self._holdings, self._open_queue)
            found = self._calibration.find(layout)
        self._strategy = (found or CopyStrategy()).with_ring_of_at_most(self._most_ring_nbytes)

    def _check_address(self, address: int, what: str) -> None:
        with self._context.current():
            is_device = self._driver.pointer_is_device(address)
            ordinal = self._driver.pointer_device(address)
        if not is_device:
            raise LayoutError(
                f"{what} of the layout does not lie in GPU memory (address {address:#x}), which {self!r} cannot copy: "
                "use CpuDevice, or pass tensors on the GPU with all their blocks"
            )
        if ordinal != self._context.ordinal:
            raise LayoutError(
                f"{what} of the layout lies on GPU {ordinal}, not on {self!r}: open a device for that GPU (ordinal), "
                "or make it current first"
            )

    def _check_open(self, asked: str) -> None:
        if self._closed:
            raise ClosedError(f"there was a {asked} for {self!r}: make another device")

    def _is_proven_idle(self, deadline: float) -> bool:
        """Say whether nothing of ours runs any more and nothing seems to hang."""
        self._engine.mark_end()
        for queue in self._queues:
            queue.close(0.0)
        proven = [queue.close(deadline - time.monotonic()) for queue in self._queues]
        return all(proven) and (bool(self.broken) or _wait_until(self._is_quiet, deadline))

    def _give_back(self, deadline: float) -> bool:
        """Give everything back, as far as that is possible; return whether that is done."""
        # A broken driver answers every call at once and frees nothing. A process that ends gives all back by ending.
        if self.broken or is_leaving():
            return True
        for queue in self._queues:
            queue.detach()
        self._tables.forget()
        self._engine.forget()
        self._events.close()
        return self._holdings.give_back(deadline - time.monotonic())

    def _is_quiet(self) -> bool:
        """Say whether uploads are over, and what the engine had queued when it was last marked."""
        try:
            return self._tables.is_idle() and self._engine.is_over()
        except DeviceError:
            return bool(self.broken)

    def _release_if_unused(self) -> None:
        """Let go of the context once nobody can need it any more: not before the last range is unregistered.

        That may take the context down and so may block; hence the thread for it.
        """
        is_used = bool(self._staging_nbytes) or bool(self._registrar.starts.size) or not self._given_back
        if not (is_used or self._released or self._inherited or self.broken):
            self._released = True
            self._holdings.give_back(0.0, and_then=self._context.release)


def _wait_until(is_so: Callable[[], bool], deadline: float) -> bool:
    while not is_so():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True
