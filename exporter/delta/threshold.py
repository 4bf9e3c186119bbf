"""Rows that moved little are left out of a delta: a bound on how far what is served stays behind.

Distances are Euclidean norms, of rows as they are served, in float64; a distance that is no number is no
small one. Tables of other types than floating point, and variables that are served whole, are not touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from exporter.delta.diff import RowSpill, differing_rows
from exporter.delta.entry import LeftOut
from exporter.delta.format import Change, Rows, Schema, ServedVariable
from exporter.delta.state import State
from exporter.dtypes import DType

Array = np.ndarray[Any, Any]

_FLOATS = {DType.FLOAT, DType.DOUBLE, DType.HALF, DType.BFLOAT16}
_ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Sifted:
    """`changes` without the rows that moved less than the bound: their numbers are in `rows`, by table.

    `left_out` is None if there are none.
    """

    changes: dict[str, Change]
    left_out: LeftOut | None = None
    rows: Mapping[str, Array] = field(default_factory=dict)


def sift(
    changes: Mapping[str, Change], published: State, schema: Schema, bound: float, scratch: Path
) -> Sifted:
    """Take from `changes` the rows whose distance from what is published is below `bound`.

    Rows that are what is published bit for bit are taken out as well, and not counted.

    Raises:
        CheckpointError: a published value cannot be read.
        DiskFull, PublishError: the scratch file cannot be written.
    """
    kept: dict[str, Change] = {}
    rows: dict[str, Array] = {}
    largest = 0.0
    for variable in schema.variables:
        change = changes.get(variable.name)
        if change is None:
            continue
        if not isinstance(change, Rows) or variable.dtype not in _FLOATS:
            kept[variable.name] = change
            continue
        far, near, furthest = _sift_table(change, published, variable, bound, scratch)
        if far is not None:
            kept[variable.name] = far
        if len(near):
            rows[variable.name], largest = near, max(largest, furthest)
    count = sum(map(len, rows.values()))
    return Sifted(kept, LeftOut(bound, count, largest) if count else None, rows)


def row_distances(a: Array, b: Array) -> Array:
    """float64 [n]: the Euclidean distances of the rows of two arrays [n, ...] of one shape."""
    with np.errstate(invalid="ignore", over="ignore"):
        moved = (a.astype(np.float64) - b.astype(np.float64)).reshape(len(a), -1)
        return np.asarray(np.sqrt(np.einsum("ij,ij->i", moved, moved)))


def _sift_table(
    change: Rows, published: State, variable: ServedVariable, bound: float, scratch: Path
) -> tuple[Rows | None, Array, float]:
    """The rows to send, the numbers of those that stay behind, and the largest of their distances."""
    near: list[Array] = [np.empty(0, np.int64)]
    largest = 0.0
    with RowSpill(variable, scratch) as spill:
        for start in range(0, len(change.ids), _ROWS_AT_ONCE):
            ids = change.ids[start : start + _ROWS_AT_ONCE]
            values = change.values[start : start + _ROWS_AT_ONCE]
            before = published.rows_at(variable.name, ids)
            moved = differing_rows(before, values)
            ids, values = ids[moved], values[moved]
            distances = row_distances(values, before[moved])
            stays = distances < bound
            spill.add(ids[~stays], values[~stays])
            near.append(ids[stays])
            largest = max(largest, float(distances[stays].max(initial=0.0)))
        return spill.rows(), np.concatenate(near), largest
