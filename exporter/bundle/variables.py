"""Write `variables/`: a new index with the served names, over shards shared with the source if possible.

Each source shard that holds a served tensor becomes one shard of the bundle: cloned where the file system
can, else linked, copied or compacted; compacted if less than an eighth of it is kept. Checksums come from the
source's index. Tensors whose bytes change (casts, and rows that move between layouts of partitions) are
written by the tasks of a `ShardJob`; so is everything in an object store. A large table is divided into
ranges of rows, which become slices that RestoreV2 joins. A table that servers are to map has a shard of its
own for each of its variables; if the source has it as a range of a larger file, the range is copied.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from typing import ClassVar, NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from exporter.bundle import link
from exporter.bundle.hot_rows import names_of
from exporter.bundle.link import ByteRange, NewFile, clone_shard, link_shard
from exporter.catalog import Catalog, Extent, SliceRef, SliceSpec, TensorRef
from exporter.checkpoint.tensor_bundle import MAX_SHARDS, encode_index, index_path, shard_path
from exporter.errors import LinkRefused, MappingError, UsageError
from exporter.graph.inference_graph import GraphVariable
from exporter.jobs.runner import LOCAL, Job, Runner
from exporter.jobs.shard_job import Place, Placed, ShardJob, Sources, Stored, stored_runs, tensors_of
from exporter.jobs.shard_sections import MovedRows, QuantisedRows, RowErrors, WriteShard
from exporter.jobs.task import Range, piece_bytes
from exporter.mapping.build import VariableMapping
from exporter.mapping.tensor_source import TensorSource
from exporter.options import DataMode
from exporter.storage import mirror
from exporter.storage.files import writing
from exporter.storage.layout import VARIABLES_DIRECTORY, VARIABLES_NAME
from exporter.terminal.progress import NoProgress, Progress, human_bytes
from exporter.wire.dtypes import JOINABLE, DType

_COPIES = 4  # at the same time: they wait for disks more than for processors
_WHY = "cast, or rows in another layout"
_OWN_FILE = "tables to be mapped have files of their own"
_IN_STORE = "the model is in an object store"
_LEAST_SHARE = 8
"""A shard is linked if an eighth of it is kept, or more.

A link holds the rest on disk after the trainer has pruned it, and every copy of the version carries it. Adam
and an average leave a quarter to what is served, AMSGrad beside them a fifth: such shards are linked. Below
an eighth a copy writes less than an eighth of what the trainer wrote a moment ago to save the shard.
"""
LITTLE_KEPT = f"less than 1/{_LEAST_SHARE} is kept"


class ShardOrigin(Enum):
    """The way in which a shard of the bundle was made."""

    CLONED = "cloned"
    LINKED = "linked"
    COPIED = "copied"
    COMPACTED = "compacted"
    REWRITTEN = "rewritten"


class ShardPlan(Struct, frozen=True):
    """The way in which a shard is made: its source, why it is not linked, its bytes and the source's.

    `source` is None for a shard that tasks write from several sources; `why` is "" for a link.
    """

    source: Path | None
    how: ShardOrigin
    why: str
    bytes_: int
    source_bytes: int = 0


class ShardReport(ShardPlan, frozen=True, kw_only=True):
    """A written shard of the bundle: how it was made, and its path."""

    path: Path


class Rounding(Struct, frozen=True):
    """The differences between a table's values as stored in 8 bits and as in the checkpoint."""

    largest: float
    """The largest difference of a value."""
    mean: float
    """The mean difference, over all values except those of rows of zeros, which are stored exactly."""


