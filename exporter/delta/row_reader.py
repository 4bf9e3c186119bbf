"""Read served variables by rows from a checkpoint, in the row order and dtype in which they are served.

A served variable is a box of a tensor. The tensor is stored in a bundle whole or in slices; its rows may have
to be read from `mod` partitions (row i is row i // n of slice i % n), arranged in others, and cast. Three
numberings are used here: *stored* rows count through the slices in the order of the file, *natural* rows are
the ids that a lookup uses, *served* rows are those of one served variable.

Rows of a local file are views of a map. Of a tensor in an object store only the rows that are asked for are
fetched (`RowMap`).
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from exporter.catalog import Catalog, Extent, SliceRef, SliceSpec, TensorRef
from exporter.checkpoint.source_shard import open_shard, reading, shard_status
from exporter.checkpoint.tensor_bundle import check_values, read_array
from exporter.checkpoint.tensor_values import cast_values, map_bytes, memory_map, stored_extent
from exporter.delta.format import Change, ChangeKind, Rows, ServedVariable
from exporter.errors import CheckpointChanged, CorruptFile
from exporter.mapping.tensor_source import TensorSource
from exporter.storage import mirror
from exporter.storage.requests import GAP_BYTES
from exporter.wire.dtypes import Array, DType
from exporter.wire.int8_codes import SCALE_BYTES

_NEAR_BYTES = 4096  # gaps up to this size are fetched too: another request would cost more
_PASSED_BYTES = 32 << 20  # limit of such gaps in one call, except that gaps of a few rows are always allowed
_FEW_ROWS = 16


class RowMap:
    """Reads rows of a tensor, or of one stored slice of it: views of a map, or fetched from a store.

    From a shard that stands for an object of a store, only rows that are asked for are read. They are not
    kept, because a pass over a table reads each row once. Kept are rows of one element, as of an index, and
    ranges that are smaller than a sensible request.
    """

    def __init__(self, catalog: Catalog, ref: TensorRef, part: SliceRef | None = None) -> None:
        extent, shape = stored_extent(ref, part)
        path = catalog.path_of(extent)
        self._object: _ObjectRange | None = None
        if not mirror.is_remote(path):
            self._values = memory_map(catalog, ref, part)
            return
        with open_shard(path) as fd, reading(path):
            self._object = _ObjectRange(path, os.fstat(fd).st_ino, extent)
            self._values = map_bytes(fd, extent).view(ref.dtype.numpy).reshape(shape)

    def fetch(self) -> None:
        """Fetch all rows from a store by concurrent requests and keep them; no effect on a local file.

        Raises CheckpointChanged if the object was replaced or is gone, CheckpointError if the store cannot be
        read, DiskFull or PublishError if the fetched bytes cannot be written.
        """
        if self._object is not None:
            self._object.fetch(np.array([0]), np.array([self._object.extent.size]))

    def at(self, rows: Array) -> Array:
        """Return the rows with these numbers (int64 [n], any order), in their order, as a copy.

        From a store, raises CheckpointError (CheckpointChanged: the object was replaced or is gone) if rows
        cannot be read, DiskFull or PublishError if fetched bytes cannot be kept.
        """
        if self._object is not None and len(rows):
            size = self._object.extent.size // len(self._values)
            if are_elements(self._values.shape):
                self._object.fetch(rows * size, rows * size + size)
            else:
                # With an inverse, numpy sorts and does not hash: see `integer_sets`.
                wanted, places = np.unique(rows, return_inverse=True)
                most = max(_FEW_ROWS, _PASSED_BYTES // max(1, size * len(wanted)))
                starts, stops, found_at = _runs_of(wanted, min(most, _NEAR_BYTES // max(1, size)))
                found = self._rows_of(self._object, starts, stops, size)
                if found is not None:
                    return np.asarray(found[found_at[places]])
        return np.asarray(self._values[rows])

    def box(self, box: tuple[slice, ...]) -> Array:
        """Return a box of the tensor, given by slices with a start and a stop for each dimension.

        It is a view of the file, or a copy if rows come from a store. From a store, raises CheckpointError
        (CheckpointChanged: the object was replaced or is gone) if rows cannot be read, DiskFull or
        PublishError if fetched bytes cannot be kept.
        """
        if self._object is not None and len(self._values):
            size = self._object.extent.size // len(self._values)
            start, stop = np.array([box[0].start]), np.array([box[0].stop])
            if are_elements(self._values.shape) or (stop - start) * size < GAP_BYTES:
                self._object.fetch(start * size, stop * size)
            elif (found := self._rows_of(self._object, start, stop, size)) is not None:
                inside: tuple[slice, ...] = (slice(None), *box[1:])
                return np.asarray(found[inside])
        return np.asarray(self._values[box])

    def _rows_of(self, source: _ObjectRange, starts: Array, stops: Array, size: int) -> Array | None:
        """Read runs of rows from the store, joined; None if the local file has them.

        `starts` and `stops` are row numbers, `size` is the bytes of a row. Raises CheckpointChanged if the
        object was replaced or is gone, CheckpointError if the store cannot be read.
        """
        found = source.read(starts * size, stops * size)
        return found if found is None else found.view(self._values.dtype).reshape(-1, *self._values.shape[1:])


def are_elements(shape: tuple[int, ...]) -> bool:
    """True if a row of a tensor of this shape is one element.

    These are few bytes, which may be read in any order, and repeatedly.
    """
    return len(shape) == 1


class _ObjectRange(Struct, frozen=True):
    """Reads an extent of a file that stands for an object; CheckpointChanged if it was replaced."""

    path: Path
    inode: int
    extent: Extent

    def fetch(self, starts: Array, stops: Array) -> None:
        """Fetch ranges of bytes of the extent into the local file, as whole blocks.

        `starts` and `stops` (int64) count from the beginning of the extent. Raises CheckpointChanged if the
        object was replaced or is gone, CheckpointError if the store cannot be read, DiskFull or PublishError
        if the fetched bytes cannot be written.
        """
        mirror.fetch(self.path, _blocks_of(starts + self.extent.offset, stops + self.extent.offset))
        self._require_same()

    def read(self, starts: Array, stops: Array) -> Array | None:
        """Return ranges of bytes of the extent, joined (uint8), read from the store without keeping them.

        None if the file has them. `starts` and `stops` (int64) count from the beginning of the extent. Raises
        CheckpointChanged if the object was replaced or is gone, CheckpointError if the store cannot be read.
        """
        first, ends = self.extent.offset, np.cumsum(stops - starts)
        columns = starts + first, stops + first, ends - (stops - starts)
        found = np.empty(ends[-1], np.uint8)
        pieces = [*zip(*(column.tolist() for column in columns), strict=True)]
        is_read = mirror.read(self.path, pieces, found.data)
        self._require_same()  # only now: the object may be replaced while it is read
        return found if is_read else None

    def _require_same(self) -> None:
        if shard_status(self.path).st_ino != self.inode:
            raise CheckpointChanged(f"{self.path} was replaced after its index was read")


def _runs_of(rows: Array, gap: int) -> tuple[Array, Array, Array]:
    """Coalesce ascending rows (at least one) into runs, bridging gaps of up to `gap` rows.

    Return the starts and stops of the runs, and each row's place in the joined runs: int64 each.
    """
    is_new = np.append(True, np.diff(rows) > gap + 1)
    starts, ends = rows[is_new], rows[np.append(is_new[1:], True)] + 1
    before = np.cumsum(ends - starts) - (ends - starts)
    return starts, ends, rows + (before - starts)[np.cumsum(is_new) - 1]


def _blocks_of(starts: Array, stops: Array) -> list[tuple[int, int]]:
    """Coalesce ranges of bytes (start, stop), in any order, into few ascending ranges of whole blocks.

    At least one is needed.
    """
    first, last = starts // GAP_BYTES, np.maximum(stops - 1, starts) // GAP_BYTES
    order = np.argsort(first, kind="stable")
    first, last = first[order], np.maximum.accumulate(last[order])
    is_new = np.append(True, first[1:] > last[:-1] + 1)
    ends = np.append(np.flatnonzero(is_new)[1:] - 1, len(last) - 1)
    return [
        (int(start) * GAP_BYTES, (int(stop) + 1) * GAP_BYTES)
        for start, stop in zip(first[is_new], last[ends], strict=True)
    ]


_STORE_RUNS = 2  # checked at a time: each has many requests of 8 MB pending


class SliceOrder(Struct, frozen=True):
    """The distribution of natural rows: over `gather` slices of a tensor, over `scatter` parts.

    The number is 0 for consecutive rows.
    """

    gather: int = 0
    scatter: int = 0


class RowReader(Struct, frozen=True, dict=True):
    """Reads the values of one served variable from a bundle.

    The variable is the `box` of the tensor, the part with number `part`; `dtype` is the served one.
    """

    name: str
    catalog: Catalog
    tensor: TensorRef
    box: SliceSpec
    dtype: DType
    order: SliceOrder = SliceOrder()
    part: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape as served; in 8 bits, the last dimension has the bytes of the row's scale, too."""
        lengths = self.box.lengths
        is_quantised = self.dtype is DType.INT8 and self.tensor.dtype is not DType.INT8
        return (*lengths[:-1], lengths[-1] + SCALE_BYTES) if is_quantised else lengths

    def rows(self, start: int, stop: int) -> Array:
        """Return served rows `start` to `stop`: a view of the file if they are contiguous, else a copy.

        Checksums are not verified. Raises CorruptFile if some rows are not stored, MappingError or NotFinite
        if a value does not fit the served dtype, CheckpointChanged or CheckpointError if a shard is gone or
        cannot be read, DiskFull or PublishError if rows fetched from a store cannot be kept.
        """
        if self.order != SliceOrder():
            return self.rows_at(np.arange(start, stop))
        first = self.box.starts[0] + start
        return self._cast(self._contiguous(first, first + stop - start))

    def rows_at(self, ids: Array) -> Array:
        """Return served rows `ids` (int64 [n], any order), in their order, as a copy.

        Checksums are not verified; rows that are not stored have undefined values. Raises MappingError or
        NotFinite if a value does not fit the served dtype, CheckpointChanged or CheckpointError if a shard is
        gone or cannot be read, DiskFull or PublishError if rows fetched from a store cannot be kept.
        """
        natural = ids * self.order.scatter + self.part if self.order.scatter else ids + self.box.starts[0]
        columns, is_wide = self.box.slices[1:], self.box.lengths[1:] == self.box.full_shape[1:]
        if is_wide and len(self._pieces) == 1 and self._pieces[0].spec.is_full:
            return self._cast(self._pieces[0].values.at(natural))
        values = np.empty((len(ids), *self.box.lengths[1:]), self.tensor.dtype.numpy)
        for number, piece in enumerate(self._pieces):
            inside, offsets = self._in_piece(natural, number, piece)
            if len(inside):
                if piece.spec.lengths[1:] == self.box.full_shape[1:]:
                    chosen = (slice(None), *columns)
                    values[inside] = piece.values.at(offsets)[chosen]
                else:
                    self._copy_columns(values, inside, piece, offsets)
        return self._cast(values)

    def fetch(self) -> None:
        """Fetch all values from a store, for a caller that will read them in any order.

        No effect on local files. Raises CheckpointError and subclasses if they cannot be read, DiskFull or
        PublishError if they cannot be kept.
        """
        for piece in self._pieces:
            piece.values.fetch()

    @property
    def is_remote(self) -> bool:
        """True if any of the values are read from an object store."""
        return any(mirror.is_remote(run.path) for run in self.runs)

    def whole(self) -> Array:
        """Return all values, checksums verified; strings as `bytes` in an object array.

        Raises CheckpointError and subclasses (CorruptFile: a checksum differs), MappingError or NotFinite if
        a value does not fit the served dtype, DiskFull or PublishError if bytes fetched from a store cannot
        be kept.
        """
        if self.shape and self.order != SliceOrder():
            self.fetch()
            check_stored([self])
            return self.rows(0, self.shape[0])
        values = read_array(self.catalog, self.tensor)
        return self._cast(values[self.box.slices] if self.shape else values)

    @property
    def has_own_runs(self) -> bool:
        """True if no other variable is in the same stored runs, unlike parts and columns of one table."""
        specs = (run.part.spec if run.part else SliceSpec.whole(self.tensor.shape) for run in self.runs)
        return not self.order.scatter and all(contains(self.box, spec) for spec in specs)

    @property
    def extent(self) -> Extent | None:
        """The extent that holds exactly the served rows, in order and in the served dtype.

        None if there is none.
        """
        if self.order != SliceOrder() or self.dtype is not self.tensor.dtype:
            return None
        if self.tensor.extent is not None:
            return self.tensor.extent if self.box.is_full else None
        return next((part.extent for part in self.tensor.slices if part.spec == self.box), None)

    @property
    def runs(self) -> Iterator[StoredRun]:
        """Yield the stored runs, each with its own checksum, that contain values of the variable."""
        if self.tensor.extent is not None:
            yield StoredRun(self.catalog.path_of(self.tensor.extent), self.tensor.extent)
        for part in self.tensor.slices:
            if part.extent is not None and (self.order != SliceOrder() or overlaps(part.spec, self.box)):
                yield StoredRun(self.catalog.path_of(part.extent), part.extent, part)

    @cached_property
    def run_of(self) -> dict[Extent, StoredRun]:
        """The stored runs by their extents."""
        return {run.extent: run for run in self.runs}

    def slices_near(self, first: int, last: int) -> tuple[SliceRef, ...]:
        """Return the slices that may hold rows `first` to `last` (excluded), ordered by their first rows.

        They are often few of thousands.
        """
        slices, starts, longest = self._by_rows
        # A slice that begins less than `longest` rows before `first` may reach it.
        return slices[bisect_right(starts, first - longest) : bisect_left(starts, last)]

    @cached_property
    def _by_rows(self) -> tuple[tuple[SliceRef, ...], list[int], int]:
        """The tensor's slices ordered by first row, their first rows, and the most rows of a slice (or 0)."""
        slices = tuple(sorted(self.tensor.slices, key=lambda part: part.spec.starts))
        longest = max((part.spec.lengths[0] for part in slices), default=0)
        return slices, [part.spec.starts[0] for part in slices], longest

    @property
    def is_row_addressable(self) -> bool:
        """True unless the variable is a scalar or its elements have no fixed size."""
        return bool(self.shape) and self.tensor.dtype.itemsize is not None

    @cached_property
    def _pieces(self) -> list[_Piece]:
        """The stored slices that the box needs, in the order of their rows, or the whole tensor as one.

        Mapped on first use. Raises CheckpointChanged or CheckpointError if a shard is gone or cannot be read.
        """
        if self.tensor.extent is not None:
            whole = SliceSpec.whole(self.tensor.shape)
            return [_Piece(whole, RowMap(self.catalog, self.tensor))]
        stored = (part for part in self.tensor.slices if part.extent is not None)
        ordered = sorted(stored, key=lambda part: part.spec.starts)
        needed = [p for p in ordered if self.order != SliceOrder() or overlaps(p.spec, self.box)]
        return [_Piece(part.spec, RowMap(self.catalog, self.tensor, part)) for part in needed]

    def _in_piece(self, natural: Array, number: int, piece: _Piece) -> tuple[Array, Array]:
        """Return the places in `natural` of the rows in a piece, and their row numbers within the piece.

        `natural` are row numbers. `number` is the piece's number, which matters if rows are distributed over
        pieces.
        """
        if self.order.gather:
            inside = np.flatnonzero(natural % self.order.gather == number)
            return inside, natural[inside] // self.order.gather
        first, count = piece.spec.starts[0], piece.spec.lengths[0]
        inside = np.flatnonzero((natural >= first) & (natural < first + count))
        return inside, natural[inside] - first

    def _contiguous(self, first: int, last: int) -> Array:
        """Return natural rows `first` to `last` (excluded) in the box's columns, in the stored dtype.

        They are joined from the pieces. Raises CorruptFile if some of them are in no piece. From a store,
        raises CheckpointError (CheckpointChanged: the object was replaced or is gone) if rows cannot be read,
        DiskFull or PublishError if fetched bytes cannot be kept.
        """
        region = SliceSpec(
            self.box.full_shape,
            (first, *self.box.starts[1:]),
            (last - first, *self.box.lengths[1:]),
        )
        values, filled = None, 0
        for piece in self._pieces:
            if not overlaps(piece.spec, region):
                continue
            source, target = _intersection(piece.spec, region)
            found = piece.values.box(source)
            if found.shape == region.lengths:  # one piece has all: nothing is copied
                return found
            values = np.empty(region.lengths, self.tensor.dtype.numpy) if values is None else values
            values[target] = found
            filled += found.size
        if values is None or filled != values.size:
            if math.prod(region.lengths) == 0:
                return np.empty(region.lengths, self.tensor.dtype.numpy)
            raise CorruptFile(f"{self.catalog.prefix}: parts of {self.tensor.name!r} are not stored")
        return values

    def _copy_columns(self, values: Array, into: Array, piece: _Piece, offsets: Array) -> None:
        """Copy rows of a piece into `values`, in the box's columns that the piece holds.

        No effect if it holds none. `offsets` are row numbers in the piece, `into` the rows of `values` to
        write. From a store, raises CheckpointError (CheckpointChanged: the object was replaced or is gone) if
        rows cannot be read, DiskFull or PublishError if fetched bytes cannot be kept.
        """
        spec = piece.spec
        wide = SliceSpec(
            spec.full_shape, (0, *self.box.starts[1:]), (spec.full_shape[0], *self.box.lengths[1:])
        )
        if overlaps(spec, wide):
            source, target = _intersection(spec, wide)
            index: tuple[Any, ...] = (into, *target[1:])
            columns: tuple[slice, ...] = (slice(None), *source[1:])
            values[index] = piece.values.at(offsets)[columns]

    def _cast(self, values: Array) -> Array:
        return cast_values(values, self.dtype, self.name)


