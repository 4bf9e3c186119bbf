"""The job of building the indexes of tables: keys are sorted by ranges, then ranges are placed.

Two kinds of tasks, one after the other, in one directory: `Partition` reads the checkpoint's keys as they are
stored, and `Place` what was sorted. Small tables share tasks, large ones are divided.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from exporter.catalog import Catalog
from exporter.checkpoint.admission import Admission
from exporter.checkpoint.embedding_variables import EmbeddingVariable
from exporter.checkpoint.tensor_values import compare_checksum
from exporter.jobs.division import batches
from exporter.jobs.range_checksums import RangeChecksums
from exporter.jobs.runner import Job
from exporter.jobs.task import Input, Receipt, Task
from exporter.progress import Progress
from exporter.storage import mirror
from exporter.tables.geometry import INDEX_ROWS, INDEX_SEEDS, KEYS, TableGeometry
from exporter.tables.place_keys import KEY_BYTES, KeyRanges, KeyRun, Partition, Place, RangeRun, Section
from exporter.wire.crc32c import mask

Array = np.ndarray[Any, Any]

_LEAST_RANGES = 16
"""Ranges of a run, if the table has so many: a part of the range behind each run is placed twice."""

_LEAST_RUNS = 4
"""Runs of a table, if it has enough ranges: so that a few threads have something to do."""


class IndexedTable(Struct, frozen=True):
    """A table whose index is to be built."""

    name: str
    variable: EmbeddingVariable
    geometry: TableGeometry

    @property
    def ranges(self) -> KeyRanges:
        """The ranges of its groups."""
        return KeyRanges.of(self.geometry, self.variable.rows)


class Piece(Struct, frozen=True):
    """Elements of a variable of a table, from `first` on: bytes of an object that a task wrote."""

    table: str
    part: str
    first: int
    count: int
    object: str
    offset: int
    size: int
    crc: int


class IndexJob:
    """The tasks for the tables of a checkpoint."""

    def __init__(
        self, catalog: Catalog, tables: Sequence[IndexedTable], admission: Admission, task_bytes: int
    ) -> None:
        self._catalog = catalog
        self._read = RangeChecksums[int]()
        self._shown = mirror.shown(os.fspath(catalog.prefix))  # the local path is another in each process
        self._planned = cache(Input.of)
        runs = [_Run(table, run) for table in tables for run in _key_runs(table, admission, task_bytes)]
        self._sorted = list(batches(runs, task_bytes, lambda each: each.run.part(each.run.keys).size))
        places = chain.from_iterable(_Wanted.of_table(table, task_bytes) for table in tables)
        self._placed = list(
            batches(places, task_bytes, lambda each: each.bytes_ if each.is_whole else task_bytes)
        )
        self.partitions = [
            self._partition(number, batch, admission) for number, batch in enumerate(self._sorted)
        ]

    @property
    def plan(self) -> list[Task]:
        """All tasks, as far as they are known before the first one is done."""
        return [*self.partitions, *(self._place(*each, {}) for each in enumerate(self._placed))]

    @property
    def size_of_work(self) -> tuple[int, int]:
        """How many tasks it is, and how many bytes they read, about."""
        size = sum(task.bytes_ for task in self.partitions)
        size += sum(each.bytes_ for batch in self._placed for each in batch)
        return len(self.partitions) + len(self._placed), size

    def run(self, job: Job, progress: Progress | None = None) -> list[Piece]:
        """Do it, in a job of this `plan`; what was written.

        Raises:
            CorruptFile: keys are damaged, or one occurs twice.
            TableFull: the keys of a table crowd in its index.
            ExportError: any other of a task's; the engine gave up.
        """
        pieces: list[Piece] = []
        place = job.directory.place
        sections: dict[str, list[_Sorted]] = {}
        with closing(job.receipts(progress, self.partitions)) as receipts:
            for batch, receipt in zip(self._sorted, receipts, strict=True):
                self._compare(batch, receipt)
                source = Input(f"{place}/{receipt.task}", receipt.written, "")
                counts, wide, offset = np.array(receipt.counts, np.int64), iter(receipt.wrote), 0
                for table, run in ((each.table, each.run) for each in batch):
                    own, counts = np.split(counts, [run.ranges.count])
                    sections.setdefault(table.name, []).append(_Sorted(source, offset, own))
                    if not run.is_wide:
                        keys, at = run.stop - run.start, offset + run.sorted_bytes
                        pieces.append(
                            Piece(table.name, KEYS, run.row, keys, receipt.task, at, 8 * keys, next(wide))
                        )
                    offset += run.written_bytes
        tasks = [self._place(number, batch, sections) for number, batch in enumerate(self._placed)]
        with closing(job.receipts(progress, tasks)) as receipts:
            for task, receipt in zip(tasks, receipts, strict=True):
                pieces += _index_pieces(task, receipt)
        return pieces

    def _partition(self, number: int, batch: Sequence[_Run], admission: Admission) -> Partition:
        refs = [ref for each in batch for ref in each.run.tensors]
        shards = sorted({extent.shard for ref in refs for extent in ref.extents})
        runs = tuple(each.run.renumbered(shards) for each in batch)
        return Partition(
            name=f"keys-{number:05d}",
            inputs=tuple(self._planned(self._catalog.shards[shard]) for shard in shards),
            bytes_=sum(found.size for run in runs for found in run.ranges_read),
            checkpoint=self._shown,
            runs=runs,
            admission=admission,
            step=self._catalog.step,
        )

    def _compare(self, batch: Iterable[_Run], receipt: Receipt) -> None:
        """Compare the checksums of the tensors that are read to their end by a task, the last of several."""
        crcs = iter(receipt.read)
        for each in batch:
            for ref in each.run.counted:
                part, (extent,) = each.run.part(ref), ref.extents
                crc = self._read.joined(part.input, part, next(crcs), extent)
                if crc is not None:
                    compare_checksum(self._catalog.path_of(extent), ref.name, extent, mask(crc))

    def _place(self, number: int, batch: Sequence[_Wanted], found: dict[str, list[_Sorted]]) -> Place:
        inputs: dict[Input, int] = {}
        runs = []
        for wanted in batch:
            run = wanted.run
            sections = []
            for each in found.get(run.table, ()):
                skipped = int(each.counts[: run.start].sum())
                counts = tuple(each.counts[run.start : run.end].tolist())
                input_ = inputs.setdefault(each.source, len(inputs))
                sections.append(Section(input_, each.offset + KEY_BYTES * skipped, counts))
            runs.append(replace(run, sections=tuple(sections)))
        return Place(
            name=f"index-{number:05d}",
            inputs=tuple(inputs),
            bytes_=sum(wanted.bytes_ for wanted in batch),
            checkpoint=self._shown,
            runs=tuple(runs),
        )


class _Run(Struct, frozen=True):
    """A run of keys and its table."""

    table: IndexedTable
    run: KeyRun


class _Wanted(Struct, frozen=True):
    """A run of ranges, without sections, and about how many bytes of sorted keys it has."""

    run: RangeRun
    bytes_: int

    @property
    def is_whole(self) -> bool:
        """True if it is all ranges of the table, so that others may share its task."""
        return self.run.stop - self.run.start == self.run.ranges.count

    @classmethod
    def of_table(cls, table: IndexedTable, task_bytes: int) -> Iterator[_Wanted]:
        """All ranges of a table, in runs of an even number."""
        ranges, stored = table.ranges, tuple((part.keys.name, part.rows) for part in table.variable.parts)
        bytes_of_range = max(1, KEY_BYTES * table.variable.rows // ranges.count)
        most = max(_LEAST_RANGES, task_bytes // bytes_of_range)
        runs = max(-(-ranges.count // most), min(_LEAST_RUNS, ranges.count // _LEAST_RANGES))
        step = -(-ranges.count // runs // 2) * 2
        for start in range(0, ranges.count, step):
            stop = min(start + step, ranges.count)
            run = RangeRun(table.name, ranges, start, stop, (), stored)
            yield cls(run, bytes_of_range * (stop - start))


class _Sorted(Struct, frozen=True, eq=False):
    """Sorted keys of one run: in an object from an offset on, so many of each range."""

    source: Input
    offset: int
    counts: Array


def _key_runs(table: IndexedTable, admission: Admission, task_bytes: int) -> Iterator[KeyRun]:
    """The keys of a table in runs of at most so many bytes."""
    variable, row = table.variable, 0
    has_freqs = admission.min_freq > 0 and all(part.freqs is not None for part in variable.parts)
    has_versions = admission.max_age_steps is not None and all(
        part.versions is not None for part in variable.parts
    )
    most = max(1, task_bytes // (variable.key_dtype.itemsize or 1))
    for part in variable.parts:
        for start in range(0, max(1, part.rows), most):
            stop = min(start + most, part.rows)
            yield KeyRun(
                table.ranges,
                part.keys,
                start,
                stop,
                row + start,
                part.offsets,
                part.freqs if has_freqs else None,
                part.versions if has_versions else None,
            )
        row += part.rows


def _index_pieces(task: Place, receipt: Receipt) -> Iterator[Piece]:
    crcs, offset = iter(receipt.wrote), 0
    for run in task.runs:
        for part, (first, count), size in ((INDEX_SEEDS, run.groups, 8), (INDEX_ROWS, run.slots, 4)):
            size *= count
            yield Piece(run.table, part, first, count, receipt.task, offset, size, next(crcs))
            offset += size
