"""How a function of the driver is called, and how its error codes become errors."""

from collections.abc import Callable
from typing import Any, Final

from kvmoor.devices.cuda.cuda_error import NOT_READY, CudaError
from kvmoor.errors import DeviceError


class DriverCalls:
    """Call functions of the driver by their names in ``cuda.bindings.driver``, or in what stands in for it."""

    def __init__(self, bindings: Any) -> None:
        self._bindings: Final = bindings
        self.broken = ""
        """Why no call is of use any more, for people; empty while all is well. Written once, by whoever meets it."""

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the driver and return what it returns, without its error code."""
        try:
            result, *values = getattr(self._bindings, name)(*arguments)
        except RuntimeError as error:  # the bindings look functions up when they are first called
            raise DeviceError(f"the CUDA driver does not offer {name}: update the NVIDIA driver") from error
        except ValueError as error:
            raise unknown_error(name, error) from error
        if result:
            raise self._error(name, result)
        return values[0] if len(values) == 1 else values

    def _without_result(self, name: str) -> Callable[..., None]:
        """Return a function as `_call` calls it, for those that return nothing but their error code."""
        function = getattr(self._bindings, name)

        def call(*arguments: Any) -> None:
            try:
                (result,) = function(*arguments)
            except ValueError as error:
                raise unknown_error(name, error) from error
            if result:
                raise self._error(name, result)

        return call

    def _with_result(self, name: str) -> Callable[..., Any]:
        """Return a function as `_call` calls it, for those that return one thing beside their error code."""
        function = getattr(self._bindings, name)

        def call(*arguments: Any) -> Any:
            try:
                result, value = function(*arguments)
            except ValueError as error:
                raise unknown_error(name, error) from error
            if result:
                raise self._error(name, result)
            return value

        return call

    def _call_unless_broken(self, name: str, *arguments: Any) -> Any:
        if self.broken:
            raise DeviceError(f"{name} is not called any more, since it could block: {self.broken}")
        return self._call(name, *arguments)

    def _is_ready(self, call: str, query: Callable[[int], tuple[Any]], handle: int) -> bool:
        try:
            (result,) = query(handle)
        except ValueError as error:
            raise unknown_error(call, error) from error
        if not result:
            return True
        if int(result) == NOT_READY:
            return False
        raise self._error(call, result)

    def _error(self, call: str, result: Any) -> CudaError:
        """Translate a result that is not a success, and remember it if nothing can succeed after it."""
        error = CudaError(call, int(result), getattr(result, "name", ""))
        if error.is_sticky and not self.broken:
            self.broken = str(error)
        return error


def unknown_error(call: str, error: ValueError) -> DeviceError:
    """Translate what the bindings raise for an error code that is newer than they are."""
    return DeviceError(f"{call} failed, and the CUDA bindings do not know why ({error}): update cuda-bindings")
