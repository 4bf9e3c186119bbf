"""Mirror a directory of an object store: a local directory of files that are empty until they are read.

Every object becomes a sparse file of its size, name and time. Opening one fetches it first: all of it, or
only the needed ranges of a shard (`exporter.storage.files.open_regular`). So the same code reads a checkpoint
in a store and a local one; of a terabyte only the index and the exported tensors cross the network. A read is
pinned to the object that was listed: an object that is replaced meanwhile is `CheckpointChanged`.

A path below a mirror is a path like any other. Other rooms ask the functions at the end of this module which
object a path stands for (`is_remote`, `pinned`) and have its bytes fetched (`fetch`), copied (`copy_ranges`)
or read without being kept (`read`, `checksum`, `copy`: for code that reads each byte of much data once).

A mirror's directory belongs to its process. It is removed when the process ends, or by a later process if
this one was killed.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from itertools import islice, takewhile
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from exporter.errors import CheckpointChanged, CheckpointError, os_error
from exporter.storage.layout import (
    CHECKPOINT_STATE_FILE,
    CHECKPOINT_SUFFIX,
    LOCK_FILE,
    SAVED_MODEL_FILES,
    flaw_of,
)
from exporter.storage.requests import GAP_BYTES, aligned
from exporter.storage.url import Url

if TYPE_CHECKING:
    from exporter.storage.objects import ObjectReader, RemoteObject

T = TypeVar("T")

_MOST_FILES = 100_000  # each becomes a sparse file here
_NEIGHBOURS = 100  # objects that are shown if a URL matches none, so that errors can name similar ones
# Files whose URL means their directory.
_OF_A_DIRECTORY = (CHECKPOINT_STATE_FILE, *SAVED_MODEL_FILES)
_MIRRORS: dict[str, Mirror] = {}  # by the path of their directory
_CHECKPOINTS: dict[Url, Mirror] = {}
_LOCK = threading.Lock()


class Held(Struct, frozen=True):
    """An object, the inode of the file that stands for it, and the ranges that were fetched into it."""

    object: RemoteObject
    inode: int
    fetched: Ranges

    def lacks(self, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the parts of these ranges (start, stop) that were not fetched, sorted and joined."""
        missing = Ranges()
        for asked in ranges:
            for gap in self.fetched.gaps(*asked):
                missing.add(*gap)
        return [*missing]


