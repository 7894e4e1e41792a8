"""What kvmoor takes from the environment. No other module reads it."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """Return where kvmoor keeps what it can make again: ``$XDG_CACHE_HOME/kvmoor``, or ``~/.cache/kvmoor``.

    Nothing is created. A relative ``XDG_CACHE_HOME`` is ignored, as the XDG base directory specification wants.
    """
    configured = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(configured) if configured and Path(configured).is_absolute() else Path.home() / ".cache"
    return base / "kvmoor"
