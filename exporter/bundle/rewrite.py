"""Plan the writing of tensors whose bytes change: casts, and rows that move between layouts of partitions.

A table is divided into ranges of rows, which become slices that RestoreV2 joins.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

from msgspec import Struct

from exporter.catalog import Catalog, SliceRef, SliceSpec, TensorRef
from exporter.errors import MappingError
from exporter.jobs.division import piece_bytes
from exporter.jobs.shard_job import Place, Placed, Sources, Stored, stored_runs
from exporter.jobs.task import Range
from exporter.jobs.write_shard import MovedRows, WriteShard
from exporter.mapping.build import TensorSource
from exporter.wire.dtypes import JOINABLE, DType


def is_needed(source: TensorSource) -> bool:
    """True if the source's bytes cannot be served as they are stored."""
    if source.is_verbatim:
        return source.tensor.dtype not in JOINABLE and not _is_stored_as_served(source)
    return True


class Move(WriteShard, frozen=True, kw_only=True):
    """Write a shard of rows that move, are cast or are copied."""

    operation: ClassVar[str] = "move"

    sections: tuple[MovedRows, ...]


class Moved(Struct, frozen=True):
    """What a section writes: the boxes of a source that its runs are."""

    source: TensorSource
    boxes: tuple[SliceSpec, ...]


def divide(source: TensorSource, files: Sources, catalog: Catalog, task_bytes: int) -> Iterator[Place[Moved]]:
    """What is to be written of a source: in one piece, or a large table in several.

    Moved rows are written in the boxes that the graph restores; a cast alone keeps those that are stored.

    Raises:
        MappingError: values would have to move out of, or into, parts that are not ranges of whole rows.
    """
    tensor = source.tensor
    outputs = _boxes_served(source) if _moves_rows(source) else _boxes_stored(tensor)
    stored = [(box, files.range_of(run), run) for box, run in stored_runs(catalog, tensor)]
    has_rows = tensor.is_complete and tensor.dtype.itemsize is not None
    if not has_rows or any(box.lengths[1:] != box.full_shape[1:] for box in outputs):
        for box, whole, run in stored:
            yield _as_stored(source, box, whole, run)
        return
    reads = _Boxes((box for box, _, _ in stored), source.gather_parts)
    writes = _Boxes(outputs, source.scatter_parts)
    count = tensor.shape[0] if tensor.shape else 1
    step = max(1, count)
    most = piece_bytes(tensor.bytes_, task_bytes)
    if source.dtype in JOINABLE and tensor.shape and most is not None:
        turn = math.lcm(source.gather_parts or 1, source.scatter_parts or 1)
        row_bytes = max(1, tensor.bytes_ // max(1, count))
        step = max(1, most // row_bytes // turn) * turn
    ranges = [whole for _, whole, _ in stored]
    for start in range(0, max(1, count), step):
        yield _rows(source, reads, ranges, writes, start, min(start + step, count))


def boxes_written(written: Placed[Moved]) -> Iterator[tuple[str, DType, SliceRef]]:
    """What was written, by key, dtype and box; boxes without rows only of tensors without any."""
    moved, section = written.place.what, written.place.section
    assert isinstance(section, MovedRows)
    for box, count, extent in zip(moved.boxes, section.counts, written.extents, strict=True):
        if count or not math.prod(box.full_shape):
            yield moved.source.key, moved.source.dtype, SliceRef(box, extent)


def _as_stored(source: TensorSource, box: SliceSpec, whole: Range, run: Stored) -> Place[Moved]:
    """A stored run as it is, or cast."""
    what = Moved(source, (box,))
    if source.tensor.dtype.itemsize is None:
        return Place(MovedRows.copied(source.key, whole), what, run)
    width = math.prod(box.lengths)
    section = MovedRows(source.key, source.tensor.dtype, source.dtype, width, (whole,), False, (1,), False)
    return Place(section, what)


def _rows(
    source: TensorSource, reads: _Boxes, ranges: Sequence[Range], writes: _Boxes, start: int, stop: int
) -> Place[Moved]:
    """Rows `start` to `stop`, in their natural order, of a tensor that lies in ranges of whole rows.

    `ranges` are those of the boxes that are read.
    """
    tensor = source.tensor
    width = math.prod(tensor.shape[1:])
    row_bytes = width * (tensor.dtype.itemsize or 0)
    parts = []
    for number, first, last in reads.shares(start, stop):
        whole = ranges[number]
        parts.append(Range(whole.input, whole.offset + first * row_bytes, (last - first) * row_bytes))
    boxes, counts = [], []
    for number, first, last in writes.shares(start, stop):
        boxes.append(_cut(writes.boxes[number], first, last))
        counts.append(last - first)
    section = MovedRows(
        source.key,
        tensor.dtype,
        source.dtype,
        width,
        tuple(parts),
        bool(source.gather_parts),
        tuple(counts),
        bool(source.scatter_parts),
    )
    return Place(section, Moved(source, tuple(boxes)))


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
