import pytest

from kvmoor.host_memory.limits import KEPT_FREE_NBYTES, MemoryLimits, read_memory_limits

GIB = 2**30
V1_NO_LIMIT = "9223372036854771712\n"


@pytest.fixture
def machine(tmp_path):
    """Return a function that writes files below a made-up root."""

    def write(**files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


def v1_files(directory, limit, usage, inactive_file=0, active_file=0):
    return {
        f"{directory}/memory.limit_in_bytes": f"{limit}\n",
        f"{directory}/memory.usage_in_bytes": f"{usage}\n",
        f"{directory}/memory.stat": (
            f"cache 1\ninactive_file 7\nactive_file 7\n"
            f"total_inactive_file {inactive_file}\ntotal_active_file {active_file}\n"
        ),
    }


def v2_files(directory, limit, usage, inactive_file=0, active_file=0):
    return {
        f"{directory}/memory.max": f"{limit}\n",
        f"{directory}/memory.current": f"{usage}\n",
        f"{directory}/memory.stat": f"anon 1\ninactive_file {inactive_file}\nactive_file {active_file}\n",
    }


def test_free_memory_is_what_the_kernel_calls_available(machine):
    """MemAvailable is read, in bytes, and not MemFree, which leaves out what can be reclaimed."""
    root = machine(**{"proc/meminfo": "MemTotal:  900 kB\nMemFree:  100 kB\nMemAvailable:   700 kB\n"})
    assert MemoryLimits(available_nbytes=700 * 1024) == read_memory_limits(root)


@pytest.mark.parametrize("text", ["", "MemAvailable: many kB\n", "MemAvailable: -5 kB\n", "MemAvailable\n", "\0\xff"])
def test_unreadable_numbers_are_unknown(machine, text):
    """A file that holds anything else than expected means unknown, never an exception and never zero."""
    root = machine(
        **{
            "proc/meminfo": text,
            "proc/self/cgroup": "0::/a\n",
            "sys/fs/cgroup/a/memory.max": text,
            "sys/fs/cgroup/a/memory.current": text,
        }
    )
    assert MemoryLimits() == read_memory_limits(root)


def test_an_empty_machine_has_no_known_limit(tmp_path):
    """Where nothing can be read nothing is claimed: no room is known, and the description says so."""
    limits = read_memory_limits(tmp_path)
    assert MemoryLimits() == limits
    assert limits.room_nbytes is None
    assert "no memory limit is known" == limits.describe()


def test_cgroup_v2_leaves_limit_minus_usage_with_droppable_cache_counted_as_free(machine):
    """File pages, used once or often, are reclaimed before anyone is killed, so they do not count as used."""
    root = machine(**{"proc/self/cgroup": "0::/a\n"}, **v2_files("sys/fs/cgroup/a", 8 * GIB, 5 * GIB, GIB, GIB))
    limits = read_memory_limits(root)
    assert 5 * GIB == limits.cgroup_nbytes
    assert "/sys/fs/cgroup/a/memory.max" == limits.cgroup_file


def test_the_tightest_parent_decides(machine):
    """A parent cgroup with less room than the process's own is the one that counts, and the one that is named."""
    root = machine(
        **{"proc/self/cgroup": "0::/pods/pod1/box\n"},
        **v2_files("sys/fs/cgroup/pods", 64 * GIB, 10 * GIB),
        **v2_files("sys/fs/cgroup/pods/pod1", 16 * GIB, 15 * GIB),
        **v2_files("sys/fs/cgroup/pods/pod1/box", "max", 14 * GIB),
    )
    limits = read_memory_limits(root)
    assert (GIB, "/sys/fs/cgroup/pods/pod1/memory.max") == (limits.cgroup_nbytes, limits.cgroup_file)


def test_memory_high_is_a_limit_too(machine):
    """Above memory.high every allocation is throttled, so host memory has to stay below it."""
    files = v2_files("sys/fs/cgroup/a", 8 * GIB, 1 * GIB) | {"sys/fs/cgroup/a/memory.high": f"{4 * GIB}\n"}
    limits = read_memory_limits(machine(**{"proc/self/cgroup": "0::/a\n"}, **files))
    assert (3 * GIB, "/sys/fs/cgroup/a/memory.high") == (limits.cgroup_nbytes, limits.cgroup_file)


def test_cgroup_v1_counts_the_droppable_cache_of_its_children(machine):
    """In version 1 usage covers child cgroups, so the hierarchical number of inactive file pages belongs to it."""
    root = machine(
        **{"proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/a/b\n"},
        **v1_files("sys/fs/cgroup/memory/a", 8 * GIB, 6 * GIB, 1 * GIB),
        **v1_files("sys/fs/cgroup/memory/a/b", V1_NO_LIMIT.strip(), 6 * GIB),
    )
    limits = read_memory_limits(root)
    assert 3 * GIB == limits.cgroup_nbytes
    assert "/sys/fs/cgroup/memory/a/memory.limit_in_bytes" == limits.cgroup_file


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("sys/fs/cgroup/memory/a", v1_files("sys/fs/cgroup/memory/a", V1_NO_LIMIT.strip(), GIB)),
        ("sys/fs/cgroup/a", v2_files("sys/fs/cgroup/a", "max", GIB)),
    ],
    ids=["v1", "v2"],
)
def test_no_limit_is_not_a_limit(machine, name, files):
    """The huge number of version 1 and the word "max" of version 2 both mean that there is no limit."""
    root = machine(**{"proc/self/cgroup": "4:memory:/a\n0::/a\n"}, **files)
    assert (root / name).is_dir()
    assert read_memory_limits(root).cgroup_nbytes is None


