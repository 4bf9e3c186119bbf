"""The task of comparing a range of one table's rows in two bundles, and what is made of its result.

The result is one object: the hashes of the new rows' blocks (uint64), the numbers of the rows that differ
(int64) and their new values, one behind another. Deltas that lie over a bundle are not a task's: the rows
that they touch are compared where the job was begun.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from exporter.catalog import Catalog, SliceSpec, TensorRef
from exporter.delta.compare_rows import Found, TableRows, differing_rows
from exporter.delta.format import Rows, ServedVariable
from exporter.delta.row_hashes import BlockHasher, without_rows
from exporter.delta.row_reader import RowReader, SliceOrder
from exporter.delta.snapshot import Snapshot
from exporter.integer_sets import among, distinct
from exporter.jobs.runner import Runner
from exporter.jobs.task import Input, Range, Receipt, Task
from exporter.storage.output_directory import Directory, new_file
from exporter.wire.crc32c import combine
from exporter.wire.dtypes import DType

Array = np.ndarray[Any, Any]


class Side(Struct, frozen=True):
    """A `RowReader` as a value; `shards` are the numbers of its catalog's, in the order of the task's inputs.

    `first` is the number of the task's first input that is of this side.
    """

    tensor: TensorRef
    box: SliceSpec
    dtype: DType
    order: SliceOrder
    part: int
    shards: tuple[int, ...]
    first: int

    @classmethod
    def of(cls, reader: RowReader, first: int) -> Side:
        """The value of a reader."""
        shards = tuple(sorted({run.extent.shard for run in reader.runs}))
        return cls(reader.tensor, reader.box, reader.dtype, reader.order, reader.part, shards, first)

    def reader(self, name: str, paths: Sequence[Path]) -> RowReader:
        """The reader, of shards at other paths."""
        found = dict(zip(self.shards, paths[self.first :], strict=False))
        known = tuple(found.get(number, Path()) for number in range(max(self.shards, default=-1) + 1))
        catalog = Catalog("", Path(), {}, known, ())
        return RowReader(name, catalog, self.tensor, self.box, self.dtype, self.order, self.part)

    def ranges(self, start: int, stop: int) -> Iterator[Range]:
        """The bytes that served rows `start` to `stop` are made of, and whose checksum is taken."""
        low, high = self.box.starts[0] + start, self.box.starts[0] + stop
        if self.order.scatter:
            low, high = start * self.order.scatter, stop * self.order.scatter
        whole = [(SliceSpec.whole(self.tensor.shape), self.tensor.extent)]
        stored = [(part.spec, part.extent) for part in self.tensor.slices] or whole
        for spec, extent in stored:
            if extent is None:
                continue
            first, last = max(low - spec.starts[0], 0), min(high - spec.starts[0], spec.lengths[0])
            if self.order.gather:
                first, last = low // self.order.gather, min(-(-high // self.order.gather), spec.lengths[0])
            row = math.prod(spec.lengths[1:]) * (self.tensor.dtype.itemsize or 0)
            if first < last:
                number = self.first + self.shards.index(extent.shard)
                yield Range(number, extent.offset + first * row, (last - first) * row)


class Compare(Task, frozen=True, kw_only=True):
    """Compare rows `start` to `stop`, whole blocks of them. The receipt has the checksums of new and old."""

    operation: ClassVar[str] = "compare"

    variable: ServedVariable
    old: Side
    new: Side
    start: int
    stop: int
    seed: int

    def run(self, directory: Directory) -> Receipt:
        """See `Task`."""
        name, new_crc, old_crc = self.variable.name, 0, 0
        found: list[Found] = []
        with ExitStack() as stack:
            ranges = [*self.old.ranges(self.start, self.stop), *self.new.ranges(self.start, self.stop)]
            paths = [
                stack.enter_context(
                    each.file((wanted for wanted in ranges if wanted.input == number), directory.scratch)
                )
                for number, each in enumerate(self.inputs)
            ]
            old, new = (Snapshot({name: side.reader(name, paths)}) for side in (self.old, self.new))
            rows = TableRows(old, new, self.variable, BlockHasher(self.seed), rows=(self.start, self.stop))
            for each in map(rows.compare, rows.chunks()):
                new_crc = combine(new_crc, each.new_crc, each.bytes_)
                old_crc = combine(old_crc, each.old_crc, each.bytes_)
                found.append(each)
        with new_file(directory.scratch) as (descriptor, path):
            with os.fdopen(os.dup(descriptor), "wb") as file:
                for field in ("hashes", "ids", "values"):
                    for each in found:
                        file.write(np.ascontiguousarray(getattr(each, field)).reshape(-1).view(np.uint8).data)
                size = file.tell()
            tag = directory.put_file(self.name, path)
        count = sum(len(each.ids) for each in found)
        return Receipt(self.name, (new_crc, old_crc), (), size, tag, count)


class TaskComparison:
    """The comparison of tables by the tasks of one job, in the order of the tables and of their rows.

    A context manager: the job is cancelled when it is left before all was asked for.

    Raises:
        CheckpointChanged, CheckpointError: a shard is no longer there, or cannot be reached.
    """

    def __init__(
        self,
        old: Snapshot,
        new: Snapshot,
        tables: Iterable[ServedVariable],
        hasher: BlockHasher,
        runner: Runner,
        scratch: Path,
    ) -> None:
        self._old, self._new, self._hasher, self._runner = old, new, hasher, runner
        self._rows = {table.name: TableRows(old, new, table, hasher) for table in tables}
        self._tasks = [
            task for number, table in enumerate(tables) for task in self._tasks_of(table, f"{number:05d}")
        ]
        self._next = iter(self._tasks)
        self._job = runner.job(self._tasks, os.fspath(scratch / "compared"))
        self._receipts = self._job.receipts()

    def __enter__(self) -> TaskComparison:
        return self

    def __exit__(self, *error: Any) -> None:
        self._job.__exit__(*error)
        if not self._job.is_kept:
            self._job.directory.remove()

    def found(self, name: str) -> Iterator[Found] | None:
        """What differs in the next table, whose name this is; None if tasks do not compare it.

        Raises:
            ExportError: any of a task's; the engine gave up.
        """
        return self._found(name, self._rows[name]) if name in self._rows else None

    def _found(self, name: str, rows: TableRows) -> Iterator[Found]:
        touched = _touched(self._old, name), _touched(self._new, name)
        for _ in rows.chunks(self._runner.task_bytes):
            task, receipt = next(self._next), next(self._receipts)
            found = _read(self._job.directory, receipt, task, rows)
            yield _with_layers(found, task, self._old, self._new, touched)

    def _tasks_of(self, variable: ServedVariable, name: str) -> Iterator[Compare]:
        old, new = self._old.stored[variable.name], self._new.stored[variable.name]
        inputs = _inputs(old), _inputs(new)
        sides = Side.of(old, 0), Side.of(new, len(inputs[0]))
        rows = self._rows[variable.name]
        for number, (start, stop) in enumerate(rows.chunks(self._runner.task_bytes)):
            yield Compare(
                name=f"{name}-{number:06d}",
                inputs=(*inputs[0], *inputs[1]),
                bytes_=2 * (stop - start) * rows.row_bytes,
                variable=variable,
                old=sides[0],
                new=sides[1],
                start=start,
                stop=stop,
                seed=self._hasher.seed,
            )


def _inputs(reader: RowReader) -> tuple[Input, ...]:
    shards = {run.extent.shard: run.path for run in reader.runs}
    return tuple(Input.of(shards[number]) for number in sorted(shards))


def _read(directory: Directory, receipt: Receipt, task: Compare, rows: TableRows) -> Found:
    source = Input(f"{directory.place}/{receipt.task}", receipt.written, receipt.tag)
    count, shape = task.stop - task.start, task.variable.shape[1:]
    blocks = -(-count // rows.block)
    with source.file((Range(0, 0, receipt.written),), directory.scratch) as path:
        content = np.fromfile(path, np.uint8)
    hashes, ids, values = np.split(content, np.cumsum([8 * blocks, 8 * receipt.rows]))
    typed = values.view(task.variable.dtype.numpy).reshape(receipt.rows, *shape)
    new_crc, old_crc = receipt.read
    size = count * rows.row_bytes
    return Found(ids.view(np.int64), typed, hashes.view(np.uint64), new_crc, old_crc, size)


def _touched(state: Snapshot, name: str) -> Array:
    """The rows of a table that changes lie over, ascending."""
    ids = [change.ids for layer in state.layers if isinstance(change := layer.get(name), Rows)]
    return distinct(np.concatenate([np.empty(0, np.int64), *ids]))


def _with_layers(
    found: Found, task: Compare, old: Snapshot, new: Snapshot, touched: tuple[Array, Array]
) -> Found:
    """What was found in the bundles, corrected where changes lie over them."""
    here = [ids[slice(*np.searchsorted(ids, (task.start, task.stop)))] for ids in touched]
    ids = distinct(np.concatenate(here))
    if not len(ids):
        return found
    name = task.variable.name
    values = new.rows_at(name, ids)
    differ = differing_rows(old.rows_at(name, ids), values)
    kept = ~among(found.ids, ids)
    rows = np.concatenate([found.ids[kept], ids[differ]])
    order = np.argsort(rows)
    hashes = without_rows(found.hashes, here[1] - task.start, found.bytes_ // (task.stop - task.start))
    return replace(
        found,
        ids=rows[order],
        values=np.concatenate([found.values[kept], values[differ]])[order],
        hashes=hashes,
    )
