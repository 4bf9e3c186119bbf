"""The index of a dynamic table in memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from exporter.tables.change_index import (
    ArrayState,
    IndexChange,
)
from exporter.tables.geometry import EMPTY_KEY, TableGeometry
from tests.support.dynamic_values import built_index

Array = np.ndarray[Any, Any]
LIMITS = np.array([0, -1, -2, 1, 2**63 - 1, -(2**63), 2**62, -(2**62)], np.int64)


def new_table(geometry: TableGeometry, keys: Array) -> ArrayState:
    held = np.zeros(geometry.capacity, np.int64)
    held[: len(keys)] = keys
    held[geometry.cursor_row], held[geometry.empty_row] = len(keys), EMPTY_KEY
    return ArrayState(*built_index(geometry, keys), held)


def apply(state: ArrayState, change: IndexChange) -> None:
    for part, target in (
        (change.seeds, state.index_seeds),
        (change.rows, state.index_rows),
        (change.keys, state.row_keys),
    ):
        assert (np.diff(part.ids) > 0).all(), "a delta's ids increase"
        target[part.ids] = part.values
