"""What the owner of a shared arena tells those who read it: a small record that travels over the engine's own channel.

Nothing in it grants anything; it says what has to be found. Whoever may open the files is decided by the kernel.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from kvmoor.block_layout import BlockLayout
from kvmoor.byte_sizes import round_up
from kvmoor.errors import CorruptDataError, SettingsError
from kvmoor.host_memory.arena import Arena
from kvmoor.host_memory.arena_plan import SLAB_ALIGNMENT, ArenaPlan, GroupPlan, SlabPlan
from kvmoor.host_memory.limits import MemoryLimits
from kvmoor.host_memory.memfd import MAX_SEGMENTS
from kvmoor.host_memory.owner_process import SharedFile, describe_shared_file
from kvmoor.host_memory.process_identity import ProcessCalls, ProcessIdentity
from kvmoor.host_memory.status_format import FINGERPRINT_NBYTES, NONCE_NBYTES, digest_geometry
from kvmoor.host_memory.status_segment import StatusSegment

TICKET_FORMAT: Final = 1
_GROUP_FIELDS: Final = (
    "group",
    "tokens_per_block",
    "slot_nbytes",
    "slots_per_slab",
    "slab_pitch",
    "num_slots",
    "offset",
)
_MAX_NUMBER: Final = 2**63 - 1
_MAX_PID: Final = 2**31 - 1
"""What the kernel's calls take for a process id."""
_MAX_SLABS: Final = 2**20
"""64 TiB in slabs of 64 MiB: numbers from outside may not make us list slabs without end."""


@dataclass(frozen=True, slots=True)
class ArenaTicket:
    """Name a shared arena: its process, its files, its nonce, its layout and where its slots are.

    Picklable, and text through `to_json` and `from_json`. Raises `CorruptDataError` for values that no owner writes.
    """

    owner: ProcessIdentity
    segments: tuple[SharedFile, ...]
    status: SharedFile
    nonce: bytes
    layout_fingerprint: bytes
    groups: tuple[GroupPlan, ...]
    format_version: int = TICKET_FORMAT

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Check every value again: unpickling does not. What the values name is for `AttachedArena` to check."""
        for field in dataclasses.fields(self):
            if not hasattr(self, field.name):  # unpickled without it
                raise CorruptDataError(f"a ticket lacks {field.name}: pass it on unchanged")
        if self.format_version != TICKET_FORMAT:
            raise CorruptDataError(
                f"a ticket has format {self.format_version!r}, this is format {TICKET_FORMAT}: run one version of "
                "kvmoor on this host"
            )
        _check_numbers(self.owner, ("pid", "start_time", "pid_namespace"), "owner", minimum=1)
        if self.owner.pid > _MAX_PID:
            raise _wrong("owner.pid", self.owner.pid, f"at most {_MAX_PID}")
        boot_id: object = self.owner.boot_id
        if not isinstance(boot_id, str) or not boot_id:
            raise _wrong("owner.boot_id", boot_id, "text")
        _check_tuple(self.segments, "segments", SharedFile)
        _check_tuple(self.groups, "groups", GroupPlan)
        for number, file in enumerate((self.status, *self.segments)):
            name = f"segments[{number - 1}]" if number else "status"
            _check_numbers(file, ("descriptor", "device", "inode", "nbytes"), name)
        _check_bytes(self.nonce, "nonce", NONCE_NBYTES)
        _check_bytes(self.layout_fingerprint, "layout_fingerprint", FINGERPRINT_NBYTES)
        for number, group in enumerate(self.groups):
            _check_numbers(group, _GROUP_FIELDS, f"groups[{number}]")
        _check_geometry(self.groups, self.segments)

    @property
    def plan(self) -> ArenaPlan:
        """Return the plan of the arena as far as it concerns readers: where the slots are."""
        nbytes = sum(group.nbytes for group in self.groups)
        return ArenaPlan(nbytes, self.groups, MemoryLimits(), "warn")

    def to_json(self) -> str:
        """Return the ticket as text; bytes are written in hexadecimal digits."""
        return json.dumps(
            {
                "format_version": self.format_version,
                "owner": dataclasses.asdict(self.owner),
                "segments": [dataclasses.asdict(segment) for segment in self.segments],
                "status": dataclasses.asdict(self.status),
                "nonce": self.nonce.hex(),
                "layout_fingerprint": self.layout_fingerprint.hex(),
                "groups": [{name: getattr(group, name) for name in _GROUP_FIELDS} for group in self.groups],
            }
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read what `to_json` wrote. Raises `CorruptDataError` for anything else."""
        try:
            fields = json.loads(text)
            return cls(
                owner=ProcessIdentity(**fields["owner"]),
                segments=tuple(SharedFile(**segment) for segment in fields["segments"]),
                status=SharedFile(**fields["status"]),
                nonce=bytes.fromhex(fields["nonce"]),
                layout_fingerprint=bytes.fromhex(fields["layout_fingerprint"]),
                groups=tuple(GroupPlan(**{name: group[name] for name in _GROUP_FIELDS}) for group in fields["groups"]),
                format_version=fields["format_version"],
            )
        except (KeyError, TypeError, ValueError, RecursionError, AttributeError) as error:
            raise CorruptDataError(
                f"a ticket cannot be read ({type(error).__name__}: {error}): pass on what to_json returned, unchanged"
            ) from error


