"""Sizes of simulated tiers: what people write, in blocks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from kvmoor.byte_sizes import format_nbytes, parse_nbytes, round_up
from kvmoor.errors import SettingsError
from kvmoor.simulation.cost_model import check_bytes_per_token, kv_size_of_config

_SLOT_ALIGNMENT: Final = 4096
"""Slots are whole memory pages, so this is what a block takes in host memory. Other tiers are counted alike."""


@dataclass(frozen=True, slots=True)
class SimulatedMemory:
    """Know what blocks take, if the model is known."""

    bytes_per_token: int | None
    explanation: str

    @classmethod
    def of_options(cls, kv_bytes_per_token: int | None, model_config: Path | None) -> Self:
        """Take what the options say of a model. Raises `SettingsError` for two answers, or a bad one."""
        if kv_bytes_per_token is not None and model_config is not None:
            raise SettingsError("--kv-bytes-per-token and --model-config say the same thing: give one of them")
        if model_config is not None:
            size = kv_size_of_config(model_config)
            return cls(size.bytes_per_token, size.explanation)
        if kv_bytes_per_token is not None:
            return cls(check_bytes_per_token(kv_bytes_per_token), "given")
        return cls(None, "")

    def slot_nbytes(self, block_size: int) -> int | None:
        """Return what a block of so many tokens takes; None if that is not known."""
        return None if self.bytes_per_token is None else round_up(self.bytes_per_token * block_size, _SLOT_ALIGNMENT)

    def blocks_of(self, size: str, block_size: int, *, option: str) -> int:
        """Return how many blocks fit. Raises `SettingsError` for what is no size, or holds no block."""
        number, _, unit = size.strip().partition("blocks")
        if number != size.strip() and not unit and number.strip().isdecimal() and int(number) > 0:
            return int(number)
        nbytes = parse_nbytes(size, option=option)
        slot_nbytes = self.slot_nbytes(block_size)
        if slot_nbytes is None:
            raise SettingsError(
                f"{option} {size!r} is in bytes, and what a token takes is not known: "
                "give --kv-bytes-per-token or --model-config, or a size such as '5000 blocks'"
            )
        if nbytes < slot_nbytes:
            raise SettingsError(
                f"{option} {size!r} holds no block: one of {block_size} tokens takes {format_nbytes(slot_nbytes)}"
            )
        return nbytes // slot_nbytes

    def check(self, size: str, *, option: str) -> None:
        """Refuse what no block size makes usable, before a trace is read."""
        if self.bytes_per_token is None or "blocks" in size:
            self.blocks_of(size, 1, option=option)
        else:
            parse_nbytes(size, option=option)
