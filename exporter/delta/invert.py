"""Compute the changes that bring the values of an earlier position back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from exporter.delta.format import Change, ChangeKind, Rows, Schema, ServedVariable
from exporter.delta.row_spill import ROWS_AT_ONCE, RowSpill
from exporter.delta.snapshot import Changes, Snapshot
from exporter.integer_sets import distinct

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
