"""Whose CUDA context kvmoor works in: the engine's, on the engine's GPU, and current only while kvmoor needs it."""

from types import TracebackType

from kvmoor.devices.cuda.cuda_error import CudaError
from kvmoor.devices.cuda.driver import CaptureMode, Driver
from kvmoor.errors import DeviceError


class CudaContext:
    """Hold on to the context of one GPU. Any thread may call, except that one owner calls `release`.

    With `ordinal` None it is the context that is current on the calling thread; if none is, the primary context of the
    one GPU that this process uses. With a number it is the context of that GPU: the current one if that is on it, else
    its primary one, created if need be. Raises `DeviceError` if that leaves no GPU, or more than one, to choose from.
    """

    def __init__(self, driver: Driver, ordinal: int | None = None) -> None:
        self._driver = driver
        current = driver.context_current()
        current_device = driver.context_device() if current else None
        self._ordinal, device = _choose_device(driver, ordinal, current_device)
        self._device = device
        self._holds_primary = False
        self._handle = current if current and device == current_device else 0
        # A reference keeps a primary context alive when the engine lets go of it while copies still run. Where it is
        # not active, the engine's context is another one, and asking for the primary one would create it.
        if not self._handle or driver.primary_context_active(device):
            primary = driver.primary_context_retain(device)
            self._holds_primary = self._handle in {0, primary}
            if self._holds_primary:
                self._handle = primary
            else:
                driver.primary_context_release(device)

    @property
    def driver(self) -> Driver:
        """Return the driver that the context belongs to."""
        return self._driver

    @property
    def handle(self) -> int:
        """Return the driver's handle of the context."""
        return self._handle

    @property
    def device(self) -> int:
        """Return the driver's handle of the GPU."""
        return self._device

    @property
    def ordinal(self) -> int:
        """Return the number of the GPU in this process."""
        return self._ordinal

    def current(self) -> "_Current":
        """Return a ``with`` block in which the context is current on this thread; then it is what it was before."""
        return _Current(self._driver, self._handle)

    def relaxed(self) -> "_Relaxed":
        """Return a ``with`` block as `current`, in which calls of this thread harm no graph capture, whoever captures.

        For what may run on a thread of the engine's. The one call that breaks a capture all the same, a device
        synchronize (measured), is never made.
        """
        return _Relaxed(self._driver, self._handle)

    def prepare_thread(self) -> None:
        """Make the context current on the calling thread, and its calls harmless to captures, for good.

        For threads of kvmoor's own: on one of the engine's it would change what the engine finds there.
        """
        self._driver.exchange_capture_mode("relaxed")
        if self._driver.context_current() != self._handle:
            self._driver.context_set(self._handle)

    def release(self) -> None:
        """Give the reference to the context back; does nothing twice.

        Caller: nothing of kvmoor's runs on the GPU and nothing is left open there, since the last reference takes the
        context with it and may block behind what still runs. A broken context stays with the process.
        """
        if self._holds_primary and not self._driver.broken:
            self._holds_primary = False
            self._driver.primary_context_release(self._device)


class _Current:
    """Make a context current and restore what was so. One use at a time."""

    __slots__ = ("_driver", "_handle", "_previous", "_pushed")

    def __init__(self, driver: Driver, handle: int) -> None:
        self._driver = driver
        self._handle = handle
        self._previous = 0
        self._pushed = False

    def __enter__(self) -> None:
        self._previous = self._driver.context_current()
        if self._previous != self._handle:
            self._driver.context_push(self._handle)
            self._pushed = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._pushed:
            return
        self._pushed = False
        try:
            try:
                self._driver.context_pop()
            except CudaError:
                # It may have failed with the error of some earlier work, popped or not.
                if self._driver.context_current() != self._previous:
                    self._driver.context_set(self._previous)
                if error is None:
                    raise
        except DeviceError as second:
            if error is None:
                raise
            error.add_note(f"and the CUDA context that was current before could not be restored: {second}")


class _Relaxed(_Current):
    """Make a context current, and the thread harmless to captures."""

    __slots__ = ("_mode",)

    def __enter__(self) -> None:
        self._mode: CaptureMode = self._driver.exchange_capture_mode("relaxed")
        try:
            _Current.__enter__(self)
        except BaseException as error:
            self._restore_mode(error)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._pushed:
                _Current.__exit__(self, kind, error, traceback)
        except BaseException as second:
            self._restore_mode(second)
            raise
        self._restore_mode(error)

    def _restore_mode(self, error: BaseException | None) -> None:
        """Let the thread get along with captures as before. `error`: what is on its way to the caller anyway."""
        if self._mode == "relaxed":
            return
        try:
            self._driver.exchange_capture_mode(self._mode)
        except DeviceError:
            # It may have been the error of some earlier work. Were the mode left, mistakes that the engine makes during
            # its captures would no longer be found.
            try:
                self._driver.exchange_capture_mode(self._mode)
            except DeviceError as second:
                if error is None:
                    raise
                error.add_note(f"and how this thread gets along with captures could not be restored: {second}")


def _choose_device(driver: Driver, ordinal: int | None, current_device: int | None) -> tuple[int, int]:
    """Return number and handle of the GPU to work on; never one that nobody named and nobody uses."""
    devices = [driver.device_get(number) for number in range(driver.device_count())]
    if ordinal is not None:
        if not 0 <= ordinal < len(devices):
            raise DeviceError(
                f"GPU {ordinal} was asked for, and this process sees {len(devices)}: give a number from 0 below that, "
                "or make more of them visible with CUDA_VISIBLE_DEVICES"
            )
        return ordinal, devices[ordinal]
    if current_device is not None:
        return devices.index(current_device), current_device
    active = [number for number, device in enumerate(devices) if driver.primary_context_active(device)]
    if len(active) != 1:
        found = f"it uses {len(active)} of {len(devices)} GPUs" if devices else "it sees no GPU"
        raise DeviceError(
            f"no CUDA context is current on this thread, and none can be told from what the process uses ({found}): "
            "open the device after the engine has put its tensors on the GPU, on a thread that uses it, or pass ordinal"
        )
    return active[0], devices[active[0]]
