"""What the numbers mean that the CUDA driver returns: their names, what to do, and which of them end everything.

The names and which errors leave a process unable to go on are NVIDIA's (CUDA driver API, CUresult); they are repeated
here because messages have to be readable where no driver is, and because a driver may be newer than the bindings.
"""

from typing import Final

from kvmoor.errors import DeviceError

INVALID_VALUE: Final = 1
OUT_OF_MEMORY: Final = 2
NOT_INITIALIZED: Final = 3
INVALID_DEVICE: Final = 101
INVALID_CONTEXT: Final = 201
OPERATING_SYSTEM: Final = 304
INVALID_HANDLE: Final = 400
NOT_FOUND: Final = 500
NOT_READY: Final = 600
ILLEGAL_ADDRESS: Final = 700
ALREADY_REGISTERED: Final = 712
NOT_REGISTERED: Final = 713
LAUNCH_FAILED: Final = 719
NOT_PERMITTED: Final = 800
NOT_SUPPORTED: Final = 801
CAPTURE_UNSUPPORTED: Final = 900
CAPTURE_INVALIDATED: Final = 901
CAPTURE_IMPLICIT: Final = 906
CAPTURED_EVENT: Final = 907
UNKNOWN: Final = 999

_RESTART: Final = (
    "a kernel or the GPU failed and every later call of this process fails as well: look at the engine's log for the "
    "kernel (compute-sanitizer finds it), and restart the process"
)
_HARDWARE: Final = (
    "the GPU reports a hardware error: look at `nvidia-smi -q` and the kernel log, and restart the process"
)
_SETUP: Final = "driver and CUDA bindings do not fit: compare `nvidia-smi` with the installed cuda-bindings"
_CAPTURE: Final = "a CUDA graph was being captured: this is a bug in kvmoor if its own thread made the call, report it"
_HANDLE: Final = "what was used does not belong to the current CUDA context, or was destroyed by somebody else"

_KNOWN: Final[dict[int, tuple[str, str]]] = {
    INVALID_VALUE: ("CUDA_ERROR_INVALID_VALUE", "the driver does not accept these arguments on this platform"),
    OUT_OF_MEMORY: (
        "CUDA_ERROR_OUT_OF_MEMORY",
        "free GPU memory or page-locked host memory, of this process or of others, or ask for less",
    ),
    NOT_INITIALIZED: ("CUDA_ERROR_NOT_INITIALIZED", "CUDA cannot be used in a forked child: start processes by spawn"),
    4: ("CUDA_ERROR_DEINITIALIZED", "the process is ending: close kvmoor before that"),
    36: ("CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER", _SETUP),
    46: ("CUDA_ERROR_DEVICE_UNAVAILABLE", "another process holds the GPU exclusively: see `nvidia-smi -q -d COMPUTE`"),
    100: ("CUDA_ERROR_NO_DEVICE", "no GPU is visible: look at `nvidia-smi` and CUDA_VISIBLE_DEVICES"),
    INVALID_DEVICE: ("CUDA_ERROR_INVALID_DEVICE", "give the number of a GPU that CUDA_VISIBLE_DEVICES leaves visible"),
    200: ("CUDA_ERROR_INVALID_IMAGE", "the compiled kernel is not for this GPU: delete the kernel cache"),
    INVALID_CONTEXT: ("CUDA_ERROR_INVALID_CONTEXT", "no usable CUDA context is current on the calling thread"),
    209: ("CUDA_ERROR_NO_BINARY_FOR_GPU", "the compiled kernel is not for this GPU: delete the kernel cache"),
    214: ("CUDA_ERROR_ECC_UNCORRECTABLE", _HARDWARE),
    220: ("CUDA_ERROR_NVLINK_UNCORRECTABLE", _HARDWARE),
    226: ("CUDA_ERROR_CONTAINED", _HARDWARE),
    OPERATING_SYSTEM: ("CUDA_ERROR_OPERATING_SYSTEM", "the operating system refused: look at its log and the limits"),
    INVALID_HANDLE: ("CUDA_ERROR_INVALID_HANDLE", _HANDLE),
    NOT_FOUND: ("CUDA_ERROR_NOT_FOUND", ""),
    NOT_READY: ("CUDA_ERROR_NOT_READY", ""),
    ILLEGAL_ADDRESS: ("CUDA_ERROR_ILLEGAL_ADDRESS", _RESTART),
    702: ("CUDA_ERROR_LAUNCH_TIMEOUT", _RESTART),
    709: ("CUDA_ERROR_CONTEXT_IS_DESTROYED", "the engine destroyed its CUDA context: close kvmoor before that"),
    710: ("CUDA_ERROR_ASSERT", _RESTART),
    ALREADY_REGISTERED: ("CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "somebody else page-locked this range"),
    NOT_REGISTERED: ("CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "somebody else gave this range back"),
    714: ("CUDA_ERROR_HARDWARE_STACK_ERROR", _RESTART),
    715: ("CUDA_ERROR_ILLEGAL_INSTRUCTION", _RESTART),
    716: ("CUDA_ERROR_MISALIGNED_ADDRESS", _RESTART),
    717: ("CUDA_ERROR_INVALID_ADDRESS_SPACE", _RESTART),
    718: ("CUDA_ERROR_INVALID_PC", _RESTART),
    LAUNCH_FAILED: ("CUDA_ERROR_LAUNCH_FAILED", _RESTART),
    721: ("CUDA_ERROR_TENSOR_MEMORY_LEAK", _RESTART),
    NOT_PERMITTED: ("CUDA_ERROR_NOT_PERMITTED", ""),
    NOT_SUPPORTED: ("CUDA_ERROR_NOT_SUPPORTED", "the platform does not offer this, as under confidential computing"),
    803: ("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", _SETUP),
    810: ("CUDA_ERROR_MPS_CLIENT_TERMINATED", "the MPS server ended this client: restart the process"),
    CAPTURE_UNSUPPORTED: ("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", _CAPTURE),
    CAPTURE_INVALIDATED: ("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", _CAPTURE),
    CAPTURE_IMPLICIT: ("CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", _CAPTURE),
    CAPTURED_EVENT: ("CUDA_ERROR_CAPTURED_EVENT", _CAPTURE),
    911: ("CUDA_ERROR_EXTERNAL_DEVICE", _HARDWARE),
    UNKNOWN: ("CUDA_ERROR_UNKNOWN", "look at the kernel log for messages of the NVIDIA driver"),
}

STICKY_CODES: Final = frozenset(
    {4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911},
)
"""Errors after which every call in this context fails. Documented so ("leaves the process in an inconsistent state"),
but for 4 and 709 (nothing is left to call), 710 (a failed assertion in a kernel does the same) and 214 and 220 (memory
of the device cannot be trusted any more)."""


class CudaError(DeviceError):
    """Report a call of the CUDA driver that failed; nothing was done by it, unless the method says otherwise.

    `call` is the driver's function, `code` and `name` its error, `remedy` what an operator can do (may be empty).
    """

    def __init__(self, call: str, code: int, name: str = "", remedy: str = "") -> None:
        known_name, known_remedy = _KNOWN.get(code, ("an error unknown to kvmoor", ""))
        self.call = call
        self.code = code
        self.name = name or known_name
        self.remedy = remedy or known_remedy
        super().__init__(f"{call}: {self.name} ({code})" + (f": {self.remedy}" if self.remedy else ""))

    @property
    def is_sticky(self) -> bool:
        """Say whether every later call in this context fails as well."""
        return self.code in STICKY_CODES
