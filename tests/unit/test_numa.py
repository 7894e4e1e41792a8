import ctypes
import errno

import pytest

from kvmoor.errors import SettingsError
from kvmoor.host_memory import page_mapping
from kvmoor.host_memory.numa import (
    MemoryNodes,
    NumaMode,
    NumaPolicy,
    plan_numa,
    read_memory_nodes,
    read_memory_nodes_of_machine,
)
from kvmoor.host_memory.page_mapping import PageMapping, SystemCalls

KIB, MIB = 2**10, 2**20


@pytest.fixture
def machine(tmp_path):
    """Return a function that makes a machine with some nodes and returns its root."""

    def make(**files):
        folder = tmp_path / "sys/devices/system/node"
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("files", "nodes"),
    [
        ({"has_memory": "0-1\n", "online": "0-3\n"}, (0, 1)),
        ({"has_memory": "0,2-3,8\n"}, (0, 2, 3, 8)),
        ({"online": "0-1\n"}, (0, 1)),
        ({"has_memory": "\n", "online": "0-1\n"}, (0, 1)),
        ({"has_memory": "zero\n"}, (0,)),
        ({"has_memory": "0-\n"}, (0,)),
        ({}, (0,)),
    ],
)
def test_the_nodes_with_memory_are_read_and_node_0_is_what_there_is_at_least(machine, files, nodes):
    """Nodes without memory do not count where the kernel tells; what cannot be read leaves node 0."""
    assert nodes == read_memory_nodes_of_machine(machine(**files))


def test_a_list_of_nodes_without_end_is_cut(machine):
    """Garbage in a file does not fill our memory: no kernel has more than 1024 nodes."""
    assert 1024 == len(read_memory_nodes_of_machine(machine(has_memory="0-99999999999\n")))


@pytest.mark.parametrize(
    ("numa", "device_node", "mode", "nodes", "reason"),
    [
        ("auto", 1, NumaMode.PREFERRED, (1,), "next to the device"),
        ("auto", 0, NumaMode.PREFERRED, (0,), "next to the device"),
        ("auto", None, NumaMode.DEFAULT, (), "the node of the device is not known"),
        ("auto", -1, NumaMode.DEFAULT, (), "the node of the device is not known"),
        ("auto", 5, NumaMode.DEFAULT, (), "node 5 of the device has no memory"),
        ("off", 1, NumaMode.DEFAULT, (), 'numa="off"'),
        ("interleave", 1, NumaMode.INTERLEAVE, (0, 1), 'numa="interleave"'),
        (0, 1, NumaMode.PREFERRED, (0,), "numa=0"),
        (1, None, NumaMode.PREFERRED, (1,), "numa=1"),
    ],
)
def test_what_was_asked_for_becomes_a_policy_on_a_machine_with_two_nodes(
    machine, numa, device_node, mode, nodes, reason
):
    """The node of the device, a named node, all nodes in turn, or nothing; the reason says which and why."""
    policy = plan_numa(numa, device_numa_node=device_node, root=machine(has_memory="0-1\n"))
    assert NumaPolicy(mode, nodes, reason) == policy
    assert reason in policy.describe()


@pytest.mark.parametrize("numa", ["auto", "interleave"])
def test_with_one_node_there_is_nothing_to_choose(machine, numa):
    """On a machine with one node nothing is asked of the kernel, and the plan says why."""
    policy = plan_numa(numa, device_numa_node=0, root=machine(has_memory="0\n"))
    assert NumaMode.DEFAULT is policy.mode
    assert "left to the kernel (the machine has one node with memory)" == policy.describe()


@pytest.mark.parametrize("numa", [2, -1, 10**6])
def test_a_node_that_does_not_exist_is_refused_with_those_that_do(machine, numa):
    """The error names what was asked, the nodes with memory, and the other choices."""
    with pytest.raises(SettingsError, match=rf'numa is {numa}, .* node 0, 1 only: give one of these, "auto"'):
        plan_numa(numa, root=machine(has_memory="0-1\n"))


