"""Change the index of a published table: find keys, add some, drop others.

Only the elements that an added key needs are read: the seed of its group, the slots of the group's window,
the keys in them. If a new key's slot is taken, its whole group gets another seed, so a few keys that did not
change get other slots, too.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from msgspec import Struct

from exporter.errors import TableFull
from exporter.tables.geometry import WINDOW, TableGeometry
from exporter.tables.integer_sets import among, distinct
from exporter.tables.spread import Crowded, spread, table_full
from exporter.wire.dtypes import Array

_SCAN = 1 << 20  # slots read at a time


class TableState(Protocol):
    """Reads elements of a published table's variables, with any numbers (int64) in any order."""

    def seeds(self, groups: Array) -> Array:
        """Return the elements of `index_seeds` (int64) with these numbers, in the order of `groups`."""

    def rows(self, slots: Array) -> Array:
        """Return the elements of `index_rows` (int32) with these numbers, in the order of `slots`."""

    def keys(self, rows: Array) -> Array:
        """Return the elements of `keys` (int64) with these numbers, in the order of `rows`."""


class ArrayState(Struct, frozen=True):
    """A `TableState` whose variables are arrays, or mapped files."""

    index_seeds: Array
    index_rows: Array
    row_keys: Array

    def seeds(self, groups: Array) -> Array:
        """Return the elements of `index_seeds` with these numbers, in the order of `groups`."""
        return self.index_seeds[groups]

    def rows(self, slots: Array) -> Array:
        """Return the elements of `index_rows` with these numbers, in the order of `slots`."""
        return self.index_rows[slots]

    def keys(self, rows: Array) -> Array:
        """Return the elements of `keys` with these numbers, in the order of `rows`."""
        return self.row_keys[rows]


class Elements(Struct, frozen=True):
    """Elements of one variable to write: strictly increasing numbers, and the values."""

    ids: Array
    values: Array

    @classmethod
    def of(cls, ids: Array, values: Array) -> Elements:
        """Return elements sorted by their numbers `ids` (any order, no number twice), each with its value."""
        order = np.argsort(ids)
        return cls(ids[order].astype(np.int64), values[order])


class IndexChange(Struct, frozen=True):
    """The elements of a table's index to write.

    `added` is the row of each key to be added, in the keys' order.
    """

    seeds: Elements
    rows: Elements
    keys: Elements
    added: Array


def find_rows(geometry: TableGeometry, state: TableState, keys: Array) -> Array:
    """Return the row of each key (int64 [n], any order) in a published table: int64 [n], -1 for absent keys.

    Errors of reading are those of `state`.
    """
    return _Found.of(geometry, state, keys).rows


def live_rows(geometry: TableGeometry, state: TableState) -> Array:
    """Return a mask, bool [capacity], of the rows that a key has; reads all of `index_rows`.

    IndexError if the index names a row that does not exist; errors of reading are those of `state`.
    """
    used = np.zeros(geometry.capacity, bool)
    for begin in range(0, geometry.slots, _SCAN):
        rows = state.rows(np.arange(begin, min(begin + _SCAN, geometry.slots)))
        if rows.min(initial=0) < 0:  # numpy would count it from the end
            raise IndexError(f"there is no row {rows.min()}")
        used[rows] = True
    used[geometry.cursor_row :] = False  # empty slots hold the last row
    return used


