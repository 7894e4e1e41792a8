"""Compiled kernels on disk, so that only the first process of a machine waits for the compiler.

    <folder>/<key>.cubin      checksum (32 bytes), then what the compiler returned

The key names all that the result depends on, so an entry never becomes outdated, only unused. Readers see whole files
(written beside and renamed) and check them; they are not flushed: one torn by a power cut fails its check. A cache is a
convenience: whatever goes wrong with it, the kernel is compiled.
"""

import logging
import os
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from blake3 import blake3

from kvmoor.devices.cuda.compiler import DEFAULT_OPTIONS, compile_source, compiler_version

_log = logging.getLogger("kvmoor")

_FORMAT: Final = b"kvmoor cubin 1"
_CHECKSUM_NBYTES: Final = 32
_MAX_NBYTES: Final = 64 * 2**20
"""More than any kernel has (the page kernel: 0.3 MB); what is longer is not read. Guessed."""
_TEMPORARY_PREFIX: Final = ".writing-"
_STALE_AFTER_S: Final = 3600.0
"""When a file that some process was writing is taken for abandoned. Guessed: writing takes a millisecond."""


def load_or_compile(
    source: str,
    architecture: str,
    *,
    folder: Path | None,
    driver_version: int,
    options: tuple[str, ...] = DEFAULT_OPTIONS,
) -> bytes:
    """Return the compiled source, from `folder` (None: there is no cache) if it is there; else compile and keep it.

    Arguments and errors as of `compile_source`; `driver_version` as of `Driver.driver_version`. Any number of threads
    and processes may use one folder. Files of other users, or that others may write, are not trusted.
    """
    if folder is None:
        return compile_source(source, architecture, options=options)
    fields = (source, architecture, *options, compiler_version(), str(driver_version))
    key = _digest(*(field.encode() for field in fields))
    path = folder / f"{key.hex()}.cubin"
    compiled = _read(path, key)
    if compiled is None:
        compiled = compile_source(source, architecture, options=options)
        _write(path, key, compiled)
    return compiled


def _digest(*fields: bytes) -> bytes:
    """Return a digest that tells apart any two sequences of fields."""
    hasher = blake3(_FORMAT)
    for field in fields:
        hasher.update(len(field).to_bytes(8, "little"))
        hasher.update(field)
    return hasher.digest()


def _read(path: Path, key: bytes) -> bytes | None:
    """Return what a file holds, None if it is not there or not to be trusted."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.info("the kernel cache %s cannot be read (%s): the kernel is compiled", path, error)
        return None
    try:
        found = os.fstat(descriptor)
        is_ours = found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not stat.S_ISREG(found.st_mode) or not is_ours:
            _log.warning("%s is not a file that only this user writes: the kernel is compiled", path)
            return None
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(_MAX_NBYTES)
    except OSError as error:
        _log.info("the kernel cache %s cannot be read (%s): the kernel is compiled", path, error)
        return None
    finally:
        os.close(descriptor)
    checksum, compiled = content[:_CHECKSUM_NBYTES], content[_CHECKSUM_NBYTES:]
    if checksum != _digest(key, compiled):
        _log.info("%s is damaged: the kernel is compiled", path)
        return None
    return compiled


def _write(path: Path, key: bytes, compiled: bytes) -> None:
    """Keep a result if that can be done."""
    try:
        # Each level by itself: `parents=True` would make the upper ones with default permissions.
        for folder in (*reversed(path.parent.parents), path.parent):
            if not folder.exists():
                folder.mkdir(mode=0o700, exist_ok=True)
        _remove_abandoned(path.parent)
        descriptor, name = tempfile.mkstemp(prefix=_TEMPORARY_PREFIX, dir=path.parent)  # with mode 0600
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb", closefd=False) as file:
                file.write(_digest(key, compiled) + compiled)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
    except OSError as error:
        _log.info("the compiled kernel cannot be kept in %s (%s): the next start compiles again", path, error)


def _remove_abandoned(folder: Path) -> None:
    """Remove what processes left that were killed while they wrote."""
    oldest = time.time() - _STALE_AFTER_S
    for path in folder.glob(f"{_TEMPORARY_PREFIX}*"):
        with suppress(OSError):  # another process does the same, or it is nothing of ours
            if path.lstat().st_mtime < oldest:
                path.unlink()
