"""Directories for temporary files that go with their process, however that ends."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

from exporter.layout import LOCK_FILE

_PREFIX = "export-model-"
_LOCKED_SECONDS = 60.0  # within which a directory that is made has its lock


def private_directory() -> Path:
    """A directory that is removed when the process ends, or by a later one if the process was killed."""
    import tempfile

    new, owner = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}")), os.getpid()
    lock = os.open(new / LOCK_FILE, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)  # open as long as we live
    fcntl.flock(lock, fcntl.LOCK_EX)
    root = new.rename(new.with_name(new.name[1:]))  # it is locked when others can find it
    for left in root.parent.glob(f"{_PREFIX}*"):
        _remove_if_left(left, os.O_RDWR)
    for left in root.parent.glob(f".{_PREFIX}*"):  # perhaps killed before it was locked
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _LOCKED_SECONDS:
                _remove_if_left(left, os.O_RDWR | os.O_CREAT)

    def remove() -> None:
        if os.getpid() == owner:  # a forked child's end is not ours
            shutil.rmtree(root, ignore_errors=True)

    atexit.register(remove)
    return root


def _remove_if_left(directory: Path, flags: int) -> None:
    """Remove a directory whose lock, opened with these flags, nobody holds."""
    with suppress(OSError):
        lock = os.open(directory / LOCK_FILE, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(lock)