class VariablesReport(Struct, frozen=True):
    """The contents of a written `variables/`, and how each shard was made.

    `catalog` describes the new bundle.
    """

    catalog: Catalog
    shards: tuple[ShardReport, ...]
    work: tuple[int, int] = (0, 0)
    """The number of tasks that wrote shards, and of the bytes that these read."""
    job: Job | None = None
    """The job that wrote shards; a context manager, to be exited once the version is published. None without
    tasks.
    """
    rounded: Mapping[str, Rounding] = field(default_factory=dict)
    """The tables that were stored in 8 bits, by key."""

    def bytes_of(self, *how: ShardOrigin) -> int:
        """Return the bytes of the shards that were made in one of these ways."""
        return sum(shard.bytes_ for shard in self.shards if shard.how in how)

    @property
    def bytes_linked(self) -> int:
        """The bytes of the shards that were hard-linked."""
        return self.bytes_of(ShardOrigin.LINKED)

    @property
    def bytes_cloned(self) -> int:
        """The bytes of the shards that share their blocks with the trainer's files."""
        return self.bytes_of(ShardOrigin.CLONED)

    @property
    def bytes_copied(self) -> int:
        """The bytes of the shards that were copied, whole or compacted."""
        return self.bytes_of(ShardOrigin.COPIED, ShardOrigin.COMPACTED)

    @property
    def bytes_rewritten(self) -> int:
        """The bytes of the shards that tasks wrote, of values cast or laid out anew."""
        return self.bytes_of(ShardOrigin.REWRITTEN)


def as_rewritten(report: VariablesReport, source: Path, why: str) -> VariablesReport:
    """Return the report with all shards reported as rewritten from `source`, for the reason `why`."""
    shards = (replace(shard, source=source, how=ShardOrigin.REWRITTEN, why=why) for shard in report.shards)
    return replace(report, shards=tuple(shards))


def write_variables(
    mapping: VariableMapping,
    directory: Path,
    *,
    data: DataMode = DataMode.AUTO,
    runner: Runner = LOCAL,
    made: Path | None = None,
    progress: Progress | None = None,
) -> VariablesReport:
    """Write `directory/variables`, which must not exist yet, and return a report.

    A model without variables gets no directory. `data` says whether shards are linked, copied or compacted.
    `made` is a directory of shards that this command has made itself (None: there are none); a job that the
    runner keeps names these by their content. The report's `job` stays entered: exit it once the version is
    published. `progress` advances by bytes, from several threads. Waits for all copies and tasks.

    Raises:
        CheckpointChanged: a shard vanished or changed since the catalog was read.
        CheckpointError: a shard cannot be read.
        CorruptFile: a checksum of a tensor that is rewritten is wrong.
        LinkRefused: `data` is LINK and a shard cannot be linked, or the server could not read it.
        MappingError, NotFinite: a value does not fit the dtype it is cast to; MappingError also if values
            would have to move out of, or into, parts that are not ranges of whole rows.
        EngineFailed: the engine of `runner` failed.
        PublishError and subclasses: the target exists or cannot be written (DiskFull: no space), or a kept
            job cannot be used.
        UsageError: tasks are so small that there would be more shards than a bundle may have, or the store in
            which `runner` keeps jobs cannot be opened.
    """
    prefix = directory / VARIABLES_DIRECTORY / VARIABLES_NAME
    if not mapping.sources:
        return VariablesReport(Catalog(_FAMILY, prefix, {}, (), ()), ())
    with writing(prefix.parent):
        prefix.parent.mkdir(parents=True)
        with ThreadPoolExecutor(_COPIES, "bundle") as pool:
            return _Writer(mapping, prefix, data, pool, runner, made, progress or NoProgress()).run()


def size_of_work(mapping: VariableMapping, model: Path, task_bytes: int) -> tuple[int, int]:
    """Return the number of tasks that write values in an export to `model`, and the bytes that they read.

    `task_bytes` is the wanted input of a task in bytes.

    Raises:
        MappingError: values would have to move out of, or into, parts that are not ranges of whole rows.
        UsageError: tasks are so small that there would be more shards than a bundle may have.
    """
    _, moved = _divided(mapping, model)
    job = _job(mapping.catalog, moved, task_bytes)
    _require_few(job.tasks, task_bytes)
    return job.tasks, job.bytes_


