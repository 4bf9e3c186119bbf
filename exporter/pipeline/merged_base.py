"""Write the variables of a base anew with deltas laid over them, by tasks that read each byte once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from msgspec.structs import replace

from exporter.catalog import SliceRef, SliceSpec, TensorRef
from exporter.checkpoint.tensor_bundle import BundleWriter, encode_index, index_path, shard_path
from exporter.delta.delta_files import DeltaTensors
from exporter.delta.format import Schema, ServedVariable
from exporter.delta.merge_deltas import newest_value
from exporter.delta.merge_job import Files, MergeJob, Piece, Placed, Stored, table_pieces
from exporter.delta.merge_task import MergedRows
from exporter.delta.row_reader import RowReader, SliceOrder
from exporter.delta.snapshot import Snapshot
from exporter.jobs.runner import Runner
from exporter.jobs.task import Range
from exporter.layout import VARIABLES_PREFIX
from exporter.mapping.mapping_spec import MappingSpec
from exporter.pipeline.merged_variables import row_blocks
from exporter.progress import Progress
from exporter.wire.dtypes import DType


class BaseMerger:
    """The variables of a base, `stored`, with `deltas` laid over them, oldest first.

    Raises:
        CheckpointChanged: a file is no longer there.
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
        hint: str = "",
    ) -> None:
        self._prefix = bundle / VARIABLES_PREFIX
        self._sources = mapping_spec.sources()
        self._variables = {variable.name: variable for variable in schema.variables}
        self._stored, self._deltas = stored, deltas
        self._files = Files(hint)
        self._left: list[tuple[str, SliceSpec | None, str]] = []
        self._job = MergeJob(self._files, list(self._pieces(task_bytes)), self._prefix, task_bytes)
        self.tasks = self._job.tasks

    @property
    def bytes_(self) -> int:
        """Bytes that tasks read."""
        return self._job.bytes_

    def write(
        self,
        stack: ExitStack,
        runner: Runner,
        state: Callable[[], Snapshot],
        progress: Progress | None = None,
    ) -> None:
        """Write `variables/`. A job that is kept ends with the stack.

        `state` has the values of what lies in the base in boxes that are no ranges of rows: no task's.

        Raises:
            CorruptFile: a delta or the base is damaged.
            CheckpointChanged: a file was replaced, or is gone.
            ExportError: any other of a task's; the engine gave up.
        """
        self._prefix.parent.mkdir()
        others = bool(self._left) or not self.tasks
        placed = self._job.run(stack, runner, others=others, progress=progress)
        left = self._write_left(state) if others else ()
        tensors = list(_tensors((*self._boxes(placed), *left)))
        index_path(self._prefix).write_bytes(encode_index(tensors, self.tasks + others))

    def _pieces(self, task_bytes: int) -> Iterator[Piece]:
        for source in self._sources:
            if not source.variables:  # the keys or values of a lookup table
                yield from self._copied(source.key, source.key, None)
            for part in source.variables:
                variable = self._variables[part.served_name]
                runs = self._runs(variable) if variable.is_table else []
                if not runs:
                    yield from self._copied(variable.name, source.key, part.part)
                    continue
                yield from table_pieces(
                    variable, self._deltas, self._files, packing=None, task_bytes=task_bytes, base=runs
                )

    def _copied(self, name: str, key: str, part: SliceSpec | None) -> Iterator[Piece]:
        """What is served whole: as the newest delta has it, else the base."""
        copied = newest_value(name, self._deltas) if not self._variables[name].is_table else None
        reader = self._stored[name]
        if copied is None and reader.extent is not None:
            run = next((run.part for run in reader.runs if run.extent == reader.extent), None)
            copied = Stored(reader.catalog, reader.tensor, run)
        if copied is None:
            self._left.append((key, part, name))
        else:
            yield Piece(name, self._files.range_of(copied), copied)

    def _runs(self, variable: ServedVariable) -> list[tuple[int, Range]]:
        """The rows of a table as runs of whole rows in the base; none if they do not lie so."""
        reader = self._stored[variable.name]
        tensor, box = reader.tensor, reader.box
        if reader.order != SliceOrder() or reader.dtype is not tensor.dtype or not _has_whole_rows(box):
            return []
        runs: list[tuple[int, Range]] = []
        at, end = box.starts[0], box.starts[0] + box.lengths[0]
        for spec, part in _parts(tensor):
            first, count = spec.starts[0], spec.lengths[0]
            if not _has_whole_rows(spec):
                return []
            low, high = max(first, at), min(first + count, end)
            if low >= high:
                continue
            if low != at or (part is not None and part.extent is None):
                return []
            whole = self._files.range_of(Stored(reader.catalog, tensor, part))
            row = whole.size // count
            run = Range(whole.input, whole.offset + (low - first) * row, (high - low) * row)
            runs.append((high - low, run))
            at = high
        return runs if at == end else []

    def _write_left(self, state: Callable[[], Snapshot]) -> Iterator[tuple[str, DType, SliceRef]]:
        """Write the shard of what no task writes; its tensors by key, dtype and box."""
        aside = self._prefix.with_name("left")
        values = state()
        with BundleWriter(aside) as writer:
            for key, part, name in self._left:
                variable = self._variables[name]
                if variable.is_table:
                    values.stored[name].fetch()  # it is read twice: for its checksums, and to be written
                    values.check([name])
                    writer.add_chunks(key, variable.dtype, variable.shape, row_blocks(values, variable), part)
                else:
                    writer.add(key, values.whole(name), part)
        shard_path(aside, 0, 1).rename(shard_path(self._prefix, self.tasks, self.tasks + 1))
        index_path(aside).unlink()
        for tensor in writer.tensors:
            whole = [SliceRef(SliceSpec.whole(tensor.shape), tensor.extent)] if tensor.extent else []
            for part_ in (*tensor.slices, *whole):
                assert part_.extent is not None
                extent = replace(part_.extent, shard=self.tasks)
                yield tensor.name, tensor.dtype, SliceRef(part_.spec, extent)

    def _boxes(self, placed: Sequence[Placed]) -> Iterator[tuple[str, DType, SliceRef]]:
        """What tasks wrote, by key, dtype and box."""
        found: dict[str, list[Placed]] = defaultdict(list)
        for each in placed:
            found[each.piece.name].append(each)
        for source in self._sources:
            for name, part in [(part.served_name, part.part) for part in source.variables] or [
                (source.key, None)
            ]:
                for each in found.get(name, ()):
                    box = part or SliceSpec.whole(self._shape(each, name))
                    if isinstance(each.piece.what, MergedRows):
                        box = _rows_of_box(box, each.piece.what.low, each.piece.what.high)
                    yield source.key, self._variables[name].dtype, SliceRef(box, each.extents[0])

    def _shape(self, each: Placed, name: str) -> tuple[int, ...]:
        """The shape of a variable; of the contents of a lookup table that which they have now."""
        variable, copied = self._variables[name], each.piece.copied
        if variable.contents is None or copied is None:
            return variable.shape
        is_of_base = copied.catalog is self._stored[name].catalog
        return copied.tensor.shape[0 if is_of_base else 1 :]


