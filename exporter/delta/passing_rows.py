"""Compare a table of a store in this process: a range is fetched, compared, and gone when the next one comes.

While it is compared it lies in scratch files. Where hashes of the old rows are known, the old rows that are
read do not even that: see `exporter.delta.row_reader`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from exporter.delta.compare_rows import Array, Found, ReadRange, TableRows
from exporter.delta.compare_task import Side, SideChecksums
from exporter.delta.format import ServedVariable
from exporter.delta.row_hashes import BlockHasher
from exporter.delta.row_reader import RowReader
from exporter.delta.snapshot import Snapshot
from exporter.jobs.task import Input, Task


class PassingRows:
    """As `TableRows`, of tables in stores; tells the checksums of everything that is read in a row.

    `known` are hashes of the old rows. Several threads may compare ranges.
    """

    def __init__(
        self,
        old: Snapshot,
        new: Snapshot,
        variable: ServedVariable,
        hasher: BlockHasher,
        known: Array | None,
        scratch: Path,
    ) -> None:
        self._old, self._new, self._variable = old, new, variable
        self._hasher, self._known, self._scratch = hasher, known, scratch
        self._planned = cache(Input.of)  # every range is of the same objects
        self.is_old_as_known = True

    def compare(self, chunk: tuple[int, int]) -> list[Found]:
        """The rows of a range (start, stop), whole blocks of them, that differ.

        Raises:
            CheckpointChanged, CheckpointError, DiskFull, PublishError: they cannot be fetched.
        """
        with ExitStack() as stack:
            new = stack.enter_context(self._passing(self._new, chunk))
            old = stack.enter_context(self._passing(self._old, chunk)) if self._known is None else None
            state = self._old if old is None else old.state
            rows = TableRows(
                state, new.state, self._variable, self._hasher, self._known, chunk, checksums=False
            )
            found = []
            for part in rows.chunks() if old else (chunk,):  # so that old rows come by few requests
                found.append(rows.compare(part))
                for side in (old, new):
                    if side is not None:
                        side.checksums.read(*part)
            if not rows.is_old_as_known:
                self.is_old_as_known = False
            old_read = () if old is None else old.read(*chunk)
            return [*found[:-1], replace(found[-1], old_read=old_read, new_read=new.read(*chunk))]

    @contextmanager
    def _passing(self, state: Snapshot, chunk: tuple[int, int]) -> Iterator[_Passing]:
        name = self._variable.name
        reader = state.stored[name]
        side, paths = Side.of(reader, *chunk, 0), {run.extent.shard: run.path for run in reader.runs}
        task = Task(name=name, inputs=tuple(self._planned(paths[shard]) for shard in side.shards))
        with task.files(list(side.ranges(*chunk)), self._scratch) as files:
            here = Snapshot({name: side.reader(name, files)}, state.layers)
            yield _Passing(reader, side, here, SideChecksums(side, files))


class _Passing(Struct, frozen=True):
    """A range of one side while it is there."""

    reader: RowReader
    side: Side
    state: Snapshot
    checksums: SideChecksums

    def read(self, start: int, stop: int) -> tuple[ReadRange, ...]:
        crcs = self.checksums.of(start, stop)
        return tuple(self.side.read_ranges(self.reader, start, stop, crcs))
