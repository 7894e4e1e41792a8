"""A user chooses which blocks give way: by a name, or with a policy of one's own."""

from typing import Any

import pytest

from device_blocks import DeviceBlocks, content_keys
from kvmoor.coordinator import Coordinator
from kvmoor.devices.cpu import CpuDevice
from kvmoor.errors import SettingsError
from kvmoor.index.eviction.arc import TailFirstArc
from kvmoor.index.eviction.device_lru import DeviceAwareLru
from kvmoor.index.eviction.lru import TailFirstLru
from kvmoor.index.eviction.policies import POLICIES, policy_factory
from kvmoor.offloader import Offloader

WAIT_S = 20.0


def surviving(eviction: Any) -> list[int]:
    """Store a prompt, load it, store eight others in eight slots, and return what is left of the first."""
    device_blocks = DeviceBlocks()
    with Offloader(device_blocks.layout(), host_memory=8 * 4096, device=CpuDevice(), eviction=eviction) as offloader:
        offloader.wait([offloader.submit_store(content_keys(1, 2), [0, 1]).job_id], WAIT_S)
        match = offloader.match(content_keys(1, 2))
        offloader.wait([offloader.submit_load(match, [4, 5])], WAIT_S)
        for number in range(11, 19):
            offloader.wait([offloader.submit_store(content_keys(number), [0]).job_id], WAIT_S)
            offloader.poll_results()
        offloader._coordinator.check_invariants()
        return [number for number in (1, 2) if offloader._coordinator._index.contains(*content_keys(number))]


def test_every_policy_has_a_name() -> None:
    """The table of policies names those of the package, and nobody can change it."""
    assert {"lru": TailFirstLru, "arc": TailFirstArc, "device-lru": DeviceAwareLru} == dict(POLICIES)
    with pytest.raises(TypeError):
        POLICIES["lru"] = TailFirstArc  # type: ignore[index]


@pytest.mark.parametrize(
    ("eviction", "expected"), [("lru", []), ("device-lru", []), ("arc", [1, 2]), (TailFirstArc, [1, 2])]
)
def test_the_chosen_policy_decides(eviction: Any, expected: list[int]) -> None:
    """After a scan the default has forgotten a prompt that returned once, adaptive replacement has not."""
    assert expected == surviving(eviction)


def test_lru_is_the_default() -> None:
    """Whoever chooses nothing gets least recently used."""
    with Offloader(DeviceBlocks().layout(), host_memory=8 * 4096, device=CpuDevice()) as offloader:
        assert TailFirstLru is type(offloader._coordinator._index._groups[0].policy)


def test_each_group_has_its_own_policy() -> None:
    """A factory is called once for each group."""
    made: list[TailFirstArc] = []

    def make() -> TailFirstArc:
        made.append(TailFirstArc())
        return made[-1]

    coordinator = Coordinator(3, eviction=make)

    assert 3 == len(made)
    assert made == [group.policy for group in coordinator._index._groups]


@pytest.mark.parametrize("eviction", ["LRU", "lfu", "", None, 3, TailFirstLru()])
def test_an_unknown_choice_is_refused(eviction: Any) -> None:
    """A name that is not in the table, or what cannot be called, is a setting error that names the choices."""
    with pytest.raises(SettingsError, match=r"eviction is .*give one of 'lru', 'arc', 'device-lru', or a"):
        policy_factory(eviction)


def failing_factory() -> TailFirstLru:
    raise ValueError("no policy today")


@pytest.mark.parametrize("eviction", ["lfu", failing_factory])
def test_a_bad_choice_opens_nothing(eviction: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An offloader that cannot have its policy closes the device and maps no memory."""
    monkeypatch.setattr("kvmoor.offloader.TransferWorker", None)
    device = CpuDevice()

    with pytest.raises(ValueError, match=r"eviction is 'lfu'|no policy today"):
        Offloader(DeviceBlocks().layout(), host_memory=8 * 4096, device=device, eviction=eviction)

    assert device.closed