def _job(catalog: Catalog, moved: Iterable[TensorSource], task_bytes: int) -> ShardJob[Moved]:
    files = Sources()
    places = (place for source in moved for place in divide(source, files, catalog, task_bytes))
    return ShardJob(Move, files, places, task_bytes)


def _require_few(shards: int, task_bytes: int) -> None:
    """Raise UsageError, before any work, if there would be more shards than a bundle may have.

    `task_bytes` is for the hint.
    """
    if shards > MAX_SHARDS:
        raise UsageError(
            f"the values would lie in {shards:,} shards, and a bundle has at most {MAX_SHARDS:,}",
            hint=f"name a larger --engine task-size than {human_bytes(task_bytes)}",
        )


def _divided(mapping: VariableMapping, target: Path) -> tuple[list[TensorSource], list[TensorSource]]:
    """Return the sources with shards to link or copy, and the sources that tasks write.

    For a target in a store, tasks write all.
    """
    is_in_store = mirror.is_remote(target)
    verbatim: list[TensorSource] = []
    moved: list[TensorSource] = []
    for source in mapping.sources:
        is_joined = source.is_mapped and not _is_stored_as_served(source)
        (moved if is_in_store or is_joined or needs_rewrite(source) else verbatim).append(source)
    return verbatim, moved


_FAMILY = "TensorFlow V2, name-based"


class _Origin(NamedTuple):
    """The source of a bundle's shard: a source shard or, for a mapped table, one extent of it."""

    shard: int
    run: Extent | None = None

    @classmethod
    def of(cls, source: TensorSource, extent: Extent) -> _Origin:
        return cls(extent.shard, extent if source.is_mapped else None)


class _Placed(Struct, frozen=True):
    """A source shard that is now in the bundle: its report, and the function from old extents to new ones."""

    report: ShardReport
    moved: Callable[[Extent], Extent]


