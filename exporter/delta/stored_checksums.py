"""The checksums of stored runs, joined from those of the ranges that were read of them."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from exporter.checkpoint.tensor_values import compare_checksum
from exporter.delta.row_reader import StoredRun
from exporter.delta.snapshot import Snapshot
from exporter.jobs.range_checksums import RangeChecksums
from exporter.wire.crc32c import mask


class ReadRange(Struct, frozen=True):
    """`size` bytes from `start` of a stored run that were read, and their plain crc32c."""

    run: StoredRun
    start: int
    size: int
    crc: int


class StoredChecksums:
    """What is known of one side's runs."""

    def __init__(self, state: Snapshot) -> None:
        self._state = state
        self._ranges = RangeChecksums[StoredRun]()

    def add(self, read: Iterable[ReadRange]) -> None:
        """Note what was read."""
        for each in read:
            self._ranges.add(each.run, each.start, each.size, each.crc)

    def check(self, names: Iterable[str]) -> None:
        """Compare the checksums of what these variables are made of; what was not read is read.

        Raises:
            CorruptFile: one differs.
            CheckpointChanged: a file vanished or shrank.
        """
        names = list(names)
        for variable in (self._state.stored[name] for name in names):
            for run in variable.runs:
                crc = self._ranges.of(run, 0, run.extent.size)
                if crc is None:
                    continue
                name = variable.tensor.name
                compare_checksum(run.path, name, run.extent, mask(crc), hint=self._state.hint)
                self._state.note_checked([run])
        self._state.check(names)