def make_ticket(
    arena: Arena, status_segment: StatusSegment, layout: BlockLayout, *, calls: ProcessCalls | None = None
) -> ArenaTicket:
    """Return the ticket with which others read an arena of this process; valid until arena or segment is closed.

    Raises `SettingsError` for an arena of anonymous memory, and for a segment or a layout of another arena.
    """
    calls = calls or ProcessCalls()
    if not arena.descriptors:
        raise SettingsError(f"{arena!r} has nothing to share: open it with backing=Backing.MEMFD, and not closed")
    if status_segment.closed:
        raise SettingsError(f"{status_segment!r} cannot be read by others any more: open a new one")
    if status_segment.layout_fingerprint != layout.fingerprint:
        raise SettingsError(f"{status_segment!r} was made for another layout: pass the layout of the arena")
    if status_segment.geometry_digest != digest_geometry(arena.plan.groups, layout.fingerprint):
        slots = tuple(group.num_slots for group in arena.plan.groups)
        raise SettingsError(
            f"{status_segment!r} has {status_segment.num_slots} slots and the arena {slots}, or they lie elsewhere: "
            "pass the segment that was made for the plan of the arena"
        )
    return ArenaTicket(
        owner=status_segment.owner,
        segments=tuple(describe_shared_file(fd, calls) for fd in arena.descriptors),
        status=status_segment.shared_file,
        nonce=status_segment.nonce,
        layout_fingerprint=layout.fingerprint,
        groups=arena.plan.groups,
    )


@dataclass(frozen=True, slots=True)
class SlabPlace:
    """Say where a slab lies: in which segment, and how many bytes from its beginning."""

    slab: SlabPlan
    segment: int
    file_offset: int


def place_slabs(slabs: Sequence[SlabPlan]) -> tuple[tuple[SlabPlace, ...], tuple[int, ...]]:
    """Return where the owner put each slab, and the size of each segment: slab k lies in segment k mod n."""
    sizes = [0] * min(MAX_SEGMENTS, len(slabs))
    places = []
    for slab in slabs:
        segment = slab.number % len(sizes)
        places.append(SlabPlace(slab, segment, sizes[segment]))
        sizes[segment] += round_up(slab.nbytes, SLAB_ALIGNMENT)
    return tuple(places), tuple(sizes)


def _check_geometry(groups: Sequence[GroupPlan], segments: Sequence[SharedFile]) -> None:
    """Check that slots lie in slabs, slabs beside each other, and all of them in the files."""
    if not groups or not segments:
        raise CorruptDataError(f"a ticket has {len(groups)} groups and {len(segments)} segments: expected some of each")
    shared_nbytes = sum(segment.nbytes for segment in segments)
    end = num_slabs = 0
    for number, group in enumerate(groups):
        consistent = group.group == number and group.offset == end and group.num_slots > 0
        if group.slot_nbytes:
            consistent &= 0 < group.slots_per_slab * group.slot_nbytes <= group.slab_pitch
            consistent &= group.slab_pitch % SLAB_ALIGNMENT == 0
        if consistent:
            num_slabs += group.num_slabs
        if not consistent or group.nbytes > shared_nbytes or num_slabs > _MAX_SLABS:
            raise CorruptDataError(
                f"groups[{number}] of a ticket contradicts itself or the sizes of the segments ({group}): "
                "pass the ticket on unchanged"
            )
        end += round_up(group.nbytes, SLAB_ALIGNMENT)
    _, sizes = place_slabs(ArenaPlan(shared_nbytes, tuple(groups), MemoryLimits(), "warn").slabs)
    found = tuple(segment.nbytes for segment in segments)
    if sizes != found:
        raise CorruptDataError(
            f"the segments of a ticket have {found} bytes, its groups need {sizes}: pass the ticket on unchanged"
        )


def _check_numbers(record: object, names: Sequence[str], path: str, *, minimum: int = 0) -> None:
    for name in names:
        value = getattr(record, name, None)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= _MAX_NUMBER:
            raise _wrong(f"{path}.{name}", value, f"a whole number from {minimum}")


def _check_tuple(value: Any, path: str, kind: type) -> None:
    if not isinstance(value, tuple):
        raise _wrong(path, value, "a tuple")
    for number, item in enumerate(value):
        if not isinstance(item, kind):
            raise _wrong(f"{path}[{number}]", item, kind.__name__)


def _check_bytes(value: Any, path: str, nbytes: int) -> None:
    if not isinstance(value, bytes) or len(value) != nbytes:
        raise _wrong(path, value, f"{nbytes} bytes")


def _wrong(path: str, value: object, expected: str) -> CorruptDataError:
    return CorruptDataError(f"{path} of a ticket is {str(value)[:80]!r}: expected {expected}")
