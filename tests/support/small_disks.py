"""File systems of their own, with as much room as a test gives them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

PAGE = os.sysconf("SC_PAGE_SIZE")
_PLENTY = {"size": "1g", "nr_inodes": "1m"}


@dataclass(frozen=True)
class SmallDisk:
    """A file system in memory, mounted at `path`."""

    path: Path

    def leave(self, *, blocks: int | None = None, files: int | None = None) -> None:
        """Leave room for so many further blocks, and so many further names; None leaves plenty."""
        found, limits = os.statvfs(self.path), dict(_PLENTY)
        if blocks is not None:
            limits["size"] = str((found.f_blocks - found.f_bfree + blocks) * found.f_frsize)
        if files is not None:
            limits["nr_inodes"] = str(found.f_files - found.f_ffree + files)
        self.mount("remount", **limits)

    def mount(self, *options: str, **limits: str) -> None:
        given = ",".join([*options, *(f"{name}={value}" for name, value in limits.items())])
        subprocess.run(["mount", "-t", "tmpfs", "-o", given, "tmpfs", str(self.path)], check=True)

    @property
    def used(self) -> tuple[int, int]:
        """The blocks and the names that are used."""
        found = os.statvfs(self.path)
        return found.f_blocks - found.f_bfree, found.f_files - found.f_ffree


@contextmanager
def small_disk(path: Path, size: str = _PLENTY["size"]) -> Iterator[SmallDisk]:
    """A file system of that size; the test is skipped where mounting is not permitted."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a file system is not permitted here")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
