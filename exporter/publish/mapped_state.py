"""Check whether a server on this machine maps a version's tables, as its graph would, without loading it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from exporter.publish.manifest import MappedRecord
from exporter.storage.files import below, close_quietly, open_regular, read_record
from exporter.storage.layout import MAPPED_ID_FILE, VARIABLES_DIRECTORY
from exporter.storage.memory import available_bytes

_NETWORK = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "glusterfs", "fuse.glusterfs", "9p", "beegfs")
)
_LONGEST_ID = 64


def why_restored(record: MappedRecord) -> str:
    """The reason why a server that runs here, as this user, reads the tables into memory; "" if it maps them.

    `record` is the manifest's, by which files are looked at where servers map them.

    Raises:
        ManifestError: the name of a table's file is not below the version.
    """
    if not record.tables:
        return "none of its tables can be mapped"
    directory = Path(record.directory)
    path = directory / MAPPED_ID_FILE
    try:
        if read_record(path, _LONGEST_ID) != record.id.encode():
            return f"{path} is that of another version"
        for table in record.tables:
            path = below(directory / VARIABLES_DIRECTORY, table.file, "the manifest:")
            if path.stat().st_size < table.bytes_:
                return f"{path} is shorter than its table"
            if not os.access(path, os.R_OK):
                return f"{path} may not be read"
            if table.places:
                path = below(directory / VARIABLES_DIRECTORY, table.places, "the manifest:")
                if not os.access(path, os.R_OK):
                    return f"{path} is not there, or may not be read"
    except OSError as error:
        return f"{path}: {error.strerror}"
    except ValueError:
        return f"{record.directory!r} is not a path"
    return ""


_STEP_BYTES = 128 << 10
"""Linux reads no more than a device's readahead window for one call: of 256 MB at once, 8 MB."""


def read_ahead(version: Path, record: MappedRecord, goes_on: Callable[[], bool]) -> int:
    """Have the kernel read the tables in the directory `version` in advance.

    `record` has the tables. Return the number of bytes requested. `goes_on` is called before each step of 128
    KiB; False ends it early. At most half of the available memory is requested, and nothing if that is
    unknown: more would push out what is being served.

    Raises:
        OSError, ManifestError: a file is missing, or its name is not below the version.
        CheckpointError: a file is a pointer of Git LFS.
    """
    left, asked = (available_bytes() or 0) // 2, 0
    # Places first, as every lookup reads them; then tables from their end, where the hot rows are.
    files = [(table.places, True) for table in record.tables if table.places]
    files += [(table.file, bool(table.places)) for table in record.tables]
    for file, from_its_end in files:
        descriptor = open_regular(below(version / VARIABLES_DIRECTORY, file, "the manifest:"))
        try:
            size = os.fstat(descriptor).st_size
            for step in range(0, min(size, left), _STEP_BYTES):
                if not goes_on():
                    return asked
                at = max(0, size - step - _STEP_BYTES) if from_its_end else step
                os.posix_fadvise(descriptor, at, _STEP_BYTES, os.POSIX_FADV_WILLNEED)
                asked += min(_STEP_BYTES, size - step)
        finally:
            close_quietly(descriptor)
        left = max(0, left - size)
    return asked


def mapped_elsewhere(record: MappedRecord, version: Path) -> str:
    """The directory that servers map, by `record`, instead of `version`, which is a copy of that directory.

    "" if `version` is that directory itself, or if one of the two does not exist, so that nothing is mapped.
    """
    try:
        is_own = Path(record.directory).samefile(version)
    except (OSError, ValueError):
        return ""  # nothing is mapped
    return "" if is_own else record.directory


def tables_state(record: MappedRecord, version: Path) -> str:
    """The state of a version's tables: `mapped`, `mapped from DIR` for a copy, or `restored: ` and why.

    `version` is the directory that is looked at, `record` is its manifest's. ManifestError if the name of a
    table's file is not below it.
    """
    why, elsewhere = why_restored(record), mapped_elsewhere(record, version)
    if why:
        return f"restored: {why}"
    return f"mapped from {elsewhere}" if elsewhere else "mapped"


def network_file_system(path: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """The kind of network file system that holds a path, as `nfs4`.

    "" if it is local, or mounts cannot be read. `mounts` is the file with the mounted file systems.
    """
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    # resolved: mount points are real paths
    there, longest, found = path.resolve(), -1, ""
    for line in lines:
        point, kind = line.split(" ")[1:3]
        # the kernel writes a blank so, as blanks divide the fields: proc(5)
        point = point.replace("\\040", " ")
        if len(point) >= longest and there.is_relative_to(point):  # of two on one point the later one counts
            longest, found = len(point), kind
    return found if found in _NETWORK else ""
