"""Write `variables/`: a new index under the served names, over shards that are hard links where possible.

Each shard that holds a served tensor becomes one shard of the bundle: linked, copied or compacted. Tensors
whose bytes change (see `rewrite`) are written by tasks, a shard each. Checksums come from the source's index.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from enum import Enum
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from exporter.bundle import kernel_copy, rewrite
from exporter.bundle.kernel_copy import ByteRange
from exporter.bundle.link import NewFile, link_shard
from exporter.catalog import Catalog, Extent, SliceRef, TensorRef
from exporter.checkpoint.tensor_bundle import MAX_SHARDS, encode_index, index_path, shard_path
from exporter.errors import LinkRefused, UsageError
from exporter.files import writing
from exporter.jobs.runner import LOCAL, Job, Runner
from exporter.jobs.shard_job import ShardJob, Sources, tensors_of
from exporter.layout import VARIABLES_DIRECTORY, VARIABLES_NAME
from exporter.mapping.build import TensorSource, VariableMapping
from exporter.options import DataMode
from exporter.progress import NoProgress, Progress, human_bytes
from exporter.storage import mirror

_COPIES = 4  # at a time: they wait for disks more than for processors
_WHY = "cast, or rows in another layout"
_IN_STORE = "the model is in an object store"


class ShardOrigin(Enum):
    """How a shard of the bundle came to be."""

    LINKED = "linked"
    COPIED = "copied"
    COMPACTED = "compacted"
    REWRITTEN = "rewritten"


class ShardReport(Struct, frozen=True):
    """One shard of the bundle: what it was made from (None: several), how, why not by a link, its bytes."""

    path: Path
    source: Path | None
    how: ShardOrigin
    why: str
    bytes_: int


class VariablesReport(Struct, frozen=True):
    """What `variables/` holds now, and how each shard got there. `catalog` is the bundle's own."""

    catalog: Catalog
    shards: tuple[ShardReport, ...]
    work: tuple[int, int] = (0, 0)
    """How many tasks wrote some of them, and how many bytes these read."""
    job: Job | None = None
    """What wrote some of them, to be left (it is a context manager) once they are published."""

    def bytes_of(self, *how: ShardOrigin) -> int:
        """Bytes of the shards that were made in one of these ways."""
        return sum(shard.bytes_ for shard in self.shards if shard.how in how)

    @property
    def bytes_linked(self) -> int:
        """Bytes that were hard-linked."""
        return self.bytes_of(ShardOrigin.LINKED)

    @property
    def bytes_copied(self) -> int:
        """Bytes copied as they are."""
        return self.bytes_of(ShardOrigin.COPIED, ShardOrigin.COMPACTED)

    @property
    def bytes_rewritten(self) -> int:
        """Bytes that were cast, or laid out anew."""
        return self.bytes_of(ShardOrigin.REWRITTEN)


def as_rewritten(report: VariablesReport, source: Path, why: str) -> VariablesReport:
    """The report for bytes that were written anew into a bundle of our own before they were moved here."""
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
    """Write `directory/variables`, which must not be there; nothing is written for a model without variables.

    Shards below `made` are the command's own: see `exporter.jobs.shard_job`. `progress` advances by bytes,
    from several threads.

    Raises:
        CheckpointChanged: a shard vanished or changed since the catalog was read.
        CorruptFile: a checksum of a tensor that is rewritten is wrong.
        LinkRefused: `data` is LINK and a shard cannot be linked, or the server could not read it.
        MappingError: a value does not fit the dtype it is cast to.
        PublishError: the target cannot be written; DiskFull if there is no space.
        UsageError: tasks are so small that there would be more shards than a bundle may have.
    """
    prefix = directory / VARIABLES_DIRECTORY / VARIABLES_NAME
    if not mapping.sources:
        return VariablesReport(Catalog(_FAMILY, prefix, {}, (), ()), ())
    with writing(prefix.parent):
        prefix.parent.mkdir(parents=True)
        with ThreadPoolExecutor(_COPIES, "bundle") as pool:
            return _Writer(mapping, prefix, data, pool, runner, made, progress or NoProgress()).run()


def size_of_work(mapping: VariableMapping, model: Path, task_bytes: int) -> tuple[int, int]:
    """How many tasks an export of the mapping to a model has, and how many bytes they read.

    Raises:
        MappingError: values would have to move out of, or into, parts that are not ranges of whole rows.
        UsageError: tasks are so small that there would be more shards than a bundle may have.
    """
    _, moved = _divided(mapping, model)
    job = _job(mapping.catalog, moved, task_bytes)
    _require_few(job.tasks, task_bytes)
    return job.tasks, job.bytes_


def _job(catalog: Catalog, moved: Iterable[TensorSource], task_bytes: int) -> ShardJob[rewrite.Moved]:
    files = Sources()
    places = (place for source in moved for place in rewrite.divide(source, files, catalog, task_bytes))
    return ShardJob(rewrite.Move, files, places, task_bytes)


def _require_few(shards: int, task_bytes: int) -> None:
    """Refuse before the work what no reader would take after it."""
    if shards > MAX_SHARDS:
        raise UsageError(
            f"the values would lie in {shards:,} shards, and a bundle has at most {MAX_SHARDS:,}",
            hint=f"name a larger --task-size than {human_bytes(task_bytes)}",
        )