class Mirror:
    """A local directory with the names, sizes and times of the objects at a URL.

    A new one is empty until `refresh` or `show`. With `is_directory` the URL is known to be a directory. The
    local directory is made at once. UsageError if the library that reads stores is not installed,
    CheckpointError if the environment's settings for a store are refused, OSError if the local directory
    cannot be made.
    """

    def __init__(self, url: Url, *, is_directory: bool = False) -> None:
        self._asked, self._is_directory = url, is_directory or not url.path
        self.url = url if self._is_directory else url.parent
        from exporter.storage.objects import ObjectReader  # late, as `waiting` is: most commands open no URL

        self._reader = ObjectReader(url)
        self._shown: dict[str, Held] = {}  # what was listed, by name
        self._stand_ins: dict[int, Held] = {}  # by inode: they may be renamed
        self._ahead = ReadAhead()
        self.spent: set[str] = set()
        """Directories of jobs in a store, to be removed after this mirror's files were uploaded."""
        self.on_lock: Callable[[], None] | None = None
        """Called after the model was locked here, before anything is read under the lock."""
        self.on_hold: Callable[[], None] | None = None
        """Called after a hold was set here, before the work that it announces."""
        # reentrant: `show` of a model's mirror holds it around this class's
        self._lock = threading.RLock()
        self._directories: set[str] = set()  # of all names shown until now
        directory = private_directory()
        self._new, self._private = directory / "new", directory / "stand-ins"
        self.root = directory / url.scheme / url.bucket / self.url.path
        self.root.mkdir(parents=True)

    @property
    def path(self) -> Path:
        """The local path for the URL: of the directory, or of the file or prefix in it that the URL names."""
        return self.root if self._is_directory else self.root / self._asked.name

    def refresh(self) -> None:
        """List the objects again: new ones appear, replaced ones become new files, others are removed.

        CheckpointError if there are more than 100,000 objects; CheckpointNotFound if the bucket does not
        exist, StoreUnavailable if the store cannot be listed; DiskFull or PublishError if a file cannot be
        made.
        """
        base = self.url.key("")
        found = {each.key[len(base) :]: each for each in self._list() if each.key.startswith(base)}
        if len(found) > _MOST_FILES:
            raise CheckpointError(
                f"{self.url} has more than {_MOST_FILES} objects below it",
                hint="name the directory of one training's checkpoints, or one checkpoint: its files' prefix",
            )
        self.show(found)

    def show(self, found: Mapping[str, RemoteObject]) -> None:
        """Make files for the objects `found`, by their names below the URL, and remove those of all others.

        The file of an unchanged object stays as it is. Names that cannot be paths, and names of directories,
        are skipped. DiskFull or PublishError if a file cannot be made.
        """
        # a key that cannot be a path here is skipped: `a//b`, `..`, `a/`, a long name
        found = {name: each for name, each in found.items() if not flaw_of(name)}
        with self._lock:
            self._directories |= _directories(found)
            # so is an object with the name of a directory: consoles and TensorFlow mark directories by these
            found = {name: each for name, each in found.items() if name not in self._directories}
            for name in self._shown.keys() - found.keys():
                (self.root / name).unlink(missing_ok=True)
                del self._shown[name]
            # after the removals: a file may have gone whose name is a directory of others now
            for name, each in found.items():
                if name not in self._shown or self._shown[name].object != each:
                    self._place(name, each)
            self._ahead.show(self._shown)

    def held(self, name: str) -> Held | None:
        """Return the object of the file of this name, with the ranges that were fetched.

        None if there is no such file, or a process wrote it here.
        """
        try:
            inode = (self.root / name).stat().st_ino
        except FileNotFoundError:
            return None
        shown = self._shown.get(name)
        return shown if shown is not None and shown.inode == inode else self._stand_ins.get(inode)

    def has(self, name: str) -> bool:
        """True if the file of this name stands for the object that was listed under this name.

        False if a process has replaced the file here, or if there is none.
        """
        held = self.held(name)
        return held is not None and held is self._shown.get(name)

    def listed(self, name: str) -> RemoteObject:
        """Return the object of the file of this name; CheckpointChanged if no file there stands for one."""
        held = self.held(name)
        if held is None:
            raise CheckpointChanged(f"{self.url}/{name} vanished after it was listed")
        return held.object

    def is_made_here(self, name: str) -> bool:
        """True for a local file that a process wrote here, and that is not the file of an object.

        False if there is no such file.
        """
        return (self.root / name).exists() and self.held(name) is None

    def forget(self, name: str) -> None:
        """Free the disk space of the file `name` if it has more than 1 MiB; opening it fetches it again.

        A new empty file replaces it. Does nothing for smaller files, and for files that a process replaced
        here. DiskFull or PublishError if the empty file cannot be made.
        """
        with self._lock:
            # an existing memory map keeps its bytes; the caller makes sure that no thread opens it now
            if self.has(name) and self._shown[name].object.size > GAP_BYTES:
                self._place(name, self._shown[name].object)

    def stand_in(self, path: Path, each: RemoteObject) -> None:
        """Make a new file `path` that stands for the object `each` of the bucket, also after it is renamed.

        It may only be renamed below the mirror's root. PublishError, DiskFull or TargetNotWritable if the
        file cannot be made, also if `path` exists.
        """
        pinned = self._private / f"{len(self._stand_ins)}"  # this link keeps the inode from being reused
        try:
            pinned.parent.mkdir(exist_ok=True)
            with pinned.open("xb") as file:
                file.truncate(each.size)
                inode = os.fstat(file.fileno()).st_ino
            path.hardlink_to(pinned)
        except OSError as error:
            raise os_error(error, path) from error
        with self._lock:
            self._stand_ins[inode] = Held(each, inode, Ranges())

    def standing_in(self, name: str) -> RemoteObject | None:
        """Return the object of the file `name` if `stand_in` made it; None for any other file."""
        held = None if self.has(name) else self.held(name)
        return None if held is None else held.object

    @property
    def stand_ins(self) -> list[RemoteObject]:
        """The objects of all files that `stand_in` made, in the order of their making."""
        return [held.object for held in self._stand_ins.values()]

    def close(self) -> None:
        """Remove the mirror's directory.

        Messages name the URL instead of its paths while the process lives.
        """
        with self._lock:
            for path in (self.root, self._private):
                shutil.rmtree(path, ignore_errors=True)
            self._stand_ins.clear()

    def fetch(self, name: str, ranges: Iterable[tuple[int, int]] | None = None) -> None:
        """Fetch the bytes of a file that were not fetched yet: of these ranges (start, stop), or all if None.

        Ranges are extended to whole MiB. With a file of at most 1 MiB, files that will probably be read next
        are fetched, too. Does nothing for a file that a process wrote here, or that does not exist.
        CheckpointChanged if the object was replaced or is gone, CheckpointError if the store cannot be read,
        DiskFull or PublishError if writing to the disk fails.
        """
        # one thread at a time: another may have fetched the same ranges meanwhile
        with self._asking(), self._lock:
            held = self.held(name)
            if held is None:
                return  # if the file does not exist, its reader reports that
            size = held.object.size
            wanted = [(0, size)] if ranges is None else [aligned(*asked, size) for asked in ranges]
            if missing := held.lacks(wanted):
                with self._reading_ahead(self._neighbours(name) if size <= GAP_BYTES else []):
                    self._fill(name, held, missing)

    def ask_store(
        self, name: str, ranges: Iterable[tuple[int, int]], ask: Callable[[ObjectReader, RemoteObject], T]
    ) -> T | None:
        """Return the result of `ask`, called with the reader of the store and the object of the file `name`.

        None, without a call, if the file has all of these ranges (start, stop) already, if a process wrote it
        here, or if it does not exist. Raises what `ask` raises.
        """
        with self._lock:
            held = self.held(name)
            if held is None or not held.lacks(ranges):
                return None
        # without the lock: what `ask` reads is not kept, and may take minutes
        with self._asking():
            return ask(self._reader, held.object)

    def _asking(self) -> AbstractContextManager[None]:
        """Return a context for requests to the store about listed objects.

        A mirror of a model (`RemoteModel`) overrides it: PositionMoved replaces CheckpointChanged there.
        """
        return nullcontext()

    def _neighbours(self, name: str) -> Sequence[str]:
        def is_there(other: str) -> bool:
            held = self._shown[other]
            return not held.lacks([(0, held.object.size)])

        def is_wanted(other: str) -> bool:
            return self._shown[other].object.size <= GAP_BYTES and not is_there(other)

        return self._ahead.with_neighbours(name, is_there, is_wanted)

    @contextmanager
    def _reading_ahead(self, names: Sequence[str]) -> Iterator[None]:
        """Fetch these files, which will probably be read next, in threads while the block runs.

        The end of the block waits for the threads. A failure is reported only when that file is opened.
        """
        if not names:
            yield
            return
        from exporter.storage.waiting import workers

        with workers(len(names), "read-ahead") as pool:
            for name in names:
                held = self._shown[name]
                pool.submit(self._fill, name, held, [(0, held.object.size)])
            yield

    def _fill(self, name: str, held: Held, missing: Sequence[tuple[int, int]]) -> None:
        path = self.root / name
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            before = os.fstat(descriptor)
            if before.st_ino != held.inode:
                return  # a local file has taken its place
            try:
                pieces = [(start, stop, start) for start, stop in missing]
                self._reader.copy(held.object, descriptor, pieces, path)
            finally:  # the object did not change: keep its time
                os.utime(descriptor, ns=(before.st_atime_ns, before.st_mtime_ns))
        finally:
            os.close(descriptor)
        # only now: a fetch that breaks off leaves holes in the file, which read as zeros
        for start, stop in missing:
            held.fetched.add(start, stop)

    def copy(
        self,
        name: str,
        descriptor: int,
        pieces: Iterable[tuple[int, int, int]],
        target: Path,
        advance: Callable[[int], None],
    ) -> None:
        """Fetch pieces (start, stop, offset) of the object of the file `name` into another, open file.

        The open file is `descriptor`, the offsets are in it, and `target` is its path, for errors. Nothing is
        kept in the mirror. Threads call `advance` with the number of bytes of each part. CheckpointChanged if
        the object was replaced or is gone, CheckpointError if the store cannot be read, DiskFull or
        PublishError if the open file cannot be written.
        """
        with self._asking():
            self._reader.copy(self.listed(name), descriptor, pieces, target, advance)

    def _list(self) -> Iterable[RemoteObject]:
        """Return the objects to show for the URL: if it is a directory, all objects below it.

        For a file whose name stands for its directory (`checkpoint`, `saved_model.pb`), all objects below the
        directory. For another file or a prefix, the objects of its directory that begin with the prefix, or
        if none does, the first 100 in the directory. CheckpointNotFound if the bucket does not exist,
        StoreUnavailable if it cannot be listed, CheckpointError if a name there is not a path.
        """
        path = self._asked.path
        below = list(self._reader.below(path))
        if self._is_directory or any(each.key.startswith(f"{path}/") for each in below):
            return below
        if self._asked.name in _OF_A_DIRECTORY:
            return self._reader.below(self.url.path)
        prefix = CHECKPOINT_SUFFIX.sub("", path)
        beside = list(self._reader.beside(self.url.path))
        return [each for each in beside if each.key.startswith(prefix)] or beside[:_NEIGHBOURS]

    def _place(self, name: str, each: RemoteObject) -> None:
        path = self.root / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._new.open("wb") as file:
                file.truncate(each.size)
                inode = os.fstat(file.fileno()).st_ino
            # before the rename: who sees the new file must see its object's time
            os.utime(self._new, (each.modified, each.modified))
            # never written in place: who has the old file open, or mapped, keeps the old object's bytes
            self._new.replace(path)
        except OSError as error:
            raise os_error(error, path) from error
        self._shown[name] = Held(each, inode, Ranges())


