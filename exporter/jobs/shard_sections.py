"""The task that writes one shard: sections in order, each made of ranges of other files.

A section defines its bytes: unchanged ranges, rows in another order or dtype, the newest rows of several
layers. Values stream in blocks of bounded size. The receipt has the checksum of every range that was read and
of everything written, so a flipped bit never gets a new, right checksum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from exporter.checkpoint.tensor_values import cast_values, not_in_8_bits
from exporter.errors import CheckpointChanged
from exporter.jobs.task import FewFiles, Range, Receipt, Task
from exporter.storage.files import writing
from exporter.storage.open_files import read_at, write_at
from exporter.storage.output_directory import Directory, new_file
from exporter.wire import crc32c
from exporter.wire.dtypes import Array, DType
from exporter.wire.int8_codes import SCALE_BYTES, beside_codes, to_codes, values_of

if TYPE_CHECKING:
    from typing_extensions import Self

BLOCK_BYTES = 1 << 20
"""Source bytes in memory at a time: on checking and writing they are still in the processor's cache."""

TURN_BYTES = 16 << 10
"""The least number of bytes read from each source when rows are taken in turns from many."""

# Bytes are copied through one buffer, with one checksum for both reading and writing. That takes 1.45 times
# the processor time of `cp`; two checksums took 2.0 times.
COPY_BYTES = 512 << 10


class ReadRun:
    """Reads a range of a file once, with a checksum.

    `wanted` is the range, in one of `files`, and `place` the file's name in errors. `crc` is the plain crc32c
    of the bytes that were read, `left` the number of bytes still to read. Its methods raise CheckpointChanged
    if the file vanished or became shorter, CheckpointError or OSError if it cannot be read.
    """

    def __init__(self, files: FewFiles, wanted: Range, place: str) -> None:
        self._files, self._input = files, wanted.input
        self._offset, self.place = wanted.offset, place
        self.size = self.left = wanted.size
        self.crc = 0

    @property
    def done(self) -> int:
        """The number of bytes that were read."""
        return self.size - self.left

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Read the next values into a new array of this shape and dtype; add their bytes to the checksum.

        The run must have that many bytes left. CheckpointChanged if the file vanished or became shorter,
        CheckpointError or OSError if it cannot be read.
        """
        values = np.empty(shape, dtype)
        self.fill(values.reshape(-1).view(np.uint8))
        return values

    def fill(self, flat: Array) -> Array:
        """Fill the array `flat` (uint8) with the run's next bytes; return the part of it that is not filled.

        That part is empty unless the run ended. The bytes are added to the checksum. CheckpointChanged if the
        file vanished or became shorter, CheckpointError or OSError if it cannot be read.
        """
        count = min(len(flat), self.left)
        for start in range(0, count, crc32c.CHUNK):  # small enough to be still in a core's cache
            data = self.read(flat[start : min(start + crc32c.CHUNK, count)])
            self.crc = crc32c.extend(self.crc, data)
        return flat[count:]

    def read(self, buffer: Array) -> Array:
        """Fill a buffer with the next bytes and return it; the caller must add them to the checksum.

        The run must have that many bytes left. CheckpointChanged if the file vanished or became shorter,
        CheckpointError or OSError if it cannot be read.
        """
        # A read, not a map: a file that shrinks under a map kills the process.
        if read_at(self._files[self._input], self._offset + self.done, buffer.data) != len(buffer):
            raise CheckpointChanged(f"{self.place} became shorter after its index was read")
        self.left -= len(buffer)
        return buffer


class WrittenRun:
    """Writes a part of an open file, which begins at `offset`, from its first byte to its last.

    `crc` and `done` are the plain crc32c and the number of the bytes that were written or skipped.
    """

    def __init__(self, descriptor: int, offset: int) -> None:
        self._descriptor, self._offset = descriptor, offset
        self.done = self.crc = 0

    def write(self, values: Array) -> None:
        """Append values, in C order, and add them to the checksum; OSError if the disk refuses."""
        view = np.ascontiguousarray(values).reshape(-1).view(np.uint8)  # no copy if contiguous already
        self.crc = crc32c.extend(self.crc, view)
        self.put(view)

    def skip(self, size: int) -> None:
        """Leave a hole of `size` bytes, which is read as zeros and takes no space on disk.

        The zeros are added to the checksum.
        """
        if size:
            self.crc = crc32c.combine(self.crc, crc32c.zeros_crc(size), size)
            self.done += size

    def put(self, data: Array) -> None:
        """Append bytes; the caller must add them to the checksum. OSError if the disk refuses."""
        write_at(self._descriptor, self._offset + self.done, data.data)
        self.done += len(data)


class NewShard:
    """The file that a task writes, run by run; large intermediate values go to files in `scratch`.

    `size` is the number of bytes of all runs so far. `rows` is for the receipt; sections set it.
    """

    def __init__(self, descriptor: int, scratch: Path) -> None:
        self._descriptor, self.scratch = descriptor, scratch
        self._runs: list[WrittenRun] = []
        self.size = self.rows = 0

    @property
    def crcs(self) -> tuple[int, ...]:
        """The plain crc32c of each run, in order; of an unfinished run, of the bytes that it has."""
        return tuple(run.crc for run in self._runs)

    def reserve(self, size: int) -> WrittenRun:
        """Add a run of `size` bytes behind the others; the caller must write all of it."""
        run = WrittenRun(self._descriptor, self.size)
        self._runs.append(run)
        self.size += size
        return run

    def append(self, blocks: Iterable[Array]) -> None:
        """Write a run of these values behind the others, however many there are.

        OSError if the disk refuses; errors of `blocks` pass.
        """
        run = self.reserve(0)
        for block in blocks:
            run.write(block)
        self.size += run.done


class Section(Struct, frozen=True, array_like=True):
    """The base of a shard's sections: each reads `ranges` of a task's inputs, and writes runs of bytes."""

    counted: ClassVar[int] = 0
    """The number of the section's counts in the receipt."""

    @property
    def ranges(self) -> tuple[Range, ...]:
        """The ranges that the section reads, in the order of the receipt's checksums."""
        raise NotImplementedError

    @property
    def bytes_(self) -> int:
        """The number of bytes that the section adds to a task."""
        return sum(each.size for each in self.ranges)

    @property
    def is_verbatim(self) -> bool:
        """True if the section writes its ranges unchanged."""
        return False

    def renumbered(self, numbers: Mapping[int, int]) -> Self:
        """Return the same section, with the number of each input replaced by its value in `numbers`."""
        raise NotImplementedError

    def sizes(self, *counts: int) -> tuple[int, ...]:
        """Return the size in bytes of each run, in order, given the counts that `write` returned."""
        raise NotImplementedError

    def write(self, sources: Sequence[ReadRun], shard: NewShard) -> tuple[int, ...]:
        """Write the section's runs from its ranges; return its `counted` counts for the receipt.

        `sources` are its ranges, in order, not read yet. CheckpointChanged if a file vanished or became
        shorter, CheckpointError if it cannot be read, OSError if the disk refuses, and the section's own
        errors.
        """
        raise NotImplementedError