class StoredRun(Struct, frozen=True):
    """A run of stored bytes with one checksum: a tensor, or one slice of it."""

    path: Path
    extent: Extent
    part: SliceRef | None = None


def check_stored(variables: Iterable[RowReader], known: Collection[StoredRun] = ()) -> frozenset[StoredRun]:
    """Verify the checksums of the variables' stored runs that are not in `known`, several at a time.

    Return the runs read.

    Raises:
        CorruptFile: a checksum is wrong.
        CheckpointChanged: a shard vanished or shrank since its catalog was read.
        CheckpointError: a shard cannot be read.
        DiskFull, PublishError: bytes fetched from a store cannot be kept.
    """
    from exporter.storage.waiting import workers  # late: with logging

    found = {run: variable for variable in variables for run in variable.runs if run not in known}
    if not found:
        return frozenset()
    is_remote = any(variable.is_remote for variable in found.values())
    with workers(_STORE_RUNS if is_remote else len(os.sched_getaffinity(0)), "check") as pool:
        for job in [
            pool.submit(check_values, v.catalog, v.tensor, run.part, keep=are_elements(v.tensor.shape))
            for run, v in found.items()
        ]:
            job.result()
    return frozenset(found)


class _Piece(Struct, frozen=True):
    spec: SliceSpec
    values: RowMap


