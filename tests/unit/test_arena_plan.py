from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmoor.block_layout import BlockLayout, GroupLayout, TensorPages
from kvmoor.errors import NoRoomError, SettingsError
from kvmoor.host_memory.arena_plan import plan_arena
from kvmoor.host_memory.limits import KEPT_FREE_NBYTES, MemoryLimits

KIB, MIB, GIB = 2**10, 2**20, 2**30
UNKNOWN = MemoryLimits()


def make_layout(*groups):
    """Return a layout from (tokens per block, page bytes) pairs; 0 bytes: a group without tensors."""
    return BlockLayout(
        tuple(
            GroupLayout((TensorPages(2**30, 8, nbytes, nbytes),) if nbytes else (), tokens_per_block=tokens)
            for tokens, nbytes in groups
        )
    )


group_shapes = st.lists(
    st.tuples(
        st.sampled_from([1, 16, 48, 256, 4096]),
        st.one_of(st.just(0), st.integers(1, 300 * KIB), st.integers(1 * MIB, 100 * MIB)),
    ),
    min_size=1,
    max_size=4,
).filter(lambda groups: any(nbytes for _, nbytes in groups))


@given(group_shapes, st.integers(0, 6 * GIB))
def test_every_plan_keeps_its_promises(shapes, extra_nbytes):
    """Never more than requested, equal tokens, aligned slabs that do not overlap, each slot in exactly one slab."""
    layout = make_layout(*shapes)
    requested = sum(group.slot_nbytes for group in layout.groups) + extra_nbytes
    plan = plan_arena(layout, requested, limits=UNKNOWN)

    assert plan.nbytes <= requested
    assert sum(slab.resident_nbytes for slab in plan.slabs) == plan.nbytes
    assert all(group.num_slots >= 1 for group in plan.groups)

    # Equal tokens: some number of tokens is within one slot of what every group covers.
    sized = [group for group in plan.groups if group.slot_nbytes]
    assert max(group.num_tokens - group.tokens_per_block for group in sized) < min(
        group.num_tokens + group.tokens_per_block for group in sized
    )
    for group in plan.groups:
        if not group.slot_nbytes:
            assert 0 <= group.num_tokens - max(other.num_tokens for other in sized) < group.tokens_per_block
    # As much as fits: the group that covers least would not fit with one slot more.
    least = min(sized, key=lambda group: group.num_tokens)
    assert plan.nbytes - least.nbytes + replace(least, num_slots=least.num_slots + 1).nbytes > requested

    assert list(range(len(plan.slabs))) == [slab.number for slab in plan.slabs]
    ranges = sorted((slab.offset, slab.offset + slab.resident_nbytes) for slab in plan.slabs)
    assert all(first_end <= second_start for (_, first_end), (second_start, _) in pairwise(ranges))
    assert ranges[-1][1] <= plan.address_nbytes
    for slab in plan.slabs:
        group = plan.groups[slab.group]
        assert 0 == slab.offset % (2 * MIB)
        assert 0 == slab.nbytes % (4 * KIB)
        assert slab.num_slots * group.slot_nbytes == slab.nbytes
        assert slab.nbytes <= slab.resident_nbytes < slab.nbytes + 2 * MIB
        assert group.offset + slab.first_slot // group.slots_per_slab * group.slab_pitch == slab.offset
    for group in plan.groups:
        slabs = sorted((slab for slab in plan.slabs if slab.group == group.group), key=lambda slab: slab.first_slot)
        slots = [slot for slab in slabs for slot in (slab.first_slot, slab.first_slot + slab.num_slots)]
        assert slots[1:-1:2] == slots[2::2]
        assert ([0, group.num_slots] if group.slot_nbytes else []) == [*slots[:1], *slots[-1:]]
        assert len(slabs) == group.num_slabs
        if slabs:
            assert slabs[-1].nbytes == slabs[-1].resident_nbytes  # not padded to 2 MiB


@given(st.integers(1, 200 * MIB))
def test_slabs_are_about_64_mib_of_whole_slots(page_nbytes):
    """A slab has 48 to 80 MiB unless one slot alone is larger or two do not fit, and wastes at most 5 percent."""
    (group,) = plan_arena(make_layout((16, page_nbytes)), 64 * GIB, limits=UNKNOWN).groups
    nbytes = group.slots_per_slab * group.slot_nbytes
    assert 48 * MIB <= nbytes <= 80 * MIB or 1 == group.slots_per_slab
    assert group.slab_pitch - nbytes <= 0.05 * nbytes


