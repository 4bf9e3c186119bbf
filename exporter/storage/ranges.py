"""Ranges of a file, for what of it has been fetched."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator


class Ranges:
    """Ranges that do not overlap, in order."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Each as (start, stop)."""
        return zip(self._starts, self._stops, strict=True)

    def gaps(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """What is missing of a range."""
        at = bisect_left(self._stops, start)
        while start < stop and at < len(self._starts) and self._starts[at] < stop:
            if start < self._starts[at]:
                yield start, self._starts[at]
            start = max(start, self._stops[at])
            at += 1
        if start < stop:
            yield start, stop

    def add(self, start: int, stop: int) -> None:
        """Add a range, joined with those that it touches."""
        first, last = bisect_left(self._stops, start), bisect_left(self._starts, stop + 1)
        if first < last:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        self._starts[first:last], self._stops[first:last] = [start], [stop]
