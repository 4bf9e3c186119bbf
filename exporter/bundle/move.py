"""The task of writing one shard from ranges of others: rows in another order or dtype, or as they are.

Values stream in blocks of bounded size. Every source byte passes by, and the receipt has its checksum: a
flipped bit never gets a new checksum that calls it right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from msgspec import Struct

from exporter.checkpoint.cast_values import cast_values
from exporter.files import writing
from exporter.jobs.byte_runs import ReadRun, WrittenRun
from exporter.jobs.task import Range, Receipt, Task
from exporter.storage.output_directory import Directory, new_file
from exporter.wire import crc32c
from exporter.wire.dtypes import DType

Array = np.ndarray[Any, Any]

BLOCK_BYTES = 1 << 20
"""Source bytes in memory at a time: what is checked and written is still in the processor's cache."""

TURN_BYTES = 16 << 10
"""What is read of each source at least, where rows are taken in turns from many."""

COPY_BYTES = 512 << 10
"""The same where bytes are copied as they are, through one buffer."""


class Segment(Struct, frozen=True, array_like=True):
    """Rows of one tensor that a shard gets.

    `sources` hold them one after another or, if they take `turns_in`, row i in source i % n. They are written
    as runs of `counts` rows, one behind another in the shard; with `turns_out` row i goes to run i % n.
    A row has `width` elements of `dtype`, which are cast to `to`.
    """

    name: str
    dtype: DType
    to: DType
    width: int
    sources: tuple[Range, ...]
    turns_in: bool
    counts: tuple[int, ...]
    turns_out: bool

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as it is written."""
        return self.width * self.to.numpy.itemsize

    @property
    def bytes_(self) -> int:
        """Bytes that are written."""
        return sum(self.counts) * self.row_bytes

    @property
    def is_verbatim(self) -> bool:
        """True if its runs are its sources as they are, whatever the ranges of each."""
        return self.dtype is self.to and not (self.turns_in or self.turns_out)


class Move(Task, frozen=True, kw_only=True):
    """Write a shard of segments. The receipt's checksums are those of all sources and runs, in order.

    Raises:
        CheckpointChanged: a source vanished, was replaced or became shorter.
        MappingError: a value is too large for the dtype that it is cast to.
    """

    operation: ClassVar[str] = "move"

    segments: tuple[Segment, ...]

    @property
    def is_verbatim(self) -> bool:
        """True if runs are sources as they are."""
        return all(each.is_verbatim for each in self.segments)

    def run(self, directory: Directory) -> Receipt:
        """See `Task`."""
        wanted = [each for segment in self.segments for each in segment.sources]
        with self.opened(wanted, directory.scratch) as files, new_file(directory.scratch) as (target, path):
            read: list[int] = []
            wrote: list[int] = []
            offset = 0
            for segment in self.segments:
                sources = [ReadRun(files, each, self.inputs[each.input].place) for each in segment.sources]
                runs = []
                for count in segment.counts:
                    runs.append(WrittenRun(target, offset))
                    offset += count * segment.row_bytes
                with writing(path):
                    if segment.is_verbatim:
                        _copy(segment, sources, runs)
                    else:
                        _deal(segment, _rows(segment, sources), runs)
                read += [source.crc for source in sources]
                wrote += [run.crc for run in runs]
            tag = directory.put_file(self.name, path)
        return Receipt(self.name, tuple(read), tuple(wrote), offset, tag)


def _copy(segment: Segment, sources: Sequence[ReadRun], runs: Sequence[WrittenRun]) -> None:
    """Copy bytes as they are: what is read has the checksum of what is written, which is taken once."""
    buffer = np.empty(min(COPY_BYTES, max((source.size for source in sources), default=0)), np.uint8)
    waiting = zip(runs, segment.counts, strict=True)
    room = 0
    for source in sources:
        while source.left:
            while not room:
                run, count = next(waiting)
                room = count * segment.row_bytes
            size, crc = min(source.left, room), 0
            for part in _cut(size, len(buffer)):
                data = source.read(buffer[:part])
                crc = crc32c.extend(crc, data)
                run.put(data)
            source.crc = _followed(source.crc, crc, source.done, size)
            run.crc = _followed(run.crc, crc, run.done, size)
            room -= size


def _followed(crc: int, by: int, done: int, size: int) -> int:
    """The checksum of `done` bytes, of which the last `size` have one of their own."""
    return by if done == size else crc32c.combine(crc, by, size)


def _rows(segment: Segment, sources: Sequence[ReadRun]) -> Iterator[Array]:
    """The rows in their natural order, as blocks [n, width]."""
    row_bytes = max(1, segment.width * segment.dtype.numpy.itemsize)
    rows = max(1, BLOCK_BYTES // row_bytes)
    if not segment.turns_in:
        for source in sources:
            yield from (
                source.take((count, segment.width), segment.dtype.numpy)
                for count in _cut(source.size // row_bytes, rows)
            )
        return
    parts = len(sources)
    each = max(1, rows // parts, TURN_BYTES // row_bytes)
    for count in _cut(sum(segment.counts), each * parts):
        block = np.empty((count, segment.width), segment.dtype.numpy)
        for part, source in enumerate(sources):
            into = block[part::parts]
            into[...] = source.take(into.shape, segment.dtype.numpy)
        yield block


def _cut(rows: int, most: int) -> Iterator[int]:
    for start in range(0, rows, most):
        yield min(most, rows - start)


def _deal(segment: Segment, blocks: Iterable[Array], runs: Sequence[WrittenRun]) -> None:
    first = 0
    ends = np.cumsum([0, *segment.counts])
    for block in blocks:
        for part, run in enumerate(runs):
            if segment.turns_out:
                rows = block[(part - first) % len(runs) :: len(runs)]
            else:
                start, stop = ends[part : part + 2] - first
                rows = block[max(0, start) : max(0, stop)]
            run.write(cast_values(rows, segment.to, segment.name))
        first += len(block)
