"""Changes of dynamic tables: rows by keys become rows by number of a table's four variables.

Trainers write rows by keys (`KeyedRows`). A dynamic table is served from four ordinary variables
(`exporter.tables.geometry`), and the published ones say in which row each key is, which rows are free, and
how keys are placed. So a delta of a dynamic table holds rows of four tables, and the code that applies,
merges or reverts deltas does not handle keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
from msgspec import Struct

from exporter.delta.format import Change, Rows, Schema, ServedVariable
from exporter.delta.layered_state import LayeredState
from exporter.delta.row_spill import spilled
from exporter.errors import CorruptFile, TableFull
from exporter.mapping.mapping_spec import DynamicTable
from exporter.tables.change_index import IndexChange, change_index, find_rows, live_rows
from exporter.tables.geometry import EMPTY_KEY, TableGeometry
from exporter.tables.integer_sets import among, distinct
from exporter.tables.parts import VALUES
from exporter.wire.dtypes import Array


class KeyedRows(Struct, frozen=True, eq=False):
    """Rows of table `name`, in any order: row i of `values` belongs to `keys[i]`, int64, no key twice.

    `freqs` has the number of times that each key was seen; None if that was not recorded.
    """

    name: str
    keys: Array
    values: Array
    freqs: Array | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def at(self, which: Array) -> KeyedRows:
        """Return the rows that `which` selects: a mask of all rows, or row numbers in the wanted order."""
        freqs = None if self.freqs is None else self.freqs[which]
        return KeyedRows(self.name, self.keys[which], self.values[which], freqs)

    def rows_of(self, keys: Array) -> Array:
        """Return the row number, in this object, of each key, int64 [n]; -1 for keys without a row.

        The keys may have any order.
        """
        if not len(self.keys):
            return np.full(len(keys), -1)
        order = np.argsort(self.keys)
        places = np.minimum(np.searchsorted(self.keys, keys, sorter=order), len(order) - 1)
        rows = order[places]
        return np.where(self.keys[rows] == keys, rows, -1)

    def same_as(self, other: KeyedRows) -> Array:
        """Return a mask, bool [n], of the rows that `other` has under the same keys with the same bytes."""
        from exporter.delta.compare_rows import differing_rows

        rows = other.rows_of(self.keys)
        ours = np.flatnonzero(rows >= 0)
        differing = differing_rows(self.values[ours], other.values[rows[ours]])
        same = rows >= 0
        same[ours[differing]] = False
        return same


class KeyedChange(Struct, frozen=True, eq=False):
    """A change of a table: first the keys `removed`, increasing, then new `rows`, also of new keys."""

    rows: KeyedRows
    removed: Array

    def then(self, later: KeyedChange) -> KeyedChange:
        """Return one change with the effect of this one followed by a `later` one of the same table.

        The result's rows have no `freqs`.
        """
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
    """Merge consecutive changes of several tables, oldest first, into one of each table.

    Return them by the table's name; merged ones have no `freqs`.
    """
    found: dict[str, KeyedChange] = {}
    for change in changes:
        before = found.get(change.rows.name)
        found[change.rows.name] = change if before is None else before.then(change)
    return found


_KEYS_AT_ONCE = 1 << 20
_BYTES_AT_ONCE = 4 << 20
_NO_KEYS = {0, EMPTY_KEY}  # of rows that no key has had


class KeyedSource(Protocol):
    """A table as the trainer has it now: `keys`, int64, no key twice, and the row of each."""

    @property
    def keys(self) -> Array:
        """The keys that are to be served, int64, no key twice."""

    def values(self, places: Array) -> Array:
        """Return the rows, in the served dtype, of the keys at these places of `keys`, in that order."""


class ServedTable(Struct, frozen=True):
    """Reads a published dynamic table at any places, without verifying checksums: call `check` first."""

    state: LayeredState
    variables: tuple[ServedVariable, ServedVariable, ServedVariable, ServedVariable]
    geometry: TableGeometry

    @classmethod
    def of(cls, table: DynamicTable, schema: Schema, state: LayeredState) -> ServedTable:
        """Return the reader of a table whose variables are in a schema; `state` has their values.

        Raises CorruptFile if variables are absent or their shapes do not fit together.
        """
        by_name = {variable.name: variable for variable in schema.variables}
        try:
            seeds, rows, keys, values = (by_name[name] for name in table.keys)
            (groups,), (slots,), (capacity,), (_, _) = seeds.shape, rows.shape, keys.shape, values.shape
            geometry = TableGeometry.of_shapes(groups, slots, capacity, table.defaults)
        except (KeyError, ValueError) as error:
            raise CorruptFile(
                f"published variables of table {table.name!r} are inconsistent: {error}", hint=state.hint
            ) from None
        return cls(state, (seeds, rows, keys, values), geometry)

    def check(self) -> None:
        """Verify the checksums of all variables of the table.

        They are fetched whole first if they are in a store. Raises CorruptFile if one differs,
        CheckpointError (and subclasses) if values cannot be read, DiskFull or PublishError if bytes fetched
        from a store cannot be kept.
        """
        names = [variable.name for variable in self.variables]
        for name in names:  # rows will be read in any order
            self.state.stored[name].fetch()
        self.state.check(names)

    @property
    def index_names(self) -> tuple[str, ...]:
        """The names of the table's variables except the values: seeds, rows, keys."""
        return tuple(variable.name for variable in self.variables[:-1])

    @property
    def row_values(self) -> ServedVariable:
        """The served variable that holds the rows' values."""
        return self.variables[-1]

    def seeds(self, groups: Array) -> Array:
        """Return the elements of `index_seeds` with these numbers, in the order of `groups`.

        Raises CheckpointError (and subclasses) if they cannot be read, DiskFull or PublishError if bytes
        fetched from a store cannot be kept.
        """
        return self._at(0, groups)

    def rows(self, slots: Array) -> Array:
        """Return the elements of `index_rows` with these numbers, in the order of `slots`.

        Raises CheckpointError (and subclasses) if they cannot be read, DiskFull or PublishError if bytes
        fetched from a store cannot be kept.
        """
        return self._at(1, slots)

    def keys(self, rows: Array) -> Array:
        """Return the elements of `keys` with these numbers, in the order of `rows`.

        Raises CheckpointError (and subclasses) if they cannot be read, DiskFull or PublishError if bytes
        fetched from a store cannot be kept.
        """
        return self._at(2, rows)

    def find(self, keys: Array) -> Array:
        """Return the row of each key (int64, any order), int64; -1 for keys that are absent.

        Raises CheckpointError (and subclasses) if the index cannot be read, DiskFull or PublishError if bytes
        fetched from a store cannot be kept.
        """
        found = [
            find_rows(self.geometry, self, keys[start : start + _KEYS_AT_ONCE])
            for start in range(0, len(keys), _KEYS_AT_ONCE)
        ]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def live(self) -> tuple[Array, Array]:
        """Return the numbers of the rows in use, int64 ascending, and their keys; reads all of the index.

        Raises CheckpointError (and subclasses) if the index cannot be read, DiskFull or PublishError if bytes
        fetched from a store cannot be kept.
        """
        rows = np.flatnonzero(live_rows(self.geometry, self))
        return rows, self.keys(rows)

    def change(self, add: Array, drop: Array) -> IndexChange:
        """Return the changes of the index that add the keys `add` and drop `drop`; nothing is written.

        `add` and `drop` are keys, int64. An added key that exists keeps its row; absent keys to drop are
        ignored.

        Raises:
            TableFull: there is no room for the new keys.
            CorruptFile: the index does not fit its number of default rows.
            ValueError: a key occurs twice in `add` and `drop` together.
            CheckpointError: the index cannot be read.
            DiskFull, PublishError: bytes fetched from a store cannot be kept.
        """
        cursor, *others = self.keys(np.arange(self.geometry.cursor_row, self.geometry.capacity)).tolist()
        is_last, unused = others[-1] == EMPTY_KEY, set(others[:-1]) <= _NO_KEYS
        if not (0 <= cursor <= self.geometry.usable_rows and is_last and unused):
            raise self._inconsistent()
        try:
            change = change_index(self.geometry, self, add, drop)
        except TableFull as error:
            full = TableFull(f"table {self.name!r} is full: {error.message}", cause=error.cause)
            full.hint = error.hint
            raise full from None
        fresh = np.unique(self.keys(change.added[change.added >= cursor]))  # rows that no key has used yet
        if not set(fresh.tolist()) <= _NO_KEYS:
            raise self._inconsistent()
        return change

    def _inconsistent(self) -> CorruptFile:
        return CorruptFile(
            f"the index of table {self.name!r} does not fit its manifest",
            cause=f"by incremental.recipe.dynamic it has {self.geometry.defaults} default rows",
            hint=self.state.hint,
        )

    @property
    def name(self) -> str:
        """The name of the table, without the name of a variable."""
        return self.row_values.name.removesuffix(f"/{VALUES}")

    def _at(self, part: int, ids: Array) -> Array:
        return self.state.rows_at(self.variables[part].name, ids.astype(np.int64, copy=False))


