"""Page-locking host memory with the CUDA driver, so that the GPU reaches it at the speed of the link."""

import logging
from contextlib import ExitStack
from typing import Final

from kvmoor.devices.cuda.context import CudaContext
from kvmoor.devices.cuda.cuda_error import (
    ALREADY_REGISTERED,
    CAPTURE_IMPLICIT,
    CAPTURE_INVALIDATED,
    CAPTURE_UNSUPPORTED,
    INVALID_VALUE,
    NOT_REGISTERED,
    NOT_SUPPORTED,
    OPERATING_SYSTEM,
    OUT_OF_MEMORY,
    UNKNOWN,
    CudaError,
)
from kvmoor.errors import DeviceError
from kvmoor.registration import RegistrationError

_log = logging.getLogger("kvmoor")

_PASSING: Final = frozenset(
    {
        OUT_OF_MEMORY,
        OPERATING_SYSTEM,
        ALREADY_REGISTERED,
        CAPTURE_UNSUPPORTED,
        CAPTURE_INVALIDATED,
        CAPTURE_IMPLICIT,
        UNKNOWN,
    }
)
"""Refusals that say something about this range or this moment; after any other there is no use in trying again."""

_REMEDIES: Final = {
    INVALID_VALUE: "the platform does not page-lock such memory: leave pin off, kvmoor then copies through memory of "
    "the driver's own",
    OUT_OF_MEMORY: "lower host_memory, or what other processes page-lock: the limit is the driver's or the platform's, "
    "not `ulimit -l`",
    NOT_SUPPORTED: "run without confidential computing if copies are too slow: nothing else makes host memory "
    "page-lockable there",
    ALREADY_REGISTERED: "let nobody else page-lock memory of kvmoor",
}
_OTHER_ADDRESS_REMEDY: Final = (
    "use a platform with unified addressing; until then kvmoor copies through memory of the driver's own"
)


class CudaRegistrar:
    """Register host memory for all GPUs of this process. A `Registrar`; no CUDA error stays pending after a failure.

    The runtime library would leave one for whoever calls it next (vLLM issue 50070); the driver itself does not.
    """

    def __init__(self, context: CudaContext) -> None:
        self._context = context
        self._driver = context.driver

    @property
    def name(self) -> str:
        """Return ``"CUDA driver"``."""
        return "CUDA driver"

    def prepare_thread(self) -> None:
        """Make the context current on the calling thread, and its calls harmless to captures."""
        self._context.prepare_thread()

    def register(self, address: int, nbytes: int, *, read_only: bool = False) -> None:
        """Register one range, which the device then has to see at the very address that the host does.

        Raises `RegistrationError` with nothing registered; `DeviceError` if a range that is of no use could not be
        undone.
        """
        with ExitStack() as current:
            try:
                current.enter_context(self._context.relaxed())
            except DeviceError as error:
                raise _refusal(f"{nbytes} bytes at {address:#x} could not be page-locked", error) from error
            if read_only and not self._driver.device_attribute(
                self._context.device, "READ_ONLY_HOST_REGISTER_SUPPORTED"
            ):
                raise RegistrationError(
                    f"the GPU cannot register {nbytes} bytes that are mapped for reading only",
                    code=NOT_SUPPORTED,
                    remedy="use a newer GPU or driver; until then kvmoor copies through memory of the driver's own",
                    permanent=True,
                )
            try:
                self._driver.host_register(address, nbytes, read_only)
            except DeviceError as error:
                raise _refusal(f"{nbytes} bytes at {address:#x} could not be page-locked", error) from error
            self._check_device_address(address, nbytes)

    def unregister(self, address: int, nbytes: int) -> None:
        """Undo `register`. Blocks until everything that runs on the device has ended."""
        with self._context.relaxed():
            try:
                self._driver.host_unregister(address)
            except CudaError as error:
                if error.code == NOT_REGISTERED:  # which is what was asked for
                    _log.warning("%d bytes at %#x were unregistered by somebody else: %s", nbytes, address, error)
                    return
                raise _refusal(f"{nbytes} bytes at {address:#x} may still be page-locked", error) from error
            except DeviceError as error:
                raise _refusal(f"{nbytes} bytes at {address:#x} may still be page-locked", error) from error

    def _check_device_address(self, address: int, nbytes: int) -> None:
        """Unregister a range that the device sees elsewhere: copies use one address for both sides."""
        cause: DeviceError | None = None
        found = "the driver does not tell where"
        try:
            device_address = self._driver.host_device_pointer(address)
        except DeviceError as error:
            cause = error
        else:
            if device_address == address:
                return
            found = f"at {device_address:#x}"
        self._driver.host_unregister(address)
        message = f"the GPU sees {nbytes} bytes at {address:#x} elsewhere ({found}), so no copy can use them"
        code = cause.code if isinstance(cause, CudaError) else 0
        raise RegistrationError(message, code=code, remedy=_OTHER_ADDRESS_REMEDY, permanent=True) from cause


def _refusal(message: str, error: DeviceError) -> RegistrationError:
    """Translate an error of the driver, or its being broken."""
    if not isinstance(error, CudaError):
        return RegistrationError(f"{message}: {error}", permanent=True)
    remedy = _REMEDIES.get(error.code, error.remedy)
    return RegistrationError(
        f"{message}: {error.name}", code=error.code, remedy=remedy, permanent=error.code not in _PASSING
    )