def row_readers(catalog: Catalog, source: TensorSource) -> Iterator[RowReader]:
    """Yield the readers of the variables served from one source, in their order.

    They read the trainer's checkpoint `catalog`. A lookup table's source has one reader, of its keys or
    values.
    """
    if not source.variables:
        yield _contents(catalog, source.tensor)
    order = SliceOrder(source.gather_parts, source.scatter_parts)
    for part, variable in enumerate(source.variables):
        yield RowReader(variable.served_name, catalog, source.tensor, variable.box, source.dtype, order, part)


def served_in(catalog: Catalog, source: TensorSource) -> Iterator[RowReader]:
    """Yield the readers of the variables served from one source, in their order.

    They read a published bundle, `catalog`, in which values are stored as served. A lookup table's source has
    one reader, of its keys or values. While iterating, raises CorruptFile if the bundle has no such tensor.
    """
    tensor = catalog.tensors.get(source.key)
    if tensor is None:
        raise CorruptFile(f"{catalog.prefix} has no tensor {source.key!r}")
    if not source.variables:
        yield _contents(catalog, tensor)
    for variable in source.variables:
        yield RowReader(variable.served_name, catalog, tensor, source.stored(variable.box), source.dtype)


def _contents(catalog: Catalog, tensor: TensorRef) -> RowReader:
    """Return the reader of a lookup table's keys or values: a whole tensor of any length."""
    box = SliceSpec.whole(tensor.shape)
    return RowReader(tensor.name, catalog, tensor, box, tensor.dtype)


