"""Compiling CUDA C++ for one kind of GPU with NVRTC, which needs neither a GPU nor a driver nor a toolkit."""

import logging
from importlib.resources import files
from typing import Any, Final

from kvmoor.errors import DeviceError, MissingDependencyError

_log = logging.getLogger("kvmoor")

DEFAULT_OPTIONS: Final = ("--std=c++17",)
_SUCCESS: Final = 0


def page_copy_source() -> str:
    """Return the source of the page kernel."""
    return (files(__package__) / "page_copy.cu").read_text(encoding="utf-8")


def compiler_version() -> str:
    """Return the version of NVRTC, ``"13.0"``. Loads its library. Raises `MissingDependencyError`."""
    major, minor = _call(_load(), "nvrtcVersion")
    return f"{major}.{minor}"


def choose_architecture(major: int, minor: int) -> str:
    """Return what to compile for, on a GPU of compute capability `major`.`minor`.

    That is the GPU's own architecture (``"sm_90"``) if this NVRTC knows it, else the next lower one of the same major
    version, whose code it runs as well (CUDA C++ Programming Guide, Binary Compatibility), else, on a GPU newer than
    NVRTC, the latest virtual one (``"compute_120"``), which the driver translates.
    Raises `DeviceError` for a GPU that NVRTC knows no more, `MissingDependencyError` without NVRTC.
    """
    known = sorted(divmod(int(number), 10) for number in _call(_load(), "nvrtcGetSupportedArchs"))
    usable = [each for each in known if each <= (major, minor)]
    if not usable:
        raise DeviceError(
            f"the GPU has compute capability {major}.{minor}, and NVRTC {compiler_version()} compiles from "
            f"{known[0][0]}.{known[0][1]} on: kvmoor cannot copy with this GPU"
        )
    kind = "sm" if usable[-1][0] == major else "compute"
    return f"{kind}_{usable[-1][0]}{usable[-1][1]}"


def compile_source(
    source: str, architecture: str, *, options: tuple[str, ...] = DEFAULT_OPTIONS, name: str = "page_copy.cu"
) -> bytes:
    """Compile and return what `Driver.module_load` takes: a cubin for ``"sm_90"``, PTX for ``"compute_90"``.

    Takes about a second for the page kernel, without the interpreter lock. Any thread may call. Raises `DeviceError`
    with NVRTC's messages, `MissingDependencyError` without NVRTC.
    """
    nvrtc = _load()
    program = _call(nvrtc, "nvrtcCreateProgram", source.encode(), name.encode(), 0, [], [])
    try:
        arguments = [f"--gpu-architecture={architecture}".encode(), *(option.encode() for option in options)]
        (result,) = nvrtc.nvrtcCompileProgram(program, len(arguments), arguments)
        messages = _read(nvrtc, "ProgramLog", program).decode(errors="replace").strip("\0 \n")
        if int(result) != _SUCCESS:
            raise DeviceError(
                f"NVRTC {compiler_version()} cannot compile {name} for {architecture} with {' '.join(options)} "
                f"({_error_name(nvrtc, result)}):\n{messages}"
            )
        if messages:
            _log.debug("NVRTC about %s for %s: %s", name, architecture, messages)
        return _read(nvrtc, "CUBIN" if architecture.startswith("sm_") else "PTX", program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _load() -> Any:
    """Return the bindings, with the library loaded."""
    try:
        from cuda.bindings import nvrtc  # noqa: PLC0415 - nobody without a GPU has to have it

        nvrtc.nvrtcVersion()
    except Exception as error:  # what a missing library raises differs from version to version
        raise MissingDependencyError(
            f"the copy kernel of a CUDA device is compiled with NVRTC, which cannot be loaded ({error}): "
            'pip install "kvmoor[cuda]"'
        ) from error
    return nvrtc


def _call(nvrtc: Any, function: str, *arguments: object) -> Any:
    """Call and return what comes after the error code: one value, or a tuple of them."""
    result, *values = getattr(nvrtc, function)(*arguments)
    if int(result) != _SUCCESS:
        raise DeviceError(f"{function}: {_error_name(nvrtc, result)} ({int(result)})")
    return values[0] if len(values) == 1 else tuple(values)


def _read(nvrtc: Any, what: str, program: Any) -> bytes:
    """Return one of the results of a compilation."""
    nbytes = int(_call(nvrtc, f"nvrtcGet{what}Size", program))
    # NVRTC writes into this object. Python shares bytes objects of length 0 and 1, so it is made one longer.
    result = bytes(nbytes + 1)
    _call(nvrtc, f"nvrtcGet{what}", program, result)
    return result[:nbytes]


def _error_name(nvrtc: Any, result: Any) -> str:
    _, name = nvrtc.nvrtcGetErrorString(result)
    return str(name.decode())