def change_index(geometry: TableGeometry, state: TableState, add: Array, drop: Array) -> IndexChange:
    """Return the changes of a table's index that add keys and drop others; nothing is written.

    `add` and `drop` are int64 in any order, each key once in both together. An added key that exists keeps
    its row; keys to drop that are absent are ignored. New keys get the rows of dropped keys first. Errors of
    reading are those of `state`.

    Raises:
        TableFull: rows run out, or a group of keys finds no seed.
        ValueError: a key is named twice.
    """
    both = np.concatenate([add, drop])
    # A new key given twice finds no seed: without this check the error would be that the table is full.
    if len(distinct(both)) != len(both):
        raise ValueError("a key is named twice")
    found, dropped = _Found.of(geometry, state, add), _Found.of(geometry, state, drop)
    gone, gone_slots = dropped.rows[dropped.rows >= 0], dropped.slots[dropped.rows >= 0]
    rows, is_new = found.rows, found.rows < 0
    new = add[is_new]
    taken, cursor = _take_rows(geometry, state, gone, len(new))
    rows[is_new] = taken
    is_free = (found.held == geometry.empty_row) | among(found.slots, np.sort(gone_slots))
    placed = _Placed(found.slots[is_new], taken.astype(np.int32), new)
    try:
        seeds, slots = _insert(geometry, state, placed, is_free[is_new], gone_slots)
    except Crowded as error:
        raise table_full(geometry, error.keys) from None
    # Dropped keys stay in `keys`: once their slots are empty no lookup reaches their rows.
    keys = Elements.of(np.append(taken, geometry.cursor_row), np.append(new, cursor))
    # The cursor did not move either: writing it would make a change of a table that has none.
    if not len(new):
        keys = Elements(np.empty(0, np.int64), np.empty(0, np.int64))
    return IndexChange(seeds, slots, keys, rows)


class _Found(Struct, frozen=True):
    """Keys that were looked up: their rows (-1: absent), their slots, and the rows that these slots hold."""

    rows: Array
    slots: Array
    held: Array

    @classmethod
    def of(cls, geometry: TableGeometry, state: TableState, keys: Array) -> _Found:
        """Look up keys (int64 [n]) in the index; the fields of the result have the keys' order.

        Errors of reading are those of `state`.
        """
        groups = geometry.groups_of(keys)
        slots = geometry.slots_of(keys, groups, state.seeds(groups))
        held = state.rows(slots).astype(np.int64)
        # An absent key -1 finds the last row, whose key is -1, and is not present: see the module `geometry`.
        present = (state.keys(held) == keys) & (held != geometry.empty_row)
        return cls(np.where(present, held, -1), slots, held)


