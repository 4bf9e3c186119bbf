"""Measure the disk space that a model takes, and name the command that frees or explains it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from exporter.publish.delta_log import list_deltas
from exporter.publish.versions import log_directories, version_dirs
from exporter.storage.local_paths import quoted
from exporter.terminal.progress import count, human_bytes

_NEEDED_VERSIONS = 2
"""A server holds the version that it serves while it loads the next one."""


class Room(Struct, frozen=True):
    """The disk of a model: its `size`, and the bytes that are `used` and `free` on it.

    `taken` are the bytes of the model, `deltas` is the number of its deltas. `own` has the bytes that
    removing each version would free, the oldest version first. Data that another version, or a trainer, has a
    hard link to is not freed with a version.
    """

    model: Path
    size: int
    used: int
    free: int
    taken: int
    own: tuple[int, ...]
    deltas: int

    @classmethod
    def of(cls, model: Path) -> Room:
        """Measure the disk of a model, and the model on it, now.

        Every file below the model is looked at; files with several hard links count once. OSError if the disk
        cannot be asked, ManifestError if a directory of the model cannot be listed.
        """
        disk, blocks, own = os.statvfs(model), dict[int, int](), []
        for version in reversed(version_dirs(model)):
            found = [*_files(version.path)]
            own.append(sum(_bytes(each) for each in found if each.st_nlink == 1))
        for each in _files(model):
            blocks[each.st_ino] = _bytes(each)
        deltas = sum(len(list_deltas(log)) for log in log_directories(model))
        unit = disk.f_frsize
        used = (disk.f_blocks - disk.f_bfree) * unit
        # f_bavail, not f_bfree: some blocks are kept for root
        size, free = disk.f_blocks * unit, disk.f_bavail * unit
        return cls(model, size, used, free, sum(blocks.values()), tuple(own), deltas)

    @property
    def text(self) -> str:
        """The disk's size, and its space used by this model and by other files, as a clause for people."""
        what = f"{count(len(self.own), 'version')}, {count(self.deltas, 'delta')}"
        others = max(0, self.used - self.taken)
        return (
            f"of {human_bytes(self.size)} there other files take {human_bytes(others)}, "
            f"this model {human_bytes(self.taken)} ({what}){self._older}"
        )

    @property
    def spare(self) -> int:
        """The number of bytes that removing all versions but the newest two would free; servers need two."""
        return sum(self.own[:-_NEEDED_VERSIONS])

    @property
    def _older(self) -> str:
        number = len(self.own) - _NEEDED_VERSIONS
        old = count(number, "old version")
        return f"; {human_bytes(self.spare)} of it are of {old} that no server needs" if self.spare else ""

    def command(self, published: str | Path) -> str:
        """The command that removes old versions of the model `published`, a URL or path.

        If there are none to remove, it is the command that shows what else is on the disk.
        """
        if self.spare:
            return f"export-model merge {quoted(published)} --rebase --keep {quoted(_NEEDED_VERSIONS)}"
        return f"du -xah -d 1 {quoted(_mounted_at(self.model))} | sort -h | tail"


def _files(directory: Path) -> Iterator[os.stat_result]:
    for path in directory.rglob("*"):
        with suppress(OSError):  # it was just removed
            if path.is_file() and not path.is_symlink():
                yield path.lstat()


def _bytes(found: os.stat_result) -> int:
    return found.st_blocks * 512  # in units of 512 bytes on every file system: stat(2)


def _mounted_at(path: Path) -> Path:
    place = path.resolve()
    return next((each for each in (place, *place.parents) if each.is_mount()), place)
