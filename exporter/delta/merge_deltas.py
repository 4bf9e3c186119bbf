"""Write the delta that holds the newest rows and values of several."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from exporter.catalog import Extent, SliceRef, SliceSpec, TensorRef
from exporter.checkpoint.tensor_bundle import encode_index, index_path, shard_path
from exporter.delta.delta_files import DeltaTensors, header_tensors, tensor_keys
from exporter.delta.format import DeltaHeader, Schema, ServedVariable
from exporter.delta.merge_job import Files, MergeJob, Piece, Placed, Stored, table_pieces
from exporter.delta.merge_task import MergedRows, header_bytes
from exporter.jobs.runner import LOCAL, Runner
from exporter.progress import Progress
from exporter.wire.crc32c import mask, masked_crc
from exporter.wire.dtypes import DType

_NOTHING = Extent(0, 0, 0, mask(0))


class DeltaMerger:
    """The merger of `deltas`, oldest first, as the delta of a header.

    A small one is written by one task as one shard. If there are many tasks the header has its own shard.

    Raises:
        CheckpointChanged: a delta is no longer there.
    """

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
        self._files = Files(hint)
        self._job = MergeJob(self._files, self._pieces(task_bytes), prefix, task_bytes)
        self.tasks = self._job.tasks

    @property
    def bytes_(self) -> int:
        """How many bytes the tasks read."""
        return self._job.bytes_

    def write(self, stack: ExitStack, runner: Runner = LOCAL, progress: Progress | None = None) -> int:
        """Write it; its rows. A job that is kept ends with the stack.

        Raises:
            CorruptFile: a delta is damaged.
            CheckpointChanged: one was replaced, or is gone.
            ExportError: any other of a task's; the engine gave up.
        """
        is_alone = self.tasks == 1
        header = self._header if is_alone else None
        placed = self._job.run(stack, runner, others=not is_alone, header=header, progress=progress)
        rows = sum(each.rows for each in placed)
        own = self.tasks - is_alone  # the number of the shard that has the header
        offset = max((each.extents[-1].offset + each.extents[-1].size for each in placed), default=0)
        tensors = [*self._tensors(placed), *self._header_tensors(own, offset if is_alone else 0, rows)]
        shards = own + 1
        if not is_alone:
            content = b"".join(data for _, data, _ in header_bytes(self._header, rows))
            shard_path(self._prefix, own, shards).write_bytes(content)
        index_path(self._prefix).write_bytes(encode_index(tensors, shards))
        return rows

    def _pieces(self, task_bytes: int) -> Iterator[Piece]:
        for variable in self._schema.variables:
            if variable.is_table:
                packing = self._header.packing
                yield from table_pieces(
                    variable, self._deltas, self._files, packing=packing, task_bytes=task_bytes
                )
            elif (copied := newest_value(variable.name, self._deltas)) is not None:
                yield Piece(variable.name, self._files.range_of(copied), copied)
            elif variable.dtype is DType.STRING:  # even an empty one has bytes
                copied = Stored(self._deltas[-1].catalog, self._deltas[-1].catalog.tensors[variable.keys[0]])
                yield Piece(variable.name, self._files.range_of(copied), copied)

    def _tensors(self, placed: Sequence[Placed]) -> Iterator[TensorRef]:
        found: dict[str, list[Placed]] = defaultdict(list)
        for each in placed:
            found[each.piece.name].append(each)
        for variable in self._schema.variables:
            pieces = found.get(variable.name)
            if pieces is None:
                yield from self._absent(variable)
            elif (copied := pieces[0].piece.copied) is not None:
                yield TensorRef(variable.keys[0], variable.dtype, copied.tensor.shape, pieces[0].extents[0])
            else:
                yield from self._rows(variable, pieces)

    def _absent(self, variable: ServedVariable) -> Iterator[TensorRef]:
        """The tensors of a variable that did not change: they have no rows, or no value."""
        shapes = self._shapes(variable, 0, 0)
        for key in tensor_keys(variable, self._header.packing):
            dtype, shape = shapes[key]
            yield TensorRef(key, dtype, shape, _NOTHING)

    def _rows(self, variable: ServedVariable, pieces: Sequence[Placed]) -> Iterator[TensorRef]:
        if len(pieces) == 1:
            (one,) = pieces
            shapes = self._shapes(variable, one.rows, one.exact)
            assert isinstance(one.piece.what, MergedRows)
            for key, extent in zip(one.piece.what.keys, one.extents, strict=True):
                yield TensorRef(key, *shapes[key], extent)
            return
        rows, start = sum(each.rows for each in pieces), 0
        whole = self._shapes(variable, rows, rows)
        slices: dict[str, list[SliceRef]] = defaultdict(list)
        for each in pieces:
            assert isinstance(each.piece.what, MergedRows)
            for key, extent in zip(each.piece.what.keys, each.extents, strict=True):
                shape = whole[key][1]
                rest = shape[1:]
                box = SliceSpec(shape, (start, *[0] * len(rest)), (each.rows, *rest))
                slices[key].append(SliceRef(box, extent))
            start += each.rows
        for key, parts in slices.items():
            yield TensorRef(key, *whole[key], slices=tuple(parts))

    def _shapes(
        self, variable: ServedVariable, rows: int, exact: int
    ) -> dict[str, tuple[DType, tuple[int, ...]]]:
        """Dtype and shape of each tensor of a variable; of one that is no table, without a value."""
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
        arrays = header_tensors(self._header, rows)
        for key, data, crc in header_bytes(self._header, rows):
            dtype = DType.INT64 if crc is None else DType.STRING
            extent = Extent(shard, offset, len(data), masked_crc(data) if crc is None else crc)
            yield TensorRef(key, dtype, arrays[key].shape, extent)
            offset += len(data)


def newest_value(name: str, deltas: Sequence[DeltaTensors]) -> Stored | None:
    """The newest whole value of a variable, None if none of the deltas has one."""
    for delta in reversed(deltas):
        if refs := delta.tensors.get(name):
            return Stored(delta.catalog, refs[0])
    return None
