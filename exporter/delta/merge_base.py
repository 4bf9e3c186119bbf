"""Write the variables of a base with deltas applied on top: each byte is read once, by tasks.

This makes merged bases, and bases that begin with a trainer's increments.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from msgspec.structs import replace

from exporter.catalog import SliceRef, SliceSpec
from exporter.checkpoint.tensor_bundle import BundleWriter, encode_index, index_path, shard_path
from exporter.delta.delta_files import DeltaTensors
from exporter.delta.format import Schema, ServedVariable
from exporter.delta.layered_state import LayeredState
from exporter.delta.merge_deltas import copied_value, newest_value
from exporter.delta.newest_rows import Merge, NewestRows, table_sections
from exporter.delta.row_reader import RowReader, SliceOrder
from exporter.jobs.runner import Runner
from exporter.jobs.shard_job import Place, Placed, ShardJob, Sources, Stored, stored_runs, tensors_of
from exporter.jobs.task import Range
from exporter.mapping.mapping_spec import MappingSpec
from exporter.storage.layout import VARIABLES_PREFIX
from exporter.terminal.progress import Progress
from exporter.wire.dtypes import Array, DType

_BLOCK_BYTES = 4 << 20


class BaseMerger:
    """Writes the variables of a base, `stored`, with `deltas` applied on top, oldest first.

    Variables that servers map, `mapped`, get files of their own.
    """

    def __init__(
        self,
        bundle: Path,
        mapping_spec: MappingSpec,
        schema: Schema,
        stored: Mapping[str, RowReader],
        deltas: Sequence[DeltaTensors],
        *,
        task_bytes: int,
        mapped: Collection[str] = (),
        hint: str = "",
    ) -> None:
        self._prefix = bundle / VARIABLES_PREFIX
        self._sources = mapping_spec.sources()
        self._variables = {variable.name: variable for variable in schema.variables}
        self._stored, self._deltas = stored, deltas
        self._mapped = mapped
        self._files = Sources(hint)
        self._left: list[tuple[str, SliceSpec | None, str]] = []
        self._job = ShardJob(Merge, self._files, self._places(task_bytes), task_bytes)
        self.tasks = self._job.tasks

    @property
    def bytes_(self) -> int:
        """The number of bytes that all tasks read."""
        return self._job.bytes_

    def write(
        self,
        stack: ExitStack,
        runner: Runner,
        state: Callable[[], LayeredState],
        progress: Progress | None = None,
    ) -> None:
        """Write the bundle in `variables/`, which must not exist; wait for all tasks.

        The job of the tasks is exited when `stack` closes: a job that the runner keeps is then removed,
        except after an error that a second run may overcome (see `Job`). `state` returns the values that the
        base stores in boxes that are not ranges of rows: no task writes these. `progress` advances by the
        bytes that tasks read; None reports nothing.

        Raises:
            CorruptFile: a checksum differs.
            CheckpointError: a file changed or cannot be read.
            EngineFailed: the engine of `runner` failed.
            UsageError: the store in which `runner` keeps jobs cannot be opened.
            OSError, PublishError and subclasses: `variables/` exists, a file cannot be written, or a kept job
                cannot be used.
        """
        self._prefix.parent.mkdir()
        others = bool(self._left) or not self.tasks  # a bundle has at least one shard
        placed = self._job.run(stack, runner, self._prefix, behind=others, progress=progress).placed
        left = self._write_left(state) if others else ()
        tensors = list(tensors_of((*self._boxes(placed), *left)))
        index_path(self._prefix).write_bytes(encode_index(tensors, self.tasks + others))

    def _places(self, task_bytes: int) -> Iterator[Place[str]]:
        """Yield the sections that tasks write, each with the name of its variable.

        Values that no task can write are noted for `_write_left`. While iterating, raises CorruptFile if
        slices in a delta do not match, CheckpointChanged or CheckpointError if a file is gone or cannot be
        read, DiskFull or PublishError if bytes fetched from a store cannot be kept.
        """
        for source in self._sources:
            if not source.variables:  # the keys or values of a lookup table
                yield from self._copied(source.key, source.key, None)
            for part in source.variables:
                variable = self._variables[part.served_name]
                runs = self._runs(variable) if variable.is_table else []
                if not runs:
                    yield from self._copied(variable.name, source.key, part.part and source.stored(part.part))
                    continue
                is_mapped = variable.name in self._mapped  # from one file: one task writes all of it
                sections = table_sections(
                    variable,
                    self._deltas,
                    self._files,
                    packing=None,
                    task_bytes=sys.maxsize if is_mapped else task_bytes,
                    base=runs,
                )
                yield from (Place(section, variable.name, alone=is_mapped) for section in sections)

    def _copied(self, name: str, key: str, part: SliceSpec | None) -> Iterator[Place[str]]:
        """Yield at most one section, which copies a whole value.

        It copies from the newest delta that has the value, else from the base. `name` is the value's
        variable. If no extent holds the value, it is noted for `_write_left`, with the tensor's key and its
        box (None: all of it).
        """
        copied = newest_value(name, self._deltas) if not self._variables[name].is_table else None
        reader = self._stored[name]
        if copied is None and reader.extent is not None:
            run = next((run.part for run in reader.runs if run.extent == reader.extent), None)
            copied = Stored(reader.catalog, reader.tensor, run)
        if copied is None:
            self._left.append((key, part, name))
        else:
            yield copied_value(name, copied, self._files)

    def _runs(self, variable: ServedVariable) -> list[tuple[int, Range]]:
        """Return the runs of whole rows in which the base stores a table, in the order of the rows.

        Each is a count of rows and a range of bytes. Empty if they are not stored so: cast, in another order,
        in columns, or incomplete. The stored runs are registered in the job's files.
        """
        reader = self._stored[variable.name]
        tensor, box = reader.tensor, reader.box
        if reader.order != SliceOrder() or reader.dtype is not tensor.dtype or not _has_whole_rows(box):
            return []
        runs: list[tuple[int, Range]] = []
        at, end = box.starts[0], box.starts[0] + box.lengths[0]
        for spec, stored in stored_runs(reader.catalog, tensor):
            first, count = spec.starts[0], spec.lengths[0]
            if not _has_whole_rows(spec):
                return []
            low, high = max(first, at), min(first + count, end)
            if low >= high:
                continue
            if low != at:
                return []
            whole = self._files.range_of(stored)
            row = whole.size // count
            run = Range(whole.input, whole.offset + (low - first) * row, (high - low) * row)
            runs.append((high - low, run))
            at = high
        return runs if at == end else []

    def _write_left(self, state: Callable[[], LayeredState]) -> Iterator[tuple[str, DType, SliceRef]]:
        """Write the last shard, of values that no task writes; yield key, dtype and box of its tensors.

        Nothing is written before the first item is asked for. `state` returns the values. Raises CorruptFile
        if a checksum differs, CheckpointError (and subclasses) if values cannot be read, OSError, DiskFull or
        PublishError if the shard, or bytes fetched from a store, cannot be written.
        """
        aside = self._prefix.with_name("left")
        values = state()
        with BundleWriter(aside) as writer:
            for key, part, name in self._left:
                variable = self._variables[name]
                if variable.is_table:
                    values.stored[name].fetch()  # it is read twice: to verify its checksums, and to write it
                    values.check([name])
                    writer.add_chunks(
                        key, variable.dtype, variable.shape, _row_blocks(values, variable), part
                    )
                else:
                    writer.add(key, values.whole(name), part)
        # Its tensors get entries in the index of all shards; its own index is of no use.
        shard_path(aside, 0, 1).rename(shard_path(self._prefix, self.tasks, self.tasks + 1))
        index_path(aside).unlink()
        for tensor in writer.tensors:
            whole = [SliceRef(SliceSpec.whole(tensor.shape), tensor.extent)] if tensor.extent else []
            for part_ in (*tensor.slices, *whole):
                assert part_.extent is not None
                extent = replace(part_.extent, shard=self.tasks)
                yield tensor.name, tensor.dtype, SliceRef(part_.spec, extent)

    def _boxes(self, placed: Sequence[Placed[str]]) -> Iterator[tuple[str, DType, SliceRef]]:
        """Yield key, dtype and box of each tensor that tasks wrote.

        `placed` are the sections, each with its extents.
        """
        found: dict[str, list[Placed[str]]] = defaultdict(list)
        for each in placed:
            found[each.place.what].append(each)
        for source in self._sources:
            parts = [(v.served_name, v.part and source.stored(v.part)) for v in source.variables]
            for name, part in parts or [(source.key, None)]:
                for each in found.get(name, ()):
                    box = part or SliceSpec.whole(self._shape(each, name))
                    section = each.place.section
                    if isinstance(section, NewestRows):
                        box = _rows_of_box(box, section.low, section.high)
                    yield source.key, self._variables[name].dtype, SliceRef(box, each.extents[0])

    def _shape(self, each: Placed[str], name: str) -> tuple[int, ...]:
        """Return the shape of the variable `name`, which `each` holds.

        For the contents of a lookup table, the shape of the value that was copied.
        """
        variable, copied = self._variables[name], each.place.copied
        if variable.contents is None or copied is None:
            return variable.shape
        is_of_base = copied.catalog is self._stored[name].catalog
        # In a delta the value has a first dimension of 1.
        return copied.tensor.shape[0 if is_of_base else 1 :]


def _has_whole_rows(box: SliceSpec) -> bool:
    return bool(box.full_shape) and box.lengths[1:] == box.full_shape[1:]


def _rows_of_box(box: SliceSpec, low: int, high: int) -> SliceSpec:
    starts = (box.starts[0] + low, *box.starts[1:])
    return SliceSpec(box.full_shape, starts, (high - low, *box.lengths[1:]))


def _row_blocks(state: LayeredState, variable: ServedVariable) -> Iterator[Array]:
    """Yield a table's rows in order, in blocks of at most 4 MiB, or of one larger row."""
    step = max(1, _BLOCK_BYTES // max(1, variable.row_bytes))
    for start in range(0, variable.shape[0], step):
        yield state.rows(variable.name, start, min(start + step, variable.shape[0]))
