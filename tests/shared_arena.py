"""A small arena that processes share: one group of large slots, one of small ones, one without bytes."""

import ctypes
import sys
from contextlib import ExitStack, contextmanager

import numpy as np

from kvmoor.block_layout import BlockLayout, GroupLayout, TensorPages
from kvmoor.host_memory.arena import Arena
from kvmoor.host_memory.arena_plan import ArenaPlan, GroupPlan
from kvmoor.host_memory.limits import MemoryLimits
from kvmoor.host_memory.slab_memory import Backing
from kvmoor.host_memory.status_segment import StatusSegment
from kvmoor.host_memory.ticket import make_ticket
from kvmoor.transfer_messages import OrderId

KIB, MIB = 2**10, 2**20
LAYOUT = BlockLayout(
    (
        GroupLayout((TensorPages(2**30, 8, 64 * KIB, 64 * KIB),), tokens_per_block=16),
        GroupLayout((TensorPages(2**31, 8, 4 * KIB, 4 * KIB),), tokens_per_block=16),
        GroupLayout((), tokens_per_block=16),
    )
)
GROUPS = (
    GroupPlan(0, 16, 64 * KIB, 16, 2 * MIB, num_slots=40),
    GroupPlan(1, 16, 4 * KIB, 60, 2 * MIB, num_slots=80, offset=6 * MIB),
    GroupPlan(2, 16, 0, 0, 0, num_slots=80, offset=10 * MIB),
)
PLAN = ArenaPlan(3 * MIB, GROUPS, MemoryLimits(), "refuse")


def pattern(group, slot):
    """Return the bytes that belong into a slot."""
    return bytes([1 + (group * 80 + slot) % 255]) * GROUPS[group].slot_nbytes


def read_slot(arena, group, slot):
    """Return the bytes of a slot, as the arena says where it is."""
    address = int(arena.slot_addresses(group, np.array([slot]))[0])
    return ctypes.string_at(address, GROUPS[group].slot_nbytes)


class SharingOwner:
    """Hold an arena, its status segment and its ticket; do to slots what a worker does."""

    def __init__(self, opened, engine_id="engine"):
        self.arena = opened.enter_context(Arena(PLAN, backing=Backing.MEMFD, mapping="eager", name="shared"))
        self.status = opened.enter_context(StatusSegment(PLAN, LAYOUT, engine_id=engine_id, rank=0))
        self.ticket = make_ticket(self.arena, self.status, LAYOUT)

    def publish(self):
        for slots in self.arena.take_published():
            self.status.publish_slots(slots)

    def begin(self, group, slot):
        """Start a copy into a slot and leave it half-way."""
        self.status.begin_fill(group, [slot])
        address = int(self.arena.slot_addresses(group, np.array([slot]))[0])
        ctypes.memset(address, 0xFF, GROUPS[group].slot_nbytes // 2)

    def fill(self, group, slot, order_id):
        self.begin(group, slot)
        content = pattern(group, slot)
        ctypes.memmove(int(self.arena.slot_addresses(group, np.array([slot]))[0]), content, len(content))
        self.status.complete_fill(group, [slot], OrderId(order_id))


@contextmanager
def sharing_owner(engine_id="engine"):
    """Share an arena from this process, all slots published."""
    with ExitStack() as opened:
        owner = SharingOwner(opened, engine_id)
        owner.publish()
        yield owner


def serve_owner(engine_id):
    """Share an arena from a child process: print the ticket, then obey one command a line and answer each."""
    with ExitStack() as opened:
        owner = SharingOwner(opened, engine_id)
        print(owner.ticket.to_json(), flush=True)
        for line in sys.stdin:
            command, *numbers = line.split()
            if command == "beat":
                owner.status.beat()
            elif command == "close":
                opened.close()
            else:
                getattr(owner, command)(*map(int, numbers))
            print("done", flush=True)