class WriteShard(Task, frozen=True, kw_only=True):
    """A task that writes a shard of sections.

    The receipt has the checksums of all ranges and runs, in order.
    """

    sections: tuple[Any, ...]

    def run(self, directory: Directory) -> Receipt:
        """Write the shard of all sections, and return its receipt: checksums of ranges and runs, and counts.

        CheckpointChanged if an input is not as planned, CheckpointError if it cannot be read; PublishError
        and subclasses if the shard cannot be written; errors of the sections pass.
        """
        ranges = [each for section in self.sections for each in section.ranges]
        read: list[int] = []
        counts: list[int] = []
        with (
            self.files(ranges, directory.scratch) as paths,
            FewFiles(paths) as files,
            new_file(directory.scratch) as (target, path),
        ):
            shard = NewShard(target, directory.scratch)
            for section in self.sections:
                sources = [ReadRun(files, each, self.inputs[each.input].place) for each in section.ranges]
                with writing(path):
                    counts += section.write(sources, shard)
                read += [source.crc for source in sources]
            tag = directory.put_file(self.name, path)
        return Receipt(self.name, tuple(read), shard.crcs, shard.size, tag, shard.rows, tuple(counts))


def renumbered(ranges: Sequence[Range], numbers: Mapping[int, int]) -> tuple[Range, ...]:
    """Return the ranges, in order, with the number of each input replaced by its value in `numbers`."""
    return tuple(replace(each, input=numbers[each.input]) for each in ranges)


