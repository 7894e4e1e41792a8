"""A worker that only loads, from an arena that another worker owns."""

from types import SimpleNamespace

import pytest

from device_blocks import DeviceBlocks
from kvmoor.devices.cpu import CpuDevice
from kvmoor.errors import BusyError, ClosedError, LayoutError, RequestError, SettingsError
from kvmoor.observation import RegistrationDegraded, TransferEnded
from kvmoor.reading_worker import ReadingWorker
from kvmoor.testing.scripted_registrar import ScriptedRegistrar
from kvmoor.transfer_messages import OrderId, OrderKind, Outcome
from reading_rig import NUM_SLOTS, PLAN, SLAB_NBYTES, SLOTS_PER_SLAB, WAIT_S, Owner, Reader

DONE = Outcome.DONE
NUM_SLABS = NUM_SLOTS // SLOTS_PER_SLAB


@pytest.fixture
def owner():
    with Owner() as owner:
        owner.publish()
        yield owner


@pytest.fixture
def registrar():
    with ScriptedRegistrar() as registrar:
        yield registrar


@pytest.fixture
def make_reader(owner):
    readers = []

    def make(*, attach=True, **options):
        readers.append(Reader(**options))
        if attach:
            readers[-1].worker.attach(owner.worker.ticket())
        return readers[-1]

    yield make
    for reader in readers:
        with reader:
            pass


def test_what_the_owner_stored_is_loaded(owner, make_reader) -> None:
    """Every reader gets the bytes of the slots it asks for, on either lane, and reports each load once."""
    owner.keep(1, {3: 33, 30: 44})
    for reader in (make_reader(), make_reader()):
        reader.load(7, [3, 30], [5, 6])
        reader.load(8, [30], [1], expedited=True)

        assert [(7, DONE), (8, DONE)] == sorted(reader.finish(7, 8))
        assert [True] * 3 == [reader.holds(5, 33), reader.holds(6, 44), reader.holds(1, 44)]
        assert [] == reader.outcomes()
        assert 3 * 1536 == reader.worker.statistics().loaded_nbytes


def test_what_is_stored_later_is_loaded_too(owner, make_reader) -> None:
    """A slot that is filled again is read with its new bytes; nobody has to attach again."""
    reader = make_reader()
    for number, content in ((1, 33), (2, 44)):
        owner.keep(number, {3: content})
        reader.load(number, [3], [5])
        assert [(number, DONE)] == reader.finish(number)
        assert reader.holds(5, content)


def test_nothing_is_loaded_before_the_ticket_is_there(owner, make_reader) -> None:
    """An order that comes too early is refused, and nothing of it runs."""
    owner.keep(1, {3: 33})
    reader = make_reader(attach=False)

    with pytest.raises(RequestError, match="before the ticket"):
        reader.load(1, [3], [5])

    assert not reader.worker.may_touch(OrderId(1))
    assert not reader.worker.wait_registered(0.0)
    assert reader.worker.pause_registration(0.0)
    reader.worker.resume_registration()
    reader.worker.attach(owner.worker.ticket())
    reader.load(1, [3], [5])
    assert [(1, DONE)] == reader.finish(1)


def test_nobody_stores_but_the_owner(make_reader) -> None:
    """A store is refused."""
    with pytest.raises(RequestError, match="only the owner"):
        make_reader().store(1, [3], [5])


def test_only_slots_that_hold_a_whole_block_are_loaded(owner, make_reader) -> None:
    """A slot that nothing was stored in is refused, also beside others, and so is one that is being stored in."""
    owner.keep(1, {3: 33})
    reader = make_reader()
    with pytest.raises(RequestError, match="slot 4 of group 0 cannot be read: it is not READY"):
        reader.load(1, [3, 4], [5, 6])
    gate = owner.scripted.hold("store")
    owner.store(2, [3], [0])
    assert gate.wait_reached(WAIT_S)

    with pytest.raises(RequestError, match="slot 3"):
        reader.load(1, [3], [5])

    assert not reader.worker.may_touch(OrderId(1))


