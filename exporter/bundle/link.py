"""Share a trainer's shard with a bundle, or copy byte ranges of it where sharing is impossible.

A clone (a reflink) is a new file that shares the blocks; a hard link is the trainer's file itself. Ranges are
copied inside the kernel, in bounded pieces and in parallel; ranges of an object in a store are fetched.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

from exporter.checkpoint.source_shard import check_size, open_shard, shard_status, vanished
from exporter.errors import CheckpointChanged, os_error
from exporter.storage import mirror
from exporter.storage.files import FileIdentity
from exporter.storage.open_files import write_at
from exporter.terminal.progress import Progress

# Bytes that one task copies: large enough to amortise the task, small enough to be interrupted soon.
BATCH_BYTES = 16 << 20

# Errors of copy_file_range across file systems, on special ones, on old kernels, under a seccomp filter.
_NOT_HERE = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}
_BUFFER_BYTES = 256 << 10  # stays in a core's cache between the read and the write


class ByteRange(Struct, frozen=True):
    """`size` bytes at offset `source` of one file that are copied to offset `target` of another."""

    source: int
    target: int
    size: int


def copy_ranges(
    source: Path, target: Path, ranges: Sequence[ByteRange], *, size: int, pool: Executor, progress: Progress
) -> None:
    """Copy `ranges` of the shard `source` into the new file `target`.

    Wait for all copies. `progress` advances by bytes. `size` is the source's size in bytes by its catalog. An
    object in a store is fetched instead. After an error, part of the target may be written.

    Raises:
        CheckpointChanged: the shard vanished, has another size, or is written to meanwhile.
        CheckpointError: it cannot be read.
        DiskFull, PublishError: the target exists or cannot be written.
    """
    if mirror.is_remote(source):
        pieces = [(each.source, each.source + each.size, each.target) for each in ranges]
        with _target(target) as writer:
            mirror.copy_ranges(source, writer, pieces, target, progress.advance)
        return
    with open_shard(source) as reader, _target(target) as writer:
        before = os.fstat(reader)
        check_size(source, before.st_size, size)
        tasks = [pool.submit(_copy_batch, reader, writer, batch) for batch in _batches(ranges)]
        try:
            for task in tasks:
                progress.advance(task.result())
        except EOFError as exc:
            raise CheckpointChanged(f"{source} became shorter while it was copied") from exc
        except OSError as exc:
            raise os_error(exc, target) from exc
        finally:
            drain(tasks)  # before the descriptors close: their numbers are reused
        after = os.fstat(reader)
        if FileIdentity.of(after) != FileIdentity.of(before):
            raise CheckpointChanged(f"{source} was written to while it was copied")


def coalesce(extents: Iterable[tuple[int, int]]) -> list[ByteRange]:
    """Return the byte ranges of (offset, size) pairs, ordered by offset, with targets packed from 0 on.

    Targets have no gaps between them. Adjacent pairs become one range; equal pairs count once. Other pairs
    must not overlap.
    """
    packed: list[ByteRange] = []
    end = 0
    for offset, size in sorted(set(extents)):
        if packed and packed[-1].source + packed[-1].size == offset:
            packed[-1] = ByteRange(packed[-1].source, packed[-1].target, packed[-1].size + size)
        else:
            packed.append(ByteRange(offset, end, size))
        end += size
    return packed


@contextmanager
def _target(path: Path) -> Iterator[int]:
    try:
        # exclusively: nothing else may write into what is staged
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    except OSError as exc:
        raise os_error(exc, path) from exc
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _batches(ranges: Iterable[ByteRange]) -> Iterator[list[ByteRange]]:
    """Yield the ranges, in order, in groups of at most BATCH_BYTES; longer ranges are divided."""
    batch: list[ByteRange] = []
    room = BATCH_BYTES
    for whole in ranges:
        done = 0
        while done < whole.size:
            take = min(whole.size - done, room)
            batch.append(ByteRange(whole.source + done, whole.target + done, take))
            done += take
            room -= take
            if not room:
                yield batch
                batch, room = [], BATCH_BYTES
    if batch:
        yield batch


def _copy_batch(reader: int, writer: int, batch: Iterable[ByteRange]) -> int:
    total = 0
    for piece in batch:
        done = 0
        while done < piece.size:
            rest = ByteRange(piece.source + done, piece.target + done, piece.size - done)
            done += _copy_in_kernel(reader, writer, rest) or _copy_through_memory(reader, writer, rest)
        total += piece.size
    return total


def _copy_in_kernel(reader: int, writer: int, piece: ByteRange) -> int:
    """Copy as much of a piece as one call of the kernel does; return the number of bytes copied.

    0 at the end of the source, or if the kernel cannot copy between these files. Raises OSError for any other
    failure.
    """
    try:
        return os.copy_file_range(reader, writer, piece.size, piece.source, piece.target)
    except OSError as exc:
        if exc.errno in _NOT_HERE:
            return 0
        raise


def _copy_through_memory(reader: int, writer: int, piece: ByteRange) -> int:
    """Copy a whole piece through a buffer; return its number of bytes.

    Raises EOFError at the end of the source, OSError if reading or writing fails.
    """
    done = 0
    while done < piece.size:
        data = os.pread(reader, min(_BUFFER_BYTES, piece.size - done), piece.source + done)
        if not data:
            raise EOFError
        write_at(writer, piece.target + done, data)
        done += len(data)
    return done


def drain(tasks: Iterable[Future[Any]]) -> None:
    """Cancel the tasks that have not started, and wait for the others to end; their errors are ignored."""
    running = [task for task in tasks if not task.cancel()]
    for task in running:
        task.exception()


# Other file system or mount; another owner under `protected_hardlinks`; too many links; no links at all.
_IMPOSSIBLE = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS}


class NewFile(Struct, frozen=True):
    """The mode and owners that a new file in a directory gets, with umask, set-gid bits and ACLs applied."""

    mode: int
    uid: int
    gid: int

    @classmethod
    def in_directory(cls, directory: Path) -> NewFile:
        """Return the mode and owners of a new file in a directory; a probe is created there and removed.

        Raises OSError if that is not possible.
        """
        # the umask cannot be read without changing it for other threads
        probe = directory / f".probe-{os.getpid()}"
        descriptor = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        try:
            found = os.fstat(descriptor)
        finally:
            os.close(descriptor)
            probe.unlink()
        return cls(found.st_mode, found.st_uid, found.st_gid)

    def readers_lost_by(self, other: os.stat_result) -> str:
        """Return who can read this file but not a file with the status `other`: "owner", "group" or "others".

        The widest of them; "" if nobody.
        """
        everyone = bool(other.st_mode & stat.S_IROTH)
        group = everyone or (other.st_gid == self.gid and bool(other.st_mode & stat.S_IRGRP))
        owner = bool(other.st_mode & stat.S_IRUSR) if other.st_uid == self.uid else group
        if self.mode & stat.S_IROTH and not everyone:
            return "others"
        if self.mode & stat.S_IRGRP and not group:
            return "group"
        return "" if owner else "owner"


# `ioctl_ficlone(2)`: XFS with reflink, btrfs, bcachefs, OCFS2, NFS 4.2 and overlays on them.
_FICLONE = 0x40049409


def clone_shard(source: Path, target: Path, *, size: int) -> bool:
    """Create `target` as a clone of `source` that shares its blocks; return False if the file system cannot.

    After False there is no file `target`. `size` is the size of `source` in bytes by its catalog. Of an
    object in a store no clone is made.

    Raises:
        CheckpointChanged: the shard vanished, or is not the one that the catalog describes.
        CheckpointError: it cannot be reached.
        DiskFull, PublishError: the target exists or cannot be created.
    """
    if mirror.is_remote(source):
        return False
    with open_shard(source) as reader, _target(target) as writer:
        before = os.fstat(reader)
        check_size(source, before.st_size, size)
        try:
            fcntl.ioctl(writer, _FICLONE, reader)
        except OSError:  # whatever the reason is, a link or a copy shows it, if it matters there
            target.unlink()
            return False
        if FileIdentity.of(os.fstat(reader)) != FileIdentity.of(before):
            raise CheckpointChanged(f"{source} was written to while it was cloned")
    return True


def link_shard(source: Path, target: Path, *, size: int, new_file: NewFile) -> str:
    """Hard-link `source` to `target`.

    Return "" if done, else the reason, for a person, why it cannot be linked. `size` is the size of `source`
    in bytes by its catalog. A link is refused if its mode would keep out users who could read `new_file`.

    Raises:
        CheckpointChanged: the shard vanished, or is not the one that the catalog describes.
        CheckpointError: it cannot be reached.
        OSError: the target cannot be written.
    """
    if mirror.is_remote(source):
        return "it is in an object store"
    before = shard_status(source)
    check_size(source, before.st_size, size)
    lost = new_file.readers_lost_by(before)
    if lost:
        mode = stat.S_IMODE(before.st_mode)
        return f"mode {mode:04o} of {source.name} would keep {lost} from reading what a new file allows"
    real = Path(os.path.realpath(source))  # os.link follows no links on Linux, even if asked to
    try:
        os.link(real, target)
    except FileNotFoundError as exc:
        # `os.link` does not say which of the two names was missing.
        raise (exc if real.exists() else vanished(source)) from exc
    except OSError as exc:
        if exc.errno not in _IMPOSSIBLE:
            raise
        return f"{source}: {os.strerror(exc.errno)} ({errno.errorcode[exc.errno]})"
    linked = FileIdentity.of(target.stat())
    if linked[1:] != FileIdentity.of(before)[1:]:  # an overlay may show its copy under another device
        raise CheckpointChanged(f"{source} was replaced or written to while it was linked")
    return ""


def link_or_copy(source: Path, target: Path) -> None:
    """Link the published file `source` to `target`, or copy it where a link is impossible.

    An object in a store is fetched first. Raises CheckpointError if it cannot be fetched, DiskFull or
    PublishError if the fetched bytes cannot be kept, OSError if the copy fails; FileExistsError if
    `target` exists: it may be another name of a published file, into which a copy would write.
    """
    mirror.fetch(source)  # a file that stands for an object is empty until then
    try:
        os.link(source, target, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError:  # a file system without links, or too many of them
        shutil.copyfile(source, target)
