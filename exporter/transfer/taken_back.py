"""Rollbacks that were made in a pulled copy: an agent's canary decides for its servers, not for the store.

A copy at position B whose canary found fault goes back to the values of G by a delta to R, which the store
does not have. Its servers stand at R then, and of what the store publishes from now on

- a delta that begins at G or before holds all rows since G: it leads on from R, to the right values;
- one that begins behind G and not behind R would be taken by a server at R, and holds too few rows: it waits,
  as does a base in between. So does nothing else.

So the copy goes on with the next merger that begins at G or before, or with the next base: the store's own,
or that which `export-model merge URL` makes.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from exporter.publish.manifest import DeltaEntry, DeltaOrigin
from exporter.transfer.items import Item


class TakenBack(Struct, frozen=True):
    """What a canary took back in a copy: to the values of `to`, at `end`; `log` has the deltas."""

    to: int
    end: int
    log: str

    @classmethod
    def of(cls, own: Iterable[Item]) -> TakenBack | None:
        """What these publications of the copy's own are; None if they are anything else."""
        own = list(own)
        entries = [item.manifest.incremental for item in own]
        deltas = [entry for entry in entries if isinstance(entry, DeltaEntry) and entry.back_to is not None]
        is_a_canarys = any(map(is_of_a_canary, own))
        logs = {item.log for item in own}
        if not is_a_canarys or len(deltas) < len(own) or len(logs) != 1:
            return None
        to = min(entry.back_to for entry in deltas if entry.back_to is not None)
        return cls(to, max(item.manifest.position for item in own), logs.pop())

    def withholds(self, item: Item) -> bool:
        """True if servers of the copy would go wrong with it."""
        start = item.manifest.from_position
        if start is None:
            return item.manifest.position <= self.end
        return self.to < start <= self.end


def is_of_a_canary(item: Item) -> bool:
    """True for the delta of a rollback that an agent's canary made."""
    entry = item.manifest.incremental
    return isinstance(entry, DeltaEntry) and entry.made is DeltaOrigin.ROLLBACK and entry.canary


def is_restoration(item: Item) -> bool:
    """True for the delta of a rollback or of its resumption."""
    entry = item.manifest.incremental
    return isinstance(entry, DeltaEntry) and entry.made in (DeltaOrigin.ROLLBACK, DeltaOrigin.RESUME)
