"""The chief's part of increments: publish them when they are due, and restore a training from them.

*Steps.* An increment's `to` is the global step, read before anything is collected. A worker adds to the step
after its writes are done and recorded, so the increment holds every write of a step up to `to`. An increment
never has the step of a full checkpoint of this session: a reader that has the full checkpoint would skip the
increment, though it may hold newer rows. It waits for the next step instead. At the end of a session no step
follows: there the last increment takes its values from the full checkpoint and equals it bit for bit.

*Runs, sessions, parents.* A run is a chain of states; an increment names its parent, the increment or full
checkpoint that it follows. Every session has an id and a generation of its own, also if it continues a run:
changes that another session made after the state that this one restored are neither in its variables nor in
its increments.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import UNSET, Struct
from msgspec.structs import replace

from exporter.delta.format import Change, Rows
from exporter.errors import MissingTensors, PublishError, ShapeMismatch, UsageError
from exporter.increments.history import CheckpointMarker, History
from exporter.increments.increment import Changed, CheckpointId, Increment, StoredIncrement
from exporter.options import given
from exporter.storage.local_paths import trained_path
from exporter.tables.trainable_table import trainable_tables
from exporter.training.access import Access, KeyedAccess, access, check_tables, overlay_tables, table_access
from exporter.training.change_tracking import VariableTracking, plan_tracking
from exporter.training.collector import CheckpointSource, Collector, RowSource
from exporter.training.event_time import EventClock
from exporter.training.store import FullCheckpoint, Store

Session = Any
log = logging.getLogger(__name__)
_FAILURES_IN_A_ROW = 3  # then the training fails: until then collected rows wait in memory


class Publisher:
    """Publishes the increments of one training, over all sessions of the chief.

    `timer` is TensorFlow's SecondOrStepTimer. With `restores` a session continues where the last increment
    ended. `clock` gives the event time of the training data. All methods may raise the errors of `Store` and
    `Collector`.
    """

    def __init__(
        self,
        store: Store,
        collector: Collector,
        timer: Any,
        *,
        restores: bool,
        clock: EventClock | None = None,
    ) -> None:
        self._store = store
        self._collector = collector
        self._timer = timer
        self._restores = restores
        self._clock = clock or EventClock()
        self._tip: RunTip | None = None
        self._full = store.newest_full()
        self._own: FullCheckpoint | None = None
        self._before = store.index_signatures()
        self._signature = store.state_signature()
        self._failures = 0

    def begin_session(self, session: Session, step: int) -> bool:
        """Find out which state a restored session continues, and restore increments if that is asked for.

        `step` is the session's global step. Returns True if increments were restored.
        """
        # The session restored the full checkpoint that was the newest before it began. Its own saver may have
        # written another one already, which holds the same values and what other workers trained since.
        restored, self._tip, self._own = self._full, None, None
        self._clock.begin(step)
        self._look()
        self._before = self._store.index_signatures()
        self._collector.forget()
        is_restored = restored is not None and self._continue(session, restored, step)
        if not is_restored and self._full is not None and self._full.id.step <= step:
            self._begin_at(self._full)
        self._timer.reset()
        # If the saver has written a full checkpoint already, an increment is due at once: it joins that
        # checkpoint and the restored chain.
        if not is_restored or self._own == restored:
            self._timer.update_last_triggered_step(self._tip.step if self._tip else step)
        return is_restored

    def is_due(self, step: int) -> bool:
        """True if an increment should be written at `step`."""
        return bool(self._timer.should_trigger_for_step(step))

    def notice(self, step: int) -> None:
        """Note a full checkpoint that a saver has finished, and a step that went back.

        A step goes back when the user's program restores an older checkpoint by hand. Such writes are not
        recorded, so increments continue from the next full checkpoint. A state file may be pointed to a
        checkpoint that this session did not write (`_is_new`): it is ignored.
        """
        self._clock.notice(step)
        if self._tip is not None and step < self._tip.step:
            log.warning(
                "increments: the step went back from %d to %d: waiting for a full checkpoint",
                self._tip.step,
                step,
            )
            self._tip = self._own = None
            self._collector.forget()
            self._timer.reset()
        if not self._look() or self._full is None:
            return
        if self._tip is None:
            self._begin_at(self._full)
        elif self._is_new(self._full, self._tip):
            self._own = self._full
            self._note(self._full, self._tip, is_equal=False, event_time=self._clock.read(None))
        else:
            self._store.require_claim(self._tip.session)
            log.warning(
                "increments: the state file names %s, which this session did not write", self._full.prefix
            )

    def save(self, session: Session, step: int) -> None:
        """Publish an increment up to `step`, or leave it due if it has no step of its own yet.

        Raises:
            UsageError: there is no full checkpoint to build on, or another training writes here, too.
            PublishError: publishing failed for the third time in a row. After an earlier failure the rows are
                kept for the next increment.
        """
        tip = self._tip
        if tip is None:
            self._check_full()
            return
        if step == tip.step or (self._own is not None and self._own.id.step >= step):
            return
        self._store.require_claim(tip.session)
        # The event time before the rows: the increment may be newer than it claims, never older.
        event_time = self._clock.read(session)
        self._collector.collect(session)
        try:
            self._publish(tip, step, self._collector.source(session), event_time)
            self._failures = 0
        except PublishError as error:
            self._failures += 1
            if self._failures == _FAILURES_IN_A_ROW:
                raise
            log.error("increments: %s; the rows are kept for the next increment", error.message)
        self._timer.update_last_triggered_step(step)

    def finish(self, session: Session, step: int) -> None:
        """Publish the last increment, from a full checkpoint of this step if there is one, or the session."""
        tip = self._tip
        if tip is None:
            self._check_full()
            return
        self._store.require_claim(tip.session)
        event_time = self._clock.read(session)
        self._collector.collect(session)
        if step == tip.step and not self._collector.knows_more:
            return
        full = self._own if self._own is not None and self._own.id.step == step else None
        source: RowSource = CheckpointSource(full.catalog()) if full else self._collector.source(session)
        self._publish(tip, step, source, event_time)
        if full is not None and self._tip is not None:
            self._note(full, self._tip, is_equal=True)

    def _publish(self, tip: RunTip, step: int, source: RowSource, event_time: datetime | None) -> None:
        begun = time.monotonic()
        draft = replace(tip.draft(step), event_time=event_time)
        try:
            stored = self._store.publish(draft, lambda writer: self._collector.write(writer, source))
        except BaseException:
            self._collector.abandon()
            raise
        self._collector.commit()
        if stored is None:
            return
        self._tip = tip.after(stored.increment)
        took = time.monotonic() - begun
        log.info("increments: %s, %d rows in %.3f s", stored.path.name, stored.increment.rows, took)
        self._store.prune()

    def _continue(self, session: Session, restored: FullCheckpoint, step: int) -> bool:
        """Apply the increments to the full checkpoint that was restored; False if there are none.

        UsageError if the session has not restored it.
        """
        history = self._store.history()
        chain = history.after(restored.id) if self._restores else ()
        if not chain:
            return False
        if step < restored.id.step:
            raise UsageError(
                f"increments cannot be restored: the session begins at step {step}, so it has not restored "
                f"{restored.prefix}",
                hint="give MonitoredTrainingSession the checkpoint_dir, or drop incremental_save_restore",
            )
        collector = self._collector
        overlay(session, chain, collector.tracked, collector.accesses, collector.tables.values())
        log.info("increments: restored %s and %d increments", restored.prefix, len(chain))
        self._stand(continued(history, chain[-1]), restored)
        if self._full is not None and self._full.id != restored.id:
            self._stand_beside(self._full, chain)
        return True

    def _stand_beside(self, full: FullCheckpoint, chain: Sequence[StoredIncrement]) -> None:
        """Continue also from a full checkpoint that the saver wrote before the chain was applied.

        That checkpoint holds what other workers trained since the session restored its variables, and nothing
        of the chain. The next increment holds both, so it follows both the chain's end and this checkpoint.
        """
        for stored in chain:
            self._collector.touch(stored)
        self._own = full
        if self._tip is not None:
            self._note(full, self._tip, is_equal=False)

    def _begin_at(self, full: FullCheckpoint) -> None:
        history = self._store.history()
        tip = self._stand(started(history, full.id), full)
        if not history.markers_of(full.id):
            self._note(full, tip, is_equal=False)

    def _stand(self, tip: RunTip, full: FullCheckpoint) -> RunTip:
        self._store.claim(tip.session)
        self._tip, self._own = tip, full
        return tip

    def _is_new(self, full: FullCheckpoint, tip: RunTip) -> bool:
        """True if this session can have written a full checkpoint.

        It has not if the checkpoint was there before the session, has a marker already, or is of an older
        step than the newest increment.
        """
        if self._store.index_signature(full.prefix) in self._before:
            return False
        return full.id.step >= tip.step and not self._store.history().markers_of(full.id)

    def _note(
        self, full: FullCheckpoint, tip: RunTip, *, is_equal: bool, event_time: datetime | None = None
    ) -> None:
        found = CheckpointMarker(
            checkpoint=full.id,
            run=tip.run,
            session=tip.session,
            after=tip.last_increment,
            is_equal=is_equal,
            event_time=event_time or UNSET,
        )
        self._store.note(found)

    def _look(self) -> bool:
        """Look up the newest full checkpoint; True if it is another one than at the last look."""
        signature = self._store.state_signature()
        if signature == self._signature:
            return False
        full = self._store.newest_full()
        if full is None:  # not complete yet: look again
            return False
        is_new = self._full is None or full.id != self._full.id
        self._full, self._signature = full, signature
        return is_new

    def _check_full(self) -> None:
        if self._full is None:
            raise UsageError(
                "there is no full checkpoint that increments could follow",
                cause=f"{self._store.path.parent} holds none",
                hint="give MonitoredTrainingSession save_checkpoint_secs or save_checkpoint_steps, too",
            )


class RunTip(Struct, frozen=True):
    """The end of a run's chain: the run, the session that writes it, and the `parent` of the next increment.

    `step` is the global step of the parent.
    """

    run: str
    session: str
    generation: int
    parent: str | CheckpointId
    step: int

    @property
    def last_increment(self) -> str | None:
        """The increment that was written or restored last; None if the parent is a full checkpoint."""
        return self.parent if isinstance(self.parent, str) else None

    def draft(self, to_step: int) -> Increment:
        """The next increment, without its variables."""
        return Increment(
            id=secrets.token_hex(16),
            run=self.run,
            session=self.session,
            generation=self.generation,
            parent=self.parent,
            from_step=self.step,
            to_step=max(to_step, self.step + 1),
            variables=(),
        )

    def after(self, increment: Increment) -> RunTip:
        """The tip once `increment` is durable."""
        return replace(self, parent=increment.id, step=increment.to_step)


def continued(history: History, last: StoredIncrement) -> RunTip:
    """The tip of a new session whose state equals that of the chain's last increment."""
    increment = last.increment
    return RunTip(increment.run, _new_id(), history.generation + 1, increment.id, increment.to_step)


