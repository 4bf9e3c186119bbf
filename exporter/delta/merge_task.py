"""The task of merging rows that lie in deltas: with one another, or laid over rows of a base.

A task reads contiguous ranges of the deltas' tensors, all of them and each once, so that the checksums of
ranges add up to those of tensors. What it writes is one shard: section by section the tensors of a table, or
rows of a base; then tensors that are copied; and if it is the only one of a delta, the delta's header.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from exporter.checkpoint.tensor_values import encode_strings
from exporter.delta.delta_files import header_tensors
from exporter.delta.format import DeltaHeader, ServedVariable
from exporter.delta.merge import newest_rows
from exporter.delta.packing import PackedRows, pack_rows
from exporter.errors import CorruptFile
from exporter.files import writing
from exporter.jobs.byte_runs import ReadRun, WrittenRun
from exporter.jobs.few_files import FewFiles
from exporter.jobs.task import Range, Receipt, Task
from exporter.options import DeltaDtype
from exporter.storage.output_directory import Directory, new_file
from exporter.wire.crc32c import chunks_of
from exporter.wire.dtypes import DType

Array = np.ndarray[Any, Any]

_BLOCK_BYTES = 4 << 20

Layer = tuple[Range, ...]
"""Rows of one delta: ids and values; of packed rows exact places and codes, too; of int8 ones also scales."""


class MergedRows(Struct, frozen=True, array_like=True):
    """Rows `low` to `high` of a table that a task writes: the newest of `layers`, oldest first.

    With `base`, which holds all of these rows one behind another, all are written. Without it those of
    the layers are written, with their ids, and packed as the delta says that is made.
    """

    variable: ServedVariable
    low: int
    high: int
    layers: tuple[Layer, ...]
    base: tuple[Range, ...] = ()
    packing: DeltaDtype | None = None

    @property
    def ranges(self) -> tuple[Range, ...]:
        """What is read, in the order of the receipt's checksums."""
        return (*self.base, *(each for layer in self.layers for each in layer))

    def renumbered(self, numbers: Mapping[int, int]) -> MergedRows:
        """The same rows, with other numbers of inputs."""
        base = renumbered(self.base, numbers)
        return replace(self, base=base, layers=tuple(renumbered(layer, numbers) for layer in self.layers))

    @property
    def keys(self) -> tuple[str, ...]:
        """The tensors of a delta that it makes, in the order in which they are written."""
        ids, values = self.variable.keys
        packed = [tensor.key for tensor in self.variable.packed(self.packing)]
        return (values, *packed[1:], *packed[:1], ids)

    def sizes(self, rows: int, exact: int) -> tuple[int, ...]:
        """The bytes of each tensor, given how many rows there are and how many of them are not packed."""
        values = exact * self.row_bytes
        if self.base:
            return (values,)
        codes = [
            (rows - exact) * math.prod(tensor.element_shape) * tensor.dtype.numpy.itemsize
            for tensor in self.variable.packed(self.packing)[1:]
        ]
        return (values, *codes, *([8 * exact] if codes else []), 8 * rows)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row that is not packed."""
        return math.prod(self.variable.shape[1:]) * self.variable.dtype.numpy.itemsize


def renumbered(ranges: Sequence[Range], numbers: Mapping[int, int]) -> tuple[Range, ...]:
    """Ranges of the same files with other numbers of inputs."""
    return tuple(replace(each, input=numbers[each.input]) for each in ranges)


class Merge(Task, frozen=True, kw_only=True):
    """Write a shard. The receipt has the checksums of everything in order, and for each section how many rows
    it has and how many of them are not packed.

    Raises:
        CorruptFile: ids are not increasing, or none of the table's.
    """

    operation: ClassVar[str] = "merge"

    sections: tuple[MergedRows, ...]
    copies: tuple[Range, ...] = ()
    header: DeltaHeader | None = None

    @property
    def ranges(self) -> tuple[Range, ...]:
        """What is read, in the order of the receipt's checksums."""
        return (*(each for section in self.sections for each in section.ranges), *self.copies)

    def run(self, directory: Directory) -> Receipt:
        """See `Task`."""
        scratch = directory.scratch
        with self.opened(self.ranges, scratch) as files, new_file(scratch) as (target, path):
            read: list[int] = []
            wrote: list[int] = []
            counts: list[int] = []
            offset = 0
            with writing(path):
                for section in self.sections:
                    job = _SectionJob(section, files, [each.place for each in self.inputs])
                    done = job.run(_Output(target, offset), directory)
                    read += job.read
                    wrote += done.crcs
                    counts += (done.rows, done.exact)
                    offset = done.end
                for copied in self.copies:
                    run = WrittenRun(target, offset)
                    for chunk in chunks_of(files[copied.input], copied.offset, copied.size):
                        run.write(np.frombuffer(chunk, np.uint8))
                    read.append(run.crc)
                    wrote.append(run.crc)
                    offset += copied.size
                rows = sum(counts[::2])
                if self.header is not None:
                    content = b"".join(data for _, data, _ in header_bytes(self.header, rows))
                    WrittenRun(target, offset).write(np.frombuffer(content, np.uint8))
                    offset += len(content)
            tag = directory.put_file(self.name, path)
        return Receipt(self.name, tuple(read), tuple(wrote), offset, tag, rows, tuple(counts))


def header_bytes(header: DeltaHeader, rows: int) -> Iterator[tuple[str, bytes, int | None]]:
    """The tensors of a delta's header as they are stored: key, bytes, and of strings the checksum."""
    for key, array in header_tensors(header, rows).items():
        if array.dtype == object:
            yield key, *encode_strings([array.item()])
        else:
            yield key, array.tobytes(), None