def test_a_hybrid_machine_is_read_through_both_hierarchies(machine):
    """With the memory controller in version 1 and an empty version 2 beside it, version 1 is found."""
    root = machine(
        **{"proc/self/cgroup": "4:memory:/svc\n1:name=systemd:/svc\n0::/svc\n"},
        **{"sys/fs/cgroup/unified/svc/cgroup.procs": ""},
        **v1_files("sys/fs/cgroup/memory/svc", 4 * GIB, 1 * GIB),
    )
    assert 3 * GIB == read_memory_limits(root).cgroup_nbytes


def test_a_container_without_a_cgroup_namespace_is_found_through_its_mount(machine):
    """The process sees the host's path of its cgroup, the mount shows only that cgroup: the mount's root tells."""
    mountinfo = (
        "30 20 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
        "35 30 0:33 /docker/abc /sys/fs/cgroup/memory ro,nosuid master:1 - cgroup cgroup rw,memory\n"
        "broken line\n"
    )
    root = machine(
        **{"proc/self/cgroup": "4:memory:/docker/abc/inner\n", "proc/self/mountinfo": mountinfo},
        **v1_files("sys/fs/cgroup/memory", 8 * GIB, 1 * GIB),
        **v1_files("sys/fs/cgroup/memory/inner", 4 * GIB, 1 * GIB),
        # Another cgroup that happens to have the path of ours, seen from the mount: it is not ours.
        **v1_files("sys/fs/cgroup/memory/docker/abc", 2 * GIB, 1 * GIB),
    )
    limits = read_memory_limits(root)
    assert (3 * GIB, "/sys/fs/cgroup/memory/inner/memory.limit_in_bytes") == (limits.cgroup_nbytes, limits.cgroup_file)


def test_a_cgroup_that_the_mount_does_not_show_is_bound_by_what_the_mount_shows(machine):
    """A path outside the mount's root is not looked up inside of it, where another cgroup may have the same name."""
    root = machine(
        **{
            "proc/self/cgroup": "4:memory:/docker/xyz/inner\n",
            "proc/self/mountinfo": "35 30 0:33 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
        },
        **v1_files("sys/fs/cgroup/memory", 8 * GIB, 1 * GIB),
        **v1_files("sys/fs/cgroup/memory/inner", 4 * GIB, 1 * GIB),
    )
    assert 7 * GIB == read_memory_limits(root).cgroup_nbytes


@pytest.mark.parametrize("path", ["/", "/../..", "/../sibling"])
def test_in_a_cgroup_namespace_the_root_of_the_mount_is_read(machine, path):
    """A process whose cgroup is the namespace's root, or outside of it, is bound by what the root of the mount says."""
    root = machine(
        **{"proc/self/cgroup": f"0::{path}\n"},
        **v2_files("sys/fs/cgroup", 4 * GIB, 3 * GIB),
        **v2_files("sys/fs/cgroup/sibling", 2 * GIB, 2 * GIB),
        **v2_files("sys/fs/sibling", 2 * GIB, 2 * GIB),
    )
    assert GIB == read_memory_limits(root).cgroup_nbytes


def test_a_limit_without_a_readable_usage_is_still_a_bound(machine):
    """If only the usage is unknown, no more than the limit can be free."""
    root = machine(**{"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": f"{GIB}\n"})
    assert GIB == read_memory_limits(root).cgroup_nbytes