def test_slots_that_are_not_published_are_refused() -> None:
    """The owner says which slots there are."""
    with Owner() as owner, Reader() as reader:
        reader.worker.attach(owner.worker.ticket())
        with pytest.raises(RequestError, match="the owner published 0 of 32"):
            reader.load(1, [3], [5])


def test_what_is_read_is_registered_for_reading(owner, make_reader, registrar) -> None:
    """Each published slab is registered once, as a whole and read-only, and unregistered at the end."""
    reader = make_reader(registrar=registrar)
    assert reader.worker.wait_registered(WAIT_S)

    calls = [call for call in registrar.calls if call.operation == "register"]
    assert [SLAB_NBYTES] * NUM_SLABS == [call.nbytes for call in calls]
    assert all(call.read_only for call in calls)
    base = reader.worker.attached.base
    assert [base + slab.offset for slab in PLAN.slabs] == [call.address for call in calls]
    assert NUM_SLABS * SLAB_NBYTES == reader.worker.statistics().registered_nbytes
    assert reader.worker.close(WAIT_S).graceful
    registrar.check()
    assert NUM_SLABS == registrar.num_calls("unregister")


def test_loads_are_staged_until_their_slab_is_registered(owner, make_reader, registrar) -> None:
    """A load that comes before is right, goes through a ring, and does not wait for the registrar."""
    owner.keep(1, {0: 33, 31: 44})
    gate = registrar.hold_at(NUM_SLABS - 1)
    reader = make_reader(registrar=registrar)
    assert gate.wait_reached(WAIT_S)

    reader.load(1, [0, 31], [5, 6])  # of the first slab, which is registered, and of the last one
    assert [(1, DONE)] == reader.finish(1)
    assert reader.holds(5, 33)
    assert reader.holds(6, 44)
    assert (1, 1536) == (reader.worker.statistics().staged_jobs, reader.worker.statistics().staged_nbytes)
    gate.release()
    assert reader.worker.wait_registered(WAIT_S)
    reader.load(2, [0, 31], [7, 8])
    assert [(2, DONE)] == reader.finish(2)
    assert reader.holds(8, 44)
    assert 1 == reader.worker.statistics().staged_jobs


def test_only_published_slabs_are_registered(registrar) -> None:
    """Memory that may not exist yet is left alone; it is registered once its owner says that it is there."""
    with Owner() as owner, Reader(registrar=registrar) as reader:
        reader.worker.attach(owner.worker.ticket())
        assert not reader.worker.wait_registered(0.2)
        assert 0 == registrar.num_calls("register")
        owner.publish()
        assert reader.worker.wait_registered(WAIT_S)
        assert NUM_SLABS == registrar.num_calls("register")


def test_an_owner_that_goes_ends_the_wait(registrar) -> None:
    """Slabs that an owner did not publish before it closed never come, so no thread looks for them any more."""
    with Reader(registrar=registrar) as reader:
        with Owner() as owner:
            reader.worker.attach(owner.worker.ticket())
        assert not reader.worker.wait_registered(WAIT_S)
        thread = reader.worker._registration._thread
        thread.join(WAIT_S)
        assert not thread.is_alive()
        assert "registered" == reader.worker.statistics().registration_mode
        assert reader.worker.close(WAIT_S).graceful


def test_a_registrar_that_refuses_leads_to_staging(owner, make_reader, registrar) -> None:
    """All loads are staged and right, the reason is told once, and closing undoes nothing that was not done."""
    events = []
    registrar.fail_permanently(801)
    owner.keep(1, {3: 33})
    reader = make_reader(registrar=registrar, observer=SimpleNamespace(on_event=events.append))
    assert not reader.worker.wait_registered(WAIT_S)

    reader.load(1, [3], [5])

    assert [(1, DONE)] == reader.finish(1)
    assert reader.holds(5, 33)
    statistics = reader.worker.statistics()
    assert ("staging", 1, 1) == (
        statistics.registration_mode,
        statistics.failed_registrations,
        statistics.staged_jobs,
    )
    assert "not supported" in statistics.registration_reason
    assert reader.worker.close(WAIT_S).graceful
    assert 0 == registrar.num_calls("unregister")
    assert 1 == sum(isinstance(event, RegistrationDegraded) for event in events)
    assert 1 == sum(isinstance(event, TransferEnded) for event in events)