def local(path: Path) -> Path:
    """Return the local path that stands for an object store's URL; any other path is returned unchanged.

    The first call for a URL lists the store; later calls return the same path without a request.

    Raises:
        UsageError: the URL is malformed, or the library that reads stores is not installed.
        CheckpointError: the store cannot be read, or has more than 100,000 objects there;
            CheckpointNotFound if the bucket does not exist.
        DiskFull, PublishError: the local files cannot be made.
        OSError: the temporary directory for them cannot be made.
    """
    url = Url.parse(os.fspath(path))
    if url is None:
        return path
    with _LOCK:
        # under the lock: other threads wait for the listing, and do not list again
        if (mirror := _CHECKPOINTS.get(url)) is None:
            mirror = Mirror(url)
            mirror.refresh()
            register(mirror)
            _CHECKPOINTS[url] = mirror
    return mirror.path


def register(mirror: Mirror) -> None:
    """Register a mirror: from then on its files are fetched when they are read, and messages name its URL."""
    _MIRRORS[str(mirror.root)] = mirror


def _directories(names: Iterable[str]) -> set[str]:
    """Return the names of all directories above files of these names, without the root."""
    found = set[str]()
    for name in names:
        directory = name.rpartition("/")[0]
        while directory and directory not in found:
            found.add(directory)
            directory = directory.rpartition("/")[0]
    return found