def test_a_cgroup_over_its_limit_leaves_nothing(machine):
    """Usage above a limit that was lowered means no room, not a negative number."""
    root = machine(**{"proc/self/cgroup": "0::/a\n"}, **v2_files("sys/fs/cgroup/a", GIB, 2 * GIB))
    assert 0 == read_memory_limits(root).cgroup_nbytes


@pytest.mark.parametrize(
    ("available", "cgroup", "room", "names"),
    [
        (4 * GIB, None, 4 * GIB, "the free memory of the machine"),
        (4 * GIB, 2 * GIB, 2 * GIB, "the cgroup limit /f"),
        (2 * GIB, 4 * GIB, 2 * GIB, "the free memory of the machine"),
        (None, 2 * GIB, 2 * GIB, "the cgroup limit /f"),
    ],
)
def test_room_is_what_the_tightest_limit_leaves_less_what_stays_free(available, cgroup, room, names):
    """The smaller of both numbers decides and is named; a fixed part of it is never offered."""
    limits = MemoryLimits(available, cgroup, "/f" if cgroup else "")
    assert room - KEPT_FREE_NBYTES == limits.room_nbytes
    assert names == limits.tightest


def test_room_is_never_negative():
    """Less memory than what is kept free is no room."""
    assert 0 == MemoryLimits(available_nbytes=KEPT_FREE_NBYTES - 1).room_nbytes


def test_this_machine_can_be_read():
    """On a real machine the available memory is known and positive."""
    available = read_memory_limits().available_nbytes
    assert available is not None
    assert available > 0


PROCESS_LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max cpu time              unlimited            unlimited            seconds
Max locked memory         {memlock:<20} unlimited            bytes
Max address space         {address:<20} unlimited            bytes
Max realtime timeout      unlimited            unlimited            us
"""


def test_the_limits_of_the_process_are_read(machine):
    """RLIMIT_AS counts less what is in use, RLIMIT_MEMLOCK as it is; both are shown and neither is room."""
    root = machine(
        **{
            "proc/self/limits": PROCESS_LIMITS.format(memlock=65536, address=8 * GIB),
            "proc/self/status": f"VmPeak:\t 9 kB\nVmSize:\t {3 * GIB // 1024} kB\n",
        }
    )
    limits = read_memory_limits(root)
    assert MemoryLimits(address_nbytes=5 * GIB, memlock_nbytes=65536) == limits
    assert limits.room_nbytes is None
    assert "the address-space limit leaves 5.37 GB, ulimit -l is 65.5 kB" == limits.describe()


def test_a_process_without_limits_has_none(machine):
    """The word "unlimited" is no number."""
    text = PROCESS_LIMITS.format(memlock="unlimited", address="unlimited")
    assert MemoryLimits() == read_memory_limits(machine(**{"proc/self/limits": text}))


def test_a_process_over_its_address_space_has_none_left(machine):
    """A limit that was lowered below what is in use leaves nothing, not a negative number."""
    text = PROCESS_LIMITS.format(memlock="unlimited", address=GIB)
    root = machine(**{"proc/self/limits": text, "proc/self/status": f"VmSize: {GIB // 512} kB\n"})
    assert 0 == read_memory_limits(root).address_nbytes


@pytest.mark.parametrize(("mode", "left"), [("0", None), ("1", None), ("2", 6 * GIB), ("", None)])
def test_the_commit_limit_counts_only_where_it_is_kept(machine, mode, left):
    """Only with vm.overcommit_memory=2 the kernel refuses to promise more than the commit limit."""
    meminfo = f"MemAvailable: 1 kB\nCommitLimit: {8 * GIB // 1024} kB\nCommitted_AS: {2 * GIB // 1024} kB\n"
    limits = read_memory_limits(machine(**{"proc/meminfo": meminfo, "proc/sys/vm/overcommit_memory": f"{mode}\n"}))
    assert left == limits.commit_nbytes
    assert ("the commit limit leaves 6.44 GB" in limits.describe()) == (left is not None)


def test_reserved_huge_pages_are_counted_apart(machine):
    """They are not part of the free memory, and shown only where there are some."""
    folder = "sys/kernel/mm/hugepages/hugepages-2048kB"
    root = machine(**{f"{folder}/free_hugepages": "512\n", f"{folder}/resv_hugepages": "256\n"})
    limits = read_memory_limits(root)
    assert MemoryLimits(hugetlb_nbytes=GIB // 2) == limits
    assert "537 MB of huge pages are reserved" == limits.describe()
    assert "no memory limit is known" == MemoryLimits(hugetlb_nbytes=0).describe()