def started(history: History, checkpoint: CheckpointId) -> RunTip:
    """The tip of a new session whose state is that of a full checkpoint, plus rows that are flagged.

    The run continues if the checkpoint equals the end of its chain; otherwise a new run begins.
    """
    if not history.after(checkpoint):
        equal = (history.find(name) for name in history.same(checkpoint) if isinstance(name, str))
        if last := next(filter(None, equal), None):
            return continued(history, last)
    return RunTip(_new_id(), _new_id(), history.generation + 1, checkpoint, checkpoint.step)


def _new_id() -> str:
    return secrets.token_hex(16)


def restore_increments(session: Session, ckpt_dir: Path | str) -> int | None:
    """Bring a session that has restored the newest full checkpoint of `ckpt_dir` to the newest increment.

    Adds operations to the session's graph. Returns the step that was reached, or None without increments.
    A session with `IncrementHook(incremental_save_restore=True)` does not need this.

    Raises:
        UsageError: the graph is finalized.
        MissingTensors, ShapeMismatch: an increment does not fit the graph's variables.
        CorruptFile: an increment is damaged. In each of these cases no variable was changed.
    """
    import tensorflow as tf

    store = Store(given.place("ckpt_dir", ckpt_dir, trained_path))
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
    tables: Iterable[KeyedAccess],
) -> None:
    """Write the increments' values into the session's variables, in order.

    Raises:
        MissingTensors, ShapeMismatch, CorruptFile: nothing was written.
    """
    by_name = {entry.name: entry for entry in tracked}
    kinds = {e.name: (e.dtype.label, e.shape[1], e.shape[0]) for e in by_name.values() if e.is_keyed}
    # Check the whole chain before the first write: a training must not start from half of it.
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
            f"{stored.path} holds {changed.variable.name!r}, which this graph lacks",
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
