"""A task: a value with everything needed to run it, so that any process anywhere can run and repeat it.

A task reads ranges of files or objects that are pinned by size and tag, writes at most one object, and
returns a receipt. Running it twice gives the same object. Tasks and receipts are written as JSON.

The smallest operation, `Digest`, is here; `exporter.jobs.execute` lists the others.
"""

from __future__ import annotations

import errno
import os
import resource
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from msgspec import Struct

from exporter.catalog import Extent
from exporter.checkpoint.source_shard import open_shard, reading, shard_status
from exporter.errors import CheckpointChanged, CheckpointError
from exporter.storage import mirror
from exporter.storage.files import file_digest, writing
from exporter.storage.objects import ObjectReader, RemoteObject, variables
from exporter.storage.output_directory import Directory, new_path
from exporter.storage.requests import MOST_COPIED
from exporter.storage.url import Url
from exporter.wire.crc32c import combine, crc_of

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

ZEROS = "zeros:"
"""The name of a file of zeros, and the place of such an input: workers make it themselves."""


class Range(Struct, frozen=True, array_like=True):
    """`size` bytes at `offset` of a task's input with this number."""

    input: int
    offset: int
    size: int


class Input(Struct, frozen=True, array_like=True):
    """A file (absolute path) or an object (URL) as it was when the task was planned.

    `tag` is the store's entity tag, or the time of a file's last change in ns. It is empty for the output of
    a task of the same job: that task may be repeated, and writes the same.
    """

    place: str
    size: int
    tag: str

    @classmethod
    def of(cls, path: Path) -> Input:
        """Pin the present state of a file, or of the object that it stands for.

        CheckpointChanged if it does not exist, CheckpointError if it cannot be reached.
        """
        if path.name == ZEROS:
            return cls(ZEROS, shard_status(path).st_size, "")
        if (found := mirror.pinned(path)) is not None:
            url, each = found
            return cls(str(url), each.size, each.tag or "")
        status = shard_status(path)
        # Not ctime: it changes when another export links the file.
        return cls(os.fspath(path.absolute()), status.st_size, str(status.st_mtime_ns))

    @contextmanager
    def file(self, ranges: Iterable[Range], scratch: Path) -> Iterator[Path]:
        """Yield the path of a file that has at least these ranges, at their offsets.

        An object's ranges are fetched into a file in `scratch`, which is removed at the end.

        Raises:
            CheckpointChanged: the input is not as planned; for a file, also if it changed during the block.
            CheckpointError: it cannot be read.
            PublishError, DiskFull: `scratch` cannot be written.
            UsageError: the library that reads stores is not installed on this machine.
        """
        url = Url.parse(self.place)
        if url is not None or self.place == ZEROS:
            with new_path(scratch) as path:
                with writing(path), path.open("xb") as file:
                    file.truncate(self.size)
                    if url is not None:
                        pieces = [(each.offset, each.offset + each.size, each.offset) for each in ranges]
                        _reader(url).copy(self._object(url), file.fileno(), pieces, path)
                yield path
            return
        path = Path(self.place)
        self._require_same(shard_status(path))
        yield path
        self._require_same(shard_status(path))  # again: a trainer may have written to it meanwhile

    def fetch(self, wanted: Range, descriptor: int, offset: int, path: Path) -> bool:
        """Fetch a range of an object to an offset of the open file at `path`, and return True.

        If the input is a local file or zeros, do nothing and return False. CheckpointChanged if the object is
        not as planned, CheckpointError if it cannot be read, DiskFull or PublishError if the file cannot be
        written, UsageError if the library that reads stores is not installed on this machine.
        """
        url = Url.parse(self.place)
        if url is not None:
            piece = (wanted.offset, wanted.offset + wanted.size, offset)
            _reader(url).copy(self._object(url), descriptor, [piece], path)
        return url is not None

    def checksums(self, ranges: Sequence[Range], scratch: Path) -> list[int]:
        """Return the plain crc32c of each range, in their order.

        Objects are read without a copy; `scratch` is a directory for a file of zeros. CheckpointChanged if
        the input is not as planned, or ends before a range does; CheckpointError if it cannot be read,
        PublishError or DiskFull if a file of zeros cannot be written, UsageError if the library that reads
        stores is not installed on this machine.
        """
        url = Url.parse(self.place)
        if url is None:
            with self.file(ranges, scratch) as path, open_shard(path) as descriptor, reading(path):
                return [crc_of(descriptor, each.offset, each.size) for each in ranges]
        asked = [(each.offset, each.offset + each.size) for each in ranges]
        return _reader(url).checksums(self._object(url), asked)

    def _object(self, url: Url) -> RemoteObject:
        return RemoteObject(url.path, self.size, self.tag or None, 0.0)

    def _require_same(self, status: os.stat_result) -> None:
        if (status.st_size, str(status.st_mtime_ns)) != (self.size, self.tag or str(status.st_mtime_ns)):
            raise CheckpointChanged(f"{self.place} was replaced or written to after the work was planned")