class _Writer:
    def __init__(
        self,
        mapping: VariableMapping,
        prefix: Path,
        data: DataMode,
        pool: Executor,
        runner: Runner,
        made: Path | None,
        progress: Progress,
    ) -> None:
        self._catalog = mapping.catalog
        self._verbatim, moved = _divided(mapping, prefix)
        self._prefix = prefix
        self._data = data
        self._pool = pool
        self._runner = runner
        self._made = made
        self._progress = progress
        self._kept = _extents_by_origin(self._verbatim)
        self._plans = list(_plans(mapping, self._kept, data))
        self._moves = _job(mapping.catalog, moved, runner.task_bytes)
        self._num_shards = len(self._kept) + self._moves.tasks
        _require_few(self._num_shards, runner.task_bytes)
        self._new_file = NewFile.in_directory(prefix.parent)
        self._rounded: dict[str, Rounding] = {}

    def run(self) -> VariablesReport:
        placed = {old: self._place(old, new) for new, old in enumerate(self._kept)}
        tensors = [_moved(source, placed) for source in self._verbatim]
        reports = [shard.report for shard in placed.values()]
        with ExitStack() as stack:
            if self._moves.tasks:
                moved, more = self._move(stack)
                tensors += moved
                reports += more
            path = index_path(self._prefix)
            path.write_bytes(encode_index(tensors, self._num_shards))
            stack.pop_all()  # the job stays until the version is published: a second run finds it
        catalog = Catalog(
            _FAMILY,
            self._prefix,
            # By bytes, as in an index.
            {tensor.name: tensor for tensor in sorted(tensors, key=lambda tensor: tensor.name.encode())},
            tuple(report.path for report in reports),
            tuple(report.bytes_ for report in reports),
            step=self._catalog.step,
        )
        work = self._moves.tasks, self._moves.bytes_
        return VariablesReport(catalog, tuple(reports), work, self._moves.job, self._rounded)

    def _place(self, origin: _Origin, new: int) -> _Placed:
        plan = self._plans[new]
        source, size, how, why = self._catalog.shards[origin.shard], plan.source_bytes, plan.how, plan.why
        target = shard_path(self._prefix, new, self._num_shards)
        # A clone shares no inode, so that no trainer can change it by writing into its file.
        if how is ShardOrigin.LINKED and clone_shard(source, target, size=size):
            how = ShardOrigin.CLONED
        elif how is ShardOrigin.LINKED:
            why = link_shard(source, target, size=size, new_file=self._new_file)
            if why and self._data is DataMode.LINK:
                raise LinkRefused(f"{source} cannot be linked to {target.parent}", cause=why)
            how = ShardOrigin.COMPACTED if why else how
        ranges = [ByteRange(0, 0, size)]
        if how is ShardOrigin.COMPACTED:
            ranges = link.coalesce((extent.offset, extent.size) for extent in self._kept[origin])
        if how in (ShardOrigin.CLONED, ShardOrigin.LINKED):
            self._progress.advance(size)
        else:
            link.copy_ranges(source, target, ranges, size=size, pool=self._pool, progress=self._progress)
        bytes_ = sum(piece.size for piece in ranges)
        return _Placed(ShardReport(source, how, why, bytes_, size, path=target), _relocate(new, ranges))

    def _move(self, stack: ExitStack) -> tuple[list[TensorRef], list[ShardReport]]:
        """Run the tasks that write the last shards, and wait for them; return their tensors and reports.

        Sets `_rounded`. The job is entered in `stack`, and exited when that closes. Raises CheckpointError
        (and subclasses) if an input changed, is damaged or cannot be read, MappingError or NotFinite if a
        value does not fit the dtype it is cast to, EngineFailed if the engine failed, UsageError if the store
        of kept jobs cannot be opened, PublishError and subclasses if a shard cannot be written.
        """
        before, runner, made = len(self._kept), self._runner, self._made
        shards = self._moves.run(
            stack, runner, self._prefix, before=before, made=made, progress=self._progress
        )
        reports = []
        for places, receipt in zip(self._moves.places, shards.receipts, strict=True):
            target = self._prefix.parent / receipt.task
            is_verbatim = all(place.section.is_verbatim for place in places)
            is_copied = is_verbatim and mirror.is_remote(target)
            how, why = (ShardOrigin.COMPACTED, _IN_STORE) if is_copied else (ShardOrigin.REWRITTEN, _WHY)
            reports.append(ShardReport(None, how, why, receipt.written, path=target))
        self._rounded = _rounded(shards.placed)
        boxes = (box for placed in shards.placed for box in boxes_written(placed))
        return list(tensors_of(boxes)), reports


def plan_shards(mapping: VariableMapping, target: Path, data: DataMode) -> list[ShardPlan]:
    """Return a plan of each shard that an export to the directory `target` links or copies.

    They are in the order of the bundle's shards. Empty for a target in a store. Nothing is written. When
    written, a planned link that the file system does not allow becomes a compacted copy, or LinkRefused if
    `data` is LINK.
    """
    verbatim, _ = _divided(mapping, target)
    return list(_plans(mapping, _extents_by_origin(verbatim), data))


def _plans(
    mapping: VariableMapping, kept_extents: Mapping[_Origin, Sequence[Extent]], data: DataMode
) -> Iterator[ShardPlan]:
    mapped = (source for source in mapping.sources if source.is_mapped)
    split = {extent.shard for source in mapped for extent in source.tensor.extents}
    catalog = mapping.catalog
    for (shard, run), extents in kept_extents.items():
        size = catalog.shard_sizes[shard]
        # By offset: tensors may share an extent, which is copied once.
        kept = sum({extent.offset: extent.size for extent in extents if extent.size}.values())
        if shard in split and (run is None or run.size != size):
            how, why = ShardOrigin.COMPACTED, _OWN_FILE  # a link would hold the tables' bytes a second time
        elif data in (DataMode.COPY, DataMode.COMPACT):
            how = ShardOrigin.COPIED if data is DataMode.COPY else ShardOrigin.COMPACTED
            why = f"--data {data.value}"
        elif data is DataMode.AUTO and kept * _LEAST_SHARE < size:
            how, why = ShardOrigin.COMPACTED, LITTLE_KEPT
        else:
            how, why = ShardOrigin.LINKED, ""
        bytes_ = kept if how is ShardOrigin.COMPACTED else size
        yield ShardPlan(catalog.shards[shard], how, why, bytes_, size)


