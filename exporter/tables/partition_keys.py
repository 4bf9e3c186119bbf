"""The task of sorting keys by ranges of their table's groups; see `key_ranges`.

Its object has the keys of one run after another: for each range the hashes of its keys, then their rows, in
the order in which they are stored. `~row` stands for the row of a key that is not served. Behind a run whose
keys are stored as int32 they follow as int64, as they are served.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from exporter.catalog import Catalog, TensorRef
from exporter.checkpoint.admission import Admission
from exporter.checkpoint.embedding_variables import check_buckets, read_offsets
from exporter.checkpoint.source_shard import open_shard
from exporter.errors import CheckpointChanged, CheckpointError
from exporter.files import writing
from exporter.jobs.task import Range, Receipt, Task
from exporter.storage.open_files import read_at, write_at
from exporter.storage.output_directory import Directory, new_file
from exporter.tables.geometry import hashes_of
from exporter.tables.key_ranges import KEY_BYTES, KeyRanges
from exporter.wire.crc32c import extend
from exporter.wire.dtypes import DType

Array = np.ndarray[Any, Any]

_BLOCK = 1 << 20
"""Keys in memory at a time."""


class KeyRun(Struct, frozen=True):
    """Keys `start` to `stop` of a tensor, the first of which has row `row` in its table.

    Shards of the tensors are numbers of the task's inputs. `offsets` say where the buckets of the whole
    tensor begin; `freqs` and `versions` are there if they decide which keys are served.
    """

    ranges: KeyRanges
    keys: TensorRef
    start: int
    stop: int
    row: int
    offsets: TensorRef | None = None
    freqs: TensorRef | None = None
    versions: TensorRef | None = None

    @property
    def is_wide(self) -> bool:
        """True if keys are stored as they are served."""
        return self.keys.dtype is DType.INT64

    @property
    def counted(self) -> tuple[TensorRef, ...]:
        """The tensors of which a part is read: its checksum is in the receipt, in this order."""
        return tuple(ref for ref in (self.keys, self.freqs, self.versions) if ref is not None)

    @property
    def tensors(self) -> tuple[TensorRef, ...]:
        """All of which something is read."""
        return self.counted if self.offsets is None else (*self.counted, self.offsets)

    def renumbered(self, shards: Sequence[int]) -> KeyRun:
        """The run with the places of shards among these in the stead of their numbers."""

        def renumber(ref: TensorRef | None) -> TensorRef | None:
            if ref is None or ref.extent is None:
                return ref
            return replace(ref, extent=replace(ref.extent, shard=shards.index(ref.extent.shard)))

        keys, *others = map(renumber, (self.keys, self.offsets, self.freqs, self.versions))
        assert keys is not None
        offsets, freqs, versions = others
        return replace(self, keys=keys, offsets=offsets, freqs=freqs, versions=versions)

    @property
    def sorted_bytes(self) -> int:
        """Bytes of the sorted keys in the object."""
        return KEY_BYTES * (self.stop - self.start)

    @property
    def written_bytes(self) -> int:
        """Bytes of the run in the object."""
        return self.sorted_bytes + (0 if self.is_wide else 8 * (self.stop - self.start))

    def part(self, ref: TensorRef) -> Range:
        """Where the run's elements of a tensor lie."""
        (extent,) = ref.extents
        size = ref.dtype.numpy.itemsize
        return Range(extent.shard, extent.offset + self.start * size, (self.stop - self.start) * size)

    @property
    def ranges_read(self) -> Iterator[Range]:
        """All bytes that are read."""
        yield from map(self.part, self.counted)
        if self.offsets is not None:
            (extent,) = self.offsets.extents
            yield Range(extent.shard, extent.offset, extent.size)


class Partition(Task, frozen=True, kw_only=True):
    """Sort runs of keys by ranges.

    The receipt has the checksums of what was read of each run's `counted`, of the keys as int64 where they
    are written so, and in `counts` how many keys each range of each run has.

    Raises:
        CorruptFile: keys do not lie in their buckets, or the buckets' offsets are damaged.
        CheckpointChanged: a shard vanished, was replaced or became shorter.
    """

    operation: ClassVar[str] = "partition"

    checkpoint: str
    runs: tuple[KeyRun, ...]
    admission: Admission
    step: int | None

    def run(self, directory: Directory) -> Receipt:
        """See `Task`."""
        wanted = [each for run in self.runs for each in run.ranges_read]
        with self.files(wanted, directory.scratch) as files, new_file(directory.scratch) as (target, path):
            catalog = Catalog("", Path(self.checkpoint), {}, tuple(files), ())
            offset, sorting = 0, []
            for run in self.runs:
                one = _Sorting(self, run, catalog, target, offset)
                try:
                    with writing(path):
                        one.sort()
                except CheckpointError as error:
                    # The name of a file that was fetched says nothing.
                    for file, each in zip(files, self.inputs, strict=True):
                        error.message = error.message.replace(os.fspath(file), each.place)
                    raise
                sorting.append(one)
                offset += run.written_bytes
            tag = directory.put_file(self.name, path)
        return Receipt(
            self.name,
            tuple(crc for one in sorting for crc in one.read),
            tuple(one.wide_crc for one in sorting if not one.run.is_wide),
            offset,
            tag,
            sum(run.stop - run.start for run in self.runs),
            tuple(count for one in sorting for count in one.counts.tolist()),
        )


