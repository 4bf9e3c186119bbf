"""Write the shards of a bundle by the tasks of one job, and compare the checksums of the bytes read.

A planner says which sections there are (`Place`). The rest is the same for all planners: consecutive sections
go into shards of bounded size, one task each; receipts report the place of each section; and every stored run
that was read, in however many ranges, must have the checksum in its index.

Some inputs were made by the command itself: indexes of tables, archives as bundles. Their paths differ when
the command is run again, and workers elsewhere do not see them. So a plan names them by their contents, and
those workers read a copy in the job's directory.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from exporter.catalog import Catalog, Extent, SliceRef, SliceSpec, TensorRef
from exporter.checkpoint.tensor_bundle import check_values, shard_path
from exporter.checkpoint.tensor_values import compare_checksum
from exporter.errors import os_error
from exporter.jobs.runner import Job, Runner
from exporter.jobs.shard_sections import Section, WriteShard
from exporter.jobs.task import Input, Range, RangeChecksums, Receipt, Task, batches
from exporter.newer_python import sha256_of
from exporter.storage.files import regular_file
from exporter.storage.layout import INPUTS_DIRECTORY
from exporter.storage.output_directory import Directory, new_file
from exporter.terminal.progress import Progress
from exporter.wire.crc32c import mask
from exporter.wire.dtypes import DType

T = TypeVar("T")


class Stored(Struct, frozen=True):
    """A tensor, or a slice of one, of which tasks read every byte."""

    catalog: Catalog
    tensor: TensorRef
    part: SliceRef | None = None

    @property
    def extent(self) -> Extent:
        """The extent of the tensor, or of its slice `part`; it must be stored in a bundle."""
        found = self.tensor.extent if self.part is None else self.part.extent
        assert found is not None
        return found


def stored_runs(catalog: Catalog, tensor: TensorRef) -> list[tuple[SliceSpec, Stored]]:
    """Return the stored slices of a tensor, or the whole, in the order of rows: each with its box.

    Slices that are not stored are left out.
    """
    if tensor.extent is not None:
        return [(SliceSpec.whole(tensor.shape), Stored(catalog, tensor))]
    parts = sorted(tensor.slices, key=lambda part: part.spec.starts)
    return [(part.spec, Stored(catalog, tensor, part)) for part in parts if part.extent is not None]


class Sources:
    """Numbers the files that tasks read, and compares the checksums of the stored runs in them.

    `hint` is the hint of the error if a checksum that tasks reported differs.
    """

    def __init__(self, hint: str = "") -> None:
        self._numbers: dict[Path, int] = {}
        self._paths: list[Path] = []
        self._inputs: dict[int, Input] = {}
        self._runs: dict[Range, Stored] = {}
        self._ending: dict[tuple[int, int], list[Range]] = defaultdict(list)
        self._checksums = RangeChecksums[int]()
        self._hint = hint

    def range_of(self, stored: Stored) -> Range:
        """Register a stored run, which tasks will read, and return its range in a numbered file.

        A run that is registered already keeps its number.
        """
        extent = stored.extent
        path = stored.catalog.path_of(extent)
        number = self._numbers.setdefault(path, len(self._paths))
        if number == len(self._paths):
            self._paths.append(path)
        found = Range(number, extent.offset, extent.size)
        if found not in self._runs:
            self._runs[found] = stored
            self._ending[number, extent.offset + extent.size].append(found)
        return found

    def input(self, number: int) -> Input:
        """Return the file with this number, pinned when first asked for.

        CheckpointChanged if it no longer exists then, CheckpointError if it cannot be reached.
        """
        if number not in self._inputs:
            self._inputs[number] = Input.of(self._paths[number])
        return self._inputs[number]

    def note(self, part: Range, crc: int) -> None:
        """Record the plain crc32c of a range; if a stored run ends there, compare the run's checksum.

        CorruptFile if it differs from the index's. A run with ranges that are not recorded waits for `check`.
        """
        self._checksums.add(part.input, part.offset, part.size, crc)
        for run in self._ending[part.input, part.offset + part.size]:
            self._compare(run)

    def check(self) -> None:
        """Compare the checksums of the runs that `note` left out, as ranges came late or were not read.

        Runs with ranges that no task read, and runs of strings, are read here. CorruptFile if a checksum
        differs, CheckpointChanged if a file vanished or shrank, CheckpointError if it cannot be read.
        """
        for run in list(self._runs):
            if not self._compare(run):
                stored = self._runs[run]
                check_values(stored.catalog, stored.tensor, stored.part)

    def _compare(self, run: Range) -> bool:
        """Compare a run's checksum, unless that was done; CorruptFile if it differs.

        Returns False if not all of its ranges are known, or if its checksum does not cover the plain bytes,
        as for strings.
        """
        stored = self._runs.get(run)
        if stored is None:  # compared before
            return True
        if stored.tensor.dtype.itemsize is None:
            return False
        crc = self._checksums.of(run.input, run.offset, run.size)
        if crc is None:
            return False
        path = stored.catalog.path_of(stored.extent)
        compare_checksum(path, stored.tensor.name, stored.extent, mask(crc), hint=self._hint)
        del self._runs[run]
        return True


class Place(Struct, Generic[T], frozen=True):
    """A section to write, with the planner's own record of it (`what`) and the stored run that it copies.

    `copied` is None if it copies none. With `alone` it gets a shard of its own, of any size: its bytes begin
    at offset 0.
    """

    section: Section
    what: T
    copied: Stored | None = None
    alone: bool = False


class Placed(Struct, Generic[T], frozen=True):
    """A section that was written: the extent of each of its runs, and its counts."""

    place: Place[T]
    extents: tuple[Extent, ...]
    counts: tuple[int, ...]


class NewShards(Struct, Generic[T], frozen=True):
    """The receipts of a job, one for each shard, and the places of all sections, in order."""

    receipts: tuple[Receipt, ...]
    placed: tuple[Placed[T], ...]


class ShardJob(Generic[T]):
    """The tasks that write shards `prefix`.data-*, all of the kind `operation`.

    A task gets consecutive sections of about `task_bytes` together; sections that are `alone` come last, each
    with a task of its own. The caller may write shards of its own before and after those of the tasks.
    """

    def __init__(
        self, operation: type[WriteShard], sources: Sources, places: Iterable[Place[T]], task_bytes: int
    ) -> None:
        self._operation, self._sources = operation, sources
        together: list[Place[T]] = []
        alone: list[list[Place[T]]] = []
        for place in places:
            if place.alone:
                alone.append([place])
            else:
                together.append(place)
        self._batches = [*batches(together, task_bytes, lambda place: place.section.bytes_), *alone]
        self.job: Job | None = None
        """The job, once it ran: to be left (it is a context manager) once its shards are published."""

    @property
    def tasks(self) -> int:
        """The number of tasks, each of which writes one shard."""
        return len(self._batches)

    @property
    def bytes_(self) -> int:
        """The number of bytes that the tasks read, in total."""
        return sum(map(_bytes_read, self._batches))

    @property
    def places(self) -> Iterator[Sequence[Place[T]]]:
        """The sections that each task writes, one sequence for each task."""
        return iter(self._batches)

    def append(self, place: Place[T]) -> None:
        """Add a section at the end of the last task; IndexError if there is no task."""
        self._batches[-1].append(place)

    def run(
        self,
        stack: ExitStack,
        runner: Runner,
        prefix: Path,
        *,
        before: int = 0,
        behind: int = 0,
        made: Path | None = None,
        progress: Progress | None = None,
    ) -> NewShards[T]:
        """Run the tasks, compare the checksums of all that they read, and return the places of all sections.

        Waits for all tasks; the shards are then beside `prefix`. The job is left (see `Job`) when `stack`
        closes, which must not be before its shards are published. `before` and `behind` are the numbers of
        shards that the caller writes. Files below `made` were made by the command itself, for this run; None
        if there are none. `progress` advances by each task's bytes.

        Raises:
            CorruptFile: a checksum differs.
            CheckpointError: an input cannot be read; CheckpointChanged if it changed.
            PublishError: it, or a subclass: a directory or a shard cannot be made.
            UsageError: a store for the job cannot be opened.
            EngineFailed: the engine ends early.
            ExportError: a task's own failure, as its own class.
        """
        shards = before + self.tasks + behind
        names = (shard_path(prefix, before + number, shards).name for number in range(self.tasks))
        tasks = [self._task(batch, name) for batch, name in zip(self._batches, names, strict=True)]
        job = self.job = _begun(tasks, runner, made, os.fspath(prefix.parent), stack)
        receipts: list[Receipt] = []
        placed: list[Placed[T]] = []
        for batch, receipt in zip(self._batches, job.receipts(progress), strict=True):
            ranges = (each for place in batch for each in place.section.ranges)
            for each, crc in zip(ranges, receipt.read, strict=True):
                self._sources.note(each, crc)
            placed += _placed(before + len(receipts), batch, receipt)
            receipts.append(receipt)
        self._sources.check()  # before any shard of a kept job is shown: none may be made of damaged bytes
        for receipt in receipts if job.is_kept else ():
            job.directory.show(receipt.task, prefix.parent / receipt.task, receipt.written, receipt.tag)
        return NewShards(tuple(receipts), tuple(placed))

    def _task(self, batch: Sequence[Place[Any]], name: str) -> WriteShard:
        used = sorted({each.input for place in batch for each in place.section.ranges})
        numbers = {number: at for at, number in enumerate(used)}
        return self._operation(
            name=name,
            inputs=tuple(map(self._sources.input, used)),
            bytes_=_bytes_read(batch),
            sections=tuple(place.section.renumbered(numbers) for place in batch),
        )


def _bytes_read(batch: Sequence[Place[Any]]) -> int:
    return sum(each.size for place in batch for each in place.section.ranges)


def _begun(
    tasks: Sequence[WriteShard], runner: Runner, made: Path | None, scratch: str, stack: ExitStack
) -> Job:
    """Enter the job of these tasks as a context of `stack`, which leaves it on closing; return it.

    If the runner keeps jobs, files below `made` (None: there are none) are named by content in the job's
    plan, and copied for workers elsewhere; else outputs go to the directory `scratch`, which is made.
    PublishError and subclasses if a file cannot be read or copied, or a directory not be made;
    CheckpointError or UsageError if a store cannot be opened or read.
    """
    if made is None or not runner.kept:
        return stack.enter_context(runner.job(tasks, scratch))
    named, files = named_by_content(tasks, made)
    job = stack.enter_context(runner.job(named, scratch))
    if not runner.sees_our_files:
        files = {name: _copied(name, file, job.directory) for name, file in files.items()}
    job.tasks = with_inputs(named, files)
    return job


def _placed(shard: int, batch: Sequence[Place[T]], receipt: Receipt) -> Iterator[Placed[T]]:
    """Yield each section of a shard with the extents of its runs and its counts, from the task's receipt.

    `shard` is the shard's number; `batch` has the sections in order. The runs follow each other from offset
    0. Checksums are masked, as in an index; a copied run keeps the checksum of its source.
    """
    crcs, numbers, offset = iter(receipt.wrote), iter(receipt.counts), 0
    for place in batch:
        counts = tuple(islice(numbers, place.section.counted))
        extents = []
        for size in place.section.sizes(*counts):
            crc = mask(next(crcs))
            if place.copied is not None:  # a string's checksum does not cover just its bytes
                crc = place.copied.extent.crc32c
            extents.append(Extent(shard, offset, size, crc))
            offset += size
        yield Placed(place, tuple(extents), counts)


def tensors_of(boxes: Iterable[tuple[str, DType, SliceRef]]) -> Iterator[TensorRef]:
    """Yield the tensors of an index for boxes (key, dtype, slice) that were written: whole, or in slices.

    They are in the order of their first boxes, slices in the order of their starts.
    """
    found: dict[tuple[str, DType], list[SliceRef]] = defaultdict(list)
    for key, dtype, part in boxes:
        found[key, dtype].append(part)
    for (key, dtype), parts in found.items():
        shape = parts[0].spec.full_shape
        if parts[0].spec.is_full:
            yield TensorRef(key, dtype, shape, parts[0].extent)
        else:
            slices = tuple(sorted(parts, key=lambda part: part.spec.starts))
            yield TensorRef(key, dtype, shape, slices=slices)


AnyTask = TypeVar("AnyTask", bound=Task)


def named_by_content(tasks: Iterable[AnyTask], made: Path) -> tuple[list[AnyTask], dict[Input, Input]]:
    """Return the tasks with inputs below `made` named by digest, and the files by these names.

    The files are read; PublishError and subclasses if one cannot be read.
    """
    tasks = list(tasks)
    below = f"{made.absolute()}{os.sep}"
    files = {each for task in tasks for each in task.inputs if each.place.startswith(below)}
    names = {each: _named(each) for each in files}
    return with_inputs(tasks, names), {name: each for each, name in names.items()}


def with_inputs(tasks: Iterable[AnyTask], others: Mapping[Input, Input]) -> list[AnyTask]:
    """Return the tasks with each input that is a key of `others` replaced by its value."""
    return [replace(task, inputs=tuple(others.get(each, each) for each in task.inputs)) for task in tasks]


def _named(file: Input) -> Input:
    """Return the input named by the digest of its contents, which are read; its tag is the digest, too.

    PublishError or a subclass if the file cannot be read.
    """
    try:
        with regular_file(Path(file.place)) as content:
            digest = sha256_of(content)
    except OSError as error:
        raise os_error(error, Path(file.place)) from error
    return Input(f"{INPUTS_DIRECTORY}/{digest}", file.size, digest)


def _copied(name: Input, file: Input, directory: Directory) -> Input:
    """Return the copy of a named file in the job's directory, made unless one of its size exists.

    PublishError or a subclass if it cannot be made, CheckpointError if a store cannot be read.
    """
    found = directory.look(name.place)
    if found is None or found[0] != name.size:
        with new_file(directory.scratch) as (_, copy):
            try:
                shutil.copyfile(file.place, copy)
            except OSError as error:
                raise os_error(error, copy) from error
            found = name.size, directory.put_file(name.place, copy)
    return Input(f"{directory.place}/{name.place}", *found)
