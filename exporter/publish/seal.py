"""Make a staged directory readable and durable, and compute its files' sizes and checksums."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from exporter.errors import VerificationError
from exporter.files import sync
from exporter.publish.manifest import FileEntry
from exporter.wire.crc32c import crc_of, mask

_DATA_SHARD = re.compile(r".*\.data-[0-9]{5}-of-[0-9]{5}")


def seal(bundle: Path) -> tuple[FileEntry, ...]:
    """Make the staged tree readable and durable; its files by path. Directories come after what they hold."""
    mode = stat.S_IMODE(bundle.stat().st_mode)
    files: list[FileEntry] = []
    for name, directories, names in os.walk(bundle, topdown=False, onerror=_raise):
        directory = Path(name)
        links = [child for child in directories if (directory / child).is_symlink()]
        files += [_seal_file(bundle, directory / child, mode) for child in names + links]
        _set_mode(directory, mode)
        sync(directory)
    return tuple(sorted(files, key=lambda file: file.path))


def _seal_file(bundle: Path, path: Path, mode: int) -> FileEntry:
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise VerificationError(f"the staged {path} is not a regular file")
    if found.st_nlink == 1:
        _set_mode(path, mode & 0o666)
        sync(path)
    crc = None if _DATA_SHARD.fullmatch(path.name) else _masked_crc(path)
    shown = None if crc is None else f"{crc:08x}"
    return FileEntry(path.relative_to(bundle).as_posix(), found.st_size, shown)


def _masked_crc(path: Path) -> int:
    with path.open("rb") as file:
        return mask(crc_of(file.fileno(), 0, os.fstat(file.fileno()).st_size))


def _set_mode(path: Path, mode: int) -> None:
    """What temporary-file functions and copies of private files leave is private: servers run as others."""
    if stat.S_IMODE(path.stat().st_mode) != mode:
        path.chmod(mode)


def _raise(error: OSError) -> None:
    raise error