def locked(path: Path) -> None:
    """Begin the decision of a person's command in the store of the model at `path`, which was just locked.

    Does nothing unless the path is in a mirror that was opened for such a command (`RemoteModel`). It waits
    for other decisions, at most 75 s.

    Raises:
        ModelHeld: another person's decision takes longer than that.
        PositionMoved: other publishers always replaced the head first, or published while it was read.
        ManifestError, CheckpointError, PublishError: the head is damaged, or the store cannot be read or
            written.
    """
    found = _find(path)
    if found is not None and found[0].on_lock is not None:
        found[0].on_lock()


def held(path: Path) -> None:
    """Copy a hold that was just set at `path` to the model's store, during this process's decision there.

    Does nothing without a decision, and for a path that is not in a mirror.

    Raises:
        PositionMoved: another machine published meanwhile.
        ManifestError, CheckpointError, PublishError: the head or the tags are damaged, or the store cannot be
            read or written.
        OSError: a local file of a hold cannot be read.
    """
    found = _find(path)
    if found is not None and found[0].on_hold is not None:
        found[0].on_hold()


def is_remote(path: Path) -> bool:
    """True for a path in a mirror of an object store."""
    return _find(path) is not None


def pinned(path: Path) -> tuple[Url, RemoteObject] | None:
    """Return the URL and the object of the file `path`; None for a local file, also one written in a mirror.

    Raises:
        CheckpointChanged: the path is in a mirror, and the file does not exist.
    """
    if (found := _find(path)) is None:
        return None
    mirror, name = found
    if mirror.is_made_here(name):
        return None
    each = mirror.listed(name)
    return replace(mirror.url, path=each.key), each


