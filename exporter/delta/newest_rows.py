"""Sections with the newest rows of deltas: merged with one another, or applied on top of a base.

A section reads contiguous ranges of the deltas' tensors, all of them and each once, so that the checksums of
ranges add up to those of tensors. A very large table is divided into ranges of ids: then what is written are
slices, which RestoreV2 joins.

Changes in memory are merged by the same rule: of each row that any of them touched, the newest value. The
changes that bring the values of an earlier position back are computed here, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np
from msgspec.structs import replace

from exporter.checkpoint.tensor_values import encode_strings, memory_map
from exporter.delta.delta_files import DeltaTensors, header_tensors
from exporter.delta.format import Change, ChangeKind, DeltaHeader, Rows, Schema, ServedVariable
from exporter.delta.layered_state import Changes, LayeredState
from exporter.delta.packing import PackedRows, StoredRows, pack_rows
from exporter.delta.row_spill import ROWS_AT_ONCE, in_pieces, spilled
from exporter.errors import CorruptFile
from exporter.jobs.shard_job import Sources, Stored
from exporter.jobs.shard_sections import (
    MovedRows,
    NewShard,
    ReadRun,
    Section,
    WriteShard,
    WrittenRun,
    renumbered,
)
from exporter.jobs.task import Range, piece_bytes
from exporter.options import DeltaDtype
from exporter.storage.output_directory import new_file
from exporter.tables.integer_sets import distinct
from exporter.wire.crc32c import chunks_of
from exporter.wire.dtypes import JOINABLE, Array, DType


def restoring(
    since: Sequence[Changes], then: LayeredState, schema: Schema, scratch: Path
) -> dict[str, Change]:
    """The changes that bring the rows and variables in `since` back to the state `then`, checksums verified.

    Raises:
        CheckpointError: a value cannot be read any more, or is damaged.
        DiskFull, PublishError: the scratch file cannot be written.
    """
    tables = [variable.name for variable in schema.variables if variable.kind is ChangeKind.TABLE]
    then.check(name for name in tables if any(name in layer for layer in since))
    restored: dict[str, Change] = {}
    for variable in schema.variables:
        touched = [layer[variable.name] for layer in since if variable.name in layer]
        if not touched:
            continue
        if variable.kind is ChangeKind.DENSE:
            restored[variable.name] = then.whole(variable.name)
            continue
        name, ids = variable.name, [change.ids for change in touched if isinstance(change, Rows)]
        pieces = in_pieces(distinct(np.concatenate(ids)))
        found = ((some, then.rows_at(name, some)) for some in pieces)
        if (rows := spilled(variable, scratch, found)) is not None:
            restored[name] = rows
    return restored


def merge_changes(layers: Sequence[Changes], schema: Schema, scratch: Path) -> dict[str, Change]:
    """Merge `layers`, oldest first, in bounded memory: of each row and dense variable the newest value.

    Large results lie in `scratch`. Rows of a dense variable have to be folded before (`fold_whole`).

    Raises:
        ValueError: rows of a dense variable are among the layers.
        DiskFull, PublishError: the scratch file cannot be written.
    """
    merged: dict[str, Change] = {}
    for variable in schema.variables:
        found = [layer[variable.name] for layer in layers if variable.name in layer]
        if not found:
            continue
        if variable.kind is ChangeKind.DENSE:
            if isinstance(found[-1], Rows):
                raise ValueError(f"rows of {variable.name!r}, which is served whole")
            merged[variable.name] = found[-1]
            continue
        tables = [change for change in found if isinstance(change, Rows)]
        rows = tables[0] if len(tables) == 1 else spilled(variable, scratch, newest_rows(tables))
        if rows is not None:
            merged[variable.name] = rows
    return merged


def needs_folding(layers: Sequence[Changes], schema: Schema) -> bool:
    """True if rows of a dense variable are among the layers, which `merge_changes` does not take."""
    whole = [variable.name for variable in schema.variables if variable.kind is ChangeKind.DENSE]
    return any(isinstance(layer.get(name), Rows) for layer in layers for name in whole)


def fold_whole(layers: Sequence[Changes], schema: Schema, old: LayeredState) -> tuple[Changes, ...]:
    """The layers, with each dense variable that has rows in them as one value, on top of `old`."""
    folded = [dict(layer) for layer in layers]
    for variable in schema.variables:
        if variable.kind is ChangeKind.TABLE:
            continue
        if any(isinstance(layer.get(variable.name), Rows) for layer in layers):
            value = LayeredState(old.stored, (*old.layers, *layers)).whole(variable.name)
            for layer in folded:
                layer.pop(variable.name, None)
            folded[-1][variable.name] = value
    return tuple(folded)


def newest_rows(tables: Sequence[Rows]) -> Iterator[tuple[Array, Array]]:
    """Yield ids and newest values of all rows, ascending, a bounded number at a time; the last table wins."""
    newest_first = [table for table in reversed(tables) if len(table.ids)]
    starts = [0] * len(newest_first)
    while any(start < len(table.ids) for start, table in zip(starts, newest_first, strict=True)):
        limit = _range_end(newest_first, starts)
        ends = [int(np.searchsorted(table.ids, limit)) for table in newest_first]
        pieces = [piece for piece in zip(newest_first, starts, ends, strict=True) if piece[1] < piece[2]]
        ids = np.concatenate([table.ids[start:end] for table, start, end in pieces])
        values = np.concatenate([table.values[start:end] for table, start, end in pieces])
        if len(pieces) == 1:
            yield ids, values
        else:
            unique, first = np.unique(ids, return_index=True)  # the first of equals is the newest
            yield unique, values[first]
        starts = ends


def _range_end(tables: Sequence[Rows], starts: Sequence[int]) -> int:
    """The id up to which the next range goes: no table has more rows in it than its share."""
    share = max(1, ROWS_AT_ONCE // len(tables))
    ends = [
        int(table.ids[start + share])
        for table, start in zip(tables, starts, strict=True)
        if start + share < len(table.ids)
    ]
    return min(ends, default=1 << 62)


_BLOCK_BYTES = 4 << 20
_SAMPLES = 64  # ids for each piece that a table is divided into: none is a tenth larger than planned, or so

Layer = tuple[Range, ...]
"""Where the rows of one delta lie: ids, values; if packed, exact places and codes; if int8, scales."""


class NewestRows(Section, frozen=True, array_like=True, tag="newest"):
    """Writes rows `low` to `high` of a table: the newest of `layers`, which are oldest first.

    With `base`, which holds these rows one behind another, it writes every row. Without it, it writes those
    of the layers, with their ids, packed by `packing`.
    """

    counted: ClassVar[int] = 2  # rows, and how many of them are not packed

    variable: ServedVariable
    low: int
    high: int
    layers: tuple[Layer, ...]
    base: tuple[Range, ...] = ()
    packing: DeltaDtype | None = None

    @property
    def ranges(self) -> tuple[Range, ...]:
        """See `Section`."""
        return (*self.base, *(each for layer in self.layers for each in layer))

    def renumbered(self, numbers: Mapping[int, int]) -> NewestRows:
        """See `Section`."""
        base = renumbered(self.base, numbers)
        return replace(self, base=base, layers=tuple(renumbered(layer, numbers) for layer in self.layers))

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of the delta's tensors that it writes, in the order of its runs."""
        ids, values = self.variable.keys
        packed = [tensor.key for tensor in self.variable.packed(self.packing)]
        return (values, *packed[1:], *packed[:1], ids)

    def sizes(self, *counts: int) -> tuple[int, ...]:
        """See `Section`."""
        rows, exact = counts
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

    def write(self, sources: Sequence[ReadRun], shard: NewShard) -> tuple[int, ...]:
        """See `Section`."""
        base, left = sources[: len(self.base)], iter(sources[len(self.base) :])
        layers = [_layer_rows(self, list(islice(left, len(layer)))) for layer in self.layers]
        if self.base:
            shard.append(self._on_top(base, layers))
            rows = exact = self.high - self.low
        elif self.variable.packed(self.packing):
            rows, exact = self._write_packed(newest_rows(layers), shard)
        else:
            ids: list[Array] = []
            shard.append(_values(newest_rows(layers), ids))
            shard.append(ids)
            rows = exact = sum(map(len, ids))
        shard.rows += rows
        return rows, exact

    def _on_top(self, base: Sequence[ReadRun], layers: Sequence[Rows]) -> Iterator[Array]:
        """Yield blocks of all rows: the base's, overwritten by those of the layers."""
        row, dtype = self.variable.shape[1:], self.variable.dtype.numpy
        step = max(1, _BLOCK_BYTES // max(1, self.row_bytes))
        for start in range(self.low, self.high, step):
            block = np.empty((min(step, self.high - start), *row), dtype)
            flat = block.reshape(-1).view(np.uint8)
            for stream in base:
                flat = stream.fill(flat)
            for layer in layers:
                low, high = np.searchsorted(layer.ids, (start, start + len(block)))
                block[layer.ids[low:high] - start] = layer.values[low:high]
            yield block

    def _write_packed(self, found: Iterator[tuple[Array, Array]], shard: NewShard) -> tuple[int, int]:
        """Write rows as codes if these give back every bit, else exactly; how many rows, how many exact."""
        packing = self.packing
        assert packing is not None
        ids: list[Array] = []
        places: list[Array] = []
        scales: list[Array] = []
        with new_file(shard.scratch) as (aside, _):
            codes = WrittenRun(aside, 0)  # they follow the exact rows, whose number is not known yet

            def exact_rows() -> Iterator[Array]:
                rows = 0
                for values in _values(found, ids):
                    packed = pack_rows(values, packing)
                    codes.write(packed.codes[packed.fits])
                    if packed.scales is not None:
                        scales.append(packed.scales[packed.fits])
                    places.append(np.flatnonzero(~packed.fits) + rows)
                    rows += len(values)
                    yield values[~packed.fits]

            shard.append(exact_rows())
            shard.append(np.frombuffer(chunk, np.uint8) for chunk in chunks_of(aside, 0, codes.done))
        if packing is DeltaDtype.INT8:
            shard.append(scales)
        shard.append(places)
        shard.append(ids)
        return sum(map(len, ids)), sum(map(len, places))


def _values(found: Iterable[tuple[Array, Array]], ids: list[Array]) -> Iterator[Array]:
    """Yield the values of rows, and append their ids to `ids`."""
    for some, values in found:
        ids.append(some)
        yield values


class Header(Section, frozen=True, array_like=True, tag="header"):
    """Writes the header of a delta behind its rows, all of which are in the same shard."""

    header: DeltaHeader

    @property
    def ranges(self) -> tuple[Range, ...]:
        """See `Section`: it reads nothing."""
        return ()

    def renumbered(self, numbers: Mapping[int, int]) -> Header:
        """See `Section`."""
        return self

    def sizes(self, *counts: int) -> tuple[int, ...]:
        """See `Section`; no size depends on the number of rows."""
        return tuple(len(data) for _, data, _ in header_bytes(self.header, 0))

    def write(self, sources: Sequence[ReadRun], shard: NewShard) -> tuple[int, ...]:
        """See `Section`."""
        for _, data, _ in header_bytes(self.header, shard.rows):
            shard.append([np.frombuffer(data, np.uint8)])
        return ()


class Merge(WriteShard, frozen=True, kw_only=True):
    """Write a shard of a merged delta, or of a base with deltas applied on top."""

    operation: ClassVar[str] = "merge"

    sections: tuple[NewestRows | MovedRows | Header, ...]


def header_bytes(header: DeltaHeader, rows: int) -> Iterator[tuple[str, bytes, int | None]]:
    """Yield key, stored bytes and checksum (None: not of a string) of each header tensor of a delta."""
    for key, array in header_tensors(header, rows).items():
        if array.dtype == object:
            yield key, *encode_strings([array.item()])
        else:
            yield key, array.tobytes(), None


def _layer_rows(section: NewestRows, streams: Sequence[ReadRun]) -> Rows:
    """The rows of one layer, ids read; CorruptFile if they do not increase, or are outside of the section."""
    ids = streams[0].take((streams[0].size // 8,), np.dtype(np.int64))
    if len(ids) and not ((ids[1:] > ids[:-1]).all() and section.low <= ids[0] <= ids[-1] < section.high):
        raise CorruptFile(
            f"{streams[0].place} is damaged: row numbers of {section.variable.name!r} are not strictly "
            f"increasing in {section.low}-{section.high - 1}"
        )
    return Rows(ids, _LayerValues(section.variable, len(ids), streams[1:]))


class _LayerValues(StoredRows):
    """The values of one layer, read by slices, each row once, in ascending order."""

    def __init__(self, variable: ServedVariable, count: int, streams: Sequence[ReadRun]) -> None:
        self.shape, self.dtype = (count, *variable.shape[1:]), variable.dtype.numpy
        self._values, *packed = streams
        self._exact = None
        if packed:
            exact, self._codes, *scales = packed
            self._exact = exact.take((exact.size // 8,), np.dtype(np.int64))
            self._scales = scales[0] if scales else None

    def __getitem__(self, which: slice | Array) -> Array:
        assert isinstance(which, slice)
        count, row = which.stop - which.start, self.shape[1:]
        if self._exact is None:
            return self._values.take((count, *row), self.dtype)
        low, high = np.searchsorted(self._exact, (which.start, which.stop))
        few = int(high - low)
        values = self._values.take((few, *row), self.dtype)
        dtype = DType.BFLOAT16.numpy if self._scales is None else np.dtype(np.int8)
        codes = self._codes.take((count - few, *row), dtype)
        scales = None if self._scales is None else self._scales.take((count - few,), np.dtype(np.float32))
        return PackedRows(values, self._exact[low:high] - which.start, codes, scales)[:]


def table_sections(
    variable: ServedVariable,
    deltas: Sequence[DeltaTensors],
    files: Sources,
    *,
    packing: DeltaDtype | None,
    task_bytes: int,
    base: Sequence[tuple[int, Range]] = (),
) -> Iterator[NewestRows]:
    """Yield the sections that write a table's newest rows of `deltas`, oldest first, or a base below them."""
    # A very large table is divided into ranges of ids. `base` has the number of rows and the place of each
    # run.
    layers = [layer for delta in deltas for layer in _layers_of(delta, variable)]
    if not layers and not base:
        return
    rows, ranges = variable.shape[0], [tuple(map(files.range_of, layer)) for layer in layers]
    below = tuple(each for _, each in base)
    whole = NewestRows(variable, 0, rows, tuple(ranges), below, packing)
    size = whole.bytes_
    is_packed = any(len(layer) > 2 for layer in ranges) or bool(variable.packed(packing))
    most = piece_bytes(size, task_bytes)
    if most is None or variable.dtype not in JOINABLE or is_packed:
        yield whole  # places of packed rows count from a table's first row on
        return
    count = -(-size // most)
    ids = [memory_map(ids.catalog, ids.tensor, ids.part) for ids, *_ in layers]  # `_layer_rows` checks them
    even = sorted({rows * number // count for number in range(count + 1)})
    cuts = even if base else _cuts(ids, rows, count)
    for low, high in pairwise(cuts):
        mine = [_between(layer, some, low, high) for layer, some in zip(ranges, ids, strict=True)]
        under = tuple(_rows_between(base, low, high)) if base else ()
        yield NewestRows(variable, low, high, tuple(filter(None, mine)), under, packing)


def _layers_of(delta: DeltaTensors, variable: ServedVariable) -> Iterator[tuple[Stored, ...]]:
    """Yield the stored tensors of a table's rows; of a table in slices, those of each range of ids."""
    refs = delta.tensors.get(variable.name, ())
    if not refs:
        return
    if all(ref.extent is not None for ref in refs):
        yield tuple(Stored(delta.catalog, ref) for ref in refs)
        return
    parts = [sorted(ref.slices, key=lambda part: part.spec.starts) for ref in refs]
    if any(ids.spec.lengths[0] != values.spec.lengths[0] for ids, values in zip(*parts, strict=True)):
        raise CorruptFile(f"{delta.catalog.prefix} is damaged: slices of {variable.name!r} do not match")
    for pair in zip(*parts, strict=True):
        yield tuple(Stored(delta.catalog, ref, part) for ref, part in zip(refs, pair, strict=True))


def _cuts(ids: Sequence[Array], rows: int, count: int) -> list[int]:
    """The bounds of `count` ranges of ids that hold about as many rows of all layers each."""
    step = max(1, sum(map(len, ids)) // (count * _SAMPLES))
    samples = np.sort(np.concatenate([some[::step] for some in ids]))
    inner = {int(samples[len(samples) * number // count]) for number in range(1, count)}
    return sorted({0, *(cut for cut in inner if 0 < cut < rows), rows})


def _between(layer: Layer, ids: Array, low: int, high: int) -> Layer:
    """Where the rows of a layer lie whose ids are in a range; empty if there are none."""
    first, last = (int(place) for place in np.searchsorted(ids, (low, high)))
    return tuple(_part(each, len(ids), first, last) for each in layer) if first < last else ()


def _rows_between(base: Sequence[tuple[int, Range]], low: int, high: int) -> Iterator[Range]:
    """Yield where the base's rows `low` to `high` lie, given the rows and the place of each run."""
    start = 0
    for count, each in base:
        first, last = max(low - start, 0), min(high - start, count)
        if first < last:
            yield _part(each, count, first, last)
        start += count


def _part(whole: Range, count: int, first: int, last: int) -> Range:
    """Elements `first` to `last` of a range that holds `count` of one size."""
    size = whole.size // count
    return Range(whole.input, whole.offset + first * size, (last - first) * size)