def _divided(mapping: VariableMapping, target: Path) -> tuple[list[TensorSource], list[TensorSource]]:
    """Sources whose shards are linked or copied, and those that tasks write: in a store, all."""
    is_in_store = mirror.find(target) is not None
    verbatim: list[TensorSource] = []
    moved: list[TensorSource] = []
    for source in mapping.sources:
        (moved if is_in_store or rewrite.is_needed(source) else verbatim).append(source)
    return verbatim, moved


_FAMILY = "TensorFlow V2, name-based"


class _Placed(Struct, frozen=True):
    """A source shard in the bundle: its report, and where its bytes went."""

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
        self._kept = _extents_by_shard(self._verbatim)
        self._moves = _job(mapping.catalog, moved, runner.task_bytes)
        self._num_shards = len(self._kept) + self._moves.tasks
        _require_few(self._num_shards, runner.task_bytes)
        self._new_file = NewFile.in_directory(prefix.parent)

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
            stack.pop_all()  # the job stays until the version is published: whoever begins again finds it
        catalog = Catalog(
            _FAMILY,
            self._prefix,
            {tensor.name: tensor for tensor in sorted(tensors, key=lambda tensor: tensor.name.encode())},
            tuple(report.path for report in reports),
            tuple(report.bytes_ for report in reports),
            step=self._catalog.step,
        )
        work = self._moves.tasks, self._moves.bytes_
        return VariablesReport(catalog, tuple(reports), work, self._moves.job)

    def _place(self, old: int, new: int) -> _Placed:
        source, size = self._catalog.shards[old], self._catalog.shard_sizes[old]
        target = shard_path(self._prefix, new, self._num_shards)
        why = f"--data {self._data.value}"
        if self._data in (DataMode.AUTO, DataMode.LINK):
            why = link_shard(source, target, size=size, new_file=self._new_file)
            if not why:
                self._progress.advance(size)
                return _Placed(ShardReport(target, source, ShardOrigin.LINKED, "", size), _renumber(new))
            if self._data is DataMode.LINK:
                raise LinkRefused(f"{source} cannot be linked to {target.parent}", cause=why)
        if self._data is DataMode.COPY:
            self._copy(source, target, [ByteRange(0, 0, size)], size)
            return _Placed(ShardReport(target, source, ShardOrigin.COPIED, why, size), _renumber(new))
        ranges = kernel_copy.coalesce((extent.offset, extent.size) for extent in self._kept[old])
        self._copy(source, target, ranges, size)
        kept = sum(piece.size for piece in ranges)
        return _Placed(ShardReport(target, source, ShardOrigin.COMPACTED, why, kept), _relocate(new, ranges))

    def _copy(self, source: Path, target: Path, ranges: Sequence[ByteRange], size: int) -> None:
        kernel_copy.copy_ranges(source, target, ranges, size=size, pool=self._pool, progress=self._progress)

    def _move(self, stack: ExitStack) -> tuple[list[TensorRef], list[ShardReport]]:
        """Run the tasks that write the last shards; an error on the stack ends their job."""
        before, runner, made = len(self._kept), self._runner, self._made
        shards = self._moves.run(
            stack, runner, self._prefix, before=before, made=made, progress=self._progress
        )
        reports = []
        for places, receipt in zip(self._moves.places, shards.receipts, strict=True):
            target = self._prefix.parent / receipt.task
            is_verbatim = all(place.section.is_verbatim for place in places)
            is_copied = is_verbatim and mirror.find(target) is not None
            how, why = (ShardOrigin.COMPACTED, _IN_STORE) if is_copied else (ShardOrigin.REWRITTEN, _WHY)
            reports.append(ShardReport(target, None, how, why, receipt.written))
        boxes = (box for placed in shards.placed for box in rewrite.boxes_written(placed))
        return list(tensors_of(boxes)), reports


def _extents_by_shard(sources: Iterable[TensorSource]) -> dict[int, list[Extent]]:
    found: dict[int, list[Extent]] = {}
    for source in sources:
        for extent in source.tensor.extents:
            found.setdefault(extent.shard, []).append(extent)
    return dict(sorted(found.items()))


def _moved(source: TensorSource, placed: dict[int, _Placed]) -> TensorRef:
    def move(extent: Extent | None) -> Extent | None:
        return extent and placed[extent.shard].moved(extent)

    tensor = source.tensor
    slices = tuple([SliceRef(part.spec, move(part.extent)) for part in tensor.slices])
    return TensorRef(source.key, tensor.dtype, tensor.shape, move(tensor.extent), slices)


def _renumber(shard: int) -> Callable[[Extent], Extent]:
    return lambda extent: Extent(shard, extent.offset, extent.size, extent.crc32c)


def _relocate(shard: int, ranges: Sequence[ByteRange]) -> Callable[[Extent], Extent]:
    starts = [piece.source for piece in ranges]

    def move(extent: Extent) -> Extent:
        piece = ranges[bisect_right(starts, extent.offset) - 1]
        offset = piece.target + extent.offset - piece.source
        return Extent(shard, offset, extent.size, extent.crc32c)

    return move