def stand_in(path: Path, url: Url, each: RemoteObject) -> bool:
    """Make a new file `path` stand for the object `each` in the bucket of `url`, and return True.

    False, without a file, if `path` is not in a mirror of that bucket. PublishError, DiskFull or
    TargetNotWritable if the file cannot be made.
    """
    found = _find(path)
    if found is None or found[0].url.bucket != url.bucket:
        return False
    found[0].stand_in(path, each)
    return True


def written_by_tasks(path: Path) -> RemoteObject | None:
    """Return the object, written by tasks, that a file stands for (`Mirror.stand_in`).

    None for any other file.
    """
    found = _find(path)
    return None if found is None else found[0].standing_in(found[1])


def remove_after_upload(path: Path, job: str) -> None:
    """Have the directory of a job, a URL, removed from its store after everything below `path` was uploaded.

    Does nothing if `path` is not in a mirror.
    """
    if (found := _find(path)) is not None:
        found[0].spent.add(job)  # not before, as the upload reads the job's objects


def _find(path: Path) -> tuple[Mirror, str] | None:
    """Return the mirror that contains a path, and the path's name there; None for a local path.

    The name of the mirror's directory itself is "".
    """
    if not _MIRRORS:
        return None
    text = os.fspath(path)
    for root, mirror in tuple(_MIRRORS.items()):
        if text == root or text.startswith(f"{root}/"):
            return mirror, text[len(root) + 1 :]
    return None


def is_same_file(a: Path, b: Path) -> bool:
    """True if two paths are one file, or stand for one object; False also if that is not known.

    Objects without entity tags are never known to be the same.
    """
    if a == b:
        return True
    with suppress(CheckpointChanged, OSError):
        objects = pinned(a), pinned(b)
        if objects == (None, None):
            return a.samefile(b)
        # equal sizes and times without tags prove nothing
        return objects[0] == objects[1] and objects[0] is not None and objects[0][1].tag is not None
    return False


def refresh(path: Path) -> None:
    """List the objects of a mirror's URL again, as `Mirror.refresh`; does nothing for any other path.

    CheckpointError or a subclass if the store cannot be listed, or has too many objects; DiskFull or
    PublishError if a file cannot be made.
    """
    if (found := _find(path)) is not None:
        found[0].refresh()


def fetch(path: Path, ranges: Iterable[tuple[int, int]] | None = None) -> None:
    """Fetch ranges (start, stop) of a mirror's file, or all of it if None; does nothing for any other path.

    Bytes that were fetched before are not fetched again. CheckpointChanged (PositionMoved in a `RemoteModel`)
    if the object was replaced or is gone, CheckpointError if the store cannot be read, DiskFull or
    PublishError if writing to the disk fails.
    """
    if (found := _find(path)) is not None:
        found[0].fetch(found[1], ranges)