def test_a_small_arena_is_exact():
    """64 KiB of 4 KiB slots are 16 slots and 64 KiB: nothing is rounded up to a huge page."""
    plan = plan_arena(make_layout((16, 4 * KIB)), 64 * KIB, limits=UNKNOWN)
    assert (16, 64 * KIB) == (plan.groups[0].num_slots, plan.nbytes)


def test_power_of_two_slots_make_slabs_of_64_mib_without_waste():
    """Slots of 2 MiB fill slabs of exactly 64 MiB, and a GiB is used to the last byte."""
    plan = plan_arena(make_layout((16, 2 * MIB)), GIB, limits=UNKNOWN)
    assert (32, 64 * MIB) == (plan.groups[0].slots_per_slab, plan.groups[0].slab_pitch)
    assert GIB == plan.nbytes


def test_every_group_gets_slots_before_any_gets_its_second_slab():
    """Slabs are mapped in the order of the tokens they cover, so no group waits for another to be complete."""
    plan = plan_arena(make_layout((16, MIB), (16, 3 * MIB), (64, MIB)), 2 * GIB, limits=UNKNOWN)
    assert {0, 1, 2} == {slab.group for slab in plan.slabs[:3]}
    covered = [slab.first_slot * plan.groups[slab.group].tokens_per_block for slab in plan.slabs]
    assert sorted(covered) == covered


def test_a_group_without_tensors_takes_no_bytes_and_covers_as_many_tokens():
    """Its slots are numbers only: no slab, no bytes, and never the group that runs out first."""
    plan = plan_arena(make_layout((16, MIB), (48, 0)), 100 * MIB, limits=UNKNOWN)
    assert (100, 1600) == (plan.groups[0].num_slots, plan.num_tokens)
    assert (34, 0, 0) == (plan.groups[1].num_slots, plan.groups[1].nbytes, plan.groups[1].num_slabs)


def test_too_little_for_one_slot_of_each_group_names_the_minimum():
    """The error says what was asked and what is needed at least."""
    with pytest.raises(SettingsError, match=r"host_memory is 12287 bytes.* 12288 bytes"):
        plan_arena(make_layout((16, 4 * KIB), (16, 5 * KIB)), 12 * KIB - 1, limits=UNKNOWN)
    assert 12 * KIB == plan_arena(make_layout((16, 4 * KIB), (16, 5 * KIB)), 12 * KIB, limits=UNKNOWN).nbytes


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        (MemoryLimits(available_nbytes=GIB), r"the free memory of the machine: lower host_memory, free memory"),
        (MemoryLimits(8 * GIB, GIB, "/sys/f"), r"the cgroup limit /sys/f: lower host_memory, raise that limit"),
    ],
    ids=["machine", "cgroup"],
)
def test_more_than_the_limits_allow_is_refused_with_asked_found_and_do(limits, text):
    """The error names what is needed, what is available within which limit, and what to do."""
    with pytest.raises(NoRoomError, match=rf"needs 2\.15 GB .*2\.15 GB requested.*1\.01 GB available within {text}"):
        plan_arena(make_layout((16, MIB)), 2 * GIB, limits=limits)


def test_the_last_byte_within_the_limits_is_allowed():
    """Exactly what the limits leave can be planned; one slot more is refused."""
    layout = make_layout((16, 4 * KIB))
    limits = MemoryLimits(available_nbytes=KEPT_FREE_NBYTES + 64 * KIB)
    assert 64 * KIB == plan_arena(layout, 64 * KIB, limits=limits).nbytes
    with pytest.raises(NoRoomError):
        plan_arena(layout, 68 * KIB, limits=limits)


def test_a_check_that_only_warns_says_so_in_the_plan():
    """With memory_check "warn" the plan is made, carries the warning, and shows it."""
    limits = MemoryLimits(available_nbytes=GIB)
    plan = plan_arena(make_layout((16, MIB)), 2 * GIB, limits=limits, memory_check="warn")
    assert 2 * GIB == plan.nbytes
    assert 1 == len(plan.warnings)
    assert "warning: host memory needs 2.15 GB" in plan.describe()


@pytest.mark.parametrize("nbytes", [0, -1, True, 1.5, None])
def test_a_size_that_is_none_is_refused(nbytes):
    """Only a positive whole number of bytes is a size."""
    with pytest.raises(SettingsError, match="host_memory"):
        plan_arena(make_layout((16, MIB)), nbytes, limits=UNKNOWN)


