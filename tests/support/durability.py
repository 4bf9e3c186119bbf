"""What a power cut would leave: names that were given to what was not on disk yet, or are not themselves.

The calls by which names appear and vanish are watched, and those that wait for the disk. What was on disk is
known by content: the clock of file times is too coarse to tell a write from the one before.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

_OUT_OF_SIGHT = (".staging-", ".trash-")
_CACHES = ".state"

Identity = tuple[int, int]


def _identity(found: os.stat_result) -> Identity:
    return found.st_dev, found.st_ino


def _content(where: Path) -> object:
    if where.is_dir():
        return frozenset(path.name for path in where.iterdir())
    return hashlib.sha256(where.read_bytes()).digest()


def _is_seen(path: Path) -> bool:
    """False for work in progress, what is on its way out, and caches, which may be lost."""
    return not any(part.startswith(_OUT_OF_SIGHT) or part == _CACHES for part in path.parts)


@dataclass
class Disk:
    """What is certainly on disk, directories whose newest names may be lost, and what was given a name too
    early.
    """

    synced: dict[Identity, object] = field(default_factory=dict)
    pending: dict[Identity, str] = field(default_factory=dict)
    early: list[str] = field(default_factory=list)

    def fsync(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        self.synced[_identity(found)] = _content(path)
        self.pending.pop(_identity(found), None)

    def named(self, path: Path) -> None:
        """A name appeared or vanished: its directory is to be synced."""
        if _is_seen(path):
            self.pending[_identity(path.parent.stat())] = f"{path} is in no directory on disk"

    def about_to_be_named(self, source: Path, target: Path) -> None:
        """All that becomes visible must be on disk; what has a second link is another's, and not ours."""
        if not _is_seen(target) or source.is_symlink():
            return
        for path in (source, *source.rglob("*")):
            found = path.lstat()
            is_ours = stat.S_ISDIR(found.st_mode) or found.st_nlink == 1
            if is_ours and self.synced.get(_identity(found)) != _content(path):
                self.early.append(f"{path.relative_to(source.parent)} as {target} was not on disk")


@contextmanager
def watched_disk() -> Iterator[Disk]:
    """Everything that this process does to files meanwhile."""
    disk, real_fsync = Disk(), os.fsync

    def fsync(descriptor: int) -> None:
        real_fsync(descriptor)
        disk.fsync(descriptor)

    def renaming(call: Callable[..., None]) -> Callable[..., None]:
        def rename(source: Any, target: Any, **options: Any) -> None:
            disk.about_to_be_named(Path(source), Path(target))
            call(source, target, **options)
            disk.named(Path(target))

        return rename

    def naming(call: Callable[..., None]) -> Callable[..., None]:
        def name(path: Any, *arguments: Any, **options: Any) -> None:
            call(path, *arguments, **options)
            if not options.get("dir_fd"):
                disk.named(Path(path))

        return name

    with (
        patch("os.fsync", fsync),
        patch("os.rename", renaming(os.rename)),
        patch("os.replace", renaming(os.replace)),
        patch("os.mkdir", naming(os.mkdir)),
        patch("os.unlink", naming(os.unlink)),
    ):
        yield disk