def translate(
    source: TensorSource, change: Change, schema: Mapping[str, ServedVariable]
) -> dict[str, Change]:
    """Convert a trainer's change of a tensor into changes of the variables served from it, by their names.

    `schema` has the served variables by name. The ids of a change's rows count through the tensor as it is
    stored. Rows stay rows, also of dense variables: see `exporter.delta.layers.fold_whole`. A variable
    without any of the rows gets an empty change. Raises MappingError or NotFinite if a value does not fit the
    served dtype.
    """
    if not isinstance(change, Rows):
        return dict(_parts_of_whole(source, change, schema))
    natural = _natural(source, change.ids)
    values = cast_values(np.asarray(change.values), source.dtype, source.key)
    translated: dict[str, Change] = {}
    for part, variable in enumerate(source.variables):
        name, box = variable.served_name, source.stored(variable.box)
        if source.scatter_parts:
            inside = np.flatnonzero(natural % source.scatter_parts == part)
            ids = natural[inside] // source.scatter_parts
        else:
            inside = np.flatnonzero((natural >= box.starts[0]) & (natural < box.starts[0] + box.lengths[0]))
            ids = natural[inside] - box.starts[0]
        wanted: tuple[slice, ...] = (slice(None), *box.slices[1:])
        # A delta's ids ascend, while the trainer's may be in the order of mod partitions.
        order = np.argsort(ids, kind="stable")
        rows = values[wanted][_slice_if_consecutive(inside[order])]
        translated[name] = Rows(ids[order], rows)
    return translated