def _has_whole_rows(box: SliceSpec) -> bool:
    return bool(box.full_shape) and box.lengths[1:] == box.full_shape[1:]


def _parts(tensor: TensorRef) -> list[tuple[SliceSpec, SliceRef | None]]:
    """What is stored of a tensor, in the order of its rows; None: the whole."""
    parts = sorted(tensor.slices, key=lambda part: part.spec.starts)
    return [(part.spec, part) for part in parts] or [(SliceSpec.whole(tensor.shape), None)]


def _rows_of_box(box: SliceSpec, low: int, high: int) -> SliceSpec:
    starts = (box.starts[0] + low, *box.starts[1:])
    return SliceSpec(box.full_shape, starts, (high - low, *box.lengths[1:]))


def _tensors(boxes: Iterable[tuple[str, DType, SliceRef]]) -> Iterator[TensorRef]:
    found: dict[tuple[str, DType], list[SliceRef]] = defaultdict(list)
    for key, dtype, part in boxes:
        found[key, dtype].append(part)
    for (key, dtype), parts in found.items():
        shape = parts[0].spec.full_shape
        if parts[0].spec.is_full:
            yield TensorRef(key, dtype, shape, parts[0].extent)
        else:
            yield TensorRef(key, dtype, shape, slices=tuple(sorted(parts, key=lambda part: part.spec.starts)))