def fetch_below(directory: Path) -> None:
    """Fetch all files below a directory of a mirror, for TensorFlow itself to read.

    Does nothing for a local directory. CheckpointChanged (PositionMoved in a `RemoteModel`) if an object was
    replaced or is gone, CheckpointError if the store cannot be read, DiskFull or PublishError if writing to
    the disk fails.
    """
    if is_remote(directory):
        for path in directory.rglob("*"):
            fetch(path)


def forget(path: Path) -> None:
    """Free the disk space of a mirror's file, as `Mirror.forget`; does nothing for any other path.

    DiskFull or PublishError if the empty file cannot be made.
    """
    if (found := _find(path)) is not None:
        found[0].forget(found[1])


def shown(text: str, write: Callable[[str], str] = str) -> str:
    """Return the text with the local paths of mirrors replaced by their URLs.

    `write` is applied to each URL first, to quote it for example.
    """
    for root, mirror in tuple(_MIRRORS.items()):
        if root in text:
            text = text.replace(root, write(str(mirror.url)))
    return text


def read(path: Path, pieces: Sequence[tuple[int, int, int]], buffer: memoryview) -> bool:
    """Read pieces (start, stop, offset) of a file's object into `buffer` at their offsets, and return True.

    False, without reading, if the local file has them, or the path is not in a mirror. Nothing is kept on
    disk.

    Raises:
        CheckpointChanged: the object was replaced or is gone; PositionMoved in a `RemoteModel`.
        CheckpointError: the store cannot be read.
    """

    def put(offset: int, content: memoryview) -> None:
        buffer[offset : offset + len(content)] = content

    def take(reader: ObjectReader, each: RemoteObject) -> bool:
        reader.take(each, pieces, put)
        return True

    return _ask(path, ((start, stop) for start, stop, _ in pieces), take) is not None


def copy_ranges(
    path: Path,
    descriptor: int,
    pieces: Iterable[tuple[int, int, int]],
    target: Path,
    advance: Callable[[int], None],
) -> None:
    """Fetch pieces (start, stop, offset) of the object of `path` into the open file `descriptor`.

    `path` must be in a mirror. `target` is the open file's path, for errors; threads call `advance` with the
    number of bytes of each part. CheckpointChanged (PositionMoved in a `RemoteModel`) if the object was
    replaced or is gone, CheckpointError if the store cannot be read, DiskFull or PublishError if the open
    file cannot be written.
    """
    found = _find(path)
    assert found is not None, path
    found[0].copy(found[1], descriptor, pieces, target, advance)


def checksum(path: Path, start: int, stop: int) -> int | None:
    """Return the plain crc32c of the bytes `start` to `stop` of a file's object; nothing is kept on disk.

    None if the local file has the range, or the path is not in a mirror.

    Raises:
        CheckpointChanged: the object was replaced or is gone; PositionMoved in a `RemoteModel`.
        CheckpointError: the store cannot be read.
    """
    ranges = [(start, stop)]
    return _ask(path, ranges, lambda reader, each: reader.checksums(each, ranges)[0])


def copy(path: Path, start: int, stop: int) -> IO[bytes] | None:
    """Return a nameless temporary file with the bytes `start` to `stop` of a file's object, from offset 0.

    The caller closes it; its space is free when nothing has it open or mapped any more. None if the local
    file has the range, or the path is not in a mirror.

    Raises:
        CheckpointChanged: the object was replaced or is gone; PositionMoved in a `RemoteModel`.
        CheckpointError: the store cannot be read.
        DiskFull, PublishError: the temporary file cannot be written.
    """

    def take(reader: ObjectReader, each: RemoteObject) -> IO[bytes]:
        place = Path(tempfile.gettempdir())
        with ExitStack() as stack:
            try:
                file = stack.enter_context(tempfile.TemporaryFile())
            except OSError as error:
                raise os_error(error, place) from error
            reader.copy(each, file.fileno(), [(start, stop, 0)], place)
            stack.pop_all()  # the caller closes it
            return file

    return _ask(path, [(start, stop)], take)


