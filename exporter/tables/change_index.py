"""Change the index of a published table: find keys, add some, drop others.

Only what an added key needs is read: the seed of its group, the slots of the group's window, the keys in
them. A new key that finds its slot taken gets its whole group another seed, so a few keys that nobody touched
change their slots, too.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from msgspec import Struct

from exporter.errors import TableFull
from exporter.integer_sets import among, distinct
from exporter.tables.crowding import table_full
from exporter.tables.geometry import WINDOW, TableGeometry
from exporter.tables.spread import Crowded, spread

Array = np.ndarray[Any, Any]

_SCAN = 1 << 20


class TableState(Protocol):
    """Reads a table's variables as they are published, at any numbers (int64) in any order."""

    def seeds(self, groups: Array) -> Array:
        """Elements of `index_seeds`."""

    def rows(self, slots: Array) -> Array:
        """Elements of `index_rows`."""

    def keys(self, rows: Array) -> Array:
        """Elements of `keys`."""


class ArrayState(Struct, frozen=True):
    """A table whose variables are arrays, or mapped files."""

    index_seeds: Array
    index_rows: Array
    row_keys: Array

    def seeds(self, groups: Array) -> Array:
        """Elements of `index_seeds`."""
        return self.index_seeds[groups]

    def rows(self, slots: Array) -> Array:
        """Elements of `index_rows`."""
        return self.index_rows[slots]

    def keys(self, rows: Array) -> Array:
        """Elements of `keys`."""
        return self.row_keys[rows]


class Elements(Struct, frozen=True):
    """Elements of one variable that change: strictly increasing numbers, and their values."""

    ids: Array
    values: Array

    @classmethod
    def of(cls, ids: Array, values: Array) -> Elements:
        """The elements in order; the numbers are distinct."""
        order = np.argsort(ids)
        return cls(ids[order].astype(np.int64), values[order])


class IndexChange(Struct, frozen=True):
    """What changes in a table's index; `added` is the row of each key that was to be added, in order."""

    seeds: Elements
    rows: Elements
    keys: Elements
    added: Array


def find_rows(geometry: TableGeometry, state: TableState, keys: Array) -> Array:
    """The row of each key as int64; -1 for those that are absent."""
    return _find(geometry, state, keys)[0]


def live_rows(geometry: TableGeometry, state: TableState) -> Array:
    """True for each row that a key has; reads all of `index_rows`."""
    used = np.zeros(geometry.capacity, bool)
    for begin in range(0, geometry.slots, _SCAN):
        used[state.rows(np.arange(begin, min(begin + _SCAN, geometry.slots)))] = True
    used[geometry.cursor_row :] = False
    return used


def change_index(geometry: TableGeometry, state: TableState, add: Array, drop: Array) -> IndexChange:
    """Add keys (int64, distinct) and drop others; an added key that is there keeps its row.

    Dropped keys that are absent are left out. Rows that become free are given to new keys first.

    Raises:
        TableFull: there are not enough free rows, or a group of keys finds no seed.
        ValueError: a key occurs twice, or is to be added and dropped.
    """
    both = np.concatenate([add, drop])
    if len(distinct(both)) != len(both):
        raise ValueError("a key is named twice")
    rows, _ = _find(geometry, state, add)
    gone, gone_slots = _find(geometry, state, drop)
    gone, gone_slots = gone[gone >= 0], gone_slots[gone >= 0]
    new = add[rows < 0]
    taken, cursor = _take_rows(geometry, state, gone, gone_slots, len(new))
    rows[rows < 0] = taken
    try:
        seeds, slots = _insert(geometry, state, new, taken, gone_slots)
    except Crowded as error:
        raise table_full(geometry, error.keys) from None
    keys = Elements.of(np.append(taken, geometry.cursor_row), np.append(new, cursor))
    if not len(new):
        keys = Elements(np.empty(0, np.int64), np.empty(0, np.int64))
    return IndexChange(seeds, slots, keys, rows)


def _find(geometry: TableGeometry, state: TableState, keys: Array) -> tuple[Array, Array]:
    """Row (-1: absent) and slot of each key."""
    groups = geometry.groups_of(keys)
    slots = geometry.slots_of(keys, groups, state.seeds(groups))
    rows = state.rows(slots).astype(np.int64)
    # Key -1 may be absent and find the last row's key.
    present = (state.keys(rows) == keys) & (rows != geometry.empty_row)
    return np.where(present, rows, -1), slots


def _take_rows(
    geometry: TableGeometry, state: TableState, gone: Array, gone_slots: Array, count: int
) -> tuple[Array, int]:
    """Free rows for `count` keys, and the cursor then: of dropped keys, never used ones, others.

    Raises:
        TableFull: there are fewer.
    """
    cursor = int(state.keys(np.array([geometry.cursor_row]))[0])
    taken = np.sort(gone)[:count]
    fresh = np.arange(cursor, min(cursor + count - len(taken), geometry.usable_rows))
    taken, cursor = np.concatenate([taken, fresh]), cursor + len(fresh)
    if len(taken) < count:
        live = live_rows(geometry, state)
        live[taken] = True
        free = np.flatnonzero(~live[: geometry.usable_rows])[: count - len(taken)]
        taken = np.concatenate([taken, free])
    if len(taken) < count:
        raise TableFull(
            f"{count} new keys, and room for {len(taken)} in a table of {geometry.usable_rows} rows"
        )
    return taken, cursor


