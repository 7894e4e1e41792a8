"""How copies are made: what the page kernel gets of the GPU, and which runs go to the copy engine."""

from dataclasses import dataclass, replace
from typing import Final, Self

from kvmoor.devices.cuda.launches import DEFAULT_VARIANT, VARIANTS, PageKernelVariant
from kvmoor.devices.device import Direction
from kvmoor.errors import SettingsError

_MAX_THREAD_BLOCKS: Final = 1024
"""Above what any link can use; what is above is a slip. Guessed."""
_VARIANTS_BY_NAME: Final = {variant.name: variant for variant in VARIANTS}


@dataclass(frozen=True, slots=True)
class CopyStrategy:
    """Say how a device copies. The defaults are for where nothing was measured; see `calibration`.

    `store_thread_blocks` and `load_thread_blocks` run the page kernel, in the variant of it that `store_kernel` and
    `load_kernel` name. Runs of at least `copy_engine_from_nbytes`, adjacent on both sides, go to the copy engine (None:
    never). The defaults are the knee that was measured on an H200 beside a saturating matmul (4 device to host, 8 host
    to device) and the size from which its copy engine was faster (1 MiB).

    Long jobs go by way of a ring in device memory if the runs of their slots in host memory have `gather_from_nbytes`
    on average (None: never); see `gathering`. Each queue that has such jobs takes `gather_ring_nbytes` of device memory
    for it, or less if there is not as much. Raises `SettingsError` for what no device takes.
    """

    store_thread_blocks: int = 4
    load_thread_blocks: int = 8
    copy_engine_from_nbytes: int | None = 2**20
    store_kernel: str = DEFAULT_VARIANT.name
    load_kernel: str = DEFAULT_VARIANT.name
    gather_from_nbytes: int | None = 512 * 2**10
    gather_ring_nbytes: int = 256 * 2**20

    def __post_init__(self) -> None:
        numbers = {name: getattr(self, name) for name in ("store_thread_blocks", "load_thread_blocks")}
        numbers["gather_ring_nbytes"] = self.gather_ring_nbytes
        for name in ("copy_engine_from_nbytes", "gather_from_nbytes"):
            if getattr(self, name) is not None:
                numbers[name] = getattr(self, name)
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SettingsError(f"{name} of the copy strategy is {value!r}: give a whole number from 1 on")
            if name.endswith("thread_blocks") and value > _MAX_THREAD_BLOCKS:
                raise SettingsError(
                    f"{name} of the copy strategy is {value}: give at most {_MAX_THREAD_BLOCKS}; a few saturate the "
                    "link, and each takes a part of the GPU from the engine"
                )
        for name in ("store_kernel", "load_kernel"):
            kernel = getattr(self, name)
            if kernel not in _VARIANTS_BY_NAME:
                known = ", ".join(_VARIANTS_BY_NAME)
                raise SettingsError(f"{name} of the copy strategy is {kernel!r}: choose from {known}")

    def thread_blocks(self, direction: Direction) -> int:
        """Return how many thread blocks copy in a direction."""
        return self.store_thread_blocks if direction is Direction.DEVICE_TO_HOST else self.load_thread_blocks

    def variant(self, direction: Direction) -> PageKernelVariant:
        """Return which page kernel copies in a direction."""
        name = self.store_kernel if direction is Direction.DEVICE_TO_HOST else self.load_kernel
        return _VARIANTS_BY_NAME[name]

    def with_ring_of_at_most(self, nbytes: int | None) -> Self:
        """Return the strategy with no larger ring than that; None: itself."""
        return self if nbytes is None else replace(self, gather_ring_nbytes=min(self.gather_ring_nbytes, nbytes))
