"""Staging directories under a model base path: hidden from readers, removed after a failure or a kill.

    <model>/.staging-<id>/lock      locked (flock) while its process lives
    <model>/.staging-<id>/bundle/   filled by other stages; publishing renames it to <model>/<version>
    <model>/.trash-<id>/            a version that is being removed, see retention
    <model>/.jobs/<plan>/           the files that tasks wrote: see exporter.jobs.runner

TensorFlow Serving skips names that are not integers. The lock is beside the bundle, not in it, so that it
marks the process as alive from before the first byte until after the rename.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from exporter.errors import ExportError
from exporter.storage.files import (
    close_quietly,
    make_directories,
    open_lock,
    remove_tree,
    still_at,
    try_lock,
    writing,
)
from exporter.storage.layout import JOBS_DIRECTORY, STAGING_PREFIX, TRASH_PREFIX

_LOCK = "lock"
_YOUNG_SECONDS = 10.0  # a process may have made the directory, and not yet the lock in it
_OWN_NAME = re.compile(re.escape(STAGING_PREFIX) + r"[0-9]+-[0-9a-f]{8}")


class Staging:
    """A directory to prepare one version in: `with Staging(model) as staging: ... staging.path ...`.

    Makes the model base path if needed, and first removes directories of killed runs under it, unless
    `sweeps` is false. At the end of the block everything that was not published is removed.

    Raises:
        TargetNotWritable, DiskFull, PublishError: on entry, see `exporter.storage.files.writing`.
    """

    def __init__(self, model: Path, *, sweeps: bool = True) -> None:
        self.model = model
        self._sweeps = sweeps

    @property
    def path(self) -> Path:
        """The directory to fill; its mode follows the umask, as published directories do."""
        return self._root / "bundle"

    def __enter__(self) -> Staging:
        try:
            with writing(self.model):
                make_directories(self.model)
                if self._sweeps:
                    remove_leftovers(self.model)
                while not self._create(self.model / f"{STAGING_PREFIX}{os.getpid()}-{os.urandom(4).hex()}"):
                    pass
        except ExportError as error:
            _forget_name(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        remove_tree(self._root)  # while it is locked: no other process removes it, too
        close_quietly(self._lock)
        if isinstance(error, ExportError):
            _forget_name(error)

    def _create(self, root: Path) -> bool:
        """Make the staging directory `root` and lock it.

        False if another process's cleanup removed it meanwhile. OSError, or PublishError and its subclasses,
        if it cannot be made; it is removed then.
        """
        root.mkdir()
        with ExitStack() as undone:
            undone.callback(remove_tree, root)  # the disk may be full
            try:
                lock = open_lock(root / _LOCK)
            except FileNotFoundError:
                return False
            undone.callback(close_quietly, lock)
            if not try_lock(lock) or not still_at(lock, root / _LOCK):
                return False
            # Only now: before it has a locked file, another process may remove it as a left-over.
            self._root, self._lock = root, lock
            self.path.mkdir()
            undone.pop_all()
        return True


def _forget_name(error: ExportError) -> None:
    """Replace the random name of a staging directory by `.staging` in an error's message, in place.

    Otherwise a watch would report each repetition of one failure as a new one.
    """
    error.message = _OWN_NAME.sub(".staging", error.message)
    error.args = (error.message,)


def remove_leftovers(model: Path) -> None:
    """Remove a model's staging and trash directories of processes that died, and its abandoned jobs.

    Several processes may do this at once. What cannot be removed stays for the next run: it only costs space.
    OSError if the directory cannot be listed.
    """
    with os.scandir(model) as found:
        entries = [entry for entry in found if entry.is_dir(follow_symlinks=False) or entry.is_symlink()]
    for entry in entries:
        if entry.name.startswith(TRASH_PREFIX):
            # without a lock: what is here was published, and no path leads to it any more
            remove_tree(Path(entry.path))
        elif entry.name.startswith(STAGING_PREFIX) and not entry.is_symlink():
            _remove_if_dead(Path(entry.path))
    if (jobs := model / JOBS_DIRECTORY).is_dir():
        from exporter.jobs.runner import remove_abandoned_jobs

        remove_abandoned_jobs(jobs)


def dead_leftovers(model: Path) -> list[Path]:
    """The paths that `remove_leftovers` would remove: directories, sorted, then jobs.

    OSError if the directory cannot be listed, or what was listed vanishes meanwhile.
    """
    found = [path for path in model.iterdir() if path.name.startswith((STAGING_PREFIX, TRASH_PREFIX))]
    dead = [path for path in found if path.name.startswith(TRASH_PREFIX) or _is_dead(path)]
    from exporter.jobs.runner import abandoned_jobs

    return [*sorted(dead), *abandoned_jobs(model / JOBS_DIRECTORY)]


def _is_dead(root: Path) -> bool:
    """True if no process has the lock of a staging directory; False also for anything but a directory.

    A very new one (less than 10 s old) may still lack its lock file: it counts as alive. OSError if the
    directory vanishes meanwhile, or the file system has no locks.
    """
    # not through a link: what it leads to is not ours
    if root.is_symlink() or not root.is_dir():
        return False
    try:
        lock = open_lock(root / _LOCK, flags=0)
    except OSError:
        return not (root / _LOCK).exists() and time.time() - root.stat().st_mtime > _YOUNG_SECONDS
    try:
        return try_lock(lock)
    finally:
        close_quietly(lock)


def _remove_if_dead(root: Path) -> None:
    try:
        # made if it is missing: its process, if it lives, finds it locked and takes another directory
        lock = open_lock(root / _LOCK)
    except OSError:
        return
    try:
        if try_lock(lock):
            remove_tree(root)
    finally:
        close_quietly(lock)
