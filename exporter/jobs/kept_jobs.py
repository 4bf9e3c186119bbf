"""Directories of jobs that are kept: in use by commands that run a plan, removed by the last of them.

    <model>/.jobs/<plan>/.lock      on a file system: locked (flock) by each command that uses the directory
    <model>/.jobs/<plan>/driver     in a store: who began to use it last

Several commands may run one plan at once: their tasks write the same. What a killed command left is gone on
with by the same command, and removed once nobody has done so for a week.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from exporter.errors import ExportError
from exporter.files import open_lock, remove_tree, still_at, try_lock, writing
from exporter.layout import JOBS_DIRECTORY, LOCK_FILE, RECEIPTS_DIRECTORY
from exporter.storage.objects import ObjectWriter
from exporter.storage.output_directory import open_directory
from exporter.storage.url import Url

ABANDONED_SECONDS = 7 * 86400.0
"""A job that nobody goes on with for so long is removed: someone may come back to it after a weekend."""

_DRIVER = "driver"
_POLL_SECONDS = 0.02
_PLAN = re.compile(r"[0-9a-f]{32}", re.ASCII)
_OWNER = secrets.token_hex(8)


class UsedJob(Protocol):
    """A job's directory, from the moment on that this command uses it until it leaves or removes it."""

    def leave(self) -> None:
        """Use it no longer; it stays for whoever goes on."""

    def remove(self) -> None:
        """Use it no longer, and remove it, unless another command uses it, which removes it then."""


def use(place: str) -> UsedJob:
    """Use the directory at a path or URL, which is made if need be.

    Raises:
        DiskFull, PublishError: it cannot be written.
    """
    url = Url.parse(place)
    return _LocalJob(Path(place)) if url is None else StoredJob(place)


class _LocalJob:
    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(path):
            while (lock := _locked(path)) is None:
                time.sleep(_POLL_SECONDS)  # it is being removed
            os.utime(path)
        self._lock = lock

    def leave(self) -> None:
        os.close(self._lock)

    def remove(self) -> None:
        if try_lock(self._lock):
            remove_tree(self._path)
        self.leave()


def _locked(path: Path) -> int | None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError:  # the directory of all jobs was removed meanwhile, being empty
        path.mkdir(parents=True, exist_ok=True)
    try:
        lock = open_lock(path / LOCK_FILE)
    except FileNotFoundError:
        return None
    if try_lock(lock, shared=True) and still_at(lock, path / LOCK_FILE):
        return lock
    os.close(lock)
    return None


class StoredJob:
    """A job in a store, which has no locks: the command that began last removes the directory."""

    def __init__(self, place: str, *, is_begun: bool = False) -> None:
        self._directory = open_directory(place)
        if not is_begun:
            self._directory.put(_DRIVER, _me())

    def leave(self) -> None:
        """See `UsedJob`."""

    def remove(self) -> None:
        """See `UsedJob`."""
        with suppress(ExportError):  # then it is abandoned
            if self._directory.read(_DRIVER) in (_me(), None):
                self._directory.remove()


def _me() -> bytes:
    return f"{_OWNER}-{os.getpid()}".encode()  # a fork has our name, and is another


# --- what nobody goes on with ------------------------------------------------------------------------------


def abandoned_jobs(kept: Path) -> Iterator[Path]:
    """The directories of jobs below a local directory that nobody uses, nor has used for long."""
    for path in _directories(kept):
        with suppress(OSError):
            if _is_abandoned(path, None) and _is_free(path, remove=False):
                yield path


def remove_abandoned_jobs(kept: Path, now: float | None = None) -> None:
    """Remove them, as far as that is possible, and the directory of all if it is ours and empty.

    Concurrent calls do no harm.
    """
    for path in _directories(kept):
        with suppress(OSError):
            if _is_abandoned(path, now):
                _is_free(path, remove=True)
    if kept.name == JOBS_DIRECTORY:
        with suppress(OSError):
            kept.rmdir()


def remove_abandoned(kept: str, now: float | None = None) -> None:
    """`remove_abandoned_jobs` for a path or a URL. What a store refuses to remove stays."""
    if (url := Url.parse(kept)) is None:
        remove_abandoned_jobs(Path(kept), now)
        return
    since = (time.time() if now is None else now) - ABANDONED_SECONDS
    with suppress(ExportError):
        store = ObjectWriter(url)
        for path in store.directories(url.path):
            if _PLAN.fullmatch(path.rpartition("/")[2]):
                store.delete(*_abandoned(store, path, since))


def _abandoned(store: ObjectWriter, path: str, since: float) -> list[str]:
    """The keys of a job that nobody has used since; of one that was begun later no object is listed."""
    driver = store.look(f"{path}/{_DRIVER}")
    if driver is not None and driver.modified >= since:
        return []
    found = [*store.below(path)]
    return [] if any(each.modified >= since for each in found) else [each.key for each in found]


def _directories(kept: Path) -> list[Path]:
    with suppress(OSError):
        return sorted(path for path in kept.iterdir() if _PLAN.fullmatch(path.name) and not path.is_symlink())
    return []


def _is_abandoned(path: Path, now: float | None) -> bool:
    """True if nothing has come into it for long: directories have the time of their newest entry."""
    newest = path.stat().st_mtime
    with suppress(FileNotFoundError):
        newest = max(newest, (path / RECEIPTS_DIRECTORY).stat().st_mtime)
    return (time.time() if now is None else now) - newest > ABANDONED_SECONDS


def _is_free(path: Path, *, remove: bool) -> bool:
    """True if no command uses it; then it may be removed."""
    try:
        lock = open_lock(path / LOCK_FILE, flags=0)
    except FileNotFoundError:  # of a worker that came after the end, or of an older program
        lock = None
    try:
        is_free = lock is None or try_lock(lock)
        if is_free and remove:
            remove_tree(path)
        return is_free
    finally:
        if lock is not None:
            os.close(lock)
