"""Hard-link a trainer's shard into a bundle; if that is impossible, say why."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from msgspec import Struct

from exporter.checkpoint.source_shard import check_size, shard_status, vanished
from exporter.errors import CheckpointChanged
from exporter.files import FileIdentity
from exporter.storage import mirror

_IMPOSSIBLE = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS}
"""Other file system or mount; not ours under `protected_hardlinks`; too many links; no links at all."""


class NewFile(Struct, frozen=True):
    """Who may read a file that this process makes in a directory: umask, set-gid bits and ACLs applied."""

    mode: int
    uid: int
    gid: int

    @classmethod
    def in_directory(cls, directory: Path) -> NewFile:
        """Create a file to see its mode: the umask cannot be read without changing it for other threads.

        Raises:
            OSError: the directory cannot be written.
        """
        probe = directory / f".probe-{os.getpid()}"
        descriptor = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        try:
            found = os.fstat(descriptor)
        finally:
            os.close(descriptor)
            probe.unlink()
        return cls(found.st_mode, found.st_uid, found.st_gid)

    def readers_lost_by(self, other: os.stat_result) -> str:
        """Who could read this file but not `other`: "owner", "group", "others", or "" for nobody."""
        everyone = bool(other.st_mode & stat.S_IROTH)
        group = everyone or (other.st_gid == self.gid and bool(other.st_mode & stat.S_IRGRP))
        owner = bool(other.st_mode & stat.S_IRUSR) if other.st_uid == self.uid else group
        if self.mode & stat.S_IROTH and not everyone:
            return "others"
        if self.mode & stat.S_IRGRP and not group:
            return "group"
        return "" if owner else "owner"


def link_shard(source: Path, target: Path, *, size: int, new_file: NewFile) -> str:
    """Hard-link `source`, which a catalog knows to have `size` bytes; "" if done, else why it cannot be.

    A symbolic link is followed: what is linked is the file.

    Raises:
        CheckpointChanged: the shard vanished, or is not the one that the catalog describes.
        CheckpointError: it cannot be reached.
        OSError: the target cannot be written.
    """
    if mirror.find(source) is not None:
        return "it is in an object store"
    before = shard_status(source)
    check_size(source, before.st_size, size)
    lost = new_file.readers_lost_by(before)
    if lost:
        mode = stat.S_IMODE(before.st_mode)
        return f"mode {mode:04o} of {source.name} would keep {lost} from reading what a new file allows"
    real = Path(os.path.realpath(source))  # os.link does not follow links on Linux, whatever it is told
    try:
        os.link(real, target)
    except FileNotFoundError as exc:
        raise (exc if real.exists() else vanished(source)) from exc
    except OSError as exc:
        if exc.errno not in _IMPOSSIBLE:
            raise
        return f"{source}: {os.strerror(exc.errno)} ({errno.errorcode[exc.errno]})"
    linked = FileIdentity.of(target.stat())
    if linked[1:] != FileIdentity.of(before)[1:]:  # an overlay may show its copy under another device
        raise CheckpointChanged(f"{source} was replaced or written to while it was linked")
    return ""
