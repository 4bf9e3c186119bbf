"""Changes in memory, layer on layer: of each row that any of them touched, the newest value.

The changes that bring the values of an earlier position back are computed here, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from exporter.delta.format import Change, ChangeKind, Rows, Schema, ServedVariable, SortedRows
from exporter.delta.row_spill import ROWS_AT_ONCE, RowSpill
from exporter.delta.snapshot import Changes, Snapshot
from exporter.tables.integer_sets import distinct

Array = np.ndarray[Any, Any]


def restoring(since: Sequence[Changes], then: Snapshot, schema: Schema, scratch: Path) -> dict[str, Change]:
    """The changes that give everything in `since` the values of the state `then` again; checksums are
    verified.

    Raises:
        CheckpointError: a value cannot be read any more, or is damaged.
        DiskFull, PublishError: the scratch file cannot be written.
    """
    tables = [variable.name for variable in schema.variables if variable.kind is ChangeKind.TABLE]
    then.check(name for name in tables if any(name in layer for layer in since))
    restored: dict[str, Change] = {}
    for variable in schema.variables:
        touched = [layer[variable.name] for layer in since if variable.name in layer]
        if not touched:
            continue
        if variable.kind is ChangeKind.DENSE:
            restored[variable.name] = then.whole(variable.name)
            continue
        rows = _rows_then([change for change in touched if isinstance(change, Rows)], then, variable, scratch)
        if rows is not None:
            restored[variable.name] = rows
    return restored


def _rows_then(
    touched: Sequence[Rows], then: Snapshot, variable: ServedVariable, scratch: Path
) -> Rows | None:
    ids = distinct(np.concatenate([change.ids for change in touched]))
    with RowSpill(variable, scratch) as spill:
        for start in range(0, len(ids), ROWS_AT_ONCE):
            some = ids[start : start + ROWS_AT_ONCE]
            spill.add(some, then.rows_at(variable.name, some))
        return spill.rows()


def merge_changes(layers: Sequence[Changes], schema: Schema, scratch: Path) -> dict[str, Change]:
    """Merge `layers`, oldest first; memory is bounded, large results lie in `scratch`.

    The newest value of a variable that is served whole counts.

    Raises:
        ValueError: rows of such a variable are among the layers: see `fold_whole`.
        DiskFull, PublishError: the scratch file cannot be written.
    """
    merged: dict[str, Change] = {}
    for variable in schema.variables:
        found = [layer[variable.name] for layer in layers if variable.name in layer]
        if not found:
            continue
        if variable.kind is ChangeKind.DENSE:
            if isinstance(found[-1], Rows):
                raise ValueError(f"rows of {variable.name!r}, which is served whole")
            merged[variable.name] = found[-1]
            continue
        tables = [change for change in found if isinstance(change, Rows)]
        if len(tables) == 1:
            merged[variable.name] = tables[0]
            continue
        with RowSpill(variable, scratch) as spill:
            for ids, values in newest_rows(tables):
                spill.add(ids, values)
            if (rows := spill.rows()) is not None:
                merged[variable.name] = rows
    return merged


def needs_folding(layers: Sequence[Changes], schema: Schema) -> bool:
    """True if rows of a variable that is served whole are among the layers."""
    whole = [variable.name for variable in schema.variables if variable.kind is ChangeKind.DENSE]
    return any(isinstance(layer.get(name), Rows) for layer in layers for name in whole)


def fold_whole(layers: Sequence[Changes], schema: Schema, old: Snapshot) -> tuple[Changes, ...]:
    """Apply rows of variables that are served whole to their values in `old`."""
    folded = [dict(layer) for layer in layers]
    for variable in schema.variables:
        if variable.kind is ChangeKind.TABLE:
            continue
        if any(isinstance(layer.get(variable.name), Rows) for layer in layers):
            value = Snapshot(old.stored, (*old.layers, *layers)).whole(variable.name)
            for layer in folded:
                layer.pop(variable.name, None)
            folded[-1][variable.name] = value
    return tuple(folded)


def newest_rows(tables: Sequence[SortedRows]) -> Iterator[tuple[Array, Array]]:
    """Ids and values in ascending order, in ranges of ids that hold a bounded number of rows.

    If several tables have rows of one id, those of the last one count.
    """
    newest_first = [table for table in reversed(tables) if len(table.ids)]
    starts = [0] * len(newest_first)
    while any(start < len(table.ids) for start, table in zip(starts, newest_first, strict=True)):
        limit = _range_end(newest_first, starts)
        ends = [int(np.searchsorted(table.ids, limit)) for table in newest_first]
        pieces = [piece for piece in zip(newest_first, starts, ends, strict=True) if piece[1] < piece[2]]
        ids = np.concatenate([table.ids[start:end] for table, start, end in pieces])
        values = np.concatenate([table.values[start:end] for table, start, end in pieces])
        if len(pieces) == 1:
            yield ids, values
        else:
            unique, first = np.unique(ids, return_index=True)  # the first of equals is the newest
            yield unique, values[first]
        starts = ends


def _range_end(tables: Sequence[SortedRows], starts: Sequence[int]) -> int:
    """The end of the next range of ids: no table has more rows in it than its share of `ROWS_AT_ONCE`."""
    share = max(1, ROWS_AT_ONCE // len(tables))
    ends = [
        int(table.ids[start + share])
        for table, start in zip(tables, starts, strict=True)
        if start + share < len(table.ids)
    ]
    return min(ends, default=1 << 62)
