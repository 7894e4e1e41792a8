import json
import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmoor.errors import CorruptDataError, KvmoorError, SettingsError
from kvmoor.host_memory.arena import Arena
from kvmoor.host_memory.arena_plan import ArenaPlan, GroupPlan
from kvmoor.host_memory.limits import MemoryLimits
from kvmoor.host_memory.memfd import MemfdSegments
from kvmoor.host_memory.owner_process import SharedFile
from kvmoor.host_memory.page_mapping import SystemCalls
from kvmoor.host_memory.process_identity import ProcessIdentity
from kvmoor.host_memory.status_segment import StatusSegment
from kvmoor.host_memory.ticket import ArenaTicket, make_ticket, place_slabs
from shared_arena import GROUPS, KIB, LAYOUT, MIB, PLAN, sharing_owner

# Five slabs, so five segments; each takes what its slots need in steps of 2 MiB.
TICKET = ArenaTicket(
    owner=ProcessIdentity(100, 5000, "a-boot", 4026531836),
    segments=tuple(SharedFile(10 + number, 1, 900 + number, 2 * MIB) for number in range(5)),
    status=SharedFile(20, 1, 990, 4 * KIB),
    nonce=bytes(range(16)),
    layout_fingerprint=bytes(range(32)),
    groups=GROUPS,
)


def test_a_ticket_survives_the_journey():
    """A ticket is the same after pickling, and after it was text."""
    assert TICKET == pickle.loads(pickle.dumps(TICKET))
    assert TICKET == ArenaTicket.from_json(TICKET.to_json())
    assert TICKET == ArenaTicket.from_json(TICKET.to_json().encode())


def test_a_ticket_names_what_the_owner_has():
    """Files, nonce, layout and geometry are those of the arena and its segment."""
    with sharing_owner() as owner:
        ticket = owner.ticket
        assert owner.arena.descriptors == tuple(segment.descriptor for segment in ticket.segments)
        assert (owner.status.shared_file, owner.status.nonce) == (ticket.status, ticket.nonce)
        assert (owner.status.owner, LAYOUT.fingerprint) == (ticket.owner, ticket.layout_fingerprint)
        assert PLAN.groups == ticket.groups == ticket.plan.groups


WRONG_FIELDS = {
    "format_version": 2,
    "owner": replace(TICKET.owner, pid=0),
    "segments": (replace(TICKET.segments[0], inode=-1), *TICKET.segments[1:]),
    "status": replace(TICKET.status, descriptor="7"),
    "nonce": b"short",
    "layout_fingerprint": "text",
    "groups": (replace(GROUPS[0], num_slots=True), *GROUPS[1:]),
}


@pytest.mark.parametrize("name", list(WRONG_FIELDS))
def test_a_value_of_the_wrong_kind_is_refused_by_name(name):
    """What no owner writes is refused when a ticket is made, and the message says where in it."""
    with pytest.raises(CorruptDataError, match=name.partition("_")[0]):
        replace(TICKET, **{name: WRONG_FIELDS[name]})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("owner", None),
        ("owner", replace(TICKET.owner, pid=2**31)),
        ("segments", None),
        ("segments", 1),
        ("segments", list(TICKET.segments)),
        ("segments", (None, *TICKET.segments[1:])),
        ("status", None),
        ("groups", None),
        ("groups", 1.5),
        ("groups", "text"),
        ("groups", (TICKET.segments[0],)),
    ],
)
def test_a_record_of_the_wrong_kind_is_corrupt(name, value):
    """What is no record, no tuple of records or no process id is refused by name, and never another error."""
    ticket = pickle.loads(pickle.dumps(TICKET))
    object.__setattr__(ticket, name, value)
    with pytest.raises(CorruptDataError, match=f"{name}.* of a ticket is"):
        ticket.check()


def test_a_ticket_without_a_field_is_corrupt():
    """Another version may pickle fewer fields: what is missing is named."""
    ticket = pickle.loads(pickle.dumps(TICKET))
    object.__delattr__(ticket, "groups")
    with pytest.raises(CorruptDataError, match="lacks groups"):
        ticket.check()


def test_an_unpickled_ticket_can_be_checked():
    """Unpickling checks nothing, so whoever uses a ticket can."""
    ticket = pickle.loads(pickle.dumps(TICKET))
    object.__setattr__(ticket, "nonce", b"short")
    with pytest.raises(CorruptDataError, match="nonce of a ticket"):
        ticket.check()


