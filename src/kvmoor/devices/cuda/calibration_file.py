"""One JSON object in a file that only this user reads and writes; readers see whole files.

A cache is a convenience: what cannot be read is as good as not there, and what cannot be written is logged.
"""

import json
import logging
import os
import stat
import tempfile
from pathlib import Path
from typing import Any, Final

_log = logging.getLogger("kvmoor")

_MAX_NBYTES: Final = 2**20
"""More than any calibration has (10 KB); what is longer is not ours."""


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object; None if there is none, or not one that this user wrote."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(file.fileno())
            is_ours = found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if not stat.S_ISREG(found.st_mode) or not is_ours:
                _log.warning("%s is not a file that only this user writes: it is not used", path)
                return None
            content = json.loads(file.read(_MAX_NBYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        _log.info("%s cannot be read: %s", path, error)
        return None
    return content if isinstance(content, dict) else None


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Keep an object if that can be done: written beside and renamed, so that no reader sees a part of it."""
    try:
        # Each level by itself: `parents=True` would make the upper ones with default permissions.
        for folder in (*reversed(path.parent.parents), path.parent):
            if not folder.exists():
                folder.mkdir(mode=0o700, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=".writing-", dir=path.parent)  # with mode 0600
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        _log.info("a calibration cannot be kept in %s: %s", path, error)