def _slice_if_consecutive(places: Array) -> Array | slice:
    """Return the places as a slice if they are consecutive, as most are: rows selected by it are a view.

    Copying the rows of an increment of 25 MB, which are read once more, took a tenth of a small delta's time.
    """
    if len(places) and (np.diff(places) == 1).all():
        return slice(int(places[0]), int(places[-1]) + 1)
    return places


def _parts_of_whole(
    source: TensorSource, values: Array, schema: Mapping[str, ServedVariable]
) -> Iterator[tuple[str, Change]]:
    """Yield name and change of each variable that is served from a tensor with a new whole value.

    `schema` has the served variables by name. `values` are in the order in which the tensor is stored. Raises
    MappingError or NotFinite if a value does not fit the served dtype.
    """
    values = cast_values(values, source.dtype, source.key)
    if source.gather_parts:
        natural = _natural(source, np.arange(len(values)))
        ordered = np.empty_like(values)
        ordered[natural] = values
        values = ordered
    for part, variable in enumerate(source.variables):
        name, box = variable.served_name, source.stored(variable.box)
        if source.scatter_parts:
            found = values[part :: source.scatter_parts]
        else:
            found = values[box.slices or ...]
        if schema[name].kind is ChangeKind.TABLE:
            yield name, Rows(np.arange(len(found)), np.ascontiguousarray(found))
        else:
            yield name, found