def _reader(url: Url) -> ObjectReader:
    """Return the reader of an object's bucket, which tasks share while the environment's settings stay."""
    settings = tuple((name, os.environ[name]) for name in variables(url.scheme))
    return _shared_reader(url.scheme, url.bucket, settings)


@lru_cache(maxsize=16)
def _shared_reader(scheme: str, bucket: str, _: tuple[tuple[str, str], ...]) -> ObjectReader:
    return ObjectReader(Url(scheme, bucket, ""))


class Receipt(Struct, frozen=True):
    """The result of a task: the plain crc32c of each range that it read, and of each run that it wrote.

    `written` is the size of its output in bytes, 0 without one, and `tag` is the output's, as in `Input`. The
    operation defines the meaning of `rows` and `counts`.
    """

    task: str
    read: tuple[int, ...] = ()
    wrote: tuple[int, ...] = ()
    written: int = 0
    tag: str = ""
    rows: int = 0
    counts: tuple[int, ...] = ()


class Task(Struct, frozen=True, kw_only=True):
    """The base of every operation's tasks.

    `name` is unique in its plan, and the name of its output if it writes one. `bytes_` is the number of bytes
    that it reads. A worker finds the class by `operation`: see `exporter.jobs.execute`.
    """

    operation: ClassVar[str]

    name: str
    inputs: tuple[Input, ...] = ()
    bytes_: int = 0

    @contextmanager
    def files(self, ranges: Sequence[Range], scratch: Path) -> Iterator[list[Path]]:
        """Yield a path for each input, in order: of a file that has at least the input's `ranges`.

        Files in the directory `scratch` are removed at the end. CheckpointChanged if an input is not as
        planned, CheckpointError if it cannot be read, PublishError or DiskFull if `scratch` cannot be
        written, UsageError if the library that reads stores is not installed on this machine.
        """
        wanted: list[list[Range]] = [[] for _ in self.inputs]
        for each in ranges:
            wanted[each.input].append(each)
        with ExitStack() as stack:
            files = (source.file(some, scratch) for source, some in zip(self.inputs, wanted, strict=True))
            yield [stack.enter_context(file) for file in files]

    def run(self, directory: Directory) -> Receipt:
        """Run the task and return its receipt.

        Its output, if it has one, becomes the object `name` of the directory. Raises the subclasses of
        ExportError that the operation defines.
        """
        raise NotImplementedError


class Digest(Task, frozen=True, kw_only=True):
    """A task that reads a file; it has no output. The tag of its receipt is the file's SHA-256."""

    operation: ClassVar[str] = "digest"

    def run(self, directory: Directory) -> Receipt:
        """Read the file; return a receipt whose tag is its SHA-256 (lower-case hex).

        CheckpointChanged if the file is not as planned, CheckpointError or OSError if it cannot be read,
        PublishError or DiskFull if an object cannot be copied into `directory.scratch`, UsageError if the
        library that reads stores is not installed on this machine.
        """
        (source,) = self.inputs
        with source.file((Range(0, 0, source.size),), directory.scratch) as path:
            return Receipt(self.name, tag=file_digest(path))


# --- dividing work -----------------------------------------------------------------------------------------


# In units of a task's bytes: a larger table than the first is divided into pieces of the second. A server
# reads a table faster in one piece, but two workers write it faster in two.
_WHOLE, _DIVIDED = 16, 4