class _Written(Struct):
    rows: int
    exact: int
    crcs: list[int]
    end: int


class _Output:
    """Where a section goes in the shard: tensors one behind another."""

    def __init__(self, descriptor: int, offset: int) -> None:
        self._descriptor = descriptor
        self.end = offset
        self.crcs: list[int] = []

    def tensor(self, blocks: Iterator[Array]) -> None:
        """Append one."""
        run = WrittenRun(self._descriptor, self.end)
        for block in blocks:
            run.write(block)
            self.end += block.nbytes
        self.crcs.append(run.crc)


class _SectionJob:
    def __init__(self, section: MergedRows, files: FewFiles, places: Sequence[str]) -> None:
        self._section = section
        row = section.variable.shape[1:]
        dtype = section.variable.dtype.numpy

        def read(each: Range) -> ReadRun:
            return ReadRun(files, each, places[each.input])

        self._base = [read(each) for each in section.base]
        self._row, self._dtype = row, dtype
        self._layers = [
            _LayerRows(section, [read(each) for each in layer], places[layer[0].input])
            for layer in section.layers
        ]

    @property
    def read(self) -> list[int]:
        """The checksums of the section's ranges."""
        streams = [*self._base, *(each for layer in self._layers for each in layer.streams)]
        return [each.crc for each in streams]

    def run(self, output: _Output, directory: Directory) -> _Written:
        if self._base:
            output.tensor(self._laid_over())
            rows = self._section.high - self._section.low
            return _Written(rows, rows, output.crcs, output.end)
        if self._section.variable.packed(self._section.packing):
            return self._packed(output, directory)
        ids: list[Array] = []
        output.tensor(self._noting(ids))
        output.tensor(iter(ids))
        rows = sum(map(len, ids))
        return _Written(rows, rows, output.crcs, output.end)

    def _noting(self, ids: list[Array]) -> Iterator[Array]:
        for some, values in newest_rows(self._layers):
            ids.append(some)
            yield values

    def _laid_over(self) -> Iterator[Array]:
        """All rows, with those of the layers in the place of the base's."""
        section = self._section
        step = max(1, _BLOCK_BYTES // max(1, section.row_bytes))
        for start in range(section.low, section.high, step):
            block = np.empty((min(step, section.high - start), *self._row), self._dtype)
            flat = block.reshape(-1).view(np.uint8)
            for stream in self._base:
                flat = stream.fill(flat)
            for layer in self._layers:
                low, high = np.searchsorted(layer.ids, (start, start + len(block)))
                block[layer.ids[low:high] - start] = layer[low:high]
            yield block

    def _packed(self, output: _Output, directory: Directory) -> _Written:
        """Rows as codes, where these give back every bit, and the others as they are."""
        packing = self._section.packing
        assert packing is not None
        ids: list[Array] = []
        places: list[Array] = []
        scales: list[Array] = []
        rows = exact = 0
        with new_file(directory.scratch) as (aside, _):

            def unpacked() -> Iterator[Array]:
                nonlocal rows, exact
                codes = WrittenRun(aside, 0)
                for values in self._noting(ids):
                    found = pack_rows(values, packing)
                    codes.write(found.codes[found.fits])
                    if found.scales is not None:
                        scales.append(found.scales[found.fits])
                    places.append(np.flatnonzero(~found.fits) + rows)
                    rows += len(values)
                    exact += len(places[-1])
                    yield values[~found.fits]

            output.tensor(unpacked())
            size = os.fstat(aside).st_size
            output.tensor(np.frombuffer(chunk, np.uint8) for chunk in chunks_of(aside, 0, size))
        if packing is DeltaDtype.INT8:
            output.tensor(iter(scales))
        output.tensor(iter(places))
        output.tensor(iter(ids))
        return _Written(rows, exact, output.crcs, output.end)


class _LayerRows:
    """The rows of one layer: ids in memory, values as they are asked for, each once."""

    def __init__(self, section: MergedRows, streams: Sequence[ReadRun], place: str) -> None:
        self.streams = streams
        self._row, self._dtype = section.variable.shape[1:], section.variable.dtype.numpy
        ids, self._values, *packed = streams
        self.ids = ids.take((ids.size // 8,), np.dtype(np.int64))
        if len(self.ids) and not (
            (self.ids[1:] > self.ids[:-1]).all() and section.low <= self.ids[0] <= self.ids[-1] < section.high
        ):
            raise CorruptFile(
                f"{place} is damaged: row numbers of {section.variable.name!r} are not strictly increasing "
                f"in {section.low}-{section.high - 1}"
            )
        self._exact = None
        if packed:
            exact, self._codes, *scales = packed
            self._exact = exact.take((exact.size // 8,), np.dtype(np.int64))
            self._scales = scales[0] if scales else None

    @property
    def values(self) -> _LayerRows:
        """The rows themselves, which are read when they are asked for: see `newest_rows`."""
        return self

    def __getitem__(self, which: slice) -> Array:
        count = which.stop - which.start
        if self._exact is None:
            return self._values.take((count, *self._row), self._dtype)
        low, high = np.searchsorted(self._exact, (which.start, which.stop))
        few = int(high - low)
        values = self._values.take((few, *self._row), self._dtype)
        dtype = DType.BFLOAT16.numpy if self._scales is None else np.dtype(np.int8)
        codes = self._codes.take((count - few, *self._row), dtype)
        scales = None if self._scales is None else self._scales.take((count - few,), np.dtype(np.float32))
        return PackedRows(values, self._exact[low:high] - which.start, codes, scales)[:]