@pytest.mark.parametrize(
    "groups",
    [
        (),
        GROUPS[:1],
        GROUPS[1:],
        (GROUPS[0], replace(GROUPS[1], offset=4 * MIB), GROUPS[2]),
        (replace(GROUPS[0], num_slots=20), *GROUPS[1:]),
        (replace(GROUPS[0], num_slots=2**60), *GROUPS[1:]),
        (replace(GROUPS[0], num_slots=0), *GROUPS[1:]),
        (replace(GROUPS[0], slots_per_slab=0), *GROUPS[1:]),
        (replace(GROUPS[0], slots_per_slab=33), *GROUPS[1:]),
        (replace(GROUPS[0], slab_pitch=2 * MIB + 4096), *GROUPS[1:]),
    ],
)
def test_a_geometry_that_contradicts_itself_is_refused(groups):
    """Slots outside of their slab, slabs outside of the files, sizes that do not add up: nothing is computed with."""
    with pytest.raises(CorruptDataError):
        replace(TICKET, groups=groups)


def test_sizes_from_outside_cannot_keep_us_busy():
    """A ticket that claims slabs without end is refused at once."""
    endless = GroupPlan(0, 16, 4 * KIB, 1, 2 * MIB, num_slots=2**36)
    segments = tuple(replace(TICKET.segments[0], nbytes=2**57 // 64) for _ in range(64))
    with pytest.raises(CorruptDataError):
        replace(TICKET, groups=(endless,), segments=segments)


values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8) | st.just([])


def paths_in(value, path=()):
    """Return the way to every value inside a ticket."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, inner in items for found in paths_in(inner, (*path, key)))]


PATHS = paths_in(json.loads(TICKET.to_json()))


@given(st.sampled_from(PATHS[1:]), values)
def test_any_changed_value_is_a_ticket_or_corrupt(path, value):
    """Whatever stands in the place of one value, reading gives a ticket or says that it is none."""
    fields = json.loads(TICKET.to_json())
    place = fields
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    read_or_refuse(json.dumps(fields))


@given(st.sampled_from([path for path in PATHS[1:] if isinstance(path[-1], str)]))
def test_any_missing_value_is_corrupt(path):
    """A ticket without one of its values is refused."""
    fields = json.loads(TICKET.to_json())
    place = fields
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    with pytest.raises(CorruptDataError):
        ArenaTicket.from_json(json.dumps(fields))


@given(st.text() | st.binary() | st.recursive(values, lambda inner: st.lists(inner, max_size=3)).map(json.dumps))
def test_any_text_is_a_ticket_or_corrupt(text):
    """Text of any kind is refused without another error."""
    with pytest.raises(CorruptDataError):
        ArenaTicket.from_json(text)


def read_or_refuse(text):
    try:
        ArenaTicket.from_json(text).check()
    except CorruptDataError:
        return


def test_only_a_shared_arena_has_a_ticket():
    """Anonymous memory cannot be attached to, and a segment or layout of another arena is noticed."""
    with sharing_owner() as owner, Arena(PLAN, mapping="eager") as private:
        with pytest.raises(SettingsError, match=r"backing=Backing\.MEMFD"):
            make_ticket(private, owner.status, LAYOUT)
        other_layout = replace(LAYOUT, groups=LAYOUT.groups[::-1])
        with pytest.raises(SettingsError, match="another layout"):
            make_ticket(owner.arena, owner.status, other_layout)
        smaller = replace(PLAN, groups=(replace(GROUPS[0], num_slots=39), *GROUPS[1:]))
        with (
            StatusSegment(smaller, LAYOUT, engine_id="engine", rank=1) as other,
            pytest.raises(SettingsError, match="made for the plan of the arena"),
        ):
            make_ticket(owner.arena, other, LAYOUT)
        denser = replace(PLAN, groups=(replace(GROUPS[0], slots_per_slab=15), *GROUPS[1:]))
        with (
            StatusSegment(denser, LAYOUT, engine_id="engine", rank=1) as other,
            pytest.raises(SettingsError, match="made for the plan of the arena"),
        ):
            make_ticket(owner.arena, other, LAYOUT)
        owner.status.close()
        with pytest.raises(KvmoorError):
            make_ticket(owner.arena, owner.status, LAYOUT)
        owner.arena.close()
        with pytest.raises(KvmoorError):
            make_ticket(owner.arena, owner.status, LAYOUT)


@pytest.mark.parametrize("num_slots", [1, 40, 63 * 16, 64 * 16 + 1, 200 * 16 - 3])
def test_readers_look_where_the_owner_puts_slabs(num_slots):
    """The place of each slab, computed from the plan alone, is the one that the owner's files have."""
    groups = (replace(GROUPS[0], num_slots=num_slots), replace(GROUPS[1], offset=(num_slots + 15) // 16 * 2 * MIB))
    slabs = ArenaPlan(2**30, groups, MemoryLimits(), "warn").slabs
    places, sizes = place_slabs(slabs)
    segments = MemfdSegments("places", slabs, SystemCalls())  # sizes only: no memory is allocated
    try:
        assert list(slabs) == [place.slab for place in places]
        for place in places:
            expected = (segments.descriptors[place.segment], place.file_offset)
            assert expected == segments.location(place.slab)
        assert len(segments.descriptors) == len(sizes)
    finally:
        segments.close()
