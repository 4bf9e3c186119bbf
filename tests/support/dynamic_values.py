"""A dynamic table as a dictionary, the reference; and as the variables that a base would serve it from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from msgspec import Struct

from exporter.graph.inference_graph import GraphDynamicTable
from exporter.tables.geometry import EMPTY_KEY, TableGeometry, hashes_of
from exporter.tables.parts import INDEX_ROWS, INDEX_SEEDS
from exporter.tables.place_keys import KeyRanges, place_ranges

Array = np.ndarray[Any, Any]


class Rows(Struct, eq=False):
    """Rows of a table by their keys."""

    keys: Array
    values: Array

    def read(self, keys: Iterable[int], defaults: Array) -> Array:
        """What a lookup gives; an absent key reads row `key mod d` of the defaults."""
        held = dict(zip(self.keys.tolist(), self.values, strict=True))
        found = [held.get(key, defaults[key % len(defaults)]) for key in map(int, keys)]
        return np.array(found, self.values.dtype).reshape(-1, self.values.shape[1])


def built_index(
    geometry: TableGeometry, keys: Array, rows: Array | None = None, run: int = 1 << 16
) -> tuple[Array, Array]:
    """The elements of `index_seeds` and `index_rows` for some keys, by default at the rows from 0 on.

    `~row` is the row of a key that is not served; `run` ranges are placed by themselves.
    """
    rows = np.arange(len(keys)) if rows is None else rows
    parts = {
        INDEX_SEEDS: np.zeros(geometry.groups, np.int64),
        INDEX_ROWS: np.full(geometry.slots, -7, np.int32),
    }

    def put(part: str, first: int, elements: Array) -> None:
        parts[part][first : first + len(elements)] = elements

    ranges = KeyRanges.of(geometry, len(keys))
    hashed = hashes_of(keys)
    owners = ranges.of_hashes(hashed)

    def keys_of_range(number: int, most: int) -> tuple[Array, Array]:
        found = np.flatnonzero(owners == number)[:most]
        return hashed[found], rows[found].astype(np.int32)

    for start in range(0, ranges.count, run):
        stop = min(start + run, ranges.count)
        for piece in place_ranges(ranges, start, stop, keys_of_range):
            parts[INDEX_SEEDS][piece.group : piece.group + len(piece.seeds)] = piece.seeds
            parts[INDEX_ROWS][piece.slot : piece.slot + len(piece.rows)] = piece.rows
    assert (parts[INDEX_ROWS] >= 0).all(), "every slot was written"
    return parts[INDEX_SEEDS], parts[INDEX_ROWS]


def table_values(table: GraphDynamicTable, rows: Rows, head_room: float = 0.25) -> dict[str, Array]:
    """The values of a table's variables, by their names."""
    count = len(rows.keys)
    geometry = TableGeometry.for_keys(count, head_room, len(table.defaults))
    keys = rows.keys.astype(np.int64)
    seeds, index_rows = built_index(geometry, keys)
    stored = np.zeros(geometry.capacity, np.int64)
    stored[:count] = keys
    stored[geometry.cursor_row] = count
    stored[-1] = EMPTY_KEY
    values = np.zeros((geometry.capacity, table.dim), table.value_dtype.numpy)
    values[:count] = rows.values
    values[geometry.first_default :] = table.defaults
    names = [variable.key for variable in table.variables]
    return dict(zip(names, (seeds, index_rows, stored, values), strict=True))
