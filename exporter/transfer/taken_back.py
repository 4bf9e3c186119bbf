"""What a copy of a store took back by itself, and what it therefore cannot take from the store.

A rollback or a resumption in a copy, by its canary or its operator, is a decision about the copy's servers:
its store does not have it, and goes on. A copy at position B that returns to the values of G does so by a
delta to R, a number that the store will give to other values. Of the store's publications in that log

- one that begins at G or before, and ends after R, has all rows since G: it continues from R, and gives the
  right values; - one that begins after G, and not after R, would be loaded by a server at R, but has too few
  rows; one that ends there leads to values that were taken back, or gives R other values. The copy withholds
  both, and also a base in between. What leads on only from there has to wait with them.

So the copy continues with the next merger that begins at G or before, or with the next base: the store's
own, or the one that `export-model merge URL` makes. A resumption from R is the same: it returns to the values
of B.

A version that was published again here takes nothing but its own number from the store.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from exporter.publish.manifest import DeltaEntry, DeltaOrigin
from exporter.transfer.items import Item, end_of


class TakenBack(Struct, frozen=True):
    """A rollback or a resumption in a copy: the delta or version at `path` has the values of `to`."""

    path: str
    to: int

    @property
    def log(self) -> str:
        """The path of the log that the delta is in; "" for a version."""
        return self.path.rpartition("/")[0]

    @property
    def end(self) -> int:
        """The position at which the delta at `path` ends, or the number of the version."""
        return end_of(self.path)

    def withholds(self, item: Item) -> bool:
        """Return True if what was taken back keeps this publication of the store from the copy's servers.

        In the log of a rollback's or resumption's delta, these are publications that begin or end after `to`
        and not after `end`. For a version that was published again here, it is only the store's version of
        its own number.
        """
        if item.log_path != self.log or not self.log:
            return item.path == self.path
        ends = item.manifest.from_position, item.manifest.position
        return any(one is not None and self.to < one <= self.end for one in ends)

    def is_passed_by(self, item: Item, reached: Iterable[int]) -> bool:
        """True for a delta of this log that begins after `end` and applies at no position in `reached`."""
        start, position = item.manifest.from_position, item.manifest.position
        if start is None or item.log != self.log or start <= self.end:
            return False
        return not any(start <= one < position for one in reached)


def restored(item: Item) -> int | None:
    """Return the position whose values a rollback or a resumption published again.

    None for any other publication.
    """
    entry, told = item.manifest.incremental, item.manifest.taken_back
    if isinstance(entry, DeltaEntry):
        return entry.back_to if entry.made in (DeltaOrigin.ROLLBACK, DeltaOrigin.RESUME) else None
    return None if told is None else told.back_to


def is_restoration(item: Item) -> bool:
    """Return True if a publication is a rollback or the resumption of one."""
    return restored(item) is not None


def is_merger(item: Item) -> bool:
    """Return True if a publication was merged from others: it has the values of its last part."""
    entry = item.manifest.incremental
    is_merged = isinstance(entry, DeltaEntry) and entry.made is DeltaOrigin.MERGE
    return is_merged or item.manifest.merged_from is not None


def is_of_a_canary(item: Item) -> bool:
    """Return True if a publication is a rollback's delta after which resuming returns the log to a canary."""
    entry = item.manifest.incremental
    return isinstance(entry, DeltaEntry) and entry.made is DeltaOrigin.ROLLBACK and entry.canary
