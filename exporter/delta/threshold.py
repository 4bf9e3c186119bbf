"""Rows that moved little are left out of a delta: a bound on how far what is served stays behind.

Distances are Euclidean norms, of rows as they are served, in float64; a distance that is no number is no
small one. Tables of other types than floating point, and variables that are served whole, are not touched.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from exporter.checkpoint.tensor_bundle import check_values
from exporter.delta.diff import RowSpill, differing_rows
from exporter.delta.entry import LeftOut
from exporter.delta.files import read_delta, write_delta
from exporter.delta.format import Change, DeltaHeader, Rows, Schema, ServedVariable
from exporter.delta.state import Changes, State
from exporter.dtypes import DType
from exporter.errors import CheckpointError

Array = np.ndarray[Any, Any]

_FLOATS = {DType.FLOAT, DType.DOUBLE, DType.HALF, DType.BFLOAT16}
_REMEMBERED = "left-out-"
_ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Sifted:
    """`changes` without the rows that moved less than the bound, which are in `stay`, by table.

    `left_out` is None if there are none.
    """

    changes: dict[str, Change]
    left_out: LeftOut | None = None
    stay: Mapping[str, Rows] = field(default_factory=dict)


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
    stay: dict[str, Rows] = {}
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
        if near is not None:
            stay[variable.name], largest = near, max(largest, furthest)
    count = sum(len(rows.ids) for rows in stay.values())
    return Sifted(kept, LeftOut(bound, count, largest) if count else None, stay)


def row_distances(a: Array, b: Array) -> Array:
    """float64 [n]: the Euclidean distances of the rows of two arrays [n, ...] of one shape."""
    with np.errstate(invalid="ignore", over="ignore"):
        moved = (a.astype(np.float64) - b.astype(np.float64)).reshape(len(a), math.prod(a.shape[1:]))
        return np.asarray(np.sqrt(np.einsum("ij,ij->i", moved, moved)))


def remember(directory: Path, schema: Schema, header: DeltaHeader, stay: Mapping[str, Rows]) -> None:
    """Keep the trainer's values of rows that the delta `header` left out, in the form of a delta.

    What is kept is a cache of the exporter's: if it is lost or damaged, states are compared instead.

    Raises:
        DiskFull, PublishError: it cannot be written.
    """
    directory.mkdir(exist_ok=True)
    name = f"{_REMEMBERED}{header.to_position}"
    write_delta(directory / name, schema, header, stay)
    for path in directory.glob(f"{_REMEMBERED}*"):
        if path.name.partition(".")[0] != name:
            path.unlink(missing_ok=True)


def recall(directory: Path, schema: Schema, *, lineage: str, position: int) -> Changes | None:
    """What `remember` kept for the state at a position of a log, None if it is not whole."""
    try:
        found = read_delta(directory / f"{_REMEMBERED}{position}", schema)
        for ref in found.catalog.tensors.values():
            check_values(found.catalog, ref)
    except CheckpointError:
        return None
    header = found.header
    return found.changes if (header.lineage, header.to_position) == (lineage, position) else None


def _sift_table(
    change: Rows, published: State, variable: ServedVariable, bound: float, scratch: Path
) -> tuple[Rows | None, Rows | None, float]:
    """The rows to send, those that stay behind, and the largest of their distances."""
    largest = 0.0
    with RowSpill(variable, scratch) as far, RowSpill(variable, scratch) as near:
        for start in range(0, len(change.ids), _ROWS_AT_ONCE):
            ids = change.ids[start : start + _ROWS_AT_ONCE]
            values = change.values[start : start + _ROWS_AT_ONCE]
            before = published.rows_at(variable.name, ids)
            moved = differing_rows(before, values)
            ids, values = ids[moved], values[moved]
            distances = row_distances(values, before[moved])
            stays = distances < bound
            far.add(ids[~stays], values[~stays])
            near.add(ids[stays], values[stays])
            largest = max(largest, float(distances[stays].max(initial=0.0)))
        return far.rows(), near.rows(), largest
