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

A rollback of the store is a decision about all its copies. If the copy withholds it, its servers get the
values all the same: the copy publishes them again, by a delta of its own to the position after R, which is
held for the store (`to_repeat`). When the store resumes, the copy repeats that, too.

A version that was published again here takes nothing but its own number from the store.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping

from msgspec import Struct

from exporter.delta.spans import Span, furthest
from exporter.publish.manifest import DeltaEntry, DeltaOrigin
from exporter.transfer.items import Item, end_of


class TakenBack(Struct, frozen=True):
    """A rollback or a resumption in a copy: the publication at `path` has the values of position `to`."""

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
        """Return True if the copy must not fetch the store's publication `item` after this rollback.

        In the log of the delta at `path`, that is a publication that begins or ends after `to` and not after
        `end`. If `path` is a version, it is only the store's version of the same number.
        """
        if item.log_path != self.log or not self.log:
            return item.path == self.path
        return self.is_within(item.manifest.from_position) or self.is_within(item.manifest.position)

    def is_within(self, position: int | None) -> bool:
        """Return True for a position after `to`, and not after `end`; False for None."""
        return position is not None and self.to < position <= self.end

    def is_passed_by(self, item: Item, reached: Iterable[int]) -> bool:
        """Return True if `item` is a delta of this log after `end` that applies at no position in `reached`.

        It begins after `end`. It applies at the positions from its beginning up to, not including, its end.
        """
        start, position = item.manifest.from_position, item.manifest.position
        if start is None or item.log != self.log or start <= self.end:
            return False
        return not any(start <= one < position for one in reached)


def restored(item: Item) -> int | None:
    """Return the position whose values a publication restored, if it is a rollback or a resumption.

    None for any other publication.
    """
    entry, told = item.manifest.incremental, item.manifest.taken_back
    if isinstance(entry, DeltaEntry):
        return entry.back_to if entry.made in (DeltaOrigin.ROLLBACK, DeltaOrigin.RESUME) else None
    return None if told is None else told.back_to


def is_restoration(item: Item) -> bool:
    """Return True if a publication is a rollback or the resumption of one."""
    return restored(item) is not None


def repeated(item: Item, here: Mapping[str, Item], stored: Container[str]) -> Item | None:
    """Return the copy's own delta that repeats the store's rollback or resumption `item`; None without one.

    The delta restores the values of the same position in the same way, in the same log, and ends at a greater
    position; of several, the last one is returned. `here` has the copy's publications by path, `stored` the
    paths of the store's publications.
    """
    own = (each for path, each in here.items() if path not in stored and each.log == item.log)
    beyond = (each for each in own if each.manifest.position > item.manifest.position)
    same = (each for each in beyond if _decision(each) == _decision(item) is not None)
    return max(same, key=lambda each: each.order, default=None)


def _decision(item: Item) -> tuple[DeltaOrigin, int] | None:
    """Return the origin of a delta, rollback or resumption, and the position that it restored.

    None for any other item.
    """
    entry, to = item.manifest.incremental, restored(item)
    return (entry.made, to) if isinstance(entry, DeltaEntry) and to is not None else None


def to_repeat(
    here: Mapping[str, Item], stored: Mapping[str, Item], taken_back: Iterable[TakenBack], reach: int | None
) -> Item | None:
    """Return the store's newest publication if the copy has to publish its values itself; else None.

    `here` and `stored` have the publications of the copy and of the store by path; `taken_back` are the
    copy's own rollbacks and resumptions, and `reach` is the greatest position that the copy's own hold lets
    servers read (None: there is no hold). The result is a rollback or a resumption that `taken_back`
    withholds, in the copy's newest log, to a position whose values the copy has from the store. A rollback is
    repeated if the copy's newest values are later ones, and no hold keeps servers from them; a resumption
    only after a rollback that was repeated, and without a hold of the copy.
    """
    theirs = _newest(stored.values())
    decided = None if theirs is None else _decision(theirs)
    if theirs is None or decided is None:
        return None
    made, to = decided
    base = _newest(item for item in here.values() if not item.is_delta)
    in_log = [item for item in here.values() if item.log_path == theirs.log]
    is_known = base in in_log and to in {item.manifest.position for item in in_log}
    if not (is_known and _is_withheld(theirs, to, taken_back)):
        return None
    newest = max(in_log, key=lambda item: item.order)
    values = newest.manifest.position if (found := restored(newest)) is None else found
    if made is DeltaOrigin.ROLLBACK:
        return theirs if values > to and (reach is None or reach > to) else None
    was_repeated = any(repeated(item, here, stored) is newest for item in stored.values() if item.log)
    return theirs if values < to and reach is None and was_repeated else None


def _newest(items: Iterable[Item]) -> Item | None:
    return max(items, key=lambda item: item.order, default=None)


def _is_withheld(theirs: Item, to: int, taken_back: Iterable[TakenBack]) -> bool:
    """True if a copy withholds a decision of its store, to position `to`, that it did not make itself."""
    ours = [each for each in taken_back if each.log == theirs.log]
    return any(each.withholds(theirs) for each in ours) and not any(each.end == to for each in ours)


def way_on(stored: Collection[Item], taken_back: Iterable[TakenBack]) -> tuple[str, ...]:
    """Return the options with which `export-model merge URL` publishes something that a copy can fetch.

    The copy withholds other publications because of its rollbacks and resumptions, `taken_back`. `stored` are
    the store's publications, at least one of them a version. () makes a merged delta, ("--rebase",) a base.
    LookupError if neither helps before the store has published more.
    """
    versions = [item for item in stored if not item.is_delta]
    base = max(versions, key=lambda item: item.order)
    deltas = [item for item in stored if item.log and item.log == base.log_path]
    start = base.manifest.position
    spans = [Span(each.manifest.from_position or 0, each.manifest.position) for each in deltas]
    chain, ours = furthest(spans, start), [each for each in taken_back if each.log == base.log_path]
    if not chain or any(each.is_within(chain[-1].end) for each in ours):
        raise LookupError
    is_merged = len(chain) == 1 or any(each.is_within(start) for each in ours)
    return ("--rebase",) if is_merged else ()


def is_merger(item: Item) -> bool:
    """Return True if a publication was merged from others: it has the values of its last part."""
    entry = item.manifest.incremental
    is_merged = isinstance(entry, DeltaEntry) and entry.made is DeltaOrigin.MERGE
    return is_merged or item.manifest.merged_from is not None


def is_of_a_canary(item: Item) -> bool:
    """Return True if a publication is a rollback's delta whose resumption returns the log to a canary."""
    entry = item.manifest.incremental
    return isinstance(entry, DeltaEntry) and entry.made is DeltaOrigin.ROLLBACK and entry.canary
