"""Local files: named errors, writes that survive a power cut, locks that end with their process."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Generic, NamedTuple, TypeVar

from msgspec import Struct, field

from exporter.errors import ExportError, LfsPointer, ManifestError, os_error
from exporter.newer_python import sha256_of
from exporter.storage import mirror
from exporter.storage.layout import flaw_of

T = TypeVar("T")

_LOCK_POLL_SECONDS = 0.02  # flock has no limit of time of its own
# A file older than this has other times after each change; clocks of file servers differ a little.
SETTLED_NS = 2_000_000_000
_MOST_KEPT_BYTES = 16 << 20  # of files whose content is kept in memory: 5,000 manifests of deltas


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Replace an `OSError` of the block by a named error about the error's own file, or else about `path`.

    Other exceptions pass.

    Raises:
        TargetNotWritable: no permission, a read-only file system, something that is not a directory.
        DiskFull: no space left, or a quota or size limit reached.
        PublishError: any other failure of the operating system.
    """
    try:
        yield
    except OSError as exc:
        name = exc.filename2 or exc.filename  # of two, the second is the target
        raise os_error(exc, Path(os.fsdecode(name)) if isinstance(name, str | bytes) else path) from exc


def below(
    directory: Path, name: str, said: str, error: type[ExportError] = ManifestError, *, writes: bool = False
) -> Path:
    """Return the path below `directory` for a `name` from a document; it need not exist.

    No other code makes paths of such names. `said` begins the error's message, and says whose name it is. For
    a path to be written, `writes` also refuses a symbolic link below `directory`.

    Raises:
        ExportError: an instance of `error`: the name is absolute, not below the directory, or invalid (see
            `flaw_of`); or with `writes`, a part of the path is a symbolic link.
        OSError: with `writes`, a part of the path cannot be looked at.
    """
    path, flaw = directory / name, flaw_of(name)
    if not flaw and writes:
        steps = (path, *path.parents[: name.count("/")])
        flaw = next((f"{step} is a symbolic link" for step in steps if step.is_symlink()), "")
    if flaw:
        raise error(f"{said} {name!r:.99} is not the name of a file below its directory", cause=flaw)
    return path


def make_directories(path: Path) -> None:
    """Make `path` and its missing parents, and wait until their directory entries are on disk.

    NotADirectoryError or FileExistsError if `path` is a file, other OSErrors if a directory cannot be made;
    PublishError, TargetNotWritable or DiskFull if an entry cannot be synced.
    """
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)  # another process may make it, too
        sync(directory.parent)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fspath(path))


def write_durably(path: Path, content: bytes) -> None:
    """Write a new file with this content and wait until its bytes are on disk, but not its directory entry.

    Raises:
        PublishError: `path` exists or cannot be written; TargetNotWritable or DiskFull if that is why.
    """
    with writing(path), path.open("xb") as file:
        file.write(content)
        file.flush()  # fsync knows nothing of bytes that Python still buffers
        os.fsync(file.fileno())


# The beginning of a Git LFS pointer, and the length that it stays below (docs/spec.md of git-lfs).
_LFS, _LFS_BYTES = b"version https://git-lfs.github.com/spec/v1\n", 1024


# Errors of fsync on a directory if the file system does not support it: `vfs_fsync_range` in fs/sync.c.
_NO_SYNC = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}