def _take_rows(geometry: TableGeometry, state: TableState, gone: Array, count: int) -> tuple[Array, int]:
    """Return rows for `count` new keys (int64 [count]), and the new cursor.

    The cursor is the first row that was never used. Rows of dropped keys, `gone`, are chosen first, then rows
    that were never used, then other free rows; only then all of `index_rows` is read. Raises TableFull if
    there are too few rows, the errors of `state` if it cannot be read.
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


class _Placed(Struct, frozen=True):
    """Slots, the rows that they will hold, and the keys of these rows."""

    slots: Array
    rows: Array
    keys: Array

    def at(self, which: Array) -> _Placed:
        """Return the entries that a mask (bool) or entry numbers (int64) select, in that order."""
        return _Placed(self.slots[which], self.rows[which], self.keys[which])


def _insert(
    geometry: TableGeometry, state: TableState, new: _Placed, is_free: Array, gone_slots: Array
) -> tuple[Elements, Elements]:
    """Place new keys and clear the slots of dropped ones.

    Return the elements of `index_seeds` and of `index_rows` to write. `is_free` is a mask of the keys in
    `new` whose slot is empty or becomes so; `gone_slots` are the slots of dropped keys, in any order. Raises
    Crowded if a group of keys finds no seed, the errors of `state` if it cannot be read.
    """
    # If the slots of all of a group's new keys are free, nothing around them has to be read.
    groups = geometry.groups_of(new.keys)
    fits = is_free & _is_first(new.slots)
    fits &= ~among(groups, np.sort(groups[~fits]))
    # In ascending order neighbours are in the processor's cache.
    fitting, others = new.at(np.flatnonzero(fits)[np.argsort(new.slots[fits])]), new.at(~fits)
    gone_slots = np.sort(gone_slots)
    area = _Area.around(geometry, state, groups[~fits], gone_slots, fitting)
    seeds = area.move(others)
    empty = np.full(len(gone_slots), geometry.empty_row, np.int32)
    is_cleared = ~among(gone_slots, fitting.slots)
    ids = np.concatenate([gone_slots[is_cleared], fitting.slots])
    values = np.concatenate([empty[is_cleared], fitting.rows])
    outside = ~among(ids, area.slots)
    changed = area.changed()
    return seeds, Elements.of(
        np.concatenate([changed.ids, ids[outside]]), np.concatenate([changed.values, values[outside]])
    )


def _is_first(values: Array) -> Array:
    """Return a mask of the values that do not occur earlier in the array."""
    order = np.argsort(values, kind="stable")
    first = np.ones(len(values), bool)
    first[order[1:]] = values[order[1:]] != values[order[:-1]]
    return first


class _Area(Struct):
    """The slots of some groups' windows, in order; `starts` is the beginning of each window."""

    # Windows that overlap share their slots.

    geometry: TableGeometry
    groups: Array
    starts: Array
    slots: Array
    before: Array
    rows: Array
    keys: Array

    @classmethod
    def around(
        cls, geometry: TableGeometry, state: TableState, groups: Array, cleared: Array, placed: _Placed
    ) -> _Area:
        """Return the area of these groups' windows, with the slots `cleared` emptied and `placed` filled.

        Groups may have any order, and repeat. The windows are read from `state`; slots outside of them are
        ignored. Errors of reading are those of `state`.
        """
        groups = distinct(groups)
        # of each window, the slots before the next one
        steps = np.minimum(np.diff(groups) * geometry.stride, WINDOW)
        lengths = np.append(steps, WINDOW)[: len(groups)]
        starts = np.cumsum(lengths) - lengths
        slots = np.repeat(groups * geometry.stride - starts, lengths) + np.arange(lengths.sum())
        before = state.rows(slots).astype(np.int32, copy=False)
        rows = before.copy()
        # In this order: a slot may be cleared and then filled by a new key, which `state` does not know yet.
        _put(rows, slots, cleared, np.int32(geometry.empty_row))
        filled = np.flatnonzero(rows != geometry.empty_row)
        keys = np.zeros(len(slots), np.int64)
        keys[filled] = state.keys(rows[filled].astype(np.int64))
        _put(rows, slots, placed.slots, placed.rows)
        _put(keys, slots, placed.slots, placed.keys)
        return cls(geometry, groups, starts, slots, before, rows, keys)

    def changed(self) -> Elements:
        """Return the slots, ascending, that have another row than was read, with their present rows."""
        differ = np.flatnonzero(self.rows != self.before)
        return Elements(self.slots[differ], self.rows[differ])

    def move(self, new: _Placed) -> Elements:
        """Choose a new seed for each group of the area, and place its present and its `new` keys by it.

        Return the seeds to write, by group. Changes `rows` and `keys` of the area. Raises Crowded if a group
        finds no seed.
        """
        filled = np.flatnonzero(self.rows != self.geometry.empty_row)
        groups = self.geometry.groups_of(self.keys[filled])
        # A window has keys of other groups, too: they keep their slots.
        ours = among(groups, self.groups)
        places = filled[ours]
        owners = np.concatenate([groups[ours], self.geometry.groups_of(new.keys)])
        numbers = np.searchsorted(self.groups, owners)
        order = np.argsort(numbers, kind="stable")
        keys = np.concatenate([self.keys[places], new.keys])[order]
        rows = np.concatenate([self.rows[places], new.rows])[order]
        # Before `occupied`: these keys may get their own old slots again.
        self.rows[places] = self.geometry.empty_row
        occupied = np.asarray(self.rows != self.geometry.empty_row)
        counts = np.bincount(numbers, minlength=len(self.groups))
        seeds, slots = spread(keys, counts, self.starts, occupied)
        self.rows[slots], self.keys[slots] = rows, keys
        return Elements(self.groups, seeds)


def _put(values: Array, ids: Array, wanted: Array, given: Array | np.generic) -> None:
    """Overwrite in place the elements of `values` whose numbers, `ids` (ascending), are among `wanted`.

    `given` is one scalar for all of them, or a value for each of `wanted`. Wanted numbers that are not in
    `ids` are ignored.
    """
    if len(ids):
        places = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
        inside = ids[places] == wanted
        values[places[inside]] = given if isinstance(given, np.generic) else given[inside]
