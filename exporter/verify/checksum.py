"""The task of reading ranges for their checksums."""

from __future__ import annotations

from typing import ClassVar

from exporter.jobs.task import Range, Receipt, Task
from exporter.storage.output_directory import Directory


class Checksum(Task, frozen=True, kw_only=True):
    """Read ranges; the receipt has the checksum of each, of less where a file ends. There is no output."""

    operation: ClassVar[str] = "checksum"

    ranges: tuple[Range, ...]

    def run(self, directory: Directory) -> Receipt:
        """See `Task`."""
        crcs = [0] * len(self.ranges)
        for number, source in enumerate(self.inputs):
            mine = [index for index, each in enumerate(self.ranges) if each.input == number]
            found = source.checksums([self.ranges[index] for index in mine], directory.scratch)
            for index, crc in zip(mine, found, strict=True):
                crcs[index] = crc
        return Receipt(self.name, read=tuple(crcs))
