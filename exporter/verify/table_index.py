"""Check the index of staged dynamic tables: keys of the checkpoint are looked up, and must find their rows.

A thousand rows of each table are asked for, from everywhere in it. A key that a filter leaves out must not
be found, or be found at its row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from exporter.catalog import Catalog, TensorRef
from exporter.checkpoint.tensor_values import memory_map
from exporter.errors import VerificationError
from exporter.tables.change_index import find_rows
from exporter.tables.geometry import INDEX_ROWS, INDEX_SEEDS, KEYS
from exporter.tables.lay_out import TableLayout, TablePlan

Array = np.ndarray[Any, Any]

_ASKED = 1024
"""Of a table: each key that is looked up maps some pages of several large files."""


def verify_tables(layout: TableLayout, staged: Catalog, *, is_filtered: bool) -> None:
    """Look keys of the checkpoint up in the staged tables, as the graph does.

    Raises:
        VerificationError: one is not found, or at the row of another.
    """
    for table in layout.tables:
        named = {part: staged.tensors[f"{table.name}/{part}"] for part in (INDEX_SEEDS, INDEX_ROWS, KEYS)}
        state = _Staged(*(_Elements.of(staged, ref) for ref in named.values()))
        first = 0
        for part in table.variable.parts:
            if part.rows:
                keys = memory_map(layout.source, part.keys)
                asked = np.linspace(0, part.rows - 1, -(-_ASKED // len(table.variable.parts)))
                _check(table, state, keys, asked.astype(np.int64), first, is_filtered=is_filtered)
            first += part.rows


def _check(
    table: TablePlan, state: _Staged, keys: Array, asked: Array, first: int, *, is_filtered: bool
) -> None:
    found = find_rows(table.geometry, state, keys[asked].astype(np.int64))
    wrong = found != asked + first
    if is_filtered:
        wrong &= found >= 0
    if wrong.any():
        place = int(wrong.argmax())
        raise VerificationError(
            f"key {keys[asked[place]]} of table {table.name!r} is at row {found[place]} of the staged index, "
            f"expected row {asked[place] + first}"
        )


class _Elements(Struct, frozen=True):
    """The elements of a tensor of one dimension: where each of its slices begins, and the slices."""

    starts: Array
    slices: tuple[Array, ...]

    @classmethod
    def of(cls, catalog: Catalog, ref: TensorRef) -> _Elements:
        if not ref.slices:
            return cls(np.zeros(1, np.int64), (memory_map(catalog, ref),))
        ordered = sorted(ref.slices, key=lambda part: part.spec.starts)
        starts = np.array([part.spec.starts[0] for part in ordered])
        return cls(starts, tuple(memory_map(catalog, ref, part) for part in ordered))

    def at(self, ids: Array) -> Array:
        """The elements with these numbers."""
        values = np.empty(len(ids), self.slices[0].dtype)
        owners = np.searchsorted(self.starts, ids, side="right") - 1
        for number, part in enumerate(self.slices):
            ours = owners == number
            values[ours] = part[ids[ours] - self.starts[number]]
        return values


class _Staged(Struct, frozen=True):
    """A staged table, as a `TableState`."""

    index_seeds: _Elements
    index_rows: _Elements
    row_keys: _Elements

    def seeds(self, groups: Array) -> Array:
        """Elements of `index_seeds`."""
        return self.index_seeds.at(groups)

    def rows(self, slots: Array) -> Array:
        """Elements of `index_rows`."""
        return self.index_rows.at(slots)

    def keys(self, rows: Array) -> Array:
        """Elements of `keys`."""
        return self.row_keys.at(rows)
