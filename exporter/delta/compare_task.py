"""The task of comparing a range of one table's rows in two bundles, and what is made of its result.

The result is one object: the hashes of the new rows' blocks (uint64), the numbers of the rows that differ
(int64) and their new values, one behind another. Deltas that lie over a bundle are not a task's: the rows
that they touch are compared where the job was begun.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
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
from exporter.storage.output_directory import Directory, new_file, open_directory
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


def compare_by_tasks(
    old: Snapshot, new: Snapshot, variable: ServedVariable, hasher: BlockHasher, runner: Runner, scratch: Path
) -> Iterator[Found]:
    """What differs in a table, in the order of its rows.

    Raises:
        ExportError: any of a task's; the engine gave up.
    """
    rows = TableRows(old, new, variable, hasher)
    sides = old.stored[variable.name], new.stored[variable.name]
    inputs = [_inputs(side) for side in sides]
    values = Side.of(sides[0], 0), Side.of(sides[1], len(inputs[0]))
    ranges = list(rows.chunks(runner.task_bytes))
    tasks = [
        Compare(
            name=f"{number:06d}",
            inputs=(*inputs[0], *inputs[1]),
            bytes_=2 * (stop - start) * rows.row_bytes,
            variable=variable,
            old=values[0],
            new=values[1],
            start=start,
            stop=stop,
            seed=hasher.seed,
        )
        for number, (start, stop) in enumerate(ranges)
    ]
    touched = _touched(old, variable.name), _touched(new, variable.name)
    job = runner.directory_of(tasks)
    directory = open_directory(job or os.fspath(scratch / "compared"))
    with closing(runner.run(tasks, directory.place)) as receipts:
        for task, receipt in zip(tasks, receipts, strict=True):
            found = _read(directory, receipt, task, rows)
            yield _with_layers(found, task, old, new, touched)
    directory.remove()


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
