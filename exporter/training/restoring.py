"""Bring a training to its newest increment: a session that has restored a full checkpoint, or `fit`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from exporter.checkpoint.tensor_bundle import read_catalog
from exporter.delta.format import Change, Rows
from exporter.errors import MissingTensors, ShapeMismatch, UsageError
from exporter.increments.increment import Changed, CheckpointId, StoredIncrement
from exporter.options import given
from exporter.storage.local_paths import trained_path
from exporter.tables.trainable_table import trainable_tables
from exporter.training import trainer_side
from exporter.training.keyed import TableAccess, table_access
from exporter.training.session_hook import named, require_session
from exporter.training.store import CatalogSource, Store
from exporter.training.trainer_side import (
    SCOPE,
    Collector,
    EventClock,
    FullCheckpoint,
    RunTip,
    VariablePart,
    VariableTracking,
    log,
    pieces,
    plan_tracking,
)

Session = Any
Array = np.ndarray[Any, Any]
Write = Callable[[Session, Array, Array], None]
"""Writes rows of a part of a variable, or a scalar."""

Overlay = Callable[[Session, Sequence[StoredIncrement]], None]
"""Writes the values of increments, in order, into a session's variables."""


class Publisher(trainer_side.Publisher):
    """A publisher whose sessions continue where the last increment ended, if it has an `overlay`."""

    _store: Store

    def __init__(
        self,
        store: Store,
        collector: Collector,
        timer: Any,
        clock: EventClock | None = None,
        overlay: Overlay | None = None,
    ) -> None:
        super().__init__(store, collector, timer, clock)
        self._overlay = overlay

    def values_of(self, full: FullCheckpoint) -> CatalogSource:
        """Return a source of the values of a full checkpoint.

        CheckpointError or a subclass if it cannot be read.
        """
        return CatalogSource(read_catalog(full.prefix))

    def _continue(self, session: Session, before: FullCheckpoint, step: int) -> bool:
        """Apply the increments after the full checkpoint `before`, which was restored.

        False if there are none, or the publisher has no `overlay`. Afterwards the run continues at the last
        increment. UsageError if the session, which begins at `step`, has not restored `before`;
        MissingTensors, ShapeMismatch, CorruptFile or another CheckpointError if an increment does not fit the
        graph, is damaged or cannot be read; PublishError if the session's claim cannot be written.
        """
        if self._overlay is None:
            return False
        history = self._store.history()
        chain = history.after(CheckpointId(before.prefix.name, before.step, before.digest))
        if not chain:
            return False
        if step < before.step:
            raise UsageError(
                f"increments cannot be restored: the session begins at step {step}, so it has not restored "
                f"{before.prefix}",
                hint="give MonitoredTrainingSession the checkpoint_dir, or drop incremental_save_restore",
            )
        self._overlay(session, chain)
        log.info("increments: restored %s and %d increments", before.prefix, len(chain))
        last = chain[-1].increment
        self._set_tip(RunTip.of(last.run, history.generation, last.id, last.to_step), before)
        if self._full is not None and self._full.key != before.key:
            self._continue_from_both(self._full, chain)
        return True

    def _continue_from_both(self, full: FullCheckpoint, chain: Sequence[StoredIncrement]) -> None:
        """Continue also from a full checkpoint that the saver wrote before the chain was applied.

        That checkpoint holds all changes of other workers since the session restored its variables, and
        nothing of the chain. The next increment holds both, so it follows both the chain's end and this
        checkpoint: rows and keys of the chain count as changed, and the checkpoint's marker is written.
        CheckpointError and subclasses if an increment cannot be read, PublishError if the marker cannot be
        written.
        """
        for stored in chain:
            for changed, change in stored.changes():
                if isinstance(change, Rows):
                    self._collector.touch(changed.variable.name, change.ids)
            for table, found in stored.tables():
                self._collector.tables[table.name].note(found.ids, found.removed)
        self._own = full
        if self._tip is not None:
            self._note(full, self._tip, is_equal=False)


def writers_of(tracked: Iterable[VariableTracking]) -> dict[int, Write]:
    """Add operations that write variables to the current default graph; return functions that run them.

    They are by the id() of each part, and are called with a session, row numbers (int64) within the part, and
    values; a scalar ignores the row numbers.
    """
    return {id(part): _writer(entry, part) for entry in tracked for part in entry.parts}


def _writer(entry: VariableTracking, part: VariablePart) -> Write:
    import tensorflow as tf

    v1 = tf.compat.v1
    with trainer_side.near(part.variable, f"{SCOPE}/access/"):
        ids = v1.placeholder(tf.int64, [None])
        values = v1.placeholder(part.variable.dtype.base_dtype, [None, *part.shape[1:]] if part.shape else [])
        if part.shape:
            written = tf.group(v1.scatter_update(part.variable, ids, values))
        else:
            written = part.variable.assign(values).op

    def write(session: Session, rows: Array, found: Array) -> None:
        if not part.shape:
            session.run(written, {values: found})
            return
        for piece in pieces(np.arange(len(rows)), entry):
            session.run(written, {ids: rows[piece], values: found[piece]})

    return write


