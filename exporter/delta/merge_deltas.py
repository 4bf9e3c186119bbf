"""Write the delta that holds the newest rows and values of several deltas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from exporter.catalog import Extent, SliceRef, SliceSpec, TensorRef
from exporter.checkpoint.tensor_bundle import encode_index, index_path, shard_path
from exporter.delta.delta_files import DeltaTensors, header_tensors, tensor_keys
from exporter.delta.format import DeltaHeader, Schema, ServedVariable
from exporter.delta.newest_rows import Header, Merge, NewestRows, header_bytes, table_sections
from exporter.jobs.runner import LOCAL, Runner
from exporter.jobs.shard_job import Place, Placed, ShardJob, Sources, Stored, tensors_of
from exporter.jobs.shard_sections import MovedRows
from exporter.terminal.progress import Progress
from exporter.wire.crc32c import mask, masked_crc
from exporter.wire.dtypes import DType

_NOTHING = Extent(0, 0, 0, mask(0))


class DeltaMerger:
    """Merges `deltas`, oldest first, into the delta of a header."""

    # A small delta is written by one task as one shard. With many tasks the header has its own shard, because
    # it holds the number of rows, which is known only when all tasks are done.

    def __init__(
        self,
        prefix: Path,
        schema: Schema,
        header: DeltaHeader,
        deltas: Sequence[DeltaTensors],
        *,
        task_bytes: int = LOCAL.task_bytes,
        hint: str = "",
    ) -> None:
        self._prefix, self._schema, self._header, self._deltas = prefix, schema, header, deltas
        files = Sources(hint)
        places = sorted(self._places(files, task_bytes), key=lambda place: place.copied is not None)
        self._job = ShardJob(Merge, files, places, task_bytes)
        self.tasks = self._job.tasks
        if self.tasks == 1:
            self._job.append(Place(Header(header), ""))

    @property
    def bytes_(self) -> int:
        """The number of bytes that all tasks read."""
        return self._job.bytes_

    def write(self, stack: ExitStack, runner: Runner = LOCAL, progress: Progress | None = None) -> int:
        """Write the merged delta's bundle at its prefix; return the number of rows of all its tables.

        Waits for all tasks. The job of the tasks is exited when `stack` closes: a job that the runner keeps
        is then removed, except after an error that a second run may overcome (see `Job`). `progress` advances
        by the bytes that tasks read; None reports nothing.

        Raises:
            CorruptFile: a checksum differs, or row numbers are wrong.
            CheckpointError: a file changed or cannot be read.
            EngineFailed: the engine of `runner` failed.
            UsageError: the store in which `runner` keeps jobs cannot be opened.
            OSError, PublishError and subclasses: a file cannot be written, or a kept job cannot be used.
        """
        own = self.tasks != 1
        placed = self._job.run(stack, runner, self._prefix, behind=own, progress=progress).placed
        rows = sum(each.counts[0] for each in placed if each.counts)
        if own:
            content = b"".join(data for _, data, _ in header_bytes(self._header, rows))
            shard_path(self._prefix, self.tasks, self.tasks + 1).write_bytes(content)
        offset = 0 if own else placed[-1].extents[0].offset
        shards = self.tasks + own
        tensors = [*self._tensors(placed), *self._header_tensors(shards - 1, offset, rows)]
        index_path(self._prefix).write_bytes(encode_index(tensors, shards))
        return rows

    def _places(self, files: Sources, task_bytes: int) -> Iterator[Place[str]]:
        """Yield the sections to write, each with the name of its variable.

        These are all variables that changed, and every dense variable of strings. Stored runs are registered
        in `files`; `task_bytes` is the approximate size of a task's input. While iterating, raises
        CorruptFile if slices of ids and values in a delta do not match, CheckpointChanged or CheckpointError
        if a file is gone or cannot be read, DiskFull or PublishError if bytes fetched from a store cannot be
        kept.
        """
        for variable in self._schema.variables:
            name, packing = variable.name, self._header.packing
            if variable.is_table:
                sections = table_sections(
                    variable, self._deltas, files, packing=packing, task_bytes=task_bytes
                )
                yield from (Place(section, name) for section in sections)
            elif (copied := newest_value(name, self._deltas)) is not None:
                yield copied_value(name, copied, files)
            elif variable.dtype is DType.STRING:  # an empty tensor of strings is stored as bytes, too
                catalog = self._deltas[-1].catalog
                yield copied_value(name, Stored(catalog, catalog.tensors[variable.keys[0]]), files)

    def _tensors(self, placed: Sequence[Placed[str]]) -> Iterator[TensorRef]:
        """Yield the index entries of all variables' tensors, given where their sections were written."""
        found: dict[str, list[Placed[str]]] = defaultdict(list)
        for each in placed:
            found[each.place.what].append(each)
        for variable in self._schema.variables:
            parts = found.get(variable.name)
            if parts is None:
                yield from self._absent(variable)
            elif (copied := parts[0].place.copied) is not None:
                yield TensorRef(variable.keys[0], variable.dtype, copied.tensor.shape, parts[0].extents[0])
            else:
                yield from tensors_of(self._boxes(variable, parts))

    def _absent(self, variable: ServedVariable) -> Iterator[TensorRef]:
        """Yield the index entries of a variable that did not change: empty tensors without bytes."""
        shapes = self._shapes(variable, 0, 0)
        for key in tensor_keys(variable, self._header.packing):
            dtype, shape = shapes[key]
            yield TensorRef(key, dtype, shape, _NOTHING)

    def _boxes(
        self, variable: ServedVariable, parts: Sequence[Placed[str]]
    ) -> Iterator[tuple[str, DType, SliceRef]]:
        """Yield key, dtype and slice of each tensor of a table in the merged delta.

        A table in several `parts` is not packed.
        """
        rows, exact = (sum(numbers) for numbers in zip(*(part.counts for part in parts), strict=True))
        shapes, start = self._shapes(variable, rows, exact), 0
        for part in parts:
            section = part.place.section
            assert isinstance(section, NewestRows)
            for key, extent in zip(section.keys, part.extents, strict=True):
                dtype, shape = shapes[key]
                count = shape[0] if len(parts) == 1 else part.counts[0]
                box = SliceSpec(shape, (start, *[0] * len(shape[1:])), (count, *shape[1:]))
                yield key, dtype, SliceRef(box, extent)
            start += part.counts[0]

    def _shapes(
        self, variable: ServedVariable, rows: int, exact: int
    ) -> dict[str, tuple[DType, tuple[int, ...]]]:
        """Return dtype and shape of each tensor of a table with `rows` rows, by key.

        `exact` of the rows are not packed. Of a dense variable, those of its value without any change; `rows`
        and `exact` are then not used.
        """
        if not variable.is_table:
            return {variable.keys[0]: (variable.dtype, (0, *(size or 0 for size in variable.element_shape)))}
        ids, values = variable.keys
        packed = variable.packed(self._header.packing)
        found = {
            tensor.key: (tensor.dtype, (rows - exact if number else exact, *tensor.element_shape))
            for number, tensor in enumerate(packed)
        }
        found[ids] = (DType.INT64, (rows,))
        found[values] = (variable.dtype, (exact, *variable.shape[1:]))
        return found

    def _header_tensors(self, shard: int, offset: int, rows: int) -> Iterator[TensorRef]:
        """Yield the index entries of the header's tensors.

        They are stored in the shard with the number `shard`, from `offset` on. `rows` is the number of rows
        of all tables.
        """
        arrays = header_tensors(self._header, rows)
        for key, data, crc in header_bytes(self._header, rows):
            dtype = DType.INT64 if crc is None else DType.STRING
            extent = Extent(shard, offset, len(data), masked_crc(data) if crc is None else crc)
            yield TensorRef(key, dtype, arrays[key].shape, extent)
            offset += len(data)


def copied_value(what: str, copied: Stored, files: Sources) -> Place[str]:
    """Return the section that copies a stored run unchanged.

    Its name is `what`. Registers the run in `files`.
    """
    return Place(MovedRows.copied(what, files.range_of(copied)), what, copied)


def newest_value(name: str, deltas: Sequence[DeltaTensors]) -> Stored | None:
    """Return the stored tensor of the newest value of a dense variable.

    None if none of the deltas, oldest first, has one.
    """
    for delta in reversed(deltas):
        if refs := delta.tensors.get(name):
            return Stored(delta.catalog, refs[0])
    return None
