"""The increments directory of a trainer, with this package's reader, writer and errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from exporter.catalog import Catalog, Extent, SliceRef, TensorRef
from exporter.checkpoint.embedding_variables import KEYS, ROWS, VALUES, embedding_variables
from exporter.checkpoint.identity import index_digest
from exporter.checkpoint.locate import candidates
from exporter.checkpoint.tensor_bundle import BundleWriter, read_array, read_catalog
from exporter.checkpoint.tensor_values import checked_map
from exporter.errors import CheckpointError, CorruptFile, PublishError
from exporter.increments.history import History, read_history
from exporter.storage.files import sync, writing
from exporter.tables.integer_sets import among
from exporter.training import trainer_side
from exporter.training.session_hook import naming
from exporter.training.trainer_side import FullCheckpoint, VariablePart, VariableTracking
from exporter.wire.dtypes import DType

Array = np.ndarray[Any, Any]


class Bundle(BundleWriter):
    """A tensor bundle, written while values are added, without TensorFlow."""

    def add_rows(self, key: str, dtype: str, shape: tuple[int, ...], pieces: Iterable[Array]) -> None:
        """Append a tensor, given in pieces of whole rows, to the shard.

        `dtype` is TensorFlow's name of its type; KeyError if there is no such type. ValueError if the pieces
        have another size than `shape`, or the key was added before. OSError if the shard cannot be written;
        errors of `pieces` pass.
        """
        self.add_chunks(key, DType.of(dtype), shape, pieces)


@naming("require_claim")
class Store(trainer_side.Store):
    """The increments of a checkpoint directory, with the errors of `exporter.errors`.

    Every write raises TargetNotWritable, DiskFull or another PublishError if it fails; `require_claim` raises
    UsageError.
    """

    failure = PublishError
    bundle = Bundle

    def history(self) -> History:
        """Read the increments and markers of the directory; empty if there are none.

        CorruptFile or UnsupportedFormat if one is damaged or of another version, CheckpointError if the
        directory cannot be read.
        """
        return read_history(self.ckpt_dir)

    def newest_full(self) -> FullCheckpoint | None:
        """Return the full checkpoint that a trainer would restore now.

        None if there is none, it has no step, or it cannot be read.
        """
        try:
            prefix = candidates(self.ckpt_dir)[0]
            step = read_catalog(prefix).step
            return None if step is None else FullCheckpoint(prefix, step, index_digest(prefix))
        except CheckpointError:
            return None

    @contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """Raise TargetNotWritable, DiskFull or another PublishError for an OSError of the block.

        `path` is named if the error names no file.
        """
        with writing(path):
            yield

    @staticmethod
    def sync(path: Path) -> None:
        """Wait until a file's bytes, or a directory's entries, are on disk, if the file system can do so.

        TargetNotWritable, DiskFull or another PublishError if that fails.
        """
        sync(path)


class CatalogSource(trainer_side.Source):
    """The values of a full checkpoint, whose tables are mapped into memory, each verified once."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._maps: dict[Extent | None, Array] = {}

    def read(self, tracked: VariableTracking, part: VariablePart, rows: Array | None) -> Any:
        """Yield the values of rows of a part, or of all (None), as one piece.

        A checkpoint holds only the rows of a table by keys that are in use: `rows` must be among them, and
        with None the others are 0. During the iteration: CorruptFile if slices are missing or a checksum is
        wrong, CheckpointChanged if a shard is gone or was written to, other CheckpointErrors if it cannot be
        read, KeyError if the checkpoint lacks the variable.
        """
        if tracked.is_keyed:
            ref, used = self._part(tracked, VALUES), self._table(tracked, ROWS)
            if rows is not None:
                yield self._rows_of(ref, np.searchsorted(used, rows))
                return
            whole = np.zeros(tracked.shape, tracked.numpy)
            whole[used] = read_array(self._catalog, ref)
            yield whole
            return
        ref = self._catalog.tensors[tracked.name]
        if ref.shape != tracked.shape:  # a slot of one part, declared with the whole table's shape
            stored = next(found for found in ref.slices if found.spec.lengths == tracked.shape)
            ref = TensorRef(ref.name, ref.dtype, tracked.shape, stored.extent)
        if part.shape and part.shape[1:] == tracked.shape[1:]:
            wanted = np.arange(part.rows) if rows is None else rows
            yield self._rows_of(ref, wanted + part.offset)
        else:
            box = tuple(slice(at, at + size) for at, size in zip(part.starts, part.shape, strict=True))
            yield read_array(self._catalog, ref)[box]

    def keyed(self, tracked: VariableTracking, ids: Array) -> tuple[Array, Array]:
        """Return the rows among `ids` of a table that are in use, in their order, and the key of each.

        Keys are distinct; rows and keys are int64. CorruptFile if the table is damaged, CheckpointChanged if
        a shard is gone, other CheckpointErrors if it cannot be read, KeyError if the checkpoint lacks the
        table.
        """
        rows = self._table(tracked, ROWS)
        found = ids[among(ids, rows)]
        return found, self._table(tracked, KEYS)[np.searchsorted(rows, found)]

    def _rows_of(self, ref: TensorRef, ids: Array) -> Array:
        """Return the rows of a tensor with the numbers `ids`, in the order of `ids`.

        The tensor is stored whole or in slices of whole rows. `ids` must be within its rows. Raises
        CorruptFile if it is sliced in another way, some of the rows are not stored or a checksum is wrong,
        UnsupportedFormat for strings, CheckpointChanged if a shard vanished or was written to,
        CheckpointError if it cannot be read.
        """
        if ref.extent is not None:
            return np.asarray(self._map(ref)[ids])
        rows = np.empty((len(ids), *ref.shape[1:]), ref.dtype.numpy)
        found = np.zeros(len(ids), bool)
        for part in ref.slices:
            if part.extent is None or part.spec.lengths[1:] != ref.shape[1:]:
                raise CorruptFile(
                    f"{self._catalog.prefix}: {ref.name!r} is not stored in slices of whole rows"
                )
            start = part.spec.starts[0]
            inside = (ids >= start) & (ids < start + part.spec.lengths[0])
            if inside.any():
                rows[inside] = self._map(ref, part)[ids[inside] - start]
                found |= inside
        if not found.all():
            raise CorruptFile(f"{self._catalog.prefix}: rows of {ref.name!r} are not stored")
        return rows

    def _map(self, ref: TensorRef, part: SliceRef | None = None) -> Array:
        # An increment gets new checksums: rows that were not verified would look right in it for ever.
        extent = ref.extent if part is None else part.extent
        if extent not in self._maps:
            self._maps[extent] = checked_map(self._catalog, ref, part)
        return self._maps[extent]

    def _table(self, entry: VariableTracking, part: str) -> Array:
        return read_array(self._catalog, self._part(entry, part))

    def _part(self, entry: VariableTracking, part: str) -> TensorRef:
        """Return the tensor of a table whose name ends with `part`, `-keys` for example.

        Keras' checkpoints name it by the path to the table's object. KeyError if there is none;
        CheckpointError and subclasses if the checkpoint's tables are damaged.
        """
        keys = embedding_variables(self._catalog)[entry.name].parts[0].keys.name
        return self._catalog.tensors[keys.removesuffix(KEYS) + part]
