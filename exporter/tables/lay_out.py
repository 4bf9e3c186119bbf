"""Present the tables of a checkpoint as ordinary tensors, so that they are served like any others.

The keys and the rows stay where the trainer wrote them: they become slices of `<table>/keys` and
`<table>/values`. The tensors and their sizes follow from the checkpoint's index alone (`lay_out`); keys are
read when the rest is written (`TableLayout.write`).

The rest is the index, room for more rows, and the default rows. A job of two kinds of tasks builds the index
(`IndexJob`): `Partition` sorts the checkpoint's keys by ranges, `PlaceKeys` places ranges in slots. Small
tables share tasks, large ones are divided. In a file system the tasks' results are joined with the room,
which is a hole, and the default rows in one new shard, because a server reads a tensor faster in one piece.
In a store they stay where they are: the tasks that write the version read them there, and read zeros nowhere.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import cache
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from exporter.catalog import Catalog, Extent, SliceRef, TensorRef
from exporter.checkpoint.admission import Admission
from exporter.checkpoint.embedding_variables import embedding_variables
from exporter.checkpoint.source_shard import open_shard
from exporter.checkpoint.tensor_values import compare_checksum
from exporter.errors import CheckpointChanged, CorruptFile
from exporter.jobs.runner import LOCAL, Job, Runner
from exporter.jobs.shard_sections import NewShard, WrittenRun
from exporter.jobs.task import ZEROS, Input, RangeChecksums, Receipt, Task, batches
from exporter.storage import mirror
from exporter.storage.files import writing
from exporter.storage.open_files import write_at
from exporter.storage.output_directory import Directory, new_file, open_directory
from exporter.tables.geometry import EMPTY_KEY, TablePlan, row_box
from exporter.tables.parts import INDEX_ROWS, INDEX_SEEDS, KEYS, PARTS, VALUES
from exporter.tables.place_keys import (
    KEY_BYTES,
    KeyRanges,
    KeyRun,
    Partition,
    PlaceKeys,
    RangeRun,
    SortedKeys,
)
from exporter.terminal.progress import Progress
from exporter.wire.crc32c import chunks_of, combine, extend, mask, zeros_crc
from exporter.wire.dtypes import Array

_LEAST_RANGES = 16  # of a run, if possible: the beginning of the range behind each run is placed twice
_LEAST_RUNS = 4  # of a table, if it has enough ranges: so that a few threads have work


class WrittenPart(Struct, frozen=True):
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
    """The tasks that build the indexes of tables, from the keys in a checkpoint."""

    def __init__(
        self, catalog: Catalog, tables: Sequence[TablePlan], admission: Admission, task_bytes: int
    ) -> None:
        self._catalog = catalog
        self._read = RangeChecksums[int]()
        self._shown = mirror.shown(os.fspath(catalog.prefix))  # the local path differs between processes
        self._planned = cache(Input.of)  # all tasks must read one state of a file
        runs = [(table.name, run) for table in tables for run in _key_runs(table, admission, task_bytes)]
        self._sorted = list(batches(runs, task_bytes, lambda each: each[1].part(each[1].keys).size))
        places = chain.from_iterable(_Wanted.of_table(table, task_bytes) for table in tables)
        self._placed = list(
            # A part of a large table fills a task of its own.
            batches(places, task_bytes, lambda each: each.bytes_ if each.is_whole else task_bytes)
        )
        self.partitions = [
            self._partition(number, [run for _, run in batch], admission)
            for number, batch in enumerate(self._sorted)
        ]

    @property
    def plan(self) -> list[Task]:
        """All tasks; tasks that place keys are without their inputs, which other tasks write."""
        return [*self.partitions, *(self._place(*each, {}) for each in enumerate(self._placed))]

    @property
    def size_of_work(self) -> tuple[int, int]:
        """The number of tasks, and the approximate number of bytes that all of them read."""
        size = sum(task.bytes_ for task in self.partitions)
        size += sum(each.bytes_ for batch in self._placed for each in batch)
        return len(self.partitions) + len(self._placed), size

    def run(self, job: Job, progress: Progress | None = None) -> list[WrittenPart]:
        """Run the tasks of `plan` in `job`, wait for all, and return the parts of variables that they wrote.

        `job` is a job of this `plan`. The parts are in any order. `progress` advances by the bytes that tasks
        read; None reports nothing.

        Raises:
            CorruptFile: a tensor that tasks read has another checksum, or a key occurs twice.
            CheckpointChanged: a file changed or vanished after it was planned.
            TableFull: keys find no place in an index.
            CheckpointError: a file cannot be read.
            DiskFull, PublishError: a task's result cannot be written.
            EngineFailed: the engine that runs the tasks failed.
        """
        pieces: list[WrittenPart] = []
        place = job.directory.place
        sections: dict[str, list[_Sorted]] = {}
        with closing(job.receipts(progress, self.partitions)) as receipts:
            for batch, receipt in zip(self._sorted, receipts, strict=True):
                self._compare((run for _, run in batch), receipt)
                source = Input(f"{place}/{receipt.task}", receipt.written, "")
                counts, wide, offset = np.array(receipt.counts, np.int64), iter(receipt.wrote), 0
                for table, run in batch:
                    own, counts = np.split(counts, [run.ranges.count])
                    sections.setdefault(table, []).append(_Sorted(source, offset, own))
                    if not run.is_wide:
                        keys, at = run.stop - run.start, offset + run.sorted_bytes
                        place_of = receipt.task, at, 8 * keys, next(wide)
                        pieces.append(WrittenPart(table, KEYS, run.row, keys, *place_of))
                    offset += run.written_bytes
        tasks = [self._place(number, batch, sections) for number, batch in enumerate(self._placed)]
        with closing(job.receipts(progress, tasks)) as receipts:
            for task, receipt in zip(tasks, receipts, strict=True):
                pieces += _index_pieces(task, receipt)
        return pieces

    def _partition(self, number: int, batch: Sequence[KeyRun], admission: Admission) -> Partition:
        shards = sorted({extent.shard for run in batch for ref in run.tensors for extent in ref.extents})
        runs = tuple(run.renumbered(shards) for run in batch)
        return Partition(
            name=f"keys-{number:05d}",
            inputs=tuple(self._planned(self._catalog.shards[shard]) for shard in shards),
            bytes_=sum(found.size for run in runs for found in run.ranges_read),
            checkpoint=self._shown,
            runs=runs,
            admission=admission,
            step=self._catalog.step,
        )

    def _compare(self, batch: Iterable[KeyRun], receipt: Receipt) -> None:
        """Record the checksums in a receipt, and verify each tensor of which the last part was read.

        `batch` has the runs of the receipt's task. Raises CorruptFile if a checksum differs.
        """
        crcs = iter(receipt.read)
        for run in batch:
            for ref in run.counted:
                part, (extent,) = run.part(ref), ref.extents
                crc = self._read.joined(part.input, part, next(crcs), extent)
                if crc is not None:
                    compare_checksum(self._catalog.path_of(extent), ref.name, extent, mask(crc))

    def _place(self, number: int, batch: Sequence[_Wanted], found: dict[str, list[_Sorted]]) -> PlaceKeys:
        """Return the task that places these ranges; `found` has the sorted keys of each table, by its name.

        `number` is for the task's name. With an empty `found` the task has no inputs, as in `plan`.
        """
        inputs: dict[Input, int] = {}
        runs = []
        for wanted in batch:
            run = wanted.run
            sections = []
            for each in found.get(run.table, ()):
                skipped = int(each.counts[: run.start].sum())
                counts = tuple(each.counts[run.start : run.end].tolist())
                input_ = inputs.setdefault(each.source, len(inputs))
                sections.append(SortedKeys(input_, each.offset + KEY_BYTES * skipped, counts))
            runs.append(replace(run, sections=tuple(sections)))
        return PlaceKeys(
            name=f"index-{number:05d}",
            inputs=tuple(inputs),
            bytes_=sum(wanted.bytes_ for wanted in batch),
            checkpoint=self._shown,
            runs=tuple(runs),
        )


class _Wanted(Struct, frozen=True):
    """A run of ranges to place, without sections, and the approximate bytes of its sorted keys."""

    run: RangeRun
    bytes_: int

    @property
    def is_whole(self) -> bool:
        """True if the run has all ranges of its table; then other tables' ranges may share its task."""
        return self.run.stop - self.run.start == self.run.ranges.count

    @classmethod
    def of_table(cls, table: TablePlan, task_bytes: int) -> Iterator[_Wanted]:
        """Yield the ranges of a table in order, in runs; each run but the last has an even number of ranges.

        A run has at most about `task_bytes` of sorted keys or 16 ranges, whichever is more.
        """
        ranges, stored = _ranges(table), tuple((part.keys.name, part.rows) for part in table.variable.parts)
        bytes_of_range = max(1, KEY_BYTES * table.variable.rows // ranges.count)
        most = max(_LEAST_RANGES, task_bytes // bytes_of_range)
        runs = max(-(-ranges.count // most), min(_LEAST_RUNS, ranges.count // _LEAST_RANGES))
        # Even: `place_ranges` places every other range first, counted from where it starts.
        step = -(-ranges.count // runs // 2) * 2
        for start in range(0, ranges.count, step):
            stop = min(start + step, ranges.count)
            run = RangeRun(table.name, ranges, start, stop, (), stored)
            yield cls(run, bytes_of_range * (stop - start))


class _Sorted(Struct, frozen=True, eq=False):
    """One run's sorted keys: object, offset, and the number of keys by range."""

    source: Input
    offset: int
    counts: Array


def _ranges(table: TablePlan) -> KeyRanges:
    return KeyRanges.of(table.geometry, table.variable.rows)


def _key_runs(table: TablePlan, admission: Admission, task_bytes: int) -> Iterator[KeyRun]:
    """Yield a table's keys in order, in runs of up to `task_bytes`.

    Each has the tensors that decide on admission. A part without keys gets one empty run.
    """
    variable, row = table.variable, 0
    has_freqs = admission.min_freq > 0 and all(part.freqs is not None for part in variable.parts)
    has_versions = admission.max_age_steps is not None and all(
        part.versions is not None for part in variable.parts
    )
    most = max(1, task_bytes // (variable.key_dtype.itemsize or 1))
    for part in variable.parts:
        for start in range(0, max(1, part.rows), most):
            stop = min(start + most, part.rows)
            freqs, versions = part.freqs if has_freqs else None, part.versions if has_versions else None
            yield KeyRun(_ranges(table), part.keys, start, stop, row + start, part.offsets, freqs, versions)
        row += part.rows


def _index_pieces(task: PlaceKeys, receipt: Receipt) -> Iterator[WrittenPart]:
    """Yield the seeds and the slots of each run of a task, as parts of the object that it wrote."""
    crcs, offset = iter(receipt.wrote), 0
    for run in task.runs:
        for part, (first, count), size in ((INDEX_SEEDS, run.groups, 8), (INDEX_ROWS, run.slots, 4)):
            size *= count
            yield WrittenPart(run.table, part, first, count, receipt.task, offset, size, next(crcs))
            offset += size


def join_pieces(
    catalog: Catalog,
    tables: Sequence[TablePlan],
    pieces: Iterable[WrittenPart],
    directory: Directory,
    home: Directory,
) -> Catalog:
    """Write the catalog's last shard into `home`, from the tasks' results in `directory`.

    Return the completed catalog. `pieces` are all parts of the variables of `tables` that tasks wrote; each
    is compared with its checksum. The shard is named after its contents, so a command that resumes the job
    finds it.

    Raises:
        CheckpointChanged, CorruptFile: a task's result is gone, shorter or damaged.
        CheckpointError: a task's result cannot be read.
        DiskFull, PublishError: the shard cannot be written.
    """
    number, size = len(catalog.shards) - 1, catalog.shard_sizes[-1]
    written = defaultdict[str, list[WrittenPart]](list)
    for piece in pieces:
        written[f"{piece.table}/{piece.part}"].append(piece)
    tensors: dict[str, TensorRef] = {}
    digest = hashlib.sha256()
    with new_file(home.scratch) as (descriptor, path):
        with writing(path), ExitStack() as stack:

            @cache
            def opened(name: str) -> tuple[Path, int]:
                place = directory.as_local() / name
                return place, stack.enter_context(open_shard(place))

            shard = NewShard(descriptor, home.scratch)
            for table in tables:
                tails = _tails(table)
                for _, elements in tails.values():
                    digest.update(elements.tobytes())
                for ref in _tensors(catalog, table):
                    tail = tails.get(ref.name.rpartition("/")[2])
                    tensors[ref.name] = _written(ref, number, shard, written[ref.name], tail, opened)
            os.ftruncate(descriptor, size)  # a hole at the end does not make the file longer
        digest.update(msgspec.json.encode(list(tensors.values())))
        name = f"tables-{digest.hexdigest()[:16]}.data"
        home.put_new(name, path)
    known = {**catalog.tensors, **tensors}
    return replace(catalog, tensors=known, shards=(*catalog.shards[:-1], home.as_local() / name))


def show_pieces(
    catalog: Catalog,
    tables: Sequence[TablePlan],
    pieces: Sequence[WrittenPart],
    directory: Directory,
    scratch: Path,
) -> Catalog:
    """Return the catalog with each object that tasks wrote as a shard, in place of its last shard.

    `pieces` are all parts of the variables of `tables` that tasks wrote. What no task writes goes into two
    more shards: a small one, written into `directory`, and a file of zeros for more rows, `ZEROS` in
    `scratch`, which workers need not see (`Input`).

    Raises:
        DiskFull, PublishError: a file cannot be written, for example because `ZEROS` exists already.
    """
    first = len(catalog.shards) - 1
    objects = {name: first + n for n, name in enumerate(sorted({piece.object for piece in pieces}))}
    rest, tensors = _Rest(first + len(objects)), dict(catalog.tensors)
    for table in tables:
        tails = _tails(table)
        for ref in _tensors(catalog, table):
            part = ref.name.rpartition("/")[2]
            slices = [each for each in ref.slices if each.extent is not None and each.extent.shard < first]
            slices += [
                SliceRef(
                    row_box(ref.shape, piece.first, piece.count),
                    Extent(objects[piece.object], piece.offset, piece.size, mask(piece.crc)),
                )
                for piece in pieces
                if (piece.table, piece.part) == (table.name, part)
            ]
            if part in tails:
                slices += rest.behind(ref, sum(each.spec.lengths[0] for each in slices), *tails[part])
            if len(slices) == 1:
                tensors[ref.name] = replace(ref, extent=slices[0].extent, slices=())
            else:
                tensors[ref.name] = replace(ref, extent=None, slices=tuple(slices))
    name, shown = rest.put(directory, scratch), directory.as_local()
    paths = [*(shown / each for each in objects), shown / name, scratch / ZEROS]
    return replace(
        catalog,
        tensors=tensors,
        shards=(*catalog.shards[:-1], *paths),
        shard_sizes=(*catalog.shard_sizes[:-1], *(path.stat().st_size for path in paths)),
    )


class _Rest:
    """Collects elements that no task writes: a shard's last rows of keys and values, zeros in the next."""

    def __init__(self, shard: int) -> None:
        self._shard = shard
        self._content = bytearray()
        self._zeros = 0

    def behind(self, ref: TensorRef, held: int, row: int, elements: Array) -> Iterator[SliceRef]:
        """Yield the slices of a tensor after its first `held` rows: zeros, then its last rows, `elements`.

        The zeros reach up to row `row`; none if `held` reaches it. The elements are kept in memory, to be
        written by `put`.
        """
        raw = np.ascontiguousarray(elements).reshape(-1).view(np.uint8)
        if row > held:
            size = (row - held) * (raw.size // len(elements))
            self._zeros = max(self._zeros, size)
            # All zeros share one beginning, so the file is as long as the longest of them.
            extent = Extent(self._shard + 1, 0, size, mask(zeros_crc(size)))
            yield SliceRef(row_box(ref.shape, held, row - held), extent)
        extent = Extent(self._shard, len(self._content), raw.size, mask(extend(0, raw)))
        yield SliceRef(row_box(ref.shape, row, len(elements)), extent)
        self._content += raw.tobytes()

    def put(self, directory: Directory, scratch: Path) -> str:
        """Write both shards: the elements into the directory, the zeros as `ZEROS` into `scratch`.

        Return the name of the first, a new object of the directory. Raises DiskFull or PublishError if one
        cannot be written, for example because `ZEROS` exists already.
        """
        # Named by its contents and never rewritten: so its tag stays the same, and so do plans that read it.
        name = f"tables-{hashlib.sha256(self._content).hexdigest()[:16]}.data"
        with writing(scratch), new_file(scratch) as (descriptor, path):
            write_at(descriptor, 0, self._content)
            directory.put_new(name, path)
            with (scratch / ZEROS).open("xb") as file:
                file.truncate(self._zeros)
        return name


def _tensors(catalog: Catalog, table: TablePlan) -> Iterator[TensorRef]:
    return (catalog.tensors[f"{table.name}/{part}"] for part in PARTS)


def _tails(table: TablePlan) -> dict[str, tuple[int, Array]]:
    """Return the last rows of `keys` and `values`, by these names.

    Each is the number of the first of these rows, and their elements.
    """
    geometry, variable = table.geometry, table.variable
    keys = np.zeros(geometry.capacity - geometry.cursor_row, np.int64)
    keys[0], keys[-1] = variable.rows, EMPTY_KEY
    values = table.defaults.astype(variable.value_dtype.numpy)
    return {KEYS: (geometry.cursor_row, keys), VALUES: (geometry.first_default, values)}


def _copy(piece: WrittenPart, path: Path, descriptor: int, run: WrittenRun) -> None:
    """Append a piece of an open object to a run of a shard, and to the run's checksum.

    Raises CheckpointChanged if the object at `path` became shorter, CorruptFile if it differs from what the
    task wrote, OSError if reading or writing fails.
    """
    crc = 0
    try:
        for chunk in chunks_of(descriptor, piece.offset, piece.size):
            run.put(data := np.frombuffer(chunk, np.uint8))
            crc = extend(crc, data)
    except EOFError:
        raise CheckpointChanged(f"{path} became shorter after it was written") from None
    if crc != piece.crc:  # without this, the new shard's own checksum would confirm the damage
        raise CorruptFile(f"{path} is damaged: it is not what a task of the job wrote")
    run.crc = combine(run.crc, crc, piece.size)


def _written(
    ref: TensorRef,
    number: int,
    shard: NewShard,
    pieces: Iterable[WrittenPart],
    tail: tuple[int, Array] | None,
    opened: Callable[[str], tuple[Path, int]],
) -> TensorRef:
    """Write the elements of a tensor that are in the new shard, with holes for zeros.

    Return its completed index entry. `pieces` are the parts of the tensor that tasks wrote. `number` is the
    new shard's number, `tail` the first row and the elements of the tensor's end (None: no such rows);
    `opened` opens an object by its name. Raises CheckpointChanged or CorruptFile if a piece is gone, shorter
    or damaged, CheckpointError if it cannot be opened, OSError if reading or writing fails.
    """
    (known,) = (extent for extent in ref.extents if extent.shard == number)
    element = int(np.prod(ref.shape[1:])) * ref.dtype.numpy.itemsize
    first = ref.shape[0] - known.size // max(1, element)
    shard.size = known.offset
    run = shard.reserve(known.size)
    for piece in sorted(pieces, key=lambda each: each.first):
        run.skip((piece.first - first) * element - run.done)
        _copy(piece, *opened(piece.object), run)
    if tail is not None:
        run.skip((tail[0] - first) * element - run.done)
        run.write(tail[1])
    run.skip(known.size - run.done)
    extent = replace(known, crc32c=mask(run.crc))
    if ref.extent is not None:
        return replace(ref, extent=extent)
    slices = (replace(item, extent=extent) if item.extent == known else item for item in ref.slices)
    return replace(ref, slices=tuple(slices))


SHARD = "tables.data"


class TableLayout(Struct, frozen=True, eq=False):
    """A catalog with tables as ordinary tensors, some of which are still to be written."""

    source: Catalog
    catalog: Catalog
    tables: tuple[TablePlan, ...]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the tables' variables, by the tensor's name."""
        added = self.catalog.tensors.keys() - self.source.tensors.keys()
        return {name: self.catalog.tensors[name].shape for name in added}

    @property
    def served_names(self) -> frozenset[str]:
        """The names of the checkpoint's own tensors of keys and rows, which are served as parts of tables."""
        parts = chain.from_iterable(table.variable.parts for table in self.tables)
        return frozenset(name for part in parts for name in (part.keys.name, part.values.name))

    @property
    def stored_names(self) -> tuple[str, ...]:
        """The names of the checkpoint's tensors from which tables may be read.

        Frequencies and versions are among them.
        """
        parts = chain.from_iterable(table.variable.parts for table in self.tables)
        names = chain.from_iterable(part.tensor_names for part in parts)
        return tuple(name for name in names if name in self.source.tensors)

    def with_source(self, catalog: Catalog) -> TableLayout:
        """Return the layout of the same tables over another catalog, to which their tensors were copied.

        Raises KeyError if the catalog lacks the keys of a table, CheckpointError and subclasses if the
        catalog's embedding variables are damaged or cannot be read.
        """
        # Matched by the tensor of keys: a table's name may depend on tables that were not copied.
        known = {variable.parts[0].keys.name: variable for variable in embedding_variables(catalog).values()}
        moved = [known[plan.variable.parts[0].keys.name] for plan in self.tables]
        plans = zip(self.tables, moved, strict=True)
        return lay_out(catalog, (replace(plan, variable=variable) for plan, variable in plans))

    def index_job(self, admission: Admission, task_bytes: int) -> IndexJob:
        """Plan the tasks that build the indexes; `task_bytes` is the approximate size of a task's input.

        Raises CheckpointChanged if a shard with keys no longer exists, CheckpointError if it cannot be
        reached.
        """
        return IndexJob(self.source, self.tables, admission, task_bytes)

    def write(
        self, scratch: Path, admission: Admission, runner: Runner = LOCAL, progress: Progress | None = None
    ) -> tuple[Catalog, Job]:
        """Write the elements that no shard of the checkpoint holds, to `scratch` or where jobs are kept.

        Wait for the tasks. `admission` decides which keys are served; `progress` advances by the bytes that
        tasks read (None: not reported). Return the catalog with all tensors, and the job: a context manager,
        to be exited once the tensors have been read.

        Raises:
            CheckpointError and subclasses: the checkpoint changed, is damaged, or cannot be read.
            TableFull: keys find no place in an index.
            EngineFailed: the engine that runs the tasks failed.
            UsageError: the store in which `runner` keeps jobs cannot be opened.
            DiskFull, PublishError: a file cannot be written.
        """
        index = self.index_job(admission, runner.task_bytes)
        with ExitStack() as stack:
            job = stack.enter_context(runner.job(index.plan, os.fspath(scratch / "job")))
            pieces = index.run(job, progress)
            if not job.directory.is_in_store:
                home = job.directory if job.is_kept else open_directory(os.fspath(scratch))
                catalog = join_pieces(self.catalog, self.tables, pieces, job.directory, home)
            else:
                catalog = show_pieces(self.catalog, self.tables, pieces, job.directory, scratch)
            if not job.is_kept:
                job.directory.remove()
            stack.pop_all()
        return catalog, job


def lay_out(catalog: Catalog, tables: Iterable[TablePlan]) -> TableLayout:
    """Return the catalog with the tables' tensors added, by its index alone: no values are read or written.

    The added tensors are in one more shard, the last one, which does not exist yet.
    """
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
