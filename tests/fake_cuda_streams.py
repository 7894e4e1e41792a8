"""Streams and events of the fake driver: work queued in order, which runs only when somebody says so."""

from collections import deque
from dataclasses import dataclass, field


@dataclass(eq=False)
class Point:
    """One recording of an event."""

    is_captured: bool = False
    is_reached: bool = False
    reached_at_ms: float = 0.0


@dataclass(eq=False)
class FakeEvent:
    keeps_time: bool
    context: int
    point: Point | None = None

    @property
    def is_done(self):
        return self.point is None or self.point.is_reached


@dataclass(eq=False)
class Item:
    """One piece of queued work. With a point it is a wait, and is over once the point is reached."""

    label: str
    work: object = None
    waits_for: Point | None = None


@dataclass(eq=False)
class FakeStream:
    handle: int
    context: int
    items: deque = field(default_factory=deque)
    is_hung: bool = False
    is_capturing: bool = False

    @property
    def is_default(self):
        """Say whether it is one of the default streams, which belong to the engine."""
        return self.handle <= 2

    @property
    def is_busy(self):
        return self.is_hung or bool(self.items)

    @property
    def can_step(self):
        """Say whether the first item can run now."""
        if self.is_hung or not self.items:
            return False
        point = self.items[0].waits_for
        return point is None or point.is_reached
