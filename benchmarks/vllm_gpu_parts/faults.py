"""Loads that bring nothing, on demand: with or without saying so. In the process of the engine only."""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvmoor.devices.device import BlockCopies, Direction
from kvmoor.errors import DeviceError


class FaultScript:
    """What the next loads do. `fail`: so many bring nothing and say so. `lie`: all bring nothing and call it done."""

    def __init__(self) -> None:
        self.fail = 0
        self.lie = False
        self.num_faults = 0


class FaultyQueue:
    """A copy queue that follows a script."""

    def __init__(self, queue: Any, script: FaultScript) -> None:
        self._queue = queue
        self._script = script
        self._failed: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def enqueue(self, copies: Sequence[BlockCopies], sequence: int, wait_for: Any) -> None:
        """Queue a job, or a job of nothing in its place."""
        script = self._script
        if script.fail > 0:
            script.fail -= 1
            self._failed.add(sequence)
        if script.lie or sequence in self._failed:
            script.num_faults += 1
            copies = ()
        self._queue.enqueue(copies, sequence, wait_for)

    def failure(self, sequence: int) -> DeviceError | None:
        """Return why a job failed."""
        found: DeviceError | None = self._queue.failure(sequence)
        if sequence in self._failed:
            self._failed.discard(sequence)
            return DeviceError("the benchmark wanted this load to fail")
        return found


@contextmanager
def scripted_loads() -> Iterator[FaultScript]:
    """Let the loads of engines that are started inside, in this process, follow the script."""
    plugin: Any = importlib.import_module("kvmoor.integrations.vllm.spec")
    script = FaultScript()
    open_device = plugin.open_device

    def open_scripted(layout: Any) -> Any:
        device: Any = open_device(layout)
        open_queue = device.open_copy_queue

        def open_copy_queue(name: str, direction: Direction) -> Any:
            queue = open_queue(name, direction)
            return FaultyQueue(queue, script) if direction is Direction.HOST_TO_DEVICE else queue

        device.open_copy_queue = open_copy_queue
        return device

    plugin.open_device = open_scripted
    try:
        yield script
    finally:
        plugin.open_device = open_device
