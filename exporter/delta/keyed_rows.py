"""Rows of a table by keys, as trainers write them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from msgspec import Struct

from exporter.delta.compare_rows import differing_rows
from exporter.integer_sets import among, distinct

Array = np.ndarray[Any, Any]


class KeyedRows(Struct, frozen=True, eq=False):
    """Rows of table `name`, in any order: row i of `values` belongs to `keys[i]`, int64, no key twice.

    `freqs` is how often each key was seen, None if that was not recorded.
    """

    name: str
    keys: Array
    values: Array
    freqs: Array | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def at(self, which: Array) -> KeyedRows:
        """The rows that a mask or row numbers choose."""
        freqs = None if self.freqs is None else self.freqs[which]
        return KeyedRows(self.name, self.keys[which], self.values[which], freqs)

    def rows_of(self, keys: Array) -> Array:
        """int64 [n]: for each key its row here, -1 if it has none."""
        if not len(self.keys):
            return np.full(len(keys), -1)
        order = np.argsort(self.keys)
        places = np.minimum(np.searchsorted(self.keys, keys, sorter=order), len(order) - 1)
        rows = order[places]
        return np.where(self.keys[rows] == keys, rows, -1)

    def same_as(self, other: KeyedRows) -> Array:
        """Which rows are, bit for bit, those of their keys in another one, as a mask."""
        rows = other.rows_of(self.keys)
        ours = np.flatnonzero(rows >= 0)
        differing = differing_rows(self.values[ours], other.values[rows[ours]])
        same = rows >= 0
        same[ours[differing]] = False
        return same


class KeyedChange(Struct, frozen=True, eq=False):
    """A change of a table: keys that go, increasing, and then rows of keys, new ones among them."""

    rows: KeyedRows
    removed: Array

    def then(self, later: KeyedChange) -> KeyedChange:
        """The change and a later one of the same table as one."""
        ours = self.rows
        stays = ~among(ours.keys, np.sort(later.removed)) & (later.rows.rows_of(ours.keys) < 0)
        kept = ours.at(stays)
        rows = KeyedRows(
            ours.name,
            np.concatenate([kept.keys, later.rows.keys]),
            np.concatenate([kept.values, later.rows.values]),
        )
        return KeyedChange(rows, distinct(np.concatenate([self.removed, later.removed])))


def merged(changes: Iterable[KeyedChange]) -> dict[str, KeyedChange]:
    """Changes that follow one another as one of each table, by its name."""
    found: dict[str, KeyedChange] = {}
    for change in changes:
        before = found.get(change.rows.name)
        found[change.rows.name] = change if before is None else before.then(change)
    return found
