"""Plan the writing of tensors whose bytes change: casts, and rows that move between layouts of partitions.

A table is divided into ranges of rows, and what belongs together into shards of bounded size: one task each
(see `move`). The ranges of a divided table become slices, which RestoreV2 joins.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

from msgspec import Struct
from msgspec.structs import replace

from exporter.bundle.move import Move, Segment
from exporter.catalog import Catalog, Extent, SliceRef, SliceSpec, TensorRef
from exporter.checkpoint.tensor_values import compare_checksum
from exporter.errors import MappingError
from exporter.jobs.division import batches, piece_bytes
from exporter.jobs.range_checksums import RangeChecksums
from exporter.jobs.task import Input, Range, Receipt
from exporter.mapping.build import TensorSource
from exporter.wire import crc32c
from exporter.wire.dtypes import JOINABLE, DType


def is_needed(source: TensorSource) -> bool:
    """True if the source's bytes cannot be served as they are stored."""
    if source.is_verbatim:
        return source.tensor.dtype not in JOINABLE and not _is_stored_as_served(source)
    return True


class Piece(Struct, frozen=True):
    """Rows of a source that go into one shard: `boxes` are what its runs are of the tensor, `extents` say of
    which stored run each of its sources is a part.

    The segment's sources name shards of the catalog until a task gives them its own numbers.
    """

    source: TensorSource
    segment: Segment
    boxes: tuple[SliceSpec, ...]
    extents: tuple[Extent, ...]


def _bytes_of(piece: Piece) -> int:
    return piece.segment.bytes_


