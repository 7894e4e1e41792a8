"""What kvmoor takes from the environment. No other module reads it."""

import os
from pathlib import Path

from kvmoor.errors import SettingsError


def cache_directory() -> Path:
    """Return where kvmoor keeps what it can make again: ``$XDG_CACHE_HOME/kvmoor``, or ``~/.cache/kvmoor``.

    Nothing is created. A relative ``XDG_CACHE_HOME`` is ignored, as the XDG base directory specification wants. Raises
    `SettingsError` if neither is known.
    """
    configured = os.environ.get("XDG_CACHE_HOME", "")
    if configured and Path(configured).is_absolute():
        return Path(configured) / "kvmoor"
    try:
        return Path.home() / ".cache" / "kvmoor"
    except RuntimeError as error:  # a user without an entry in the system's list, as in some containers
        raise SettingsError(
            "there is no place for a cache: neither XDG_CACHE_HOME nor HOME is set; set one of them to a folder"
        ) from error