class _Sorting:
    """Sorts one run into a file from `offset` on: counts the keys of each range first."""

    def __init__(self, task: Partition, run: KeyRun, catalog: Catalog, target: int, offset: int) -> None:
        self.run = run
        self.read: tuple[int, ...] = ()
        self.wide_crc = 0
        self.counts = np.zeros(run.ranges.count, np.int64)
        self._task, self._catalog = task, catalog
        self._target, self._offset = target, offset

    def sort(self) -> None:
        of_blocks = list(self._count())
        self.counts = np.sum([self.counts, *of_blocks], axis=0)
        left_out = self._left_out()
        begins = np.concatenate([[0], np.cumsum(self.counts)])[:-1]
        hashes_at = self._offset + KEY_BYTES * begins
        rows_at = hashes_at + 8 * self.counts
        for (first, keys), counts in zip(self._blocks(self.run.keys), of_blocks, strict=True):
            hashed = hashes_of(keys.astype(np.int64, copy=False))
            order = np.argsort(self.run.ranges.of_hashes(hashed), kind="stable")
            rows = (order + (self.run.row + first)).astype(np.int32)
            if left_out is not None:
                rows ^= -left_out[first : first + len(keys)].take(order).astype(np.int32)
            hashed, starts = hashed.take(order), np.concatenate([[0], np.cumsum(counts)])
            for number in np.flatnonzero(counts).tolist():
                part = slice(starts[number], starts[number + 1])
                write_at(self._target, int(hashes_at[number]), bytes_of(hashed[part]))
                write_at(self._target, int(rows_at[number]), bytes_of(rows[part]))
            hashes_at, rows_at = hashes_at + 8 * counts, rows_at + 4 * counts

    def _count(self) -> Iterator[Array]:
        """How many keys of each block are in each range; they are checked, and written where that is due."""
        run, crc = self.run, 0
        offsets = None if run.offsets is None else read_offsets(self._catalog, run.keys, run.offsets)
        for first, block in self._blocks(run.keys):
            crc = extend(crc, block.view(np.uint8))
            keys = block.astype(np.int64, copy=False)
            if run.offsets is not None and offsets is not None:
                check_buckets(self._catalog, run.offsets, offsets - (run.start + first), keys)
            if not run.is_wide:
                self.wide_crc = extend(self.wide_crc, keys.view(np.uint8))
                write_at(self._target, self._offset + run.sorted_bytes + 8 * first, bytes_of(keys))
            yield np.bincount(run.ranges.of_hashes(hashes_of(keys)), minlength=run.ranges.count)
        self.read = (crc,)

    def _left_out(self) -> Array | None:
        """Which keys of the run are not served; None if all are."""
        run, task = self.run, self._task
        found = np.zeros(run.stop - run.start, bool)
        for ref in run.counted[1:]:
            crc = 0
            for first, block in self._blocks(ref):
                crc = extend(crc, block.view(np.uint8))
                is_freq = ref is run.freqs
                admitted = (
                    task.admission.enough(block) if is_freq else task.admission.recent(block, task.step)
                )
                found[first : first + len(block)] |= np.logical_not(admitted)
            self.read += (crc,)
        return found if found.any() else None

    def _blocks(self, ref: TensorRef) -> Iterator[tuple[int, Array]]:
        """The run's elements of a tensor, and the number of the first in the run."""
        count, dtype, at = self.run.stop - self.run.start, ref.dtype.numpy, self.run.part(ref)
        with open_shard(self._catalog.shards[at.input]) as descriptor:
            for first in range(0, count, _BLOCK):
                block = np.empty(min(_BLOCK, count - first), dtype)
                if read_at(descriptor, at.offset + first * dtype.itemsize, bytes_of(block)) < block.nbytes:
                    place = self._task.inputs[at.input].place
                    raise CheckpointChanged(f"{place} became shorter after its index was read")
                yield first, block


def bytes_of(array: Array) -> memoryview:
    """The bytes of an array, to be written or filled."""
    return array.view(np.uint8).data
