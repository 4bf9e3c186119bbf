"""Whether a server on this machine maps the tables of a version: what its graph finds, without loading it."""

from __future__ import annotations

import os
from pathlib import Path

from exporter.publish.manifest import MappedRecord
from exporter.storage.files import below, open_regular, read_regular
from exporter.storage.layout import MAPPED_ID_FILE, VARIABLES_DIRECTORY

_NETWORK = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "glusterfs", "fuse.glusterfs", "9p", "beegfs")
)
_LONGEST_ID = 64


def why_restored(record: MappedRecord) -> str:
    """Why a server that runs here, as this user, restores the tables, in words; "" if it maps them.

    Raises:
        ManifestError: the name of a table's file leads elsewhere.
    """
    if not record.tables:
        return "none of its tables can be mapped"
    directory = Path(record.directory)
    path = directory / MAPPED_ID_FILE
    try:
        if read_regular(path, _LONGEST_ID) != record.id.encode():
            return f"{path} is that of another version"
        for table in record.tables:
            path = below(directory / VARIABLES_DIRECTORY, table.file, "the manifest:")
            if path.stat().st_size < table.bytes_:
                return f"{path} is shorter than its table"
            if not os.access(path, os.R_OK):
                return f"{path} may not be read"
    except OSError as error:
        return f"{path}: {error.strerror}"
    except ValueError:
        return f"{record.directory!r} is not a path"
    return ""


def read_ahead(version: Path, record: MappedRecord) -> int:
    """Ask the kernel to read the tables of a version before a server maps them; how many bytes that is.

    It returns at once. What does not fit into memory is dropped by the kernel as it likes.

    Raises:
        OSError, ManifestError: a file is not there, or its name leads elsewhere.
    """
    for table in record.tables:
        path = below(version / VARIABLES_DIRECTORY, table.file, "the manifest:")
        descriptor = open_regular(path)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)
    return sum(table.bytes_ for table in record.tables)


def tables_state(record: MappedRecord) -> str:
    """`mapped`, or `restored: ` and why."""
    why = why_restored(record)
    return f"restored: {why}" if why else "mapped"


def network_file_system(path: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """The kind of network file system that a path lies on; "" if it is none, or nothing says so."""
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    there, longest, found = path.resolve(), -1, ""
    for line in lines:
        point, kind = line.split(" ")[1:3]
        point = point.replace("\\040", " ")
        if len(point) >= longest and there.is_relative_to(point):  # of two on one point the later one counts
            longest, found = len(point), kind
    return found if found in _NETWORK else ""
