"""Restore a training from a full checkpoint and the increments after it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from exporter.delta.format import Change, Rows
from exporter.errors import MissingTensors, ShapeMismatch, UsageError
from exporter.increments.increment import Changed, StoredIncrement
from exporter.local_paths import local_path
from exporter.tables.trainable_table import trainable_tables
from exporter.training.access import Access, KeyedAccess, access, check_tables, overlay_tables, table_access
from exporter.training.change_tracking import VariableTracking, plan_tracking
from exporter.training.store import Store

Session = Any


def restore_increments(session: Session, ckpt_dir: Path | str) -> int | None:
    """Bring a session that has restored the newest full checkpoint of `ckpt_dir` to the newest increment.

    Adds operations to the session's graph. Returns the step that was reached, None without increments.
    `IncrementHook(incremental_save_restore=True)` does this by itself.

    Raises:
        UsageError: the graph is finalized.
        MissingTensors, ShapeMismatch: an increment does not fit the graph's variables.
        CorruptFile: an increment is damaged. In each of these cases no variable was changed.
    """
    import tensorflow as tf

    store = Store(local_path("ckpt_dir", ckpt_dir))
    newest = store.newest_full()
    chain = store.history().after(newest.id) if newest else ()
    if not chain:
        return None
    if session.graph.finalized:
        raise UsageError(
            "increments cannot be restored: the graph is finalized",
            hint="use IncrementHook(incremental_save_restore=True), or call restore_increments before",
        )
    with session.graph.as_default():
        tables = trainable_tables()
        rows = {table.name: table.values for table in tables}
        tracked = plan_tracking(tf.compat.v1.global_variables(), rows)
        accesses = {id(part): access(part) for entry in tracked for part in entry.parts}
        keyed = [table_access(table) for table in tables]
    overlay(session, chain, tracked, accesses, keyed)
    return chain[-1].increment.to_step


def overlay(
    session: Session,
    chain: Sequence[StoredIncrement],
    tracked: Iterable[VariableTracking],
    accesses: Mapping[int, Access],
    tables: Iterable[KeyedAccess] = (),
) -> None:
    """Write the increments' values into the session's variables, in order, after all of them were checked.

    Raises:
        MissingTensors, ShapeMismatch, CorruptFile: nothing was written.
    """
    by_name = {entry.name: entry for entry in tracked}
    kinds = {e.name: (e.dtype.label, e.shape[1], e.shape[0]) for e in by_name.values() if e.is_keyed}
    for stored in chain:
        for changed, _ in stored.changes():
            _check(changed, by_name, stored)
        check_tables(stored, kinds)
    for stored in chain:
        for changed, change in stored.changes():
            entry = by_name[changed.variable.name]
            for part in entry.parts:
                _write(session, accesses[id(part)], change)
    overlay_tables(session, chain, tables)


def _check(changed: Changed, by_name: Mapping[str, VariableTracking], stored: StoredIncrement) -> None:
    entry = by_name.get(changed.variable.name)
    if entry is None:
        raise MissingTensors(
            f"{stored.path} holds {changed.variable.name!r}, which this graph has not",
            hint="train with the graph that wrote the increments, or move the increments directory away",
        )
    if (entry.shape, entry.dtype) != (changed.variable.shape, changed.variable.dtype):
        raise ShapeMismatch(
            f"{changed.variable.name!r} is {entry.dtype.label}{list(entry.shape)}, in {stored.path} it is "
            f"{changed.variable.dtype.label}{list(changed.variable.shape)}",
            hint="train with the graph that wrote the increments, or move the increments directory away",
        )


def _write(session: Session, access: Access, change: Change) -> None:
    part = access.part
    if isinstance(change, Rows):
        start, stop = np.searchsorted(change.ids, [part.offset, part.offset + part.rows])
        access.write(session, change.ids[start:stop] - part.offset, change.values[start:stop])
        return
    box = tuple(slice(start, start + size) for start, size in zip(part.starts, part.shape, strict=True))
    access.write(session, np.arange(part.rows, dtype=np.int64), change[box])