def test_a_slab_that_is_refused_is_staged_alone(owner, make_reader, registrar) -> None:
    """The others are registered, and only they are undone."""
    registrar.fail_at(1)
    gate = registrar.hold_at(NUM_SLABS - 1)
    owner.keep(1, {0: 33, SLOTS_PER_SLAB: 44})
    reader = make_reader(registrar=registrar)
    assert not reader.worker.wait_registered(WAIT_S)
    reader.worker.note_step()
    reader.worker.note_step_end()
    assert gate.wait_reached(WAIT_S)
    gate.release()

    reader.load(1, [0, SLOTS_PER_SLAB], [5, 6])

    assert [(1, DONE)] == reader.finish(1)
    assert reader.holds(6, 44)
    assert 1536 == reader.worker.statistics().staged_nbytes
    assert reader.worker.close(WAIT_S).graceful
    registrar.check()


def test_page_locking_can_be_off(owner, make_reader, registrar) -> None:
    """Then all is staged, and no registrar is asked."""
    owner.keep(1, {3: 33})
    reader = make_reader(registrar=registrar, pin="off")
    reader.load(1, [3], [5])

    assert [(1, DONE)] == reader.finish(1)
    assert reader.holds(5, 33)
    assert 0 == registrar.num_calls()
    assert "page-locking is switched off" == reader.worker.statistics().registration_reason


def test_a_pause_holds_registrations_up_and_not_loads(owner, make_reader, registrar) -> None:
    """While paused no call begins; afterwards all are made."""
    owner.keep(1, {3: 33})
    gate = registrar.hold_at(0)
    reader = make_reader(registrar=registrar)
    assert gate.wait_reached(WAIT_S)
    assert not reader.worker.pause_registration(0.0)
    gate.release()
    assert reader.worker.pause_registration(WAIT_S)
    reader.load(1, [3], [5])
    assert [(1, DONE)] == reader.finish(1)
    assert 1 == registrar.num_calls("register")
    reader.worker.resume_registration()
    reader.worker.resume_registration()
    assert reader.worker.wait_registered(WAIT_S)


def test_a_ticket_that_does_not_fit_is_refused_and_another_one_taken(owner, make_reader) -> None:
    """Who cannot attach holds nothing, says why, and may try again; once it reads, it reads that arena for good."""
    reader = make_reader(attach=False)
    other_blocks = DeviceBlocks(page_nbytes=1024)
    with ReadingWorker(other_blocks.layout(), CpuDevice()) as other, pytest.raises(SettingsError, match="same model"):
        other.attach(owner.worker.ticket())
    reader.worker.attach(owner.worker.ticket())
    with pytest.raises(BusyError, match="already"):
        reader.worker.attach(owner.worker.ticket())


def test_closing_ends_everything(owner, make_reader) -> None:
    """A closed worker takes no ticket and no order, and closing again gives the same report."""
    reader, unattached = make_reader(), make_reader(attach=False)
    report = reader.worker.close(WAIT_S)

    assert report.graceful
    assert report is reader.worker.close(WAIT_S)
    assert reader.worker.attached.closed
    with pytest.raises(ClosedError):
        reader.load(1, [3], [5])
    assert unattached.worker.close(WAIT_S).graceful
    with pytest.raises(ClosedError):
        unattached.worker.attach(owner.worker.ticket())


def test_a_worker_that_was_forgotten_warns() -> None:
    """Its memory and its threads would otherwise stay unnoticed."""
    reader = Reader()
    worker = reader.worker
    with pytest.warns(ResourceWarning, match="ReadingWorker on cpu, attached to nothing"):
        worker.__del__()
    worker.close(WAIT_S)


def test_a_layout_that_the_device_cannot_reach_is_refused() -> None:
    """The device is closed then, since the worker had taken it over."""
    device = CpuDevice()
    layout = DeviceBlocks().layout()
    elsewhere = type(layout)(layout.groups, on_host=False)
    with pytest.raises(LayoutError):
        ReadingWorker(elsewhere, device)
    with pytest.raises(ClosedError):
        device.open_copy_queue("load", OrderKind)  # type: ignore[arg-type]