def test_more_than_a_process_can_address_is_refused_at_once():
    """A slip of the keyboard is an error, even where no limit is known, and builds no giant plan."""
    with pytest.raises(SettingsError, match="can address"):
        plan_arena(make_layout((16, MIB)), 10**18, limits=UNKNOWN, memory_check="warn")


def test_an_unknown_memory_check_is_refused():
    """The two words are named in the error."""
    with pytest.raises(SettingsError, match='memory_check is \'never\': give "refuse" or "warn"'):
        plan_arena(make_layout((16, MIB)), GIB, limits=UNKNOWN, memory_check="never")


def test_without_limits_those_of_this_machine_are_read():
    """A plan made without limits carries the limits that were in force."""
    assert plan_arena(make_layout((16, 4 * KIB)), 64 * KIB).limits.available_nbytes


def test_the_description_is_a_table_of_all_that_will_be_allocated(tmp_path):
    """Bytes, slots, tokens and limits are shown for each group, before anything is allocated."""
    limits = MemoryLimits(8 * GIB, 4 * GIB, "/sys/f")
    plan = plan_arena(make_layout((16, MIB), (32, 0)), 100 * MIB, limits=limits, root=tmp_path)
    assert [
        "host memory: 105 MB of 105 MB requested, 150 slots, 1,600 tokens in every group",
        "group  tokens/block     slot  slots  tokens  slabs   bytes",
        "    0            16  1.05 MB    100   1,600      2  105 MB",
        "    1            32      0 B     50   1,600      0     0 B",
        f"placement: {plan.placement.describe()}",
        "limits: the machine has 8.59 GB available, the cgroup limit /sys/f leaves 4.29 GB",
    ] == plan.describe().splitlines()


def machine_with_two_nodes(root):
    folder = root / "sys/devices/system/node"
    folder.mkdir(parents=True)
    (folder / "has_memory").write_text("0-1\n")
    return root


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"device_numa_node": 1}, "NUMA: node 1 preferred (next to the device)"),
        ({"numa": "interleave"}, 'NUMA: interleaved over nodes 0, 1 (numa="interleave")'),
        ({"numa": "off", "device_numa_node": 1}, 'NUMA: left to the kernel (numa="off")'),
        ({"huge_pages": "off"}, 'huge pages: none (huge_pages="off")'),
    ],
)
def test_the_placement_that_was_asked_for_is_part_of_the_plan(tmp_path, options, text):
    """Nodes and page sizes are decided and shown before anything is allocated."""
    root = machine_with_two_nodes(tmp_path)
    plan = plan_arena(make_layout((16, MIB)), GIB, limits=UNKNOWN, root=root, **options)
    assert text in plan.placement.describe()
    assert f"placement: {plan.placement.describe()}" in plan.describe().splitlines()


@pytest.mark.parametrize(
    ("options", "text"), [({"numa": 2}, "numa is 2"), ({"numa": "far"}, "'far'"), ({"huge_pages": "on"}, "'on'")]
)
def test_a_placement_that_cannot_be_is_refused(tmp_path, options, text):
    """A node or a word that does not exist is an error of the settings."""
    with pytest.raises(SettingsError, match=text):
        plan_arena(make_layout((16, MIB)), GIB, limits=UNKNOWN, root=machine_with_two_nodes(tmp_path), **options)


def room(nbytes, **others):
    return MemoryLimits(available_nbytes=KEPT_FREE_NBYTES + nbytes, **others)


def test_the_ranks_of_a_host_share_what_was_asked_for():
    """The plan of one rank is its equal part, and the description tells how many there are and the sum."""
    plan = plan_arena(make_layout((16, MIB)), 4 * GIB, limits=UNKNOWN, ranks_on_host=4)
    assert (GIB, GIB, 4) == (plan.requested_nbytes, plan.nbytes, plan.ranks_on_host)
    assert "ranks: 4 on this host, 4.29 GB in all" in plan.describe().splitlines()


def test_the_sum_of_all_ranks_has_to_be_there():
    """What fits one rank four times is not enough for four: they start at once, and each sees the same free memory."""
    layout = make_layout((16, MIB))
    assert plan_arena(layout, GIB, limits=room(2 * GIB))
    with pytest.raises(
        NoRoomError,
        match=r"needs 4\.29 GB \(of 4\.29 GB requested\) for 4 ranks on this host, 1\.07 GB each, 2\.15 GB available "
        r'within .*: lower host_memory, .* or pass memory_check="warn"',
    ):
        plan_arena(layout, 4 * GIB, limits=room(2 * GIB), ranks_on_host=4)


