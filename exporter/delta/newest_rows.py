"""Sections with the newest rows of deltas: merged with one another, or applied on top of a base.

A section reads contiguous ranges of the deltas' tensors, all of them and each once, so that the checksums of
ranges add up to those of tensors. A very large table is divided into ranges of ids, which are written as
slices, and RestoreV2 joins them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import ClassVar

import numpy as np
from msgspec.structs import replace

from exporter.checkpoint.tensor_values import encode_strings, memory_map
from exporter.delta.delta_files import DeltaTensors, header_tensors
from exporter.delta.format import DeltaHeader, Rows, ServedVariable
from exporter.delta.layers import newest_rows
from exporter.delta.packing import PackedRows, StoredRows, pack_rows
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
from exporter.wire.crc32c import chunks_of
from exporter.wire.dtypes import JOINABLE, Array, DType

_BLOCK_BYTES = 4 << 20
_SAMPLES = 64  # ids sampled for each piece of a table: pieces are at most about a tenth too large

Layer = tuple[Range, ...]
"""The places of one delta's rows: ids, values; if packed, exact places and codes; if int8, scales."""


class NewestRows(Section, frozen=True, array_like=True, tag="newest"):
    """Writes rows `low` to `high` of a table: the newest of `layers`, which are oldest first.

    With `base`, which holds these rows in order, it writes every row. Without it, it writes only the rows of
    the layers, with their ids, packed by `packing`.
    """

    counted: ClassVar[int] = 2  # the number of rows, and of those that are not packed

    variable: ServedVariable
    low: int
    high: int
    layers: tuple[Layer, ...]
    base: tuple[Range, ...] = ()
    packing: DeltaDtype | None = None

    @property
    def ranges(self) -> tuple[Range, ...]:
        """The ranges that the section reads: first of the base, then of each layer."""
        return (*self.base, *(each for layer in self.layers for each in layer))

    def renumbered(self, numbers: Mapping[int, int]) -> NewestRows:
        """Return the same section with other numbers of inputs: `numbers` has the new one of each."""
        base = renumbered(self.base, numbers)
        return replace(self, base=base, layers=tuple(renumbered(layer, numbers) for layer in self.layers))

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of the delta's tensors that the section writes, in the order of its runs."""
        ids, values = self.variable.keys
        packed = [tensor.key for tensor in self.variable.packed(self.packing)]
        # Values stream first: which rows are exact, and all ids, are known only at their end.
        return (values, *packed[1:], *packed[:1], ids)

    def sizes(self, *counts: int) -> tuple[int, ...]:
        """Return the bytes of each run that the section writes, in the order of `keys`.

        `counts` are the number of rows, and of rows that are not packed. With a base only the values are
        written.
        """
        rows, exact = counts
        values = exact * self.variable.row_bytes
        if self.base:
            return (values,)
        codes = [
            (rows - exact) * math.prod(tensor.element_shape) * tensor.dtype.numpy.itemsize
            for tensor in self.variable.packed(self.packing)[1:]
        ]
        return (values, *codes, *([8 * exact] if codes else []), 8 * rows)

    def write(self, sources: Sequence[ReadRun], shard: NewShard) -> tuple[int, ...]:
        """Write the rows to the shard, and add their number to `shard.rows`.

        Return the numbers of rows and of unpacked rows. `sources` has a reader for each of `ranges`. Raises
        CorruptFile if row numbers are wrong, CheckpointChanged if a file became shorter, OSError if the shard
        or a temporary file cannot be written, PublishError and subclasses if a temporary file cannot be made.
        """
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
            shard.append(ids)  # not before the values: they fill the list
            rows = exact = sum(map(len, ids))
        shard.rows += rows
        return rows, exact

    def _on_top(self, base: Sequence[ReadRun], layers: Sequence[Rows]) -> Iterator[Array]:
        """Yield all rows `low` to `high` in blocks: the base's rows, overwritten by the layers' rows.

        Raises CheckpointChanged if a file became shorter.
        """
        row, dtype = self.variable.shape[1:], self.variable.dtype.numpy
        step = max(1, _BLOCK_BYTES // max(1, self.variable.row_bytes))
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
        """Write rows as codes if these give back every bit, else exactly.

        Return the numbers of all rows and of exact rows. `found` yields ids and values in ascending order.
        Codes are kept in a temporary file in `shard.scratch` meanwhile. Raises CheckpointChanged if a file
        became shorter, OSError if the shard or the temporary file cannot be written, PublishError and
        subclasses if the latter cannot be made.
        """
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
    """Yield the values of rows piece by piece, and append the ids of each piece to `ids`."""
    for some, values in found:
        ids.append(some)
        yield values


class Header(Section, frozen=True, array_like=True, tag="header"):
    """Writes the header of a delta behind its rows, all of which are in the same shard."""

    header: DeltaHeader

    @property
    def ranges(self) -> tuple[Range, ...]:
        """Empty: the section reads nothing."""
        return ()

    def renumbered(self, numbers: Mapping[int, int]) -> Header:
        """Return the section itself, as it has no inputs."""
        return self

    def sizes(self, *counts: int) -> tuple[int, ...]:
        """Return the bytes of each header tensor; no size depends on the number of rows."""
        return tuple(len(data) for _, data, _ in header_bytes(self.header, 0))

    def write(self, sources: Sequence[ReadRun], shard: NewShard) -> tuple[int, ...]:
        """Write the header with the number of rows written to this shard before; return an empty tuple.

        Raises OSError if the shard cannot be written.
        """
        for _, data, _ in header_bytes(self.header, shard.rows):
            shard.append([np.frombuffer(data, np.uint8)])
        return ()


class Merge(WriteShard, frozen=True, kw_only=True):
    """A task that writes a shard of a merged delta, or of a base with deltas applied on top."""

    operation: ClassVar[str] = "merge"

    sections: tuple[NewestRows | MovedRows | Header, ...]


def header_bytes(header: DeltaHeader, rows: int) -> Iterator[tuple[str, bytes, int | None]]:
    """Yield key, stored bytes and masked checksum of each header tensor of a delta.

    The checksum is None if the caller has to compute it. `rows` is the number of rows of all the delta's
    tables.
    """
    for key, array in header_tensors(header, rows).items():
        if array.dtype == object:
            yield key, *encode_strings([array.item()])
        else:
            yield key, array.tobytes(), None


def _layer_rows(section: NewestRows, streams: Sequence[ReadRun]) -> Rows:
    """Read the ids of one layer, and return its rows; the values are read later, in order.

    `streams` has a reader for each range of the layer. Raises CorruptFile if ids do not increase, or are
    outside the section, CheckpointChanged if a file became shorter.
    """
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
    """Yield sections that write a table's newest rows of `deltas`, oldest first, on top of a base if given.

    A table that is very large compared with `task_bytes` is divided into ranges of ids, unless rows are
    packed or their dtype cannot be joined (`JOINABLE`). `base` has the number of rows and the range of each
    run, in order; with it, all rows of the table are written. Stored runs of the deltas are registered in
    `files`. Yields nothing if no delta changes the table and there is no base. `packing` packs the rows
    written (None: exact). While iterating, raises CorruptFile if slices of ids and values in a delta do not
    match, CheckpointChanged or CheckpointError if a shard vanished, shrank or cannot be read, DiskFull or
    PublishError if bytes fetched from a store cannot be kept.
    """
    layers = [layer for delta in deltas for layer in _layers_of(delta, variable)]
    if not layers and not base:
        return
    rows, ranges = variable.shape[0], [tuple(map(files.range_of, layer)) for layer in layers]
    below = tuple(each for _, each in base)
    whole = NewestRows(variable, 0, rows, tuple(ranges), below, packing)
    size = whole.bytes_
    is_packed = any(len(layer) > 2 for layer in ranges) or bool(variable.packed(packing))
    most = piece_bytes(size, task_bytes)
    # RestoreV2 joins slices of `JOINABLE` types alone.
    if most is None or variable.dtype not in JOINABLE or is_packed:
        yield whole  # places of packed rows count from a table's first row on
        return
    count = -(-size // most)
    ids = [memory_map(ids.catalog, ids.tensor, ids.part) for ids, *_ in layers]  # `_layer_rows` checks them
    even = sorted({rows * number // count for number in range(count + 1)})
    # with a base every row is written: equal ranges are equal work
    cuts = even if base else _cuts(ids, rows, count)
    for low, high in pairwise(cuts):
        mine = [_between(layer, some, low, high) for layer, some in zip(ranges, ids, strict=True)]
        under = tuple(_rows_between(base, low, high)) if base else ()
        yield NewestRows(variable, low, high, tuple(filter(None, mine)), under, packing)


def _layers_of(delta: DeltaTensors, variable: ServedVariable) -> Iterator[tuple[Stored, ...]]:
    """Yield the stored tensors of a table's rows in a delta.

    Of a table in slices, the slices of each range of ids. Yields nothing if the delta does not change the
    table. While iterating, raises CorruptFile if slices of ids and values do not match.
    """
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
    """Return the bounds of at most `count` ranges of ids with about equally many rows of all layers.

    They ascend from 0 to `rows`. `ids` has the ids of each layer; at least one id is needed.
    """
    step = max(1, sum(map(len, ids)) // (count * _SAMPLES))
    samples = np.sort(np.concatenate([some[::step] for some in ids]))
    inner = {int(samples[len(samples) * number // count]) for number in range(1, count)}
    return sorted({0, *(cut for cut in inner if 0 < cut < rows), rows})


def _between(layer: Layer, ids: Array, low: int, high: int) -> Layer:
    """Return the ranges of a layer's rows with ids from `low` (included) to `high`; empty if there are none.

    `ids` are the ids of all rows of the layer.
    """
    first, last = (int(place) for place in np.searchsorted(ids, (low, high)))
    return tuple(_part(each, len(ids), first, last) for each in layer) if first < last else ()


def _rows_between(base: Sequence[tuple[int, Range]], low: int, high: int) -> Iterator[Range]:
    """Yield the byte ranges of rows `low` to `high` (excluded) of the base.

    `base` has the count of rows and the range of each run, in order.
    """
    start = 0
    for count, each in base:
        first, last = max(low - start, 0), min(high - start, count)
        if first < last:
            yield _part(each, count, first, last)
        start += count


def _part(whole: Range, count: int, first: int, last: int) -> Range:
    """Return the byte range of elements `first` to `last` of a range of `count` elements of one size."""
    size = whole.size // count
    return Range(whole.input, whole.offset + first * size, (last - first) * size)
