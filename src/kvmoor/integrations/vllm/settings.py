"""What users write into ``kv_connector_extra_config``, read once and checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final, Literal, get_args

from kvmoor.byte_sizes import parse_nbytes
from kvmoor.deadlines import checked_timeout
from kvmoor.errors import SettingsError
from kvmoor.host_memory.arena_plan import MemoryCheck
from kvmoor.host_memory.huge_pages import HugePagesChoice
from kvmoor.host_memory.numa import NumaChoice

_VLLM_KEYS: Final = frozenset(
    {
        "block_size",
        "blocks_per_chunk",
        "canonical_layout",
        "offload_prompt_only",
        "self_describing_kv_events",
        "spec_module_path",
        "spec_name",
        "sync_load_budget_bytes",
    }
)
"""Keys of the same dictionary that vLLM reads itself (0.30 to 0.33)."""

KvLayout = Literal["auto", "LBHNC", "BLHNC"]
Pin = Literal["background", "eager", "off"]
Mapped = Literal["background", "eager"]
OneCopy = Literal["auto", "off"]
Eviction = Literal["lru", "arc", "device-lru"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSettings:
    """Hold the plugin's settings. `host_memory` is bytes: the total of one engine on this host, all its ranks."""

    host_memory: int
    eviction: Eviction = "lru"
    mapping: Mapped = "background"
    pin: Pin = "background"
    memory_check: MemoryCheck = "refuse"
    huge_pages: HugePagesChoice = "auto"
    numa: NumaChoice = "auto"
    kv_layout: KvLayout = "auto"
    job_timeout_s: float = 30.0
    """When a copy is given up, and how long vLLM's worker waits for device blocks it is about to reuse."""
    one_copy: OneCopy = "auto"
    """Whether ranks that hold the same KV caches (MLA) share one copy where they can."""
    offload_prompt_only: bool = False
    """Whether to leave out what a model generated. vLLM's own default is True."""
    model_revision: str = ""
    """What tells two models of one name apart, a part of every key. The connector takes it from vLLM."""


_CHOICES: Final[dict[str, tuple[Any, ...]]] = {
    "eviction": get_args(Eviction),
    "mapping": get_args(Mapped),
    "pin": get_args(Pin),
    "memory_check": ("refuse", "warn"),
    "huge_pages": ("auto", "off"),
    "kv_layout": get_args(KvLayout),
    "one_copy": get_args(OneCopy),
    "offload_prompt_only": (False, True),
}
_OWN_KEYS: Final = frozenset(PluginSettings.__dataclass_fields__)


def read_settings(extra_config: Mapping[str, Any]) -> PluginSettings:
    """Read the plugin's settings; raises `SettingsError` for a key nobody reads, and for a value that cannot be."""
    for key in extra_config:
        if not isinstance(key, str):
            raise SettingsError(f"kv_connector_extra_config has a key {key!r} that is no text: remove it")
        if key not in _OWN_KEYS | _VLLM_KEYS:
            near = get_close_matches(key, sorted(_OWN_KEYS | _VLLM_KEYS), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(_OWN_KEYS))}"
            raise SettingsError(f"kv_connector_extra_config has a key {key!r} that nobody reads: {hint}")
    values = {key: value for key, value in extra_config.items() if key in _OWN_KEYS}
    if "host_memory" not in values:
        raise SettingsError(
            "kv_connector_extra_config does not say how much host memory to use: give host_memory, such as "
            '"64GiB", the total of one engine on this host'
        )
    values["host_memory"] = parse_nbytes(values["host_memory"], option="host_memory")
    for key, choices in _CHOICES.items():
        if key in values and not any(values[key] == choice for choice in choices):
            raise SettingsError(f"{key} is {values[key]!r}: give {' or '.join(map(repr, choices))}")
    if not isinstance(values.get("model_revision", ""), str):
        raise SettingsError(f"model_revision is {values['model_revision']!r}: give text, such as a commit")
    if "job_timeout_s" in values:
        values["job_timeout_s"] = checked_timeout(
            values["job_timeout_s"], option="job_timeout_s", at_least=0.001, error=SettingsError
        )
    return PluginSettings(**values)