def test_a_plan_that_is_accepted_has_room_for_a_slab_of_every_rank():
    """Beside the sum a slab for each other rank must fit, or the last slabs of an accepted plan would be refused."""
    layout = make_layout((16, 2 * MIB))
    needed = 4 * GIB + 3 * 64 * MIB
    assert GIB == plan_arena(layout, 4 * GIB, limits=room(needed), ranks_on_host=4).nbytes
    with pytest.raises(NoRoomError):
        plan_arena(layout, 4 * GIB, limits=room(needed - 1), ranks_on_host=4)


def test_what_other_ranks_hold_already_is_not_counted_twice():
    """A rank that starts late sees less free memory, because the others have taken what they were promised."""
    layout = make_layout((16, 2 * MIB))
    options = {"ranks_on_host": 4, "limits": room(2 * GIB + 3 * 64 * MIB)}
    assert plan_arena(layout, 4 * GIB, mapped_by_other_ranks_nbytes=2 * GIB, **options)
    with pytest.raises(NoRoomError):
        plan_arena(layout, 4 * GIB, mapped_by_other_ranks_nbytes=2 * GIB - 1, **options)


@pytest.mark.parametrize("ranks", [0, -1, True, 1.0, "2", None])
def test_a_number_of_ranks_that_is_none_is_refused(ranks):
    """Only a whole number of at least one is a number of ranks."""
    with pytest.raises(SettingsError, match="ranks_on_host is"):
        plan_arena(make_layout((16, MIB)), GIB, limits=UNKNOWN, ranks_on_host=ranks)


def test_too_little_for_one_slot_on_each_rank_names_the_minimum():
    """The minimum is that of all ranks together."""
    with pytest.raises(SettingsError, match=r"one slot of each group on each of 4 ranks takes 16384 bytes"):
        plan_arena(make_layout((16, 4 * KIB)), 16 * KIB - 1, limits=UNKNOWN, ranks_on_host=4)


def reserve_huge_pages(root, count):
    folder = root / "sys/kernel/mm/hugepages/hugepages-2048kB"
    folder.mkdir(parents=True)
    (folder / "free_hugepages").write_text(f"{count}\n")
    (folder / "resv_hugepages").write_text("0\n")
    return root


def test_reserved_huge_pages_are_room_that_free_memory_need_not_give(tmp_path):
    """A host that set its memory aside as huge pages is not refused: the free memory has to hold the rest only."""
    layout = make_layout((16, 2 * MIB))
    root = reserve_huge_pages(tmp_path, 512)
    limits = room(GIB, hugetlb_nbytes=GIB)
    assert plan_arena(layout, 2 * GIB, limits=limits, root=root)
    with pytest.raises(NoRoomError):
        plan_arena(layout, 2 * GIB + 2 * MIB, limits=limits, root=root)
    with pytest.raises(NoRoomError):
        plan_arena(layout, 2 * GIB, limits=limits, root=root, huge_pages="off")
    assert plan_arena(layout, GIB, limits=room(0, hugetlb_nbytes=GIB), root=root)
    with pytest.raises(NoRoomError):  # slabs that do not fill their pages cannot use them
        plan_arena(make_layout((16, MIB)), 3 * MIB, limits=room(0, hugetlb_nbytes=GIB), root=root)


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        (
            MemoryLimits(address_nbytes=2 * GIB - 1),
            r"address-space limit of the process leaves 2\.15 GB: lower host_memory, raise the limit \(ulimit -v",
        ),
        (
            MemoryLimits(commit_nbytes=2 * GIB - 1),
            r"commit limit of the machine leaves 2\.15 GB: lower host_memory, set vm\.overcommit_memory to 0 or 1",
        ),
    ],
    ids=["address space", "commit"],
)
def test_limits_of_addresses_and_promises_are_refused_by_name(limits, text):
    """They are taken as a whole when an arena opens, so they are looked at when it is planned."""
    layout = make_layout((16, MIB))
    with pytest.raises(NoRoomError, match=text):
        plan_arena(layout, 2 * GIB, limits=limits)
    assert plan_arena(layout, 2 * GIB - 64 * MIB, limits=limits)


def test_memory_that_grows_as_it_is_used_is_not_refused_for_good():
    """A guest whose memory is given to it on demand shows little as free: the refusal names the way around (warn)."""
    layout = make_layout((16, MIB))
    with pytest.raises(NoRoomError, match=r'pass memory_check="warn" to try all the same'):
        plan_arena(layout, 8 * GIB, limits=room(GIB))
    plan = plan_arena(layout, 8 * GIB, limits=room(GIB), memory_check="warn")
    assert 8 * GIB == plan.nbytes
    assert plan.warnings
