"""Checksums of byte ranges, joined to those of the runs that they make up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from typing import Generic, TypeVar

from exporter.catalog import Extent
from exporter.jobs.task import Range
from exporter.wire.crc32c import combine

File = TypeVar("File", bound=Hashable)


class RangeChecksums(Generic[File]):
    """The checksums that tasks report of ranges of files, in any order, of some ranges more than once."""

    def __init__(self) -> None:
        self._ranges: dict[File, dict[int, tuple[int, int]]] = defaultdict(dict)

    def add(self, file: File, start: int, size: int, crc: int) -> None:
        """The plain crc32c of `size` bytes from `start` of a file."""
        ranges = self._ranges[file]
        if size > ranges.get(start, (0, 0))[0]:
            ranges[start] = size, crc

    def joined(self, file: File, part: Range, crc: int, whole: Extent) -> int | None:
        """Add a range of a stored run, in their order; with the last one it gives the checksum of the run."""
        self.add(file, part.offset, part.size, crc)
        is_last = part.offset + part.size == whole.offset + whole.size
        return self.of(file, whole.offset, whole.size) if is_last else None

    def of(self, file: File, start: int, size: int) -> int | None:
        """The plain crc32c of a run; None if some of it was not read, or in ranges that do not join."""
        ranges, at, crc = self._ranges[file], start, 0
        while at < start + size:
            if at not in ranges:
                return None
            length, part = ranges[at]
            crc = combine(crc, part, length) if at > start else part
            at += length
        return crc if at == start + size else None