def replace_file(path: Path, content: bytes, *, mode: int = 0o666, durably: bool = False) -> None:
    """Write a file by a rename: readers find the old content or all of the new.

    `path` need not exist. Unfinished files of processes that were killed in this function are removed first.
    `mode` is that of the new file, less the umask. With `durably` this waits until bytes and name are on
    disk.

    Raises:
        OSError: the file cannot be written, `path` is a directory, or the directory cannot be listed, or its
            file system has no locks.
        PublishError, TargetNotWritable, DiskFull: with `durably`, the directory cannot be synced.
    """
    hidden = f".{path.name.removeprefix('.')}."
    _remove_unlocked(path.parent, re.compile(re.escape(hidden) + r"[0-9]+(-[0-9a-f]+)?"))
    is_written = False
    while not is_written:
        new = path.with_name(f"{hidden}{os.getpid()}-{os.urandom(4).hex()}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(new, flags, mode), "wb") as file:
            try:
                # until it is locked, another process may remove it as a left-over
                if is_written := try_lock(file.fileno()) and still_at(file.fileno(), new):
                    file.write(content)
                    file.flush()
                    if durably:
                        os.fsync(file.fileno())
                    new.replace(path)
            except BaseException:
                new.unlink(missing_ok=True)
                raise
    if durably:
        sync(path.parent)


def _remove_unlocked(directory: Path, name: re.Pattern[str]) -> None:
    """Remove the files of a directory whose names match `name`, unless a process has locked them.

    A file that cannot be opened or removed stays. OSError if the directory cannot be listed.
    """
    for path in [each for each in directory.iterdir() if name.fullmatch(each.name)]:
        with suppress(OSError):
            lock = open_lock(path, flags=0)
            try:
                if try_lock(lock):
                    path.unlink()
            finally:
                close_quietly(lock)


def sync(path: Path) -> bool:
    """Wait until a file's bytes, or a directory's entries, are on disk; return True then.

    Returns False if `path` is a directory, and its file system cannot sync directories.

    Raises:
        PublishError: `path` does not exist or cannot be synced; TargetNotWritable or DiskFull if that is the
            reason.
    """
    with writing(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # CIFS, some of FUSE: the file server decides when entries are on disk; readers do not depend on
            # it
            if error.errno not in _NO_SYNC or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise
            return False
        finally:
            close_quietly(descriptor)
    return True


def open_regular(path: Path, *, follow: bool = True, ranges: Iterable[tuple[int, int]] | None = None) -> int:
    """Return a descriptor to read the regular file `path`; the caller closes it.

    If the file stands for an object in a store, the byte `ranges` (start, stop) of the object are fetched
    first, or all of it if None. Without `follow` a symbolic link is refused (ELOOP).

    Raises:
        CheckpointError: the object cannot be fetched; CheckpointChanged if it was replaced; LfsPointer if the
            file is a pointer that Git LFS has not replaced.
        PositionMoved: the object, of a model that a command has opened in a store, was replaced.
        DiskFull, PublishError: what is fetched cannot be written.
        OSError: the file does not exist or cannot be opened; EISDIR for a directory, EINVAL for a pipe, a
            device or a socket.
    """
    kind = 0 if follow else os.O_NOFOLLOW
    # without blocking: opening a pipe or a device may wait for ever
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | kind)
    try:
        with _naming(path):
            # of what was opened: the name may lead to another file by now
            found = os.fstat(descriptor)
            if stat.S_ISDIR(found.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
            # before the first read: until then the file of an object has zeros in place of its bytes
            mirror.fetch(path, ranges)
            if found.st_size < _LFS_BYTES and os.pread(descriptor, len(_LFS), 0) == _LFS:
                raise LfsPointer(f"{path} is a pointer of Git LFS: what it stands for was not fetched")
    except BaseException:
        close_quietly(descriptor)
        raise
    return descriptor


@contextmanager
def regular_file(path: Path) -> Iterator[BinaryIO]:
    """Open the regular file `path` to read in the block; an OSError of the block without a name gets `path`.

    Raises:
        CheckpointError, DiskFull, PublishError, OSError: as `open_regular`.
    """
    descriptor = open_regular(path)
    try:
        with open(descriptor, "rb", closefd=False) as file, _naming(path):
            yield file
    finally:
        close_quietly(descriptor)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the name `path` to an OSError of the block that names no file, as of a call with a descriptor."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


def read_regular(path: Path, limit: int) -> bytes:
    """Return all bytes of a regular file of at most `limit` bytes; a pipe is refused at once.

    Raises:
        OSError: EFBIG if it has more than `limit` bytes; otherwise it does not exist, cannot be read, or is
            not a regular file.
        CheckpointError: it is a pointer of Git LFS, or an object in a store that cannot be fetched.
        DiskFull, PublishError: what is fetched from a store cannot be written.
    """
    require_size(path, path.stat().st_size, limit)
    with regular_file(path) as file:
        return _within(path, file, limit)


def read_record(path: Path, limit: int) -> bytes:
    """Return all bytes of a small file that this project writes for itself, of at most `limit` bytes.

    A pointer of Git LFS in its place is a file that cannot be read.

    Raises:
        OSError: as `read_regular`; EINVAL for a pointer of Git LFS.
        CheckpointError, DiskFull, PublishError: as `read_regular`.
    """
    try:
        return read_regular(path, limit)
    except LfsPointer:
        raise OSError(errno.EINVAL, "it is a pointer of Git LFS", os.fspath(path)) from None


def read_given(path: Path, limit: int) -> bytes:
    """Return all bytes of a file that a person named: regular, or a pipe, as a shell's <(command) makes.

    This waits for the end of a pipe.

    Raises:
        OSError: EFBIG if it has more than `limit` bytes; otherwise as `read_regular`.
        CheckpointError, DiskFull, PublishError: as `read_regular`.
    """
    if not path.is_fifo():
        return read_regular(path, limit)
    with path.open("rb") as file:
        return _within(path, file, limit)


def _within(path: Path, file: BinaryIO, limit: int) -> bytes:
    blocks, size = [], 0
    step = os.fstat(file.fileno()).st_size + 1  # `read(n)` allocates n bytes at once
    while block := file.read(step):
        blocks.append(block)
        size, step = size + len(block), _STEP
        require_size(path, size, limit)  # it may grow
    return b"".join(blocks)


_STEP = 1 << 20


def require_size(path: Path, size: int, limit: int) -> None:
    """Raise OSError (EFBIG) about the file `path` if its `size` is more than `limit`, both in bytes."""
    if size > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit} bytes", os.fspath(path))


class Unchanged(Generic[T]):
    """A cache of values read from small files, each valid while its file's identity is the same."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[tuple[int, ...], T]] = {}
        self._bytes = 0

    def of(self, path: str | Path, read: Callable[[Path], T]) -> T:
        """Return the value that `read` makes from a file; a kept value is returned without opening the file.

        Values of files of at most 1 MiB that did not change in the last two seconds are kept. All values are
        forgotten when their files together would pass 16 MiB. Raises what `read` raises.
        """
        try:
            # before the file is read: a change in between shows at the next look
            found = os.stat(path)  # noqa: PTH116  a `Path` costs more than the call, and there are thousands
        except OSError:
            return read(Path(path))  # raises the error
        name = os.fspath(path)
        # a copying tool may set mtime and size back, never ctime
        looks = (*FileIdentity.of(found), found.st_ctime_ns)
        kept = self._kept.get(name)
        if kept is not None and kept[0] == looks:
            return kept[1]
        value = read(Path(path))
        # within one tick of the clock a second write may leave the times as they are
        is_settled = time.time_ns() - max(looks[-2:]) > SETTLED_NS
        if is_settled and found.st_size <= _MOST_KEPT_BYTES // 16:
            if self._bytes + found.st_size > _MOST_KEPT_BYTES:
                self._kept, self._bytes = {}, 0
            self._kept[name] = (looks, value)
            self._bytes += found.st_size
        return value


def copy_file(source: Path | str, target: Path | str) -> None:
    """Copy the content and mode of a file; if `source` stands for an object in a store, fetch that first.

    The content of an existing target is overwritten; in a directory, the copy gets the name of `source`.

    Raises:
        CheckpointError, DiskFull, PublishError: the object cannot be fetched, or cannot be kept here.
        OSError: `source` cannot be read, `target` cannot be written, or both are one file.
    """
    # `shutil` opens it itself, past `open_regular`
    mirror.fetch(Path(source))
    shutil.copy(source, target)


def remove_tree(path: Path) -> None:
    """Remove a directory as far as possible, without an error; symbolic links are removed, never followed."""
    with suppress(OSError):  # also of looking at it: a network file system may have forgotten it (ESTALE)
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)


def close_quietly(descriptor: int) -> None:
    """Close a descriptor through which nothing was written, which releases its lock; errors are ignored."""
    # The descriptor is closed whatever is reported (EIO, ESTALE): see close(2). The report names no file, and
    # would replace an error that does.
    with suppress(OSError):
        os.close(descriptor)


def open_lock(path: Path, flags: int = os.O_CREAT) -> int:
    """Return a descriptor of the lock file `path`, made if need be; with `flags` 0 it must exist.

    The file is not locked yet, and the caller closes it. OSError if it cannot be opened: FileNotFoundError,
    ELOOP for a symbolic link.
    """
    # writable, because NFS grants exclusive locks to writers only
    return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o666)


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Try to acquire the lock (flock) of an open file without waiting; return False if another holds it.

    The lock is exclusive unless `shared`, and ends when `descriptor` and its copies are closed. OSError if
    the file system has no locks.
    """
    try:
        # it ends when the descriptor's last copy closes
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_within(descriptor: int, seconds: float) -> bool:
    """Acquire the exclusive lock of an open file, waiting up to `seconds`; return False if another kept it.

    With 0 seconds there is one attempt. The lock ends when `descriptor` and its copies are closed. OSError if
    the file system has no locks.
    """
    deadline = time.monotonic() + seconds
    while not try_lock(descriptor):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOCK_POLL_SECONDS)
    return True


