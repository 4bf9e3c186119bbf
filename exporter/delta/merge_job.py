"""Merge deltas by the tasks of one job: what belongs together into shards of bounded size, one task each.

A table goes into one shard, a very large one in ranges of ids into several: then its tensors are slices,
which RestoreV2 joins. The whole of each table's tensors is read, and what tasks tell of it is compared with
the checksums in the deltas' indexes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from exporter.catalog import Catalog, Extent, SliceRef, TensorRef
from exporter.checkpoint.tensor_bundle import check_values, memory_map, shard_path
from exporter.checkpoint.tensor_values import compare_checksum
from exporter.delta.delta_files import DeltaTensors
from exporter.delta.format import DeltaHeader, ServedVariable
from exporter.delta.merge_task import Layer, Merge, MergedRows, renumbered
from exporter.errors import CorruptFile
from exporter.jobs.division import batches, piece_bytes
from exporter.jobs.range_checksums import RangeChecksums
from exporter.jobs.runner import Runner
from exporter.jobs.task import Input, Range
from exporter.options import DeltaDtype
from exporter.progress import Progress
from exporter.wire.crc32c import mask
from exporter.wire.dtypes import JOINABLE

Array = np.ndarray[Any, Any]

_SAMPLES = 64  # ids for each piece that a table is divided into: none is a tenth larger than planned, or so


class Stored(Struct, frozen=True):
    """A tensor, or a slice of one, that is read: all of it, by whatever tasks."""

    catalog: Catalog
    tensor: TensorRef
    part: SliceRef | None = None

    @property
    def extent(self) -> Extent:
        """Where the tensor or slice lies."""
        found = self.tensor.extent if self.part is None else self.part.extent
        assert found is not None
        return found


class Piece(Struct, frozen=True):
    """What a task writes for a variable: rows of a table, or a tensor that is copied."""

    name: str
    what: MergedRows | Range
    copied: Stored | None = None

    @property
    def ranges(self) -> tuple[Range, ...]:
        """What the task reads for the piece."""
        return self.what.ranges if isinstance(self.what, MergedRows) else (self.what,)

    @property
    def bytes_(self) -> int:
        """How many bytes the task reads for the piece."""
        return sum(each.size for each in self.ranges)


class Placed(Struct, frozen=True):
    """A piece as it was written: the extents of its tensors, its rows, how many of them are not packed."""

    piece: Piece
    extents: tuple[Extent, ...]
    rows: int = 0
    exact: int = 0


class MergeJob:
    """The tasks that write shards `prefix`.data-*, and what they tell.

    `others` are shards that the caller writes, behind those of the tasks. With a `header` the only task of a
    job writes that, too, and there are no others.
    """

    def __init__(self, files: Files, pieces: Iterable[Piece], prefix: Path, task_bytes: int) -> None:
        self._files, self._prefix = files, prefix
        self._batches = list(batches(pieces, task_bytes, lambda piece: piece.bytes_))

    @property
    def tasks(self) -> int:
        """How many tasks there are."""
        return len(self._batches)

    @property
    def bytes_(self) -> int:
        """How many bytes the tasks read."""
        return sum(piece.bytes_ for batch in self._batches for piece in batch)

    def run(
        self,
        stack: ExitStack,
        runner: Runner,
        *,
        others: int = 0,
        header: DeltaHeader | None = None,
        progress: Progress | None = None,
    ) -> list[Placed]:
        """Do the tasks, and say what they wrote. A kept job ends with the stack: when that is published.

        Raises:
            CorruptFile: a checksum of what was read is wrong.
            CheckpointChanged: a file was replaced, or is gone.
            ExportError: any other of a task's; the engine gave up.
        """
        count = self.tasks + others
        tasks = [
            self._task(batch, shard_path(self._prefix, number, count).name, header)
            for number, batch in enumerate(self._batches)
        ]
        job = stack.enter_context(runner.job(tasks, os.fspath(self._prefix.parent)))
        placed: list[Placed] = []
        checksums, receipts = RangeChecksums[int](), []
        for number, (batch, receipt) in enumerate(zip(self._batches, job.receipts(progress), strict=True)):
            ranges = (each for piece in _ordered(batch) for each in piece.ranges)
            for each, crc in zip(ranges, receipt.read, strict=True):
                checksums.add(each.input, each.offset, each.size, crc)
            placed += _placed(number, _ordered(batch), receipt.wrote, receipt.counts)
            receipts.append(receipt)
        self._files.check(checksums)
        for receipt in receipts if job.is_kept else ():
            path = self._prefix.parent / receipt.task
            job.directory.show(receipt.task, path, receipt.written, receipt.tag)
        return placed

    def _task(self, batch: Sequence[Piece], name: str, header: DeltaHeader | None) -> Merge:
        used = sorted({each.input for piece in batch for each in piece.ranges})
        numbers = {number: place for place, number in enumerate(used)}
        sections = [piece.what.renumbered(numbers) for piece in batch if isinstance(piece.what, MergedRows)]
        copies = [piece.what for piece in batch if isinstance(piece.what, Range)]
        return Merge(
            name=name,
            inputs=tuple(self._files.inputs[number] for number in used),
            bytes_=sum(piece.bytes_ for piece in batch),
            sections=tuple(sections),
            copies=renumbered(copies, numbers),
            header=header,
        )


class Files:
    """The files that are read, by numbers, and the tensors in them."""

    def __init__(self, hint: str = "") -> None:
        self._numbers: dict[Path, int] = {}
        self._read: dict[tuple[int, int], Stored] = {}
        self._hint = hint
        self.inputs: list[Input] = []

    def range_of(self, stored: Stored) -> Range:
        """The range of a whole tensor, which will be read."""
        extent = stored.extent
        path = stored.catalog.path_of(extent)
        number = self._numbers.get(path)
        if number is None:
            number = self._numbers[path] = len(self.inputs)
            self.inputs.append(Input.of(path))
        self._read.setdefault((number, extent.offset), stored)
        return Range(number, extent.offset, extent.size)

    def check(self, checksums: RangeChecksums[int]) -> None:
        """Compare the tasks' checksums with the indexes; tensors that lack one are read here.

        Raises:
            CorruptFile: a checksum is wrong.
        """
        for (number, _), stored in self._read.items():
            extent = stored.extent
            crc = None
            if stored.tensor.dtype.itemsize is not None:
                crc = checksums.of(number, extent.offset, extent.size)
            if crc is None:
                check_values(stored.catalog, stored.tensor, stored.part)
            else:
                path, name = stored.catalog.path_of(extent), stored.tensor.name
                compare_checksum(path, name, extent, mask(crc), hint=self._hint)


def table_pieces(
    variable: ServedVariable,
    deltas: Sequence[DeltaTensors],
    files: Files,
    *,
    packing: DeltaDtype | None,
    task_bytes: int,
    base: Sequence[tuple[int, Range]] = (),
) -> Iterator[Piece]:
    """The pieces of a table: the newest rows of `deltas`, oldest first, laid over those of a base, if any.

    The rows of a base are given as runs of so many rows.
    """
    layers = [layer for delta in deltas for layer in _layers_of(delta, variable, files)]
    if not layers and not base:
        return
    rows, ranges = variable.shape[0], [layer.ranges for layer in layers]
    below = tuple(each for _, each in base)
    whole = MergedRows(variable, 0, rows, tuple(ranges), below, packing)
    size = sum(each.size for each in whole.ranges)
    is_packed = any(len(layer) > 2 for layer in ranges) or bool(variable.packed(packing))
    most = piece_bytes(size, task_bytes)
    if most is None or variable.dtype not in JOINABLE or is_packed:
        yield Piece(variable.name, whole)  # places of packed rows count from a table's first row on
        return
    count = -(-size // most)
    ids = [layer.ids() for layer in layers]
    cuts = _even(rows, count) if base else _cuts(ids, rows, count)
    for low, high in pairwise(cuts):
        mine = [_between(layer, some, low, high) for layer, some in zip(ranges, ids, strict=True)]
        under = tuple(_rows_between(base, low, high)) if base else ()
        yield Piece(variable.name, MergedRows(variable, low, high, tuple(filter(None, mine)), under, packing))


class _StoredLayer(Struct, frozen=True):
    ranges: Layer
    stored: Stored

    def ids(self) -> Array:
        """The row numbers of the layer, unchecked."""
        return memory_map(self.stored.catalog, self.stored.tensor, self.stored.part)


def _layers_of(delta: DeltaTensors, variable: ServedVariable, files: Files) -> Iterator[_StoredLayer]:
    """The rows of a table in a delta: one layer, or one for each range of ids if they are in slices."""
    refs = delta.tensors.get(variable.name, ())
    if not refs:
        return
    if all(ref.extent is not None for ref in refs):
        stored = [Stored(delta.catalog, ref) for ref in refs]
        yield _StoredLayer(tuple(map(files.range_of, stored)), stored[0])
        return
    parts = [sorted(ref.slices, key=lambda part: part.spec.starts) for ref in refs]
    if any(ids.spec.lengths[0] != values.spec.lengths[0] for ids, values in zip(*parts, strict=True)):
        raise CorruptFile(f"{delta.catalog.prefix} is damaged: slices of {variable.name!r} do not match")
    for pair in zip(*parts, strict=True):
        stored = [Stored(delta.catalog, ref, part) for ref, part in zip(refs, pair, strict=True)]
        yield _StoredLayer(tuple(map(files.range_of, stored)), stored[0])


def _even(rows: int, count: int) -> list[int]:
    return sorted({rows * number // count for number in range(count + 1)})


def _cuts(ids: Sequence[Array], rows: int, count: int) -> list[int]:
    """Bounds of ranges of ids that hold about as many rows of all layers each."""
    step = max(1, sum(map(len, ids)) // (count * _SAMPLES))
    samples = np.sort(np.concatenate([some[::step] for some in ids]))
    inner = {int(samples[len(samples) * number // count]) for number in range(1, count)}
    return sorted({0, *(cut for cut in inner if 0 < cut < rows), rows})


def _between(layer: Layer, ids: Array, low: int, high: int) -> Layer:
    """The rows of a layer whose ids lie in a range; empty if there are none."""
    first, last = (int(place) for place in np.searchsorted(ids, (low, high)))
    if first >= last:
        return ()
    return tuple(
        Range(
            each.input,
            each.offset + first * (each.size // len(ids)),
            (last - first) * (each.size // len(ids)),
        )
        for each in layer
    )


def _rows_between(base: Sequence[tuple[int, Range]], low: int, high: int) -> Iterator[Range]:
    start = 0
    for count, each in base:
        first, last = max(low - start, 0), min(high - start, count)
        if first < last:
            row = each.size // count
            yield Range(each.input, each.offset + first * row, (last - first) * row)
        start += count


def _ordered(batch: Sequence[Piece]) -> list[Piece]:
    """The pieces in the order in which a task writes them: sections before copies."""
    return sorted(batch, key=lambda piece: isinstance(piece.what, Range))


def _placed(
    shard: int, batch: Sequence[Piece], wrote: Sequence[int], counts: Sequence[int]
) -> Iterator[Placed]:
    crcs, numbers, offset = iter(wrote), iter(counts), 0
    for piece in batch:
        rows = exact = 0
        if isinstance(piece.what, Range):
            sizes: tuple[int, ...] = (piece.what.size,)
        else:
            rows, exact = next(numbers), next(numbers)
            sizes = piece.what.sizes(rows, exact)
        extents = []
        for size in sizes:
            crc = mask(next(crcs))
            if piece.copied is not None:  # a string's checksum is not that of its bytes alone
                crc = piece.copied.extent.crc32c
            extents.append(Extent(shard, offset, size, crc))
            offset += size
        yield Placed(piece, tuple(extents), rows, exact)
