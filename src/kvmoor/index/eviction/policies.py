"""The policies by their names, and what else may be given in place of a name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

from kvmoor.errors import SettingsError
from kvmoor.index.eviction.arc import TailFirstArc
from kvmoor.index.eviction.device_lru import DeviceAwareLru
from kvmoor.index.eviction.lru import TailFirstLru
from kvmoor.index.eviction.policy import EvictionPolicy

PolicyFactory: TypeAlias = Callable[[], EvictionPolicy]
"""Returns a new policy at each call, one for each group."""

EvictionChoice: TypeAlias = Literal["lru", "arc", "device-lru"] | PolicyFactory
"""What an `eviction` option takes: a name of `POLICIES`, or one's own factory, such as a class."""

POLICIES: Final[Mapping[str, PolicyFactory]] = MappingProxyType(
    {"lru": TailFirstLru, "arc": TailFirstArc, "device-lru": DeviceAwareLru}
)


def policy_factory(choice: EvictionChoice) -> PolicyFactory:
    """Return what makes the policies that were chosen. Raises `SettingsError` for anything else."""
    names = ", ".join(map(repr, POLICIES))
    if isinstance(choice, str):
        factory = POLICIES.get(choice)
        if factory is None:
            raise SettingsError(f"eviction is {choice!r}: give one of {names}, or a policy factory")
        return factory
    if not callable(choice):
        raise SettingsError(
            f"eviction is a {type(choice).__name__}: give one of {names}, or a callable that returns a new policy for "
            "each group, such as the policy's class"
        )
    return choice
