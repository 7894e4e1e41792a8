"""How host memory is divided among the groups, computed and shown before anything is allocated.

    address range of an arena, 2 MiB aligned:
    | group 0: slab | slab | last slab | gap | group 1: slab | ...
      slab:   | slot | slot | ... | rest to 2 MiB |        a last slab has no rest: it ends with its last slot

Within a group, slot s lies at ``offset + s // slots_per_slab * slab_pitch + s % slots_per_slab * slot_nbytes``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from kvmoor.block_layout import BlockLayout
from kvmoor.byte_sizes import format_nbytes, parse_nbytes, round_up
from kvmoor.errors import NoRoomError, SettingsError
from kvmoor.host_memory.huge_pages import HugePages, HugePagesChoice, plan_huge_pages
from kvmoor.host_memory.limits import MemoryLimits, read_memory_limits
from kvmoor.host_memory.numa import NumaChoice, NumaPolicy, plan_numa

SLAB_ALIGNMENT: Final = 2 * 2**20
"""Where huge pages begin: x86-64, and 64-bit ARM with 4 KiB pages."""
# Slabs of about 64 MiB: a registration of one stalls other threads by 1-2 ms on an H200 host; 1 GiB stalls by 276 ms.
_SLAB_TARGET_NBYTES: Final = 64 * 2**20
_SLAB_MIN_NBYTES: Final = 48 * 2**20
_SLAB_MAX_NBYTES: Final = 80 * 2**20
_ADDRESSABLE_NBYTES: Final = 64 * 2**40
"""Half of the address space of a process on x86-64 with four-level page tables."""

MemoryCheck = Literal["refuse", "warn"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Say where the pages of an arena are to lie and how large they are to be. What is refused is done without."""

    numa: NumaPolicy = field(default_factory=NumaPolicy)
    huge_pages: HugePages = field(default_factory=HugePages)

    def describe(self) -> str:
        """Return the placement as one line of text."""
        return f"NUMA: {self.numa.describe()}; huge pages: {self.huge_pages.describe()}"