@pytest.mark.parametrize("numa", ["near", "", "1", None, True, 1.0])
def test_a_word_that_is_none_of_ours_is_refused(machine, numa):
    """Neither text that looks like a number nor a truth value is a node."""
    with pytest.raises(SettingsError, match='give "auto", "interleave", "off" or the number of a node'):
        plan_numa(numa, root=machine(has_memory="0-1\n"))


def test_memory_is_never_bound():
    """No choice leads to MPOL_BIND (2): with it a node that is full ends processes although others have room."""
    assert {0, 1, 3} == {mode.value for mode in NumaMode}


def test_the_placement_of_mappings_is_added_up_within_a_range(tmp_path):
    """Bytes a node are counted in the page size of each mapping, from those that begin inside the range only."""
    numa_maps = tmp_path / "numa_maps"
    numa_maps.write_text(
        "1000 default anon=9 dirty=9 N0=9 kernelpagesize_kB=4\n"
        "2000 prefer:1 anon=3 dirty=3 N0=1 N1=2 kernelpagesize_kB=4\n"
        "3000 interleave:0-1 file=/memfd:kvmoor:a:0\\040(deleted) huge dirty=2 N1=2 kernelpagesize_kB=2048\n"
        "4000 default\n"
        "6000 default anon=9 dirty=9 N0=9 kernelpagesize_kB=4\n"
    )
    found = read_memory_nodes(0x2000, 0x4000, numa_maps)
    assert MemoryNodes({0: 4 * KIB, 1: 8 * KIB + 4 * MIB}, frozenset({"prefer:1", "interleave:0-1"})) == found


@pytest.mark.parametrize("text", [None, "nonsense default\n", "\n"])
def test_placement_that_cannot_be_read_is_unknown(tmp_path, text):
    """A kernel without NUMA, or a line that makes no sense, gives None and not an empty answer."""
    numa_maps = tmp_path / "numa_maps"
    if text is not None:
        numa_maps.write_text(text)
    assert read_memory_nodes(0x2000, 0x4000, numa_maps) is None


@pytest.mark.parametrize(("machine_name", "number"), [("x86_64", 237), ("aarch64", 235)])
@pytest.mark.parametrize(("nodes", "words"), [((0,), [1]), ((1, 3), [10]), ((63, 64), [2**63, 1]), ((), [0])])
def test_the_kernel_gets_the_number_of_its_call_and_a_mask_of_the_nodes(
    monkeypatch, machine_name, number, nodes, words
):
    """The call has another number on each architecture; the mask has a bit a node, and its length counts one more."""
    calls = []

    class Library:
        def syscall(self, *args):
            mask = (ctypes.c_ulong * len(words)).from_address(args[4])
            calls.append((*args[:4], list(mask), *args[5:]))
            return 0

    monkeypatch.setattr(page_mapping, "_libc", Library())
    monkeypatch.setattr("platform.machine", lambda: machine_name)
    SystemCalls().mbind(4096, 8192, NumaMode.PREFERRED.value, nodes)
    assert [(number, 4096, 8192, 1, words, 64 * len(words) + 1, 0)] == calls


def test_an_architecture_whose_number_is_not_known_is_like_a_kernel_without_numa(monkeypatch):
    """Nothing is called under a number that may mean something else."""
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(OSError, match="not implemented") as caught:
        SystemCalls().mbind(4096, 4096, 1, (0,))
    assert errno.ENOSYS == caught.value.errno


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, errno.EINVAL, errno.EIO, errno.ENOMEM])
def test_every_refusal_of_a_placement_is_an_answer(number):
    """A container that forbids the call, a kernel without NUMA, a cpuset: never an exception, always the words."""

    class RefusingCalls(SystemCalls):
        def mbind(self, *args):
            raise OSError(number, "refused")

    assert "refused" == PageMapping(RefusingCalls()).place(4096, 4096, 1, (0,))


def test_the_kernel_s_own_refusal_of_a_node_is_an_answer():
    """The real call refuses a node that this machine does not have, or the call itself where that is forbidden."""
    pages = PageMapping(SystemCalls())
    reservation = pages.reserve(2 * MIB, 2 * MIB)
    try:
        assert pages.place(reservation.base, 2 * MIB, NumaMode.PREFERRED.value, (1000,))
    finally:
        pages.unmap(reservation)