class MovedRows(Section, frozen=True, array_like=True, tag="rows"):
    """Writes rows of one tensor.

    `sources` hold them one after another or, if they take `turns_in`, row i in source i % n. They are written
    as runs of `counts` rows, in order in the shard; with `turns_out` row i goes to run i % n. A row has
    `width` elements of `dtype`, which are cast to `to`; MappingError if a value does not fit.
    """

    name: str
    dtype: DType
    to: DType
    width: int
    sources: tuple[Range, ...]
    turns_in: bool
    counts: tuple[int, ...]
    turns_out: bool

    @classmethod
    def copied(cls, name: str, source: Range) -> MovedRows:
        """Return the section, named `name` in errors, that copies a range unchanged."""
        return cls(name, DType.UINT8, DType.UINT8, source.size, (source,), False, (1,), False)

    @property
    def ranges(self) -> tuple[Range, ...]:
        """The sources, in order."""
        return self.sources

    @property
    def bytes_(self) -> int:
        """The number of bytes that are written (not read), which determines the size of shards."""
        return sum(self.counts) * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """The bytes of a row when written."""
        return self.width * self.to.numpy.itemsize

    @property
    def is_verbatim(self) -> bool:
        """True if the runs together are the sources together, unchanged, however both are divided."""
        return self.dtype is self.to and not (self.turns_in or self.turns_out)

    def renumbered(self, numbers: Mapping[int, int]) -> MovedRows:
        """Return the same section, with the number of each input replaced by its value in `numbers`."""
        return replace(self, sources=renumbered(self.sources, numbers))

    def sizes(self, *counts: int) -> tuple[int, ...]:
        """Return the size in bytes of each run, in order; arguments are ignored."""
        return tuple(count * self.row_bytes for count in self.counts)

    def write(self, sources: Sequence[ReadRun], shard: NewShard) -> tuple[int, ...]:
        """Write the rows to their runs, and return no counts.

        MappingError if a value does not fit into the target dtype, CheckpointChanged if a file vanished or
        became shorter, CheckpointError if it cannot be read, OSError if the disk refuses.
        """
        runs = [shard.reserve(count * self.row_bytes) for count in self.counts]
        if self.is_verbatim:
            self._copy(sources, runs)
        else:
            self._deal(self._blocks(sources), runs, lambda rows: cast_values(rows, self.to, self.name))
        return ()

    def _copy(self, sources: Sequence[ReadRun], runs: Sequence[WrittenRun]) -> None:
        """Copy the sources, one after the other, into the runs, with one checksum for reading and writing.

        CheckpointChanged if a file vanished or became shorter, CheckpointError if it cannot be read, OSError
        if the disk refuses.
        """
        buffer = np.empty(min(COPY_BYTES, max((source.size for source in sources), default=0)), np.uint8)
        waiting = zip(runs, self.counts, strict=True)
        room = 0
        for source in sources:
            while source.left:
                while not room:
                    run, count = next(waiting)
                    room = count * self.row_bytes
                size, crc = min(source.left, room), 0
                for part in _cut(size, len(buffer)):
                    data = source.read(buffer[:part])
                    crc = crc32c.extend(crc, data)
                    run.put(data)
                source.crc = _followed(source.crc, crc, source.done, size)
                run.crc = _followed(run.crc, crc, run.done, size)
                room -= size

    def _blocks(self, sources: Sequence[ReadRun]) -> Iterator[Array]:
        """Yield the rows in their natural order, as blocks [n, width] of about 1 MiB.

        CheckpointChanged if a file vanished or became shorter, CheckpointError or OSError if it cannot be
        read.
        """
        row_bytes = max(1, self.width * self.dtype.numpy.itemsize)
        rows = max(1, BLOCK_BYTES // row_bytes)
        if not self.turns_in:
            for source in sources:
                yield from (
                    source.take((count, self.width), self.dtype.numpy)
                    for count in _cut(source.size // row_bytes, rows)
                )
            return
        parts = len(sources)
        each = max(1, rows // parts, TURN_BYTES // row_bytes)
        for count in _cut(sum(self.counts), each * parts):
            block = np.empty((count, self.width), self.dtype.numpy)
            for part, source in enumerate(sources):
                into = block[part::parts]
                into[...] = source.take(into.shape, self.dtype.numpy)
            yield block

    def _deal(
        self, blocks: Iterable[Array], runs: Sequence[WrittenRun], converted: Callable[[Array], Array]
    ) -> None:
        """Write blocks of rows [n, width], in order, to the runs that they belong to.

        `converted` is applied to the rows of each write. Its errors and those of `blocks` pass; OSError if
        the disk refuses.
        """
        first = 0
        ends = np.cumsum([0, *self.counts])
        for block in blocks:
            for part, run in enumerate(runs):
                if self.turns_out:
                    rows = block[(part - first) % len(runs) :: len(runs)]
                else:
                    start, stop = ends[part : part + 2] - first
                    rows = block[max(0, start) : max(0, stop)]
                run.write(converted(rows))
            first += len(block)


class QuantisedRows(MovedRows, frozen=True, array_like=True, tag="rows8"):
    """Writes rows [n, width] in 8 bits with scales; counts `RowErrors.bits`.

    NotFinite for a row without codes: it holds NaN or infinity, or is too large for a scale (see
    `exporter.wire.int8_codes`).
    """

    counted: ClassVar[int] = 3

    @property
    def row_bytes(self) -> int:
        """The bytes of a row when written: a code for each value, and the scale."""
        return self.width + SCALE_BYTES

    def write(self, sources: Sequence[ReadRun], shard: NewShard) -> tuple[int, ...]:
        """Write the rows in 8 bits to their runs, and return `RowErrors.bits`.

        NotFinite for a row without codes, CheckpointChanged if a file vanished or became shorter,
        CheckpointError if it cannot be read, OSError if the disk refuses.
        """
        runs = [shard.reserve(count * self.row_bytes) for count in self.counts]
        errors = RowErrors()
        self._deal(self._blocks(sources), runs, partial(self._quantised, errors))
        return errors.bits

    def _quantised(self, errors: RowErrors, rows: Array) -> Array:
        codes, scales, fits = to_codes(rows)
        if not fits.all():
            raise not_in_8_bits(self.name, rows[~fits][0])
        served = beside_codes(codes, scales)
        errors.add(np.abs(values_of(served) - rows), int(np.count_nonzero(scales)) * self.width)
        return served


class RowErrors:
    """Counts the rounding errors of rows: the largest difference of a value, and the sum of all differences.

    `values` counts the values except those in rows of zeros, as in a table's room for more keys.
    """

    def __init__(self) -> None:
        self.largest = self.sum = 0.0
        self.values = 0

    def add(self, differences: Array, values: int) -> None:
        """Count the absolute differences of further rows, `values` of which are not in rows of zeros."""
        self.largest = max(self.largest, float(differences.max(initial=0)))
        self.sum += float(differences.sum(dtype=np.float64))
        self.values += values

    @property
    def mean(self) -> float:
        """The mean difference of a value, 0 without values; values in rows of zeros do not count."""
        return self.sum / max(1, self.values)

    @property
    def bits(self) -> tuple[int, int, int]:
        """Three integers for a receipt: the largest difference and the sum, as float64 bits, and `values`."""
        largest, total = np.array([self.largest, self.sum]).view(np.int64).tolist()
        return largest, total, self.values

    @classmethod
    def of(cls, bits: Sequence[int]) -> RowErrors:
        """Return the errors that a receipt describes by `bits`."""
        found = cls()
        *floats, found.values = bits
        found.largest, found.sum = np.array(floats, np.int64).view(np.float64).tolist()
        return found

    def join(self, other: RowErrors) -> None:
        """Add the counts of `other`, of other rows, to these."""
        self.largest, self.sum = max(self.largest, other.largest), self.sum + other.sum
        self.values += other.values


def _followed(crc: int, by: int, done: int, size: int) -> int:
    """Return the plain crc32c of `done` bytes, the last `size` of which have `by`, the others `crc`."""
    return by if done == size else crc32c.combine(crc, by, size)


def _cut(rows: int, most: int) -> Iterator[int]:
    """Yield the sizes of the parts of `rows`, each `most` but the last, which may be smaller."""
    for start in range(0, rows, most):
        yield min(most, rows - start)