def _extents_by_origin(sources: Iterable[TensorSource]) -> dict[_Origin, list[Extent]]:
    found: dict[_Origin, list[Extent]] = {}
    for source in sources:
        for extent in source.tensor.extents:
            found.setdefault(_Origin.of(source, extent), []).append(extent)
    return dict(sorted(found.items(), key=lambda item: (item[0].shard, item[1][0].offset)))


def _moved(source: TensorSource, placed: dict[_Origin, _Placed]) -> TensorRef:
    def move(extent: Extent | None) -> Extent | None:
        return extent and placed[_Origin.of(source, extent)].moved(extent)

    tensor = source.tensor
    slices = tuple([SliceRef(part.spec, move(part.extent)) for part in tensor.slices])
    return TensorRef(source.key, tensor.dtype, tensor.shape, move(tensor.extent), slices)


def _relocate(shard: int, ranges: Sequence[ByteRange]) -> Callable[[Extent], Extent]:
    if len(ranges) == 1:  # as in every shard that is linked: 10,000 searches for it would take 10 ms
        shift = ranges[0].target - ranges[0].source
        return lambda extent: Extent(shard, extent.offset + shift, extent.size, extent.crc32c)
    starts = [piece.source for piece in ranges]

    def move(extent: Extent) -> Extent:
        piece = ranges[bisect_right(starts, extent.offset) - 1]
        offset = piece.target + extent.offset - piece.source
        return Extent(shard, offset, extent.size, extent.crc32c)

    return move


def needs_rewrite(source: TensorSource) -> bool:
    """True if the stored bytes of a source must be rewritten to be served: cast, moved, or divided anew."""
    if source.is_verbatim:
        return source.tensor.dtype not in JOINABLE and not _is_stored_as_served(source)
    return True


class Move(WriteShard, frozen=True, kw_only=True):
    """A task that writes a shard of rows that move, are cast or are copied."""

    operation: ClassVar[str] = "move"

    sections: tuple[MovedRows | QuantisedRows, ...]


class Moved(Struct, frozen=True):
    """A source, and the boxes of it that a section of a written shard holds."""

    source: TensorSource
    boxes: tuple[SliceSpec, ...]


def divide(source: TensorSource, files: Sources, catalog: Catalog, task_bytes: int) -> Iterator[Place[Moved]]:
    """Yield the places to be written for a source: one, or several for a large table.

    Moved rows are written in the boxes that the graph restores; values that are only cast keep the stored
    boxes. Each box of a mapped table is one place, however large: a variable is mapped from one file. Stored
    runs are registered in `files`; `task_bytes` decides which tables are large. While iterating, raises
    MappingError if values would have to move into or out of boxes that are not ranges of whole rows.
    """
    tensor = source.tensor
    is_served_so = source.is_mapped or source.is_in_8_bits or _moves_rows(source)
    outputs = _boxes_served(source) if is_served_so else _boxes_stored(tensor)
    stored = [(box, files.range_of(run), run) for box, run in stored_runs(catalog, tensor)]
    has_rows = tensor.is_complete and tensor.dtype.itemsize is not None
    if not has_rows or any(box.lengths[1:] != box.full_shape[1:] for box in outputs):
        for box, whole, run in stored:
            yield _as_stored(source, box, whole, run)
        return
    reads = _Boxes((box for box, _, _ in stored), source.gather_parts)
    writes = _Boxes(outputs, source.scatter_parts)
    count = tensor.shape[0] if tensor.shape else 1
    ranges = [whole for _, whole, _ in stored]
    if source.is_mapped:
        for rows in map(_rows_of, outputs):
            yield replace(_rows(source, reads, ranges, writes, rows.start, rows.stop), alone=True)
        return
    step = _rows_at_once(source, count, task_bytes)
    for start in range(0, max(1, count), step):  # an empty tensor has one place, too, for its index entry
        yield _rows(source, reads, ranges, writes, start, min(start + step, count))