def _natural(source: TensorSource, stored: Array) -> Array:
    """Return the natural number of each row, given its stored number (int64 [n]).

    Without `gather_parts`, the numbers unchanged.
    """
    if not source.gather_parts:
        return stored
    starts = np.array(sorted(part.spec.starts[0] for part in source.tensor.slices), np.int64)
    piece = np.searchsorted(starts, stored, side="right") - 1
    return np.asarray((stored - starts[piece]) * source.gather_parts + piece)


def overlaps(a: SliceSpec, b: SliceSpec) -> bool:
    """True if two boxes have an element in common."""
    return all(
        start < other + many and other < start + count
        for start, count, other, many in zip(a.starts, a.lengths, b.starts, b.lengths, strict=True)
    )


def contains(a: SliceSpec, b: SliceSpec) -> bool:
    """True if box `a` contains all of box `b`."""
    return all(
        start <= other and other + many <= start + count
        for start, count, other, many in zip(a.starts, a.lengths, b.starts, b.lengths, strict=True)
    )


def _intersection(piece: SliceSpec, region: SliceSpec) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return the intersection of two boxes that overlap, as slices within each of them."""
    source, target = [], []
    for a, b in zip(piece.slices, region.slices, strict=True):
        low, high = max(a.start, b.start), min(a.stop, b.stop)
        source.append(slice(low - a.start, high - a.start))
        target.append(slice(low - b.start, high - b.start))
    return tuple(source), tuple(target)