def upserted(table: ServedTable, rows: KeyedRows, removed: Array) -> dict[str, Change]:
    """Return the changes that remove the keys `removed` from a table, then put `rows`, by variable.

    `rows` are in the served dtype, of old and new keys. A key that is in `removed` and in `rows` keeps its
    row number. Absent keys in `removed` are ignored. Variables that do not change are left out.

    Raises:
        TableFull: there is no room for the new keys.
        CorruptFile: the index does not fit the manifest.
        ValueError: a key of `rows` or of `removed` occurs twice.
        CheckpointError: the index cannot be read.
        DiskFull, PublishError: bytes fetched from a store cannot be kept.
    """
    change = table.change(rows.keys, removed[rows.rows_of(removed) < 0])
    changes = _index_changes(table, change)
    if len(rows):
        order = np.argsort(change.added)
        changes[table.row_values.name] = Rows(change.added[order], rows.values[order])
    return changes


def compared(table: ServedTable, trained: KeyedSource, scratch: Path) -> dict[str, Change]:
    """Return the changes after which a table holds exactly the trainer's keys and rows, by variable.

    Checksums are not verified. Large results are a map of an unnamed file in `scratch`. Variables that do not
    change are left out. Errors of `trained` pass.

    Raises:
        TableFull: there is no room for new keys.
        CorruptFile: the index does not fit the manifest.
        CheckpointError: the table cannot be read.
        DiskFull, PublishError: bytes fetched from a store cannot be kept.
        OSError: the file cannot be written.
    """
    rows = table.find(trained.keys)
    live, live_keys = table.live()
    drop = live_keys[~among(live, np.sort(rows[rows >= 0]))]
    new = np.flatnonzero(rows < 0)
    change = table.change(trained.keys[new], drop)
    rows[new] = change.added
    is_new = np.zeros(len(rows), bool)
    is_new[new] = True
    from exporter.delta.compare_rows import differing_rows  # late: changes from increments do not need it

    changes = _index_changes(table, change)

    def differing() -> Iterator[tuple[Array, Array]]:
        for ids, places in _in_steps(table, rows):
            values = trained.values(places)
            before = table.state.rows_at(table.row_values.name, ids)
            differ = is_new[places]
            differ[differing_rows(before, values)] = True
            yield ids[differ], values[differ]

    found = spilled(table.row_values, scratch, differing())
    if found is not None:
        changes[table.row_values.name] = found
    return changes


def _in_steps(table: ServedTable, rows: Array) -> Iterator[tuple[Array, Array]]:
    """Yield row numbers in ascending order, with their places in `rows`.

    Each step is at most 4 MiB of row values.
    """
    order = np.argsort(rows)
    step = max(1, _BYTES_AT_ONCE // max(1, table.row_values.row_bytes))
    for start in range(0, len(order), step):
        places = order[start : start + step]
        yield rows[places], places


def _index_changes(table: ServedTable, change: IndexChange) -> dict[str, Change]:
    found = zip(table.index_names, (change.seeds, change.rows, change.keys), strict=True)
    return {name: Rows(part.ids, part.values) for name, part in found if len(part.ids)}
