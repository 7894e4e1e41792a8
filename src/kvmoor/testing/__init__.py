"""Test tools for kvmoor and for those who build on it: scripted faults, and suites that a plug-in has to pass."""

from kvmoor.testing.device_contract import DeviceContract as DeviceContract
from kvmoor.testing.eviction_contract import EvictionContract as EvictionContract
from kvmoor.testing.scripted_copies import CopyGate as CopyGate
from kvmoor.testing.scripted_copies import ScriptedCopies as ScriptedCopies
from kvmoor.testing.scripted_registrar import RegistrationBudget as RegistrationBudget
from kvmoor.testing.scripted_registrar import ScriptedRegistrar as ScriptedRegistrar

__all__ = [
    "CopyGate",
    "DeviceContract",
    "EvictionContract",
    "RegistrationBudget",
    "ScriptedCopies",
    "ScriptedRegistrar",
]
