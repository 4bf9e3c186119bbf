"""Merge changes in memory: of each row that any layer contains, the newest value.

The changes that restore the values of an earlier position are computed here, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from exporter.delta.format import Change, ChangeKind, Rows, Schema
from exporter.delta.layered_state import Changes, LayeredState
from exporter.delta.row_spill import ROWS_AT_ONCE, in_pieces, spilled
from exporter.tables.integer_sets import distinct
from exporter.wire.dtypes import Array


def restoring(
    since: Sequence[Changes], then: LayeredState, schema: Schema, scratch: Path
) -> dict[str, Change]:
    """Return the changes that bring all rows and variables in the changes `since` back to the state `then`.

    They are by the variable's name, and their values are verified; large results are maps of unnamed files in
    `scratch`.

    Raises:
        CheckpointError: a value cannot be read any more, or is damaged.
        OSError: the scratch file cannot be written.
        DiskFull, PublishError: bytes fetched from a store cannot be kept.
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
        name, ids = variable.name, [change.ids for change in touched if isinstance(change, Rows)]
        pieces = in_pieces(distinct(np.concatenate(ids)))
        found = ((some, then.rows_at(name, some)) for some in pieces)
        if (rows := spilled(variable, scratch, found)) is not None:
            restored[name] = rows
    return restored


def merge_changes(layers: Sequence[Changes], schema: Schema, scratch: Path) -> dict[str, Change]:
    """Merge `layers`, oldest first: return the newest value of each row and dense variable, by variable.

    Memory is bounded: large results are maps of unnamed files in `scratch`. The rows of a table that one
    layer alone changes are returned without a copy. Changes of variables that the schema lacks are ignored.
    Rows of a dense variable have to be folded before (`fold_whole`).

    Raises:
        ValueError: the last change of a dense variable is of rows.
        OSError: the scratch file cannot be written.
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
        rows = tables[0] if len(tables) == 1 else spilled(variable, scratch, newest_rows(tables))
        if rows is not None:
            merged[variable.name] = rows
    return merged


def needs_folding(layers: Sequence[Changes], schema: Schema) -> bool:
    """True if any of the layers contains rows of a dense variable.

    Then call `fold_whole` before `merge_changes`.
    """
    whole = [variable.name for variable in schema.variables if variable.kind is ChangeKind.DENSE]
    return any(isinstance(layer.get(name), Rows) for layer in layers for name in whole)


def fold_whole(layers: Sequence[Changes], schema: Schema, old: LayeredState) -> tuple[Changes, ...]:
    """Return copies of the layers in which no dense variable has changes of rows.

    A variable that had some has one whole value instead, in the last layer: the value of `old` with all
    layers applied. Raises CheckpointError and subclasses if it cannot be read or is damaged, DiskFull or
    PublishError if bytes fetched from a store cannot be kept.
    """
    folded = [dict(layer) for layer in layers]
    for variable in schema.variables:
        if variable.kind is ChangeKind.TABLE:
            continue
        if any(isinstance(layer.get(variable.name), Rows) for layer in layers):
            value = LayeredState(old.stored, (*old.layers, *layers)).whole(variable.name)
            for layer in folded:
                layer.pop(variable.name, None)
            folded[-1][variable.name] = value
    return tuple(folded)


def newest_rows(tables: Sequence[Rows]) -> Iterator[tuple[Array, Array]]:
    """Yield ids (ascending) and newest values of all rows of `tables`, a bounded number at a time.

    `tables` are oldest first: of a row in several, the last one counts.
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
            # With an index, numpy sorts and does not hash: see `integer_sets`.
            unique, first = np.unique(ids, return_index=True)  # the first of equals is the newest
            yield unique, values[first]
        starts = ends


def _range_end(tables: Sequence[Rows], starts: Sequence[int]) -> int:
    """Return the id at which the next range of rows ends.

    Each table has at most its share of rows in this range. `starts` has the number of each table's first row
    that was not yielded yet. The result is greater than all ids if the rest of each table is within its
    share.
    """
    share = max(1, ROWS_AT_ONCE // len(tables))  # so all hold `ROWS_AT_ONCE` together, however dense each is
    ends = [
        int(table.ids[start + share])
        for table, start in zip(tables, starts, strict=True)
        if start + share < len(table.ids)
    ]
    return min(ends, default=1 << 62)
