"""Lay the tables of a checkpoint out as ordinary tensors, so that they are served like any others.

The keys and the rows stay where the trainer wrote them: they become slices of `<table>/keys` and
`<table>/values`. The index, the room for more rows and the default rows go into one more shard; the room is a
hole in that file. What the tensors are and how large is known from the checkpoint's index alone (`lay_out`);
keys are read when the shard is written (`TableLayout.write`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from exporter.catalog import Catalog, Extent, SliceRef, SliceSpec, TensorRef
from exporter.checkpoint.admission import Admission, admitted
from exporter.checkpoint.embedding_variables import EmbeddingVariable, key_blocks, key_twice
from exporter.errors import TableFull, UsageError, os_error
from exporter.tables.build_index import KeyTwice, Put, build_index
from exporter.tables.geometry import EMPTY_KEY, INDEX_ROWS, INDEX_SEEDS, KEYS, MAX_ROWS, VALUES, TableGeometry
from exporter.wire.crc32c import combine, extend, mask
from exporter.wire.dtypes import DType

Array = np.ndarray[Any, Any]

SHARD = "tables.data"
_ALIGNED = 64


class TablePlan(Struct, frozen=True, eq=False):
    """A table to serve: its name, where it comes from, its sizes, and its default rows [d, dim]."""

    name: str
    variable: EmbeddingVariable
    geometry: TableGeometry
    defaults: Array

    @classmethod
    def of(
        cls,
        name: str,
        variable: EmbeddingVariable,
        defaults: Array,
        head_room: float,
        awaited: int = 0,
    ) -> TablePlan:
        """The plan for all keys of a variable and `awaited` more, with room for `head_room` times as many.

        Raises:
            UsageError: more rows than row numbers.
        """
        geometry = TableGeometry.for_keys(variable.rows + awaited, head_room, len(defaults))
        if geometry.capacity > MAX_ROWS:
            raise UsageError(
                f"table {name!r} would have {geometry.capacity} rows, {MAX_ROWS} are possible",
                hint="leave less room for new keys: --table-head-room 0",
            )
        return cls(name, variable, geometry, defaults)

    def tensors(self, shard: int, offset: int) -> tuple[dict[str, TensorRef], int]:
        """Its four tensors by the last part of their names, and where the shard goes on behind them.

        What is to be written has no checksums yet.
        """
        size, place = self.geometry, _Allocation(shard, offset)
        parts, wide = self.variable.parts, self.variable.key_dtype is DType.INT64
        keys = [part.keys for part in parts] if wide else []
        dim, dtype = self.variable.dim, self.variable.value_dtype
        made = {
            INDEX_SEEDS: self._whole(INDEX_SEEDS, DType.INT64, (size.groups,), place),
            INDEX_ROWS: self._whole(INDEX_ROWS, DType.INT32, (size.slots,), place),
            KEYS: self._joined(KEYS, DType.INT64, (size.capacity,), keys, place),
            VALUES: self._joined(VALUES, dtype, (size.capacity, dim), [part.values for part in parts], place),
        }
        return made, place.offset

    def _whole(self, part: str, dtype: DType, shape: tuple[int, ...], place: _Allocation) -> TensorRef:
        return self._joined(part, dtype, shape, [], place)

    def _joined(
        self, part: str, dtype: DType, shape: tuple[int, ...], stored: Iterable[TensorRef], place: _Allocation
    ) -> TensorRef:
        """The tensor that begins with stored ones; its other rows get a place in the new shard."""
        slices, row = [], 0
        for ref in stored:
            if ref.shape[0]:
                slices.append(SliceRef(_rows(shape, row, ref.shape[0]), ref.extent))
                row += ref.shape[0]
        rest = _rows(shape, row, shape[0] - row)
        extent = place.take(int(np.prod(rest.lengths)) * (dtype.itemsize or 0))
        name = f"{self.name}/{part}"
        if not slices:
            return TensorRef(name, dtype, shape, extent)
        return TensorRef(name, dtype, shape, slices=(*slices, SliceRef(rest, extent)))


class TableLayout(Struct, frozen=True, eq=False):
    """A catalog with tables as ordinary tensors, some of which are still to be written."""

    source: Catalog
    catalog: Catalog
    tables: tuple[TablePlan, ...]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the tables' variables by their names."""
        added = self.catalog.tensors.keys() - self.source.tensors.keys()
        return {name: self.catalog.tensors[name].shape for name in added}

    @property
    def geometries(self) -> dict[str, TableGeometry]:
        """The sizes of the tables."""
        return {table.name: table.geometry for table in self.tables}

    @property
    def served_names(self) -> frozenset[str]:
        """The checkpoint's own tensors that are served as parts of tables."""
        parts = chain.from_iterable(table.variable.parts for table in self.tables)
        return frozenset(name for part in parts for name in (part.keys.name, part.values.name))

    def write(self, directory: Path, admission: Admission) -> Catalog:
        """Write what no shard of the checkpoint holds into `directory`, which must be there.

        Raises:
            CorruptFile: keys are damaged, or one occurs twice.
            TableFull: keys crowd in the index.
            CheckpointChanged: a shard vanished or changed.
            PublishError: the target cannot be written; DiskFull if there is no space.
        """
        path, tensors = directory / SHARD, dict(self.catalog.tensors)
        number = len(self.catalog.shards) - 1
        try:
            path.touch(exist_ok=False)
            for table in self.tables:
                named = {part: tensors[f"{table.name}/{part}"] for part in _PARTS}
                for ref in _Writer(self.source, table, path, number, named).write(admission):
                    tensors[ref.name] = ref
            with path.open("rb+") as file:
                file.truncate(self.catalog.shard_sizes[number])
        except OSError as error:
            raise os_error(error, path) from error
        return replace(self.catalog, tensors=tensors, shards=(*self.catalog.shards[:-1], path))