def _insert(
    geometry: TableGeometry, state: TableState, new: Array, rows: Array, gone_slots: Array
) -> tuple[Elements, Elements]:
    """Place new keys and clear the slots of those that went: changed seeds and slots."""
    area = _Area.around(geometry, state, geometry.groups_of(new), gone_slots)
    seeds = area.insert(new, rows)
    gone_slots = np.sort(gone_slots)
    outside = gone_slots[~among(gone_slots, area.slots)]
    changed = area.changed()
    ids = np.concatenate([changed.ids, outside])
    cleared = np.full(len(outside), geometry.empty_row, np.int32)
    return seeds, Elements.of(ids, np.concatenate([changed.values, cleared]))


class _Area(Struct):
    """The windows of some groups, as one run of slots: `starts` is where each window begins in it.

    Windows that overlap share their slots; the others lie behind each other.
    """

    geometry: TableGeometry
    groups: Array
    seeds: Array
    starts: Array
    slots: Array
    before: Array
    rows: Array
    keys: Array

    @classmethod
    def around(cls, geometry: TableGeometry, state: TableState, groups: Array, cleared: Array) -> _Area:
        """The windows of these groups, with `cleared` slots taken for empty."""
        groups = distinct(groups)
        steps = np.minimum(np.diff(groups) * geometry.stride, WINDOW)
        starts = np.concatenate([[0], np.cumsum(steps)]).astype(np.int64)[: len(groups)]
        slots = np.empty(starts[-1] + WINDOW if len(groups) else 0, np.int64)
        for offset in range(WINDOW):
            slots[starts + offset] = groups * geometry.stride + offset
        before = state.rows(slots).astype(np.int32)
        rows = np.where(among(slots, np.sort(cleared)), np.int32(geometry.empty_row), before)
        keys = np.zeros(len(slots), np.int64)
        filled = np.flatnonzero(rows != geometry.empty_row)
        keys[filled] = state.keys(rows[filled].astype(np.int64))
        return cls(geometry, groups, state.seeds(groups), starts, slots, before, rows, keys)

    def insert(self, new: Array, rows: Array) -> Elements:
        """Place new keys; what seeds change.

        Raises:
            Crowded: a group's keys fit under no seed.
        """
        if not len(new):
            return Elements(np.empty(0, np.int64), np.empty(0, np.int64))
        number = np.searchsorted(self.groups, self.geometry.groups_of(new))
        fits = self._fit_as_they_are(new, rows, number)
        return self._move(new[~fits], rows[~fits], number[~fits])

    def changed(self) -> Elements:
        """The slots that hold another row than before."""
        differ = np.flatnonzero(self.rows != self.before)
        return Elements(self.slots[differ], self.rows[differ])

    def _fit_as_they_are(self, new: Array, rows: Array, number: Array) -> Array:
        """Place the new keys of those groups whose seed fits them, too; which keys that were."""
        slots = self.geometry.slots_of(new, self.groups[number], self.seeds[number])
        places = self.starts[number] + slots - self.groups[number] * self.geometry.stride
        order = np.arange(len(new))
        owner = np.empty(len(self.slots), np.int64)
        owner[places] = order
        fits = (self.rows[places] == self.geometry.empty_row) & (owner[places] == order)
        refused = np.zeros(len(self.groups), bool)
        refused[number[~fits]] = True
        fits = ~refused[number]
        self.rows[places[fits]], self.keys[places[fits]] = rows[fits], new[fits]
        return fits

    def _move(self, new: Array, rows: Array, number: Array) -> Elements:
        """Choose another seed for the groups of these keys, and place all their keys by it."""
        filled = np.flatnonzero(self.rows != self.geometry.empty_row)
        groups = self.geometry.groups_of(self.keys[filled])
        # A window has keys of other groups, too: they stay where they are.
        ours = among(groups, np.sort(self.groups[number]))
        places, owners = filled[ours], np.searchsorted(self.groups, groups[ours])
        keys = np.concatenate([self.keys[places], new])
        held = np.concatenate([self.rows[places], rows.astype(np.int32)])
        numbers = np.concatenate([owners, number])
        self.rows[places] = self.geometry.empty_row
        order = np.argsort(numbers, kind="stable")
        keys, held, numbers = keys[order], held[order], numbers[order]
        which, counts = np.unique(numbers, return_counts=True)
        occupied = np.asarray(self.rows != self.geometry.empty_row)
        seeds, slots = spread(keys, counts, self.starts[which], occupied)
        self.rows[slots], self.keys[slots] = held, keys
        return Elements(self.groups[which], seeds)