def still_at(descriptor: int, path: Path) -> bool:
    """True if `path` still names the open file: a lock on a file that was moved away protects nothing.

    False if nothing has that name; other OSErrors pass.
    """
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


class FileIdentity(NamedTuple):
    """An identity that changes when another file gets the name, and when the file is written to."""

    device: int
    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> FileIdentity:
        """Return the identity of a file by its status."""
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def identity_of(path: Path) -> FileIdentity | None:
    """Return the identity of the file that has this name now; None if it cannot be reached."""
    try:
        return FileIdentity.of(path.stat())
    except OSError:
        return None


def kept_identity(path: Path) -> list[int]:
    """Return an identity to be kept on disk: device, inode, bytes, times of last write and change (ns).

    The time of the last change is the inode's (ctime), which programs cannot set.

    Raises:
        OSError: the file cannot be reached.
    """
    found = path.stat()
    return [*FileIdentity.of(found), found.st_ctime_ns]  # programs cannot set ctime


def is_gone(path: Path) -> bool:
    """True if a name no longer exists; False if it exists, or cannot be looked at."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass
    return False


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in lower-case hexadecimal digits.

    Raises:
        OSError: it cannot be read, or is not a regular file.
        CheckpointError: it is a pointer of Git LFS, or an object in a store that cannot be fetched.
        DiskFull, PublishError: what is fetched from a store cannot be written.
    """
    with regular_file(path) as file:
        return sha256_of(file)


