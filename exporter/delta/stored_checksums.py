"""The checksums of stored runs, joined from those of the ranges that were read of them."""

from __future__ import annotations

from collections.abc import Iterable

from exporter.delta.row_reader import StoredRun
from exporter.delta.snapshot import Snapshot
from exporter.errors import CorruptFile
from exporter.wire.crc32c import combine, mask


class StoredChecksums:
    """What is known of one side's runs. Tasks read ranges; those of a run may come in any order."""

    def __init__(self, state: Snapshot) -> None:
        self._state = state
        self._ranges: dict[StoredRun, dict[int, tuple[int, int]]] = {}

    def add(self, run: StoredRun, start: int, size: int, crc: int) -> None:
        """The plain crc32c of `size` bytes from `start` of a run."""
        ranges = self._ranges.setdefault(run, {})
        if size > ranges.get(start, (0, 0))[0]:
            ranges[start] = size, crc

    def check(self, names: Iterable[str]) -> None:
        """Compare the checksums of what these variables are made of; what was not read is read.

        Raises:
            CorruptFile: one differs.
            CheckpointChanged: a file vanished or shrank.
        """
        names = list(names)
        for variable in (self._state.stored[name] for name in names):
            for run in variable.runs:
                crc = self._joined(run)
                if crc is None:
                    continue
                if mask(crc) != run.extent.crc32c:
                    raise CorruptFile(
                        f"{run.path} is damaged at {variable.tensor.name!r}: "
                        f"its checksum is {mask(crc):08x}, expected {run.extent.crc32c:08x}",
                        hint=self._state.hint,
                    )
                self._state.note_checked([run])
        self._state.check(names)

    def _joined(self, run: StoredRun) -> int | None:
        """The checksum of a run; None if some of it was not read, or in ranges that do not join."""
        ranges, at, crc = self._ranges.get(run, {}), 0, 0
        while at < run.extent.size:
            if at not in ranges:
                return None
            size, part = ranges[at]
            crc = combine(crc, part, size) if at else part
            at += size
        return crc if at == run.extent.size and ranges else None
