"""How calls of the CUDA driver behave: which of them need a context, survive a fault, break a capture, or may block."""

import threading
from dataclasses import dataclass, field

NEED_NO_CONTEXT = frozenset(
    {
        "context_current",
        "context_push",
        "context_set",
        "device_attribute",
        "device_count",
        "device_get",
        "device_name",
        "device_uuid",
        "driver_version",
        "exchange_capture_mode",
        "pci_bus_id",
        "pointer_device",
        "pointer_is_device",
        "primary_context_active",
        "primary_context_release",
        "primary_context_retain",
    }
)
SURVIVE_A_FAULT = NEED_NO_CONTEXT - {"pointer_device", "pointer_is_device"} | {"context_device", "context_pop"}
HARMLESS_TO_CAPTURES = (SURVIVE_A_FAULT - {"primary_context_release", "primary_context_retain"}) | {
    "copy_async",
    "copy_batch_async",
    "event_record",
    "host_device_pointer",
    "launch",
    "memset_async",
    "pointer_device",
    "pointer_is_device",
    "stream_is_capturing",
    "stream_wait_event",
    "stream_write_value64",
}
"""From threads that are not relaxed. Measured for what queues work; what was not measured counts as harmful."""
REFUSED_ONCE_BROKEN = frozenset(
    {
        "host_alloc",
        "host_free",
        "host_register",
        "host_unregister",
        "memory_alloc",
        "memory_free",
        "module_function",
        "module_load",
        "module_unload",
        "primary_context_release",
        "primary_context_retain",
    }
)
WAIT_FOR_THE_DEVICE = frozenset(
    {"host_free", "host_unregister", "memory_free", "module_unload", "primary_context_release"}
)
"""Measured for the first three; the others may as well."""
QUEUE_LIMIT = 1024
"""How many items a stream takes before a launch blocks; about what NVIDIA's driver does."""

ATTRIBUTES = {
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "MULTIPROCESSOR_COUNT": 132,
    "UNIFIED_ADDRESSING": 1,
    "HOST_REGISTER_SUPPORTED": 1,
    "READ_ONLY_HOST_REGISTER_SUPPORTED": 1,
    "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM": 1,
    "CAN_USE_64_BIT_STREAM_MEM_OPS": 1,
    "CAN_USE_64_BIT_STREAM_MEM_OPS_V1": 1,
    "HOST_NUMA_ID": 0,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232_448,
}

ANY_SHARED_NBYTES = 48 * 1024
"""What a thread block may have of shared memory before its kernel was allowed more."""


@dataclass(frozen=True)
class FakeCall:
    """One call of the driver, noted when it begins."""

    name: str
    arguments: tuple
    thread_id: int
    thread: str


@dataclass(eq=False)
class Capture:
    """A graph capture that is or was open."""

    mode: str
    thread_id: int
    stream: int | None
    lost: bool = False


@dataclass(eq=False)
class Fault:
    """One call that fails: the one with this number, of that name or of all."""

    name: str | None
    at: int
    code: int


@dataclass(eq=False)
class ThreadState(threading.local):
    """What the driver keeps for each thread."""

    contexts: list = field(default_factory=list)
    capture_mode: str = "global"
