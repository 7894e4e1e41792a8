"""On which NUMA nodes host memory is to lie: what was asked for, what the kernel is told, and what came of it.

Memory is *preferred* on a node, never bound to it. Bound memory (MPOL_BIND) whose node is full wakes the killer of
processes although other nodes have room, and no errno tells beforehand; preferred memory goes to the next node, where
copies are slower but right. `read_memory_nodes` tells what really lies where.
"""

import re
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final, Literal

from kvmoor.errors import SettingsError

NumaChoice = Literal["auto", "interleave", "off"] | int
"""What `numa` may be: "auto" is the node of the device where that is known, a number is a node."""


class NumaMode(Enum):
    """Say what the kernel is told about the pages of an arena; the values are its own numbers."""

    DEFAULT = 0
    """Nothing: a page lies on the node of the thread that touches it first, or where the process's own policy says."""
    PREFERRED = 1
    """On one node as long as it has room."""
    INTERLEAVE = 3
    """On several nodes in turn."""


@dataclass(frozen=True, slots=True)
class NumaPolicy:
    """Say on which nodes the pages of an arena are to lie; `reason` tells why, for people."""

    mode: NumaMode = NumaMode.DEFAULT
    nodes: tuple[int, ...] = ()
    reason: str = "not asked for"

    def describe(self) -> str:
        """Return the policy as a few words."""
        nodes = ", ".join(map(str, self.nodes))
        what = {
            NumaMode.DEFAULT: "left to the kernel",
            NumaMode.PREFERRED: f"node {nodes} preferred",
            NumaMode.INTERLEAVE: f"interleaved over nodes {nodes}",
        }[self.mode]
        return f"{what} ({self.reason})"


def plan_numa(numa: NumaChoice, *, device_numa_node: int | None = None, root: Path = Path("/")) -> NumaPolicy:
    """Choose the policy for what the user asked; raises `SettingsError` for a word or a node that does not exist.

    Only what the user names can be wrong: "auto" and "interleave" fall back to the kernel's choice, and say so.
    `device_numa_node`: None or negative where it is not known. `root` is where ``sys`` is.
    """
    nodes = read_memory_nodes_of_machine(root)
    known = ", ".join(map(str, nodes))
    if isinstance(numa, int) and not isinstance(numa, bool):
        if numa not in nodes:
            raise SettingsError(
                f'numa is {numa}, but this machine has memory on node {known} only: give one of these, "auto", '
                '"interleave" or "off"'
            )
        return NumaPolicy(NumaMode.PREFERRED, (numa,), f"numa={numa}")
    if numa == "off":
        return NumaPolicy(reason='numa="off"')
    if numa not in ("auto", "interleave"):
        raise SettingsError(f'numa is {numa!r}: give "auto", "interleave", "off" or the number of a node ({known})')
    if len(nodes) == 1:
        return NumaPolicy(reason="the machine has one node with memory")
    if numa == "interleave":
        return NumaPolicy(NumaMode.INTERLEAVE, nodes, 'numa="interleave"')
    if device_numa_node is None or device_numa_node < 0:
        return NumaPolicy(reason="the node of the device is not known")
    if device_numa_node not in nodes:
        return NumaPolicy(reason=f"node {device_numa_node} of the device has no memory")
    return NumaPolicy(NumaMode.PREFERRED, (device_numa_node,), "next to the device")


def read_memory_nodes_of_machine(root: Path = Path("/")) -> tuple[int, ...]:
    """Return the nodes that have memory, ascending; node 0 alone where the kernel does not tell, as without NUMA."""
    for name in ("has_memory", "online"):  # `online` counts nodes without memory too; older kernels have it only
        try:
            nodes = _parse_node_list((root / "sys/devices/system/node" / name).read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
        if nodes:
            return nodes
    return (0,)


_MAX_NODES: Final = 1024
"""What the kernel can be built for at most."""


def _parse_node_list(text: str) -> tuple[int, ...]:
    """Read a list such as ``0-1,4``; raises `ValueError` for anything else."""
    nodes: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if part.strip():
            nodes.update(range(int(first), min(int(last) if dash else int(first), _MAX_NODES - 1) + 1))
    return tuple(sorted(nodes))


@dataclass(frozen=True, slots=True)
class MemoryNodes:
    """What the kernel says of some mappings: bytes resident on each node, and the policies in force, as it names them.

    A policy reads ``default``, ``prefer:1`` or ``interleave:0-1``.
    """

    nbytes_by_node: dict[int, int]
    policies: frozenset[str]


_PAGES: Final = re.compile(r"N(\d+)=(\d+)")
_PAGE_SIZE: Final = re.compile(r"kernelpagesize_kB=(\d+)")


def read_memory_nodes(address: int, nbytes: int, numa_maps: Path = Path("/proc/self/numa_maps")) -> MemoryNodes | None:
    """Add up the mappings that begin within a range of addresses; None if the kernel does not tell.

    Mappings without pages do not count. Takes milliseconds in a large process, so it is for reports, not for a loop.
    """
    by_node: Counter[int] = Counter()
    policies = set()
    try:
        with numa_maps.open(encoding="ascii", errors="replace") as lines:
            for line in lines:
                words = line.split()
                if not address <= int(words[0], 16) < address + nbytes:
                    continue
                size = _PAGE_SIZE.search(line)
                pages = _PAGES.findall(line)
                if pages and size is not None:
                    policies.add(words[1])
                    for node, count in pages:
                        by_node[int(node)] += int(count) * int(size[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return MemoryNodes(dict(by_node), frozenset(policies))