def _ask(
    path: Path, ranges: Iterable[tuple[int, int]], take: Callable[[ObjectReader, RemoteObject], T]
) -> T | None:
    found = _find(path)
    return None if found is None else found[0].ask_store(found[1], ranges, take)


class Ranges:
    """Sorted ranges that do not overlap."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield each range as (start, stop)."""
        return zip(self._starts, self._stops, strict=True)

    def gaps(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the parts (start, stop) of a range that are missing, in order."""
        at = bisect_left(self._stops, start)
        while start < stop and at < len(self._starts) and self._starts[at] < stop:
            if start < self._starts[at]:
                yield start, self._starts[at]
            start = max(start, self._stops[at])
            at += 1
        if start < stop:
            yield start, stop

    def add(self, start: int, stop: int) -> None:
        """Add a range (start, stop), and join it with the ranges that it touches."""
        first, last = bisect_left(self._stops, start), bisect_left(self._starts, stop + 1)
        if first < last:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        self._starts[first:last], self._stops[first:last] = [start], [stop]


AT_ONCE = 16  # the most files that are fetched together, each with a request of its own


class ReadAhead:
    """The choice of files to fetch together: of one name, in sibling directories."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str], list[str]] = {}

    def show(self, names: Iterable[str]) -> None:
        """Replace the names of all known files by these."""
        kinds = defaultdict(list)
        for name in sorted(names):
            kinds[_kind(name)].append(name)
        self._kinds = kinds

    def with_neighbours(
        self, name: str, is_there: Callable[[str], bool], is_wanted: Callable[[str], bool]
    ) -> list[str]:
        """Return the names of files to fetch together with `name`: as many as were fetched just before it.

        All have one last part, in sibling directories. They are the next names in sorted order, or the
        previous ones if the next were fetched already; at most 15. Empty if neither neighbour was fetched.
        `is_there` tells of a name if its file was fetched, `is_wanted` if it may be fetched ahead.
        """
        files = self._kinds.get(_kind(name), [])
        at = bisect_left(files, name)
        before, following = files[:at][::-1], files[at + 1 :]
        # Code that reads the manifests of deltas one after another need not know that each is a request. As
        # many of the next ones come as were fetched before, in either direction: a pass over all of them
        # seldom waits, and a command that reads a few fetches few.
        for passed, coming in ((before, following), (following, before)):
            if count := len([*takewhile(is_there, passed[: AT_ONCE - 1])]):
                return [*islice(filter(is_wanted, coming), count)]
        return []


def _kind(name: str) -> tuple[str, str]:
    directory, _, file = name.rpartition("/")
    return directory.rpartition("/")[0], file


_PREFIX = "export-model-"
_LOCKED_SECONDS = 60.0  # the time within which a new directory gets its lock


def private_directory() -> Path:
    """Return a new temporary directory that is removed when the process ends, or later if it was killed.

    Directories of this kind that killed processes left are removed now. OSError if the directory cannot be
    made.
    """
    new, owner = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}")), os.getpid()
    lock = os.open(new / LOCK_FILE, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)  # open as long as we live
    fcntl.flock(lock, fcntl.LOCK_EX)
    root = new.rename(new.with_name(new.name[1:]))  # locked before others can find it
    for left in root.parent.glob(f"{_PREFIX}*"):
        # without O_CREAT: a directory of such a name that lacks our lock file is not ours to remove
        _remove_if_left(left, os.O_RDWR)
    for left in root.parent.glob(f".{_PREFIX}*"):  # perhaps killed before it was locked
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _LOCKED_SECONDS:
                _remove_if_left(left, os.O_RDWR | os.O_CREAT)

    def remove() -> None:
        if os.getpid() == owner:  # not at the end of a forked child
            shutil.rmtree(root, ignore_errors=True)

    atexit.register(remove)
    return root


def _remove_if_left(directory: Path, flags: int) -> None:
    """Remove a directory unless a process has its lock file locked, which is opened with these flags.

    Errors are ignored.
    """
    with suppress(OSError):
        # O_NOFOLLOW: everybody may write to /tmp
        lock = os.open(directory / LOCK_FILE, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(lock)