@dataclass(frozen=True, slots=True)
class SlabPlan:
    """Place one slab: the unit that is allocated, mapped and published.

    `number` counts in mapping order, `offset` is bytes from the base of the arena, `nbytes` what its slots take.
    `resident_nbytes` adds the rest up to 2 MiB, which a huge page makes resident too.
    """

    number: int
    group: int
    first_slot: int
    num_slots: int
    offset: int
    nbytes: int
    resident_nbytes: int


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Place the slots of one group. A group without tensors has slots but no bytes and no slabs.

    `slab_pitch`: bytes from one slab to the next. `offset`: bytes from the base of the arena to the first slab.
    """

    group: int
    tokens_per_block: int
    slot_nbytes: int
    slots_per_slab: int
    slab_pitch: int
    num_slots: int = 0
    offset: int = 0

    @property
    def num_slabs(self) -> int:
        """Return how many slabs the slots fill; the last one may be smaller."""
        return -(-self.num_slots // self.slots_per_slab) if self.slot_nbytes else 0

    @property
    def num_tokens(self) -> int:
        """Return how many tokens the slots cover."""
        return self.num_slots * self.tokens_per_block

    @property
    def nbytes(self) -> int:
        """Return the bytes from the first slot to the end of the last one: what will be resident."""
        full_slabs = max(0, self.num_slabs - 1)
        return full_slabs * self.slab_pitch + (self.num_slots - full_slabs * self.slots_per_slab) * self.slot_nbytes

    def look_up(self, of_slabs: NDArray[np.bool_], slots: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        """Return what holds for the slab of each slot, in the shape of `slots`, False for slots that do not exist."""
        exists = (slots >= 0) & (slots < self.num_slots)
        answers: NDArray[np.bool_] = exists & of_slabs[np.where(exists, slots, 0) // self.slots_per_slab]
        return answers


@dataclass(frozen=True)
class ArenaPlan:
    """Say what an arena will be. Immutable; any thread may read it.

    `requested_nbytes` is what the user allowed this rank and `nbytes` what will be resident, never more. `limits` are
    those that were in force at planning. With `memory_check` "refuse" they are read again before each slab is mapped.
    `ranks_on_host` arenas like this one share the host.
    """

    requested_nbytes: int
    groups: tuple[GroupPlan, ...]
    limits: MemoryLimits
    memory_check: MemoryCheck
    warnings: tuple[str, ...] = ()
    placement: Placement = field(default_factory=Placement)
    ranks_on_host: int = 1

    @property
    def nbytes(self) -> int:
        """Return how many bytes will be resident once everything is mapped."""
        return sum(group.nbytes for group in self.groups)

    @property
    def num_tokens(self) -> int:
        """Return how many tokens every group covers."""
        return min(group.num_tokens for group in self.groups)

    @property
    def address_nbytes(self) -> int:
        """Return the length of the address range, gaps included."""
        return max(group.offset + round_up(group.nbytes, SLAB_ALIGNMENT) for group in self.groups)

    @cached_property
    def slabs(self) -> tuple[SlabPlan, ...]:
        """Return the slabs in mapping order: by the tokens that precede them, so every group gets slots early."""
        places = sorted(
            (number * group.slots_per_slab * group.tokens_per_block, group.group, number)
            for group in self.groups
            for number in range(group.num_slabs)
        )
        return tuple(
            _plan_slab(self.groups[group], position, number) for position, (_, group, number) in enumerate(places)
        )

    @cached_property
    def neighbours_nbytes(self) -> int:
        """Return what the other ranks of the host may be taking at this moment: a slab each."""
        largest = max((slab.resident_nbytes for slab in self.slabs), default=0)
        return (self.ranks_on_host - 1) * largest

    def describe(self) -> str:
        """Return the plan as a table of plain text."""
        header = ("group", "tokens/block", "slot", "slots", "tokens", "slabs", "bytes")
        rows = [
            (
                f"{group.group}",
                f"{group.tokens_per_block}",
                format_nbytes(group.slot_nbytes),
                f"{group.num_slots:,}",
                f"{group.num_tokens:,}",
                f"{group.num_slabs:,}",
                format_nbytes(group.nbytes),
            )
            for group in self.groups
        ]
        widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
        title = (
            f"host memory: {format_nbytes(self.nbytes)} of {format_nbytes(self.requested_nbytes)} requested, "
            f"{sum(group.num_slots for group in self.groups):,} slots, {self.num_tokens:,} tokens in every group"
        )
        table = [
            "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in (header, *rows)
        ]
        lines = [f"placement: {self.placement.describe()}", f"limits: {self.limits.describe()}"]
        if self.ranks_on_host > 1:
            total = format_nbytes(self.nbytes * self.ranks_on_host)
            lines.insert(0, f"ranks: {self.ranks_on_host} on this host, {total} in all")
        return "\n".join([title, *table, *lines, *(f"warning: {warning}" for warning in self.warnings)])


def plan_arena(
    layout: BlockLayout,
    host_memory_nbytes: int,
    *,
    limits: MemoryLimits | None = None,
    memory_check: MemoryCheck = "refuse",
    ranks_on_host: int = 1,
    mapped_by_other_ranks_nbytes: int = 0,
    numa: NumaChoice = "auto",
    device_numa_node: int | None = None,
    huge_pages: HugePagesChoice = "auto",
    root: Path = Path("/"),
) -> ArenaPlan:
    """Divide host memory among the groups of a layout; nothing is allocated.

    A prefix can be loaded as far as every group has it, so each group covers the same number of tokens, as nearly as
    whole slots allow: at most one slot more or less. Groups without tensors take no bytes and get as many slots as the
    largest group has tokens for.

    `host_memory_nbytes` is for all `ranks_on_host` together and the plan is for one of them: an equal part. The ranks
    start at once and each sees the same free memory, so it is the sum that has to be there;
    `mapped_by_other_ranks_nbytes` is what the others are known to hold already, which is neither free nor missing.

    `limits` None: they are read now. `root` is where ``proc`` and ``sys`` are. Raises `SettingsError` for options, a
    NUMA node that does not exist, or if not one slot of each group fits, and `NoRoomError` if the memory is not there;
    with `memory_check` "warn" the plan then carries a warning.
    """
    requested = parse_nbytes(host_memory_nbytes, option="host_memory")
    if memory_check not in ("refuse", "warn"):
        raise SettingsError(f'memory_check is {memory_check!r}: give "refuse" or "warn"')
    if type(ranks_on_host) is not int or ranks_on_host < 1:
        raise SettingsError(f"ranks_on_host is {ranks_on_host!r}: give the number of ranks on this host, at least 1")
    if requested > _ADDRESSABLE_NBYTES:
        raise SettingsError(
            f"host_memory is {format_nbytes(requested)}: a process can address {format_nbytes(_ADDRESSABLE_NBYTES)}, "
            "give less"
        )
    placement = Placement(
        plan_numa(numa, device_numa_node=device_numa_node, root=root), plan_huge_pages(huge_pages, root=root)
    )
    shapes = [
        _shape_group(number, group.tokens_per_block, group.slot_nbytes) for number, group in enumerate(layout.groups)
    ]
    minimum = ranks_on_host * sum(shape.slot_nbytes for shape in shapes)
    if requested < minimum:
        ranks = f" on each of {ranks_on_host} ranks" if ranks_on_host > 1 else ""
        raise SettingsError(
            f"host_memory is {requested} bytes, but one slot of each group{ranks} takes {minimum} bytes "
            f"({format_nbytes(minimum)}): give at least that much, and many times more to be of use"
        )
    share = requested // ranks_on_host
    plan = ArenaPlan(
        share,
        _place(_fill(shapes, share)),
        read_memory_limits(root) if limits is None else limits,
        memory_check,
        placement=placement,
        ranks_on_host=ranks_on_host,
    )
    found = _find_shortage(plan, requested, mapped_by_other_ranks_nbytes)
    if found is None:
        return plan
    shortage, remedy = found
    if memory_check == "refuse":
        raise NoRoomError(f'{shortage}: lower host_memory, {remedy}, or pass memory_check="warn" to try all the same')
    return replace(plan, warnings=(f"{shortage}: the kernel may end the process; lower host_memory or {remedy}",))


def find_slab_shortage(plan: ArenaPlan, slab: SlabPlan, limits: MemoryLimits) -> str:
    """Return why there is no room for one more slab, which is not in reserved huge pages; empty if there is.

    How far the other ranks of the host are is not known here, so of their shares only the part counts that `limits`
    cannot show yet: a slab each, which they may have found room for at the same moment. To leave room for the whole of
    their shares would count twice what they have mapped already, and refuse memory that is there.
    """
    room = limits.room_nbytes
    needed = slab.resident_nbytes + plan.neighbours_nbytes
    if room is None or needed <= room:
        return ""
    beside = f" beside {plan.ranks_on_host - 1} other ranks that may take as much" if plan.ranks_on_host > 1 else ""
    return (
        f"{format_nbytes(slab.resident_nbytes)} of host memory were to be mapped{beside}, {format_nbytes(room)} are "
        f"left within {limits.tightest}: these slots stay unused until there is room; lower host_memory, make room, or "
        'pass memory_check="warn" where the machine grows as its memory is used'
    )


def _shape_group(group: int, tokens_per_block: int, slot_nbytes: int) -> GroupPlan:
    if not slot_nbytes:
        return GroupPlan(group, tokens_per_block, slot_nbytes=0, slots_per_slab=0, slab_pitch=0)
    # The number of slots near 64 MiB that wastes least when slabs begin on 2 MiB; a slot too large for that is alone.
    candidates = range(-(-_SLAB_MIN_NBYTES // slot_nbytes), _SLAB_MAX_NBYTES // slot_nbytes + 1) or range(1, 2)
    slots_per_slab = min(
        candidates,
        key=lambda count: (
            (round_up(count * slot_nbytes, SLAB_ALIGNMENT) - count * slot_nbytes) / count,
            abs(count * slot_nbytes - _SLAB_TARGET_NBYTES),
        ),
    )
    slab_pitch = round_up(slots_per_slab * slot_nbytes, SLAB_ALIGNMENT)
    return GroupPlan(group, tokens_per_block, slot_nbytes, slots_per_slab, slab_pitch)


def _fill(shapes: Sequence[GroupPlan], nbytes: int) -> list[GroupPlan]:
    """Give each group its number of slots."""
    fewest, too_many = 0, max((nbytes // s.slot_nbytes + 1) * s.tokens_per_block for s in shapes if s.slot_nbytes)
    while too_many - fewest > 1:
        tokens = (fewest + too_many) // 2
        if _total_nbytes(_cover(shapes, tokens)) <= nbytes:
            fewest = tokens
        else:
            too_many = tokens
    groups = _cover(shapes, fewest)
    # What is left may hold one more slot of some groups; those that cover least come first.
    for group in sorted(groups, key=lambda group: (group.num_tokens, group.group)):
        larger = replace(group, num_slots=group.num_slots + 1)
        rounded_down = group.num_tokens <= fewest
        if group.slot_nbytes and rounded_down and _total_nbytes(groups) - group.nbytes + larger.nbytes <= nbytes:
            groups[group.group] = larger
    most_tokens = max(group.num_tokens for group in groups if group.slot_nbytes)
    return [
        group if group.slot_nbytes else replace(group, num_slots=-(-most_tokens // group.tokens_per_block))
        for group in groups
    ]


def _cover(shapes: Sequence[GroupPlan], tokens: int) -> list[GroupPlan]:
    """Give each group the whole slots within `tokens`, at least one."""
    return [replace(shape, num_slots=max(1, tokens // shape.tokens_per_block)) for shape in shapes]


def _total_nbytes(groups: Sequence[GroupPlan]) -> int:
    return sum(group.nbytes for group in groups)


def _place(groups: Sequence[GroupPlan]) -> tuple[GroupPlan, ...]:
    placed = []
    offset = 0
    for group in groups:
        placed.append(replace(group, offset=offset))
        offset += round_up(group.nbytes, SLAB_ALIGNMENT)
    return tuple(placed)


def _plan_slab(group: GroupPlan, number: int, number_in_group: int) -> SlabPlan:
    first_slot = number_in_group * group.slots_per_slab
    num_slots = min(group.slots_per_slab, group.num_slots - first_slot)
    nbytes = num_slots * group.slot_nbytes
    return SlabPlan(
        number=number,
        group=group.group,
        first_slot=first_slot,
        num_slots=num_slots,
        offset=group.offset + number_in_group * group.slab_pitch,
        nbytes=nbytes,
        resident_nbytes=nbytes if number_in_group == group.num_slabs - 1 else group.slab_pitch,
    )


def _find_shortage(plan: ArenaPlan, requested: int, mapped_by_others: int) -> tuple[str, str] | None:
    """Return what is missing and what would help, or None if everything is there."""
    limits = plan.limits
    total = plan.nbytes * plan.ranks_on_host
    missing = max(0, total - mapped_by_others)
    # Neither free memory nor the cgroup's limit has to give what lies in reserved huge pages.
    sizes = [slab.resident_nbytes for slab in plan.slabs]
    reservable = sum(filter(plan.placement.huge_pages.may_reserve, sizes))
    from_reserve = min(limits.hugetlb_nbytes or 0, reservable * plan.ranks_on_host)
    needed = max(0, missing - from_reserve)
    whole = f"host memory needs {format_nbytes(total)} (of {format_nbytes(requested)} requested)"
    if plan.ranks_on_host > 1:
        whole += f" for {plan.ranks_on_host} ranks on this host, {format_nbytes(plan.nbytes)} each"
    room = limits.room_nbytes
    if room is not None and needed and needed + plan.neighbours_nbytes > room:
        remedy = "raise that limit" if limits.cgroup_is_tightest else "free memory on the machine"
        return f"{whole}, {format_nbytes(room)} available within {limits.tightest}", remedy
    if limits.address_nbytes is not None and plan.address_nbytes > limits.address_nbytes:
        found = f"the address-space limit of the process leaves {format_nbytes(limits.address_nbytes)}"
        return f"{whole}, {found}", "raise the limit (ulimit -v; RLIMIT_AS)"
    if limits.commit_nbytes is not None and needed > limits.commit_nbytes:
        found = f"the commit limit of the machine leaves {format_nbytes(limits.commit_nbytes)}"
        return f"{whole}, {found}", "set vm.overcommit_memory to 0 or 1"
    return None