def restore_increments(session: Session, ckpt_dir: Path | str) -> int | None:
    """Bring a session that has restored the newest full checkpoint of `ckpt_dir` to the newest increment.

    Adds operations to the session's graph, and writes its variables. Returns the step that was reached; None,
    and nothing is changed, if there is no full checkpoint or no increment after it. A session with
    `IncrementHook(incremental_save_restore=True)` does not need this.

    Raises:
        UsageError: the graph is finalized, or has a variable that increments cannot hold; or `session` is not
            a session, or `ckpt_dir` not a path of this machine.
        MissingTensors, ShapeMismatch: an increment does not fit the graph's variables.
        CorruptFile, UnsupportedFormat: an increment is damaged, or of another version.
        CheckpointError: an increment cannot be read. In all these cases no variable was changed, unless an
            increment vanished while it was restored.
    """
    import tensorflow as tf

    require_session(session)
    store = Store(given.place("ckpt_dir", ckpt_dir, trained_path))
    newest = store.newest_full()
    if newest is None:
        return None
    chain = store.history().after(CheckpointId(newest.prefix.name, newest.step, newest.digest))
    if not chain:
        return None
    if session.graph.finalized:
        raise UsageError(
            "increments cannot be restored: the graph is finalized",
            hint="use IncrementHook(incremental_save_restore=True), or call restore_increments before",
        )
    with session.graph.as_default(), named():
        tables = trainable_tables()
        rows = {table.name: table.values for table in tables}
        tracked = plan_tracking(tf.compat.v1.global_variables(), rows)
        write = overlay_of(tracked, writers_of(tracked), [table_access(table) for table in tables])
    write(session, chain)
    return chain[-1].increment.to_step


def overlay_of(
    tracked: Iterable[VariableTracking], writers: Mapping[int, Write], tables: Iterable[TableAccess] = ()
) -> Overlay:
    """Return a function that writes increments, in order, into these variables and tables of a session.

    `writers` are the functions of `writers_of`, by the id() of each part. The function raises MissingTensors,
    ShapeMismatch or CorruptFile before it has written anything. It reads the increments twice: a
    CheckpointError may still come later if one is removed meanwhile.
    """
    entries = {entry.name: entry for entry in tracked}
    by_name = {access.name: access for access in tables}

    def overlay(session: Session, chain: Sequence[StoredIncrement]) -> None:
        # Check the whole chain before the first write: a training must not start from half of it.
        for stored in chain:
            for changed, _ in stored.changes():
                _check(changed, entries, stored)
            _check_tables(stored, entries)
        for stored in chain:
            for changed, change in stored.changes():
                for part in entries[changed.variable.name].parts:
                    writers[id(part)](session, *_of_part(part, change))
            for table, rows in stored.tables():
                by_name[table.name].write(session, rows)

    return overlay


def _check(changed: Changed, by_name: Mapping[str, VariableTracking], stored: StoredIncrement) -> None:
    variable, entry = changed.variable, by_name.get(changed.variable.name)
    if entry is None:
        raise MissingTensors(
            f"{stored.path} holds {variable.name!r}, which this graph lacks",
            hint="train with the graph that wrote the increments, or move the increments directory away",
        )
    if (entry.shape, entry.dtype) != (variable.shape, variable.dtype.label):
        raise ShapeMismatch(
            f"{variable.name!r} is {entry.dtype}{list(entry.shape)}, in {stored.path} it is "
            f"{variable.dtype.label}{list(variable.shape)}",
            hint="train with the graph that wrote the increments, or move the increments directory away",
        )


def _check_tables(stored: StoredIncrement, by_name: Mapping[str, VariableTracking]) -> None:
    hint = "train with the graph that wrote the increments, or move the increments directory away"
    for table, _ in stored.tables():
        entry = by_name.get(table.name)
        if entry is None or not entry.is_keyed:
            raise MissingTensors(
                f"{stored.path} holds table {table.name!r}, which this graph lacks", hint=hint
            )
        capacity, dim = entry.shape
        if (entry.dtype, dim) != (table.label, table.dim) or capacity < table.capacity:
            raise ShapeMismatch(
                f"table {table.name!r} has {capacity} rows {entry.dtype}[{dim}], in {stored.path} it has "
                f"{table.capacity} rows {table.label}[{table.dim}]",
                hint=hint,
            )


def _of_part(part: VariablePart, change: Change) -> tuple[Array, Array]:
    """Return a change's rows in one part, numbered within it (int64), and their values, in the same order."""
    if isinstance(change, Rows):
        # The ids increase: `check_ids` has refused all others.
        start, stop = np.searchsorted(change.ids, [part.offset, part.offset + part.rows])
        return change.ids[start:stop] - part.offset, change.values[start:stop]
    box = tuple(slice(start, start + size) for start, size in zip(part.starts, part.shape, strict=True))
    return np.arange(part.rows, dtype=np.int64), change[box]