def piece_bytes(size: int, task_bytes: int) -> int | None:
    """Return the size in bytes of the pieces in which a table of `size` bytes is written.

    None if it is written in one. `task_bytes` is the approximate size of a task.
    """
    # No piece is larger than the size that a store copies by one request to its published place.
    if size <= min(_WHOLE * task_bytes, MOST_COPIED):
        return None
    return min(_DIVIDED * task_bytes, MOST_COPIED)


def batches(pieces: Iterable[T], most: int, size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield lists of consecutive pieces of at most `most` bytes together, or of one larger piece.

    `size_of` gives the bytes of a piece. No list is empty.
    """
    batch: list[T] = []
    size = 0
    for piece in pieces:
        more = size_of(piece)
        if batch and size + more > most:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += more
    if batch:
        yield batch


# --- descriptors of many files -----------------------------------------------------------------------------


_MOST_OPEN = 256  # more bring no gain
_TOO_MANY = (errno.EMFILE, errno.ENFILE)
_IN_USE: set[FewFiles] = set()  # by all tasks that run in this process


class FewFiles:
    """Descriptors of files by their numbers, at most `most_open` at a time; a context manager."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._open: OrderedDict[int, tuple[int, ExitStack]] = OrderedDict()

    def __enter__(self) -> Self:
        _IN_USE.add(self)
        return self

    def __exit__(self, *error: object) -> None:
        _IN_USE.discard(self)
        while self._open:
            self._close_one()

    def __getitem__(self, number: int) -> int:
        """Return the descriptor of the file with this number, valid until another one is asked for.

        CheckpointChanged if the file no longer exists, CheckpointError if it cannot be opened.
        """
        if number in self._open:
            self._open.move_to_end(number)
        else:
            while len(self._open) >= most_open():
                self._close_one()
            self._open[number] = self._opened(self._paths[number])
        return self._open[number][0]

    def _opened(self, path: Path) -> tuple[int, ExitStack]:
        """Open a file for reading; return its descriptor, and the stack that closes it.

        If the process may not open more files, the oldest of these are closed first. CheckpointChanged if the
        file no longer exists, CheckpointError if it cannot be opened.
        """
        while True:
            stack = ExitStack()
            try:
                return stack.enter_context(open_shard(path)), stack
            except CheckpointError as error:
                if getattr(error.__cause__, "errno", None) not in _TOO_MANY or not self._open:
                    raise
            self._close_one()

    def _close_one(self) -> None:
        """Close the file that was not used for the longest time; there must be one."""
        _, (_, stack) = self._open.popitem(last=False)
        stack.close()


def most_open() -> int:
    """Return the number of files that each task may have open, at least 1 and at most 256.

    All tasks of the process together may have a quarter of the process's limit.
    """
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    share = allowed // (4 * max(1, len(_IN_USE)))
    return min(_MOST_OPEN, max(1, share)) if allowed != resource.RLIM_INFINITY else _MOST_OPEN


File = TypeVar("File", bound=Hashable)


class RangeChecksums(Generic[File]):
    """Joins the checksums that tasks report for ranges of files, in any order, some more than once."""

    def __init__(self) -> None:
        self._ranges: dict[File, dict[int, tuple[int, int]]] = defaultdict(dict)

    def add(self, file: File, start: int, size: int, crc: int) -> None:
        """Record the plain crc32c of the range of `size` bytes at `start` of a file.

        Of several ranges with the same start the longest counts.
        """
        ranges = self._ranges[file]
        if size > ranges.get(start, (0, 0))[0]:
            ranges[start] = size, crc

    def joined(self, file: File, part: Range, crc: int, whole: Extent) -> int | None:
        """Record `crc`, the plain crc32c of the range `part` of the stored run `whole`.

        Return the run's plain crc32c if the range ends where the run ends and all of the run's ranges are
        known; else None.
        """
        self.add(file, part.offset, part.size, crc)
        is_last = part.offset + part.size == whole.offset + whole.size
        return self.of(file, whole.offset, whole.size) if is_last else None

    def of(self, file: File, start: int, size: int) -> int | None:
        """Return the plain crc32c of `size` bytes at `start` of a file, joined from the recorded ranges.

        None if a range is not recorded, or the ranges do not follow each other without overlap.
        """
        ranges, at, crc = self._ranges[file], start, 0
        while at < start + size:
            if at not in ranges:
                return None
            length, part = ranges[at]
            crc = combine(crc, part, length) if at > start else part
            at += length
        return crc if at == start + size else None
