"""Workers that load from the arena of another process: its death proves nothing wrong right."""

import random
import select

import pytest

from child_processes import children, processes_with_memfd
from kvmoor.errors import BrokenError, RequestError
from kvmoor.host_memory.ticket import ArenaTicket
from kvmoor.transfer_messages import Outcome
from reading_rig import NUM_SLOTS, WAIT_S, Reader

NUM_STEPS = 120


class Child:
    """A process of the rig, one command and one answer a line."""

    def __init__(self, process, first_line=""):
        self.process = process
        if first_line:
            self._send(first_line)
        self.greeting = self._answer()

    def ask(self, *words):
        self._send(" ".join(map(str, words)))
        return self._answer()

    def kill(self):
        self.process.kill()
        self.process.wait(WAIT_S)

    def end(self):
        """Let it end by itself; return its exit code."""
        self.process.stdin.close()
        return self.process.wait(WAIT_S)

    def _send(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def _answer(self):
        assert select.select([self.process.stdout], [], [], WAIT_S)[0], "no answer: the process hangs"
        return self.process.stdout.readline().strip()


@pytest.fixture
def start():
    with children() as start:
        yield start


def start_owner(start, engine_id):
    return Child(start(f"from reading_rig import serve_owner\nserve_owner({engine_id!r})"))


def test_an_owner_that_is_killed_while_a_reader_loads(start) -> None:
    """The load under way and later ones of READY slots bring the right bytes; what was being stored is refused."""
    owner = start_owner(start, "reading-killed")
    for order, slot in ((1, 3), (2, 4)):
        assert owner.ask("keep", order, slot, 100 + slot) == "done"
    with Reader() as reader:
        reader.worker.attach(ArenaTicket.from_json(owner.greeting))
        gate = reader.scripted.hang_at(0)
        reader.load(1, [3], [8])
        assert gate.wait_reached(WAIT_S)
        assert owner.ask("begin", 3, 5) == "done"
        owner.kill()
        assert not reader.worker.attached.owner_alive()
        gate.release()

        assert [(1, Outcome.DONE)] == reader.finish(1)
        reader.load(2, [4], [9])
        assert [(2, Outcome.DONE)] == reader.finish(2)
        assert reader.holds(8, 103)
        assert reader.holds(9, 104)
        for slot in (5, 6):  # half stored, and never
            with pytest.raises(RequestError, match="has ended before the slot was READY"):
                reader.load(3, [slot], [10])
        assert reader.worker.close(WAIT_S).graceful
    assert set() == processes_with_memfd("reading-killed")


def test_an_owner_that_was_killed_before_is_refused_at_once(start) -> None:
    """A ticket of a process that has ended opens nothing."""
    owner = start_owner(start, "reading-gone")
    owner.kill()
    with Reader() as reader:
        with pytest.raises(BrokenError):
            reader.worker.attach(ArenaTicket.from_json(owner.greeting))
        assert reader.worker.close(WAIT_S).graceful


def test_a_reader_that_is_killed_takes_nothing_along(start) -> None:
    """Its owner and other readers go on, and its end leaves no memory behind."""
    owner = start_owner(start, "reading-reader-killed")
    readers = [Child(start("from reading_rig import serve_reader\nserve_reader()"), owner.greeting) for _ in range(2)]
    assert owner.ask("keep", 1, 3, 33) == "done"
    readers[0].kill()
    assert readers[1].ask(1, 3, 33) == "right"
    assert owner.ask("keep", 2, 3, 44) == "done"
    assert readers[1].ask(2, 3, 44) == "right"
    assert [0, 0] == [readers[1].end(), owner.end()]
    assert set() == processes_with_memfd("reading-reader-killed")


@pytest.mark.parametrize("seed", range(3))
def test_a_walk_of_an_owner_and_two_readers(start, seed) -> None:
    """Over stores, stores that never end and loads in any order, and a kill in between, a load that is DONE is right.

    The walk keeps the books of a coordinator: what is READY has to be loaded, the rest has to be refused.
    """
    chance = random.Random(seed)
    name = f"reading-walk-{seed}"
    owner = start_owner(start, name)
    readers = [Child(start("from reading_rig import serve_reader\nserve_reader()"), owner.greeting) for _ in range(2)]
    assert ["attached"] * 2 == [reader.greeting for reader in readers]
    contents, dead_at = {}, chance.randrange(NUM_STEPS // 2, NUM_STEPS)
    for step in range(NUM_STEPS):
        order = step + 1
        slot = chance.randrange(NUM_SLOTS)
        if step == dead_at:
            if chance.random() < 0.5:  # a store is under way when the owner is killed
                assert owner.ask("begin", order, slot) == "done"
                contents.pop(slot, None)
            owner.kill()
        elif step < dead_at and chance.random() < 0.4:
            content = chance.randrange(1, 2**30)
            assert owner.ask("keep", order, slot, content) == "done"
            contents[slot] = content
        else:
            answer = chance.choice(readers).ask(order, slot, contents.get(slot, 0))
            if slot in contents:
                assert answer == "right", (step, slot)
            else:
                assert answer.startswith("RequestError"), (step, slot, answer)
    assert [0, 0] == [reader.end() for reader in readers]
    assert set() == processes_with_memfd(name)