class FileDigests(Struct):
    """Digests by path, each with its file's identity; `is_new` is true once there is a new one to keep."""

    # a vocabulary may be large, and a delta is made every few seconds
    known: dict[str, tuple[list[int], str]] = field(default_factory=dict)
    is_new: bool = False

    def __call__(self, path: Path, of: Callable[[Path], str] = file_digest) -> str:
        """Return the digest of a file, computed by `of`, which must always be the same for one path.

        A known digest is returned without reading the file if its identity is the same. A new one is
        recorded, and `is_new` set, unless the file was changed in the last two seconds. Raises OSError if the
        file cannot be reached, and what `of` raises: by default, as `file_digest`.
        """
        name, looks = str(path.absolute()), kept_identity(path)
        was, digest = self.known.get(name, ([], ""))
        if was == looks:
            return digest
        digest = of(path)
        # as Git's index does: a file that was just changed may change again within one tick of the clock
        if time.time_ns() - max(looks[-2:]) > SETTLED_NS and kept_identity(path) == looks:
            self.known[name] = (looks, digest)
            self.is_new = True
        return digest

    def keep(self, paths: Iterable[Path]) -> None:
        """Forget the digests of all files but these."""
        names = {str(path.absolute()) for path in paths}
        self.known = {name: known for name, known in self.known.items() if name in names}

    def to_json(self) -> dict[str, Any]:
        """Return the digests as a JSON object: path -> [identity ..., digest]."""
        return {name: [*looks, digest] for name, (looks, digest) in self.known.items()}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> FileDigests:
        """Return the digests in a document of `to_json`, none of them new; malformed entries are left out."""
        entries = {name: entry for name, entry in document.items() if isinstance(entry, list) and entry}
        return cls({name: (looks, str(digest)) for name, (*looks, digest) in entries.items()})


def nearest(path: Path) -> Path | None:
    """Return an existing path near `path`, each missing name replaced by its nearest neighbour.

    None if a name has no near neighbour, a directory cannot be listed, or `path` itself exists.
    """
    from difflib import get_close_matches

    found = Path(path.anchor)
    for name in path.parts[1 if path.anchor else 0 :]:
        step = found / name
        if not os.path.lexists(step):
            try:
                names = sorted(entry.name for entry in found.iterdir() if not entry.name.startswith("."))
            except OSError:
                return None
            longer = [entry for entry in names if entry.startswith(name)]
            close = get_close_matches(name, names, n=1) or longer[:1]
            if not close:
                return None
            step = found / close[0]
        found = step
    return None if found == path else found