def divide(source: TensorSource, task_bytes: int) -> Iterator[Piece]:
    """What is to be written of a source: in one piece, or a large table in several.

    Moved rows are written in the boxes that the graph restores; a cast alone keeps those that are stored.

    Raises:
        MappingError: values would have to move out of, or into, parts that are not ranges of whole rows.
    """
    tensor = source.tensor
    outputs = _boxes_served(source) if _moves_rows(source) else _boxes_stored(tensor)
    has_rows = tensor.is_complete and tensor.dtype.itemsize is not None
    if not has_rows or any(box.lengths[1:] != box.full_shape[1:] for box in outputs):
        for box, extent in zip(_boxes_stored(tensor), tensor.extents, strict=True):
            yield _as_stored(source, box, extent)
        return
    stored = _in_order(tensor)
    extents = [extent for _, extent in stored]
    reads = _Boxes((box for box, _ in stored), source.gather_parts)
    writes = _Boxes(outputs, source.scatter_parts)
    count = tensor.shape[0] if tensor.shape else 1
    step = max(1, count)
    most = piece_bytes(tensor.bytes_, task_bytes)
    if source.dtype in JOINABLE and tensor.shape and most is not None:
        turn = math.lcm(source.gather_parts or 1, source.scatter_parts or 1)
        row_bytes = max(1, tensor.bytes_ // max(1, count))
        step = max(1, most // row_bytes // turn) * turn
    for start in range(0, max(1, count), step):
        yield _rows(source, reads, extents, writes, start, min(start + step, count))


def tasks_for(
    pieces: Iterable[Piece], catalog: Catalog, task_bytes: int
) -> Iterator[tuple[Sequence[Piece], Move]]:
    """Tasks that write shards of about `task_bytes`, without names yet, and the pieces in each.

    Raises:
        CheckpointChanged: a source is no longer there.
    """
    planned = cache(Input.of)
    for batch in batches(pieces, task_bytes, _bytes_of):
        used = sorted({each.input for piece in batch for each in piece.segment.sources})
        segments = tuple(
            replace(
                piece.segment,
                sources=tuple(replace(each, input=used.index(each.input)) for each in piece.segment.sources),
            )
            for piece in batch
        )
        size = sum(each.size for piece in batch for each in piece.segment.sources)
        inputs = tuple(planned(catalog.shards[shard]) for shard in used)
        yield batch, Move(name="", inputs=inputs, bytes_=size, segments=segments)


def size_of_tasks(pieces: Iterable[Piece], task_bytes: int) -> tuple[int, int]:
    """How many tasks write the pieces, and how many bytes they read."""
    sizes = [
        sum(each.size for piece in batch for each in piece.segment.sources)
        for batch in batches(pieces, task_bytes, _bytes_of)
    ]
    return len(sizes), sum(sizes)


class Written:
    """What tasks wrote, as it becomes known: tensors, with the checksums of what was read compared."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._slices: dict[str, list[SliceRef]] = {}
        self._sources: dict[str, TensorSource] = {}
        self._read = RangeChecksums[int]()

    def add(self, shard: int, pieces: Iterable[Piece], receipt: Receipt) -> None:
        """Take the receipt of the task that wrote these pieces; each source's come in the order of its rows.

        Raises:
            CorruptFile: the checksum of a source is wrong.
        """
        read, wrote, offset = iter(receipt.read), iter(receipt.wrote), 0
        for piece in pieces:
            source, segment = piece.source, piece.segment
            for extent, part in zip(piece.extents, segment.sources, strict=True):
                crc = self._read.joined(part.input, part, next(read), extent)
                if crc is not None and source.tensor.dtype.itemsize is not None:
                    path = self._catalog.path_of(extent)
                    compare_checksum(path, source.tensor.name, extent, crc32c.mask(crc))
            self._sources[source.key] = source
            slices = self._slices.setdefault(source.key, [])
            for box, count in zip(piece.boxes, segment.counts, strict=True):
                crc, size = crc32c.mask(next(wrote)), count * segment.row_bytes
                if source.tensor.dtype.itemsize is None:  # whose checksum is not that of the bytes alone
                    crc = piece.extents[0].crc32c
                if count or not math.prod(box.full_shape):
                    slices.append(SliceRef(box, Extent(shard, offset, size, crc)))
                offset += size

    def tensors(self) -> Iterator[TensorRef]:
        """What was written, under the keys it is restored by."""
        for key, source in self._sources.items():
            slices = sorted(self._slices[key], key=lambda part: part.spec.starts)
            shape = source.tensor.shape
            if slices[0].spec.is_full:
                yield TensorRef(key, source.dtype, shape, slices[0].extent)
            else:
                yield TensorRef(key, source.dtype, shape, slices=tuple(slices))


def _as_stored(source: TensorSource, box: SliceSpec, extent: Extent) -> Piece:
    """A stored run as it is, or cast."""
    wanted = (Range(extent.shard, extent.offset, extent.size),)
    if source.tensor.dtype.itemsize is None:
        dtype = to = DType.UINT8
        width = extent.size
    else:
        dtype, to, width = source.tensor.dtype, source.dtype, math.prod(box.lengths)
    segment = Segment(source.key, dtype, to, width, wanted, False, (1,), False)
    return Piece(source, segment, (box,), (extent,))


def _rows(
    source: TensorSource, reads: _Boxes, extents: Sequence[Extent], writes: _Boxes, start: int, stop: int
) -> Piece:
    """Rows `start` to `stop`, in their natural order, of a tensor that lies in ranges of whole rows.

    `extents` are those of the boxes that are read.
    """
    tensor = source.tensor
    width = math.prod(tensor.shape[1:])
    row_bytes = width * (tensor.dtype.itemsize or 0)
    parts, stored = [], []
    for number, first, last in reads.shares(start, stop):
        extent = extents[number]
        parts.append(Range(extent.shard, extent.offset + first * row_bytes, (last - first) * row_bytes))
        stored.append(extent)
    boxes, counts = [], []
    for number, first, last in writes.shares(start, stop):
        boxes.append(_cut(writes.boxes[number], first, last))
        counts.append(last - first)
    segment = Segment(
        source.key,
        tensor.dtype,
        source.dtype,
        width,
        tuple(parts),
        bool(source.gather_parts),
        tuple(counts),
        bool(source.scatter_parts),
    )
    return Piece(source, segment, tuple(boxes), tuple(stored))


class _Boxes:
    """The boxes of a tensor in the order of their rows; with `turns` each row is in the next one, in turn."""

    def __init__(self, boxes: Iterable[SliceSpec], turns: int) -> None:
        self.boxes, self._turns = sorted(boxes, key=lambda box: box.starts), turns
        self._stops = [_rows_of(box).stop for box in self.boxes]

    def shares(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The number of each box that has some of the natural rows `start` to `stop`, and which of its rows.

        Boxes that take turns all have some, and `start` begins a turn; so does a table without rows.
        """
        if self._turns:
            for number in range(len(self.boxes)):
                first = start // self._turns
                yield number, first, first + len(range(start + number, stop, self._turns))
            return
        for number in range(bisect_left(self._stops, start), len(self.boxes)):
            rows = _rows_of(self.boxes[number])
            if rows.start > stop:
                return
            first, last = max(start, rows.start), min(stop, rows.stop)
            if first < last or start == stop:
                yield number, first - rows.start, last - rows.start


def _rows_of(box: SliceSpec) -> range:
    """Which rows a box is; a scalar is one row."""
    if not box.full_shape:
        return range(1)
    return range(box.starts[0], box.starts[0] + box.lengths[0])


def _cut(box: SliceSpec, first: int, last: int) -> SliceSpec:
    """Rows `first` to `last` of a box."""
    if not box.full_shape:
        return box
    starts = (box.starts[0] + first, *box.starts[1:])
    return SliceSpec(box.full_shape, starts, (last - first, *box.lengths[1:]))


def _in_order(tensor: TensorRef) -> list[tuple[SliceSpec, Extent]]:
    if tensor.extent is not None:
        return [(SliceSpec.whole(tensor.shape), tensor.extent)]
    stored = [(part.spec, part.extent) for part in tensor.slices if part.extent is not None]
    return sorted(stored, key=lambda pair: pair[0].starts)


def _moves_rows(source: TensorSource) -> bool:
    """False if every stored box is served as it is, or may be left for RestoreV2 to join and cut."""
    if not source.gather_parts and not source.scatter_parts:
        if _is_stored_as_served(source):
            return False
        if not _has_whole_rows(source) and source.dtype in JOINABLE:
            return False
    if not _has_whole_rows(source):
        raise MappingError(
            f"the values of {source.tensor.name!r} would have to be laid out anew, and its parts in the "
            "checkpoint or in the graph are not ranges of whole rows",
            hint="export with the trainer's own partitioner, so that the table keeps its partitions",
        )
    return True


def _is_stored_as_served(source: TensorSource) -> bool:
    return set(_boxes_served(source)) <= set(_boxes_stored(source.tensor))


def _has_whole_rows(source: TensorSource) -> bool:
    """True if numbers lie in boxes that are ranges of whole rows, in the checkpoint and in the graph."""
    boxes = [*_boxes_stored(source.tensor), *_boxes_served(source)]
    whole = all(box.lengths[1:] == box.full_shape[1:] for box in boxes)
    return whole and source.tensor.is_complete and source.tensor.dtype.itemsize is not None


def _boxes_stored(tensor: TensorRef) -> list[SliceSpec]:
    return [part.spec for part in tensor.slices if part.extent is not None] or [SliceSpec.whole(tensor.shape)]


def _boxes_served(source: TensorSource) -> list[SliceSpec]:
    return sorted((variable.box for variable in source.variables), key=lambda box: box.starts)