_PARTS = (INDEX_SEEDS, INDEX_ROWS, KEYS, VALUES)


def lay_out(catalog: Catalog, tables: Iterable[TablePlan]) -> TableLayout:
    """The catalog with these tables' tensors. Nothing is read or written."""
    tables = tuple(tables)
    tensors, offset, shard = dict(catalog.tensors), 0, len(catalog.shards)
    for table in tables:
        made, offset = table.tensors(shard, offset)
        tensors |= {ref.name: ref for ref in made.values()}
    laid_out = replace(
        catalog,
        tensors=tensors,
        shards=(*catalog.shards, catalog.prefix.with_name(SHARD)),
        shard_sizes=(*catalog.shard_sizes, offset),
    )
    return TableLayout(catalog, laid_out, tables)


class _Allocation(Struct):
    """Hands out places in a shard, one behind the other."""

    shard: int
    offset: int

    def take(self, size: int) -> Extent:
        extent = Extent(self.shard, self.offset, size, 0)
        self.offset += -(-size // _ALIGNED) * _ALIGNED
        return extent


def _rows(shape: tuple[int, ...], first: int, count: int) -> SliceSpec:
    rest = shape[1:]
    return SliceSpec(shape, (first, *(0 for _ in rest)), (count, *rest))


class _Writer(Struct, frozen=True):
    """Writes what is new of one table into a shard."""

    source: Catalog
    table: TablePlan
    path: Path
    shard: int
    tensors: Mapping[str, TensorRef]

    def write(self, admission: Admission) -> Iterator[TensorRef]:
        """The tensors with their checksums."""
        variable, geometry = self.table.variable, self.table.geometry
        with self.path.open("rb+") as file:
            new = {part: _NewElements(self.tensors[part], self.shard, file.fileno()) for part in _PARTS}

            def put(part: str, first: int, elements: Array) -> None:
                new[part].put(first, elements)

            try:
                blocks = self._blocks(admission, put)
                build_index(geometry, variable.rows, blocks, put, self.path.parent)
            except KeyTwice as error:
                raise key_twice(self.source, variable, error.key) from None
            except TableFull as error:
                error.message = f"table {self.table.name!r}: {error.message}"
                raise
            put(KEYS, geometry.cursor_row, np.array([variable.rows], np.int64))
            put(KEYS, geometry.empty_row, np.array([EMPTY_KEY], np.int64))
            put(VALUES, geometry.first_default, self.table.defaults.astype(variable.value_dtype.numpy))
            for elements in new.values():
                yield elements.with_crc()

    def _blocks(self, admission: Admission, put: Put) -> Iterator[tuple[Array, Array]]:
        """Rows and keys; the keys are written where they must be wider than they are stored."""
        variable = self.table.variable
        served = admitted(self.source, variable, admission, self.source.step)
        for first, keys in key_blocks(self.source, variable):
            rows = np.arange(first, first + len(keys))
            if served is not None:
                rows[~served[first : first + len(keys)]] = -1
            if variable.key_dtype is not DType.INT64:
                put(KEYS, first, keys)
            yield rows, keys


class _NewElements:
    """Writes the elements of a tensor that lie in the new shard; what nobody writes is a hole of zeros."""

    def __init__(self, ref: TensorRef, shard: int, descriptor: int) -> None:
        self._ref, self._descriptor = ref, descriptor
        (self._extent,) = (extent for extent in ref.extents if extent.shard == shard)
        self._element_bytes = int(np.prod(ref.shape[1:])) * ref.dtype.numpy.itemsize
        self._first = ref.shape[0] - self._extent.size // max(1, self._element_bytes)
        self._written: dict[int, tuple[int, int]] = {}

    def put(self, first: int, elements: Array) -> None:
        """Write some, once; from any thread."""
        raw = _raw(elements)
        begin = (first - self._first) * self._element_bytes
        self._written[begin] = raw.size, extend(0, raw)
        left, offset = raw.data, self._extent.offset + begin
        while len(left):
            count = os.pwrite(self._descriptor, left, offset)
            left, offset = left[count:], offset + count

    def with_crc(self) -> TensorRef:
        """The tensor with the checksum of what was written."""
        crc = end = 0
        for begin, (size, piece) in sorted(self._written.items()):
            crc = combine(combine(crc, zeros_crc(begin - end), begin - end), piece, size)
            end = begin + size
        rest = self._extent.size - end
        extent = replace(self._extent, crc32c=mask(combine(crc, zeros_crc(rest), rest)))
        if self._ref.extent is not None:
            return replace(self._ref, extent=extent)
        known = self._extent
        slices = (replace(item, extent=extent) if item.extent == known else item for item in self._ref.slices)
        return replace(self._ref, slices=tuple(slices))


def _raw(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def zeros_crc(size: int) -> int:
    """The plain crc32c of `size` zeros; none of them is read."""
    crc, done = 0, 0
    block_crc, block = extend(0, b"\0"), 1
    while size:
        if size & 1:
            crc, done = combine(crc, block_crc, block), done + block
        block_crc, block = combine(block_crc, block_crc, block), block * 2
        size >>= 1
    return crc