def _rows_at_once(source: TensorSource, count: int, task_bytes: int) -> int:
    """Return how many of a source's `count` rows are written to one place, at least 1."""
    tensor = source.tensor
    most = piece_bytes(tensor.bytes_, task_bytes)
    # pieces become slices, which RestoreV2 joins of these types alone
    if source.dtype not in JOINABLE or not tensor.shape or most is None:
        return max(1, count)
    # each piece begins at a multiple of the turns of both sides: see `_Boxes.shares`
    turn = math.lcm(source.gather_parts or 1, source.scatter_parts or 1)
    row_bytes = max(1, tensor.bytes_ // max(1, count))
    return max(1, most // row_bytes // turn) * turn


def boxes_written(written: Placed[Moved]) -> Iterator[tuple[str, DType, SliceRef]]:
    """Yield key, dtype and slice of each box that was written.

    Empty boxes are left out, except if the whole tensor is empty.
    """
    moved, section = written.place.what, written.place.section
    assert isinstance(section, MovedRows)
    for box, count, extent in zip(moved.boxes, section.counts, written.extents, strict=True):
        if count or not math.prod(box.full_shape):
            yield moved.source.key, moved.source.dtype, SliceRef(moved.source.stored(box), extent)


def _rounded(written: Iterable[Placed[Moved]]) -> dict[str, Rounding]:
    """Return the rounding of each table in 8 bits, by key, joined from the counts of all its tasks."""
    errors: dict[str, RowErrors] = defaultdict(RowErrors)
    for each in written:
        if isinstance(each.place.section, QuantisedRows):
            errors[each.place.what.source.key].join(RowErrors.of(each.counts))
    return {key: Rounding(found.largest, found.mean) for key, found in errors.items()}


def _as_stored(source: TensorSource, box: SliceSpec, whole: Range, run: Stored) -> Place[Moved]:
    """Return the place of one stored box, copied or cast without a change of layout.

    `whole` is the range of bytes of the box, `run` the same in the checkpoint.
    """
    what = Moved(source, (box,))
    if source.tensor.dtype.itemsize is None:
        return Place(MovedRows.copied(source.key, whole), what, run)
    width = math.prod(box.lengths)
    section = MovedRows(source.key, source.tensor.dtype, source.dtype, width, (whole,), False, (1,), False)
    return Place(section, what)


def _rows(
    source: TensorSource, reads: _Boxes, ranges: Sequence[Range], writes: _Boxes, start: int, stop: int
) -> Place[Moved]:
    """Return the place of rows `start` to `stop` of a source's tensor.

    `reads` are the stored boxes, `ranges` the byte range of each, `writes` the boxes to write.
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
    kind = QuantisedRows if source.is_in_8_bits else MovedRows
    section = kind(
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
    """The boxes of a tensor in the order of their rows.

    With `turns` (mod partitions), row n is in box n modulo `turns`; 0 means consecutive rows (div).
    """

    def __init__(self, boxes: Iterable[SliceSpec], turns: int) -> None:
        self.boxes, self._turns = sorted(boxes, key=lambda box: box.starts), turns
        self._stops = [_rows_of(box).stop for box in self.boxes]

    def shares(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield each box with rows of `start` to `stop`: its number, its own first and last row (exclusive).

        With turns every box has a share, and `start` must be a multiple of `turns`. Without turns, boxes
        without such rows are left out, except that an empty range has a share in a box at its place.
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
    """Return the range of rows of a box in the whole tensor; a scalar is one row."""
    if not box.full_shape:
        return range(1)
    return range(box.starts[0], box.starts[0] + box.lengths[0])


def _cut(box: SliceSpec, first: int, last: int) -> SliceSpec:
    """Return the part of a box with its rows `first` to `last` (excluded), counted within the box.

    A scalar stays whole.
    """
    if not box.full_shape:
        return box
    starts = (box.starts[0] + first, *box.starts[1:])
    return SliceSpec(box.full_shape, starts, (last - first, *box.lengths[1:]))


def _moves_rows(source: TensorSource) -> bool:
    """True if values have to be laid out anew.

    False if every stored box is served unchanged, or RestoreV2 can join and cut them. Raises MappingError if
    values have to be laid out anew and a part is not a range of whole rows.
    """
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
    """True if values are complete numbers in boxes of whole rows, in checkpoint and graph."""
    boxes = [*_boxes_stored(source.tensor), *_boxes_served(source)]
    whole = all(box.lengths[1:] == box.full_shape[1:] for box in boxes)
    return whole and source.tensor.is_complete and source.tensor.dtype.itemsize is not None


def _boxes_stored(tensor: TensorRef) -> list[SliceSpec]:
    return [part.spec for part in tensor.slices if part.extent is not None] or [SliceSpec.whole(tensor.shape)]


def _boxes_served(source: TensorSource) -> list[SliceSpec]:
    return sorted({variable.box for variable in source.variables}, key=lambda box: box.starts)


def why_not_by_rows(source: TensorSource) -> str:
    """Return the reason why a source's values cannot be written row by row; "" if they can."""
    if source.tensor.dtype.itemsize is None or not source.tensor.shape:
        return "it is not an array of rows"
    return "" if _has_whole_rows(source) else "its parts are not ranges of whole rows"


def why_not_mapped(source: TensorSource) -> str:
    """Return the reason why the variables of a source cannot each have a file of their own.

    "" if they can.
    """
    if why := why_not_by_rows(source):
        return why
    if source.scatter_parts or (source.gather_parts and len(_boxes_served(source)) > 1):
        return "its rows take turns in its parts (mod)"
    return ""


class ServedRun(Struct, frozen=True):
    """A variable in a bundle: its box as stored, and the box's extent.

    `extent` is None if the box is stored in several extents.
    """

    variable: GraphVariable
    box: SliceSpec
    extent: Extent | None


def served_runs(source: TensorSource, written: Catalog) -> Iterator[ServedRun]:
    """Yield each variable of a source, in order, with its box and extent in a written bundle.

    While iterating, raises KeyError if the bundle lacks the source's tensor.
    """
    runs = {box: run.extent for box, run in stored_runs(written, written.tensors[source.key])}
    for variable in source.variables:
        box = source.as_stored(variable).box
        yield ServedRun(variable, box, runs.get(box))


def own_file(run: ServedRun, written: Catalog) -> tuple[str, int]:
    """Return the name and size in bytes of a mapped variable's own file, which includes its hot rows.

    The caller must know that it has one: AssertionError otherwise.
    """
    name, extent = run.variable.served_name, run.extent
    whole = written.tensors.get(names_of(name)[0])
    end = whole.bytes_ if whole is not None else 0 if extent is None else extent.size
    is_alone = extent is not None and (extent.offset, end) == (0, written.shard_sizes[extent.shard])
    assert extent is not None and is_alone, f"{name} has no file of its own"
    return written.path_of(extent).name, end


def mapped_files(mapping: VariableMapping, written: Catalog) -> dict[str, str]:
    """Return the file name in `variables/` of each mapped variable, by node.

    Each must have a file of its own. Raises KeyError if the bundle lacks one of their tensors.
    """
    mapped = (source for source in mapping.sources if source.is_mapped)
    runs = (run for source in mapped for run in served_runs(source, written))
    return {run.variable.node: own_file(run, written)[0] for run in runs}
