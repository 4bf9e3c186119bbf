"""`IncrementCallback`: write full checkpoints and increments of `model.fit`, in one process.

    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    manager = tf.train.CheckpointManager(checkpoint, ckpt_dir, max_to_keep=3)
    model.fit(..., callbacks=[IncrementCallback(manager, save_increment_steps=100)])

It extends the callback of `exporter.training.trainer_side` with restoring and with tables by keys
(`exporter.tables.trainable_table`), which record the keys that got and lost rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from exporter.options import given
from exporter.storage.local_paths import trained_path
from exporter.training import trainer_side
from exporter.training.hook import EventTime, schedule
from exporter.training.keyed import KeyedChanges, layer_access, layer_tracking
from exporter.training.restoring import Publisher, Write, overlay_of
from exporter.training.session_hook import naming
from exporter.training.store import Store
from exporter.training.trainer_side import (
    Collector,
    EagerSource,
    FullCheckpoint,
    VariablePart,
    callback_of,
    eager_tracking,
)

Array = np.ndarray[Any, Any]


def IncrementCallback(
    manager: Any,
    save_increment_secs: float | None = None,
    save_increment_steps: int | None = None,
    *,
    save_checkpoint_steps: int | None = None,
    incremental_save_restore: bool = False,
    event_time: EventTime | None = None,
) -> Any:
    """Return a Keras callback (Keras 3 or tf-keras) that writes full checkpoints and increments of `fit`.

    It saves full checkpoints by `manager` (`tf.train.CheckpointManager`) when `fit` begins and ends, and
    every `save_checkpoint_steps` if given, and increments in between: give one interval for them, in seconds
    or in steps. The step is the optimizer's `iterations`. `event_time` gives the time of the newest event
    that was trained on (`trainer_side.EventClock`).

    With `incremental_save_restore`, `fit` itself restores the newest full checkpoint and the increments after
    it, and continues where the last increment ended. Without it, `fit` continues with the values that the
    model has: if the program has restored the newest full checkpoint, increments continue from that one.

    Raises:
        UsageError: the arguments contradict each other; later, from `fit`: the model is not built, its
            variables are spread over several processes, or another training writes to the directory.
        PublishError: from `fit`: an increment could not be written three times in a row, or not at the end.
        MissingTensors, ShapeMismatch: from `fit`, if it restores: an increment does not fit the model.
        CheckpointError: from `fit`: its last full checkpoint cannot be read; or, if it restores, an increment
            is damaged (CorruptFile) or cannot be read.
        AssertionError: from `fit`, if it restores: the full checkpoint lacks an object of the program.
    """
    interval = schedule(save_increment_secs, steps=save_increment_steps)
    if not hasattr(manager, "directory") or not hasattr(manager, "checkpoint"):
        hint = "IncrementCallback(tf.train.CheckpointManager(checkpoint, ckpt_dir, max_to_keep=3), ...)"
        raise given.wrong("manager", manager, "a tf.train.CheckpointManager", hint)
    fit = _Fit(manager, interval, save_checkpoint_steps, event_time)
    fit.restores = incremental_save_restore
    return callback_of(fit)


@naming("begin", "after_batch", "end")
class _Fit(trainer_side.Fit):
    """The increments of a callback; it restores increments if `restores` is set."""

    restores = False
    _store: Store

    def _make_store(self, directory: str) -> Store:
        return Store(trained_path("the CheckpointManager's directory", directory))

    def _restore(self, full: FullCheckpoint | None) -> bool:
        if full is None or not self.restores:
            return False
        self._checkpoint.restore(str(full.prefix)).assert_existing_objects_matched()
        return True

    def _collector(self, full: FullCheckpoint) -> Collector:
        objects = self._objects(full)[1].values()
        tables = [each for each in objects if getattr(each, "is_dynamic_table", False)]
        accesses = [layer_access(table) for table in tables]
        # Before the first look at the values: from here on, tables record removed keys.
        for access in accesses:
            access.begin(None)
        keyed = {str(table.name): table.rows for table in tables}
        rows = {id(variable) for variable in keyed.values()}
        found = self._by_key(full)
        others = {name: each for name, each in found if id(getattr(each, "_value", each)) not in rows}
        source = EagerSource(others | keyed)
        tracked = [eager_tracking(name, others[name]) for name in sorted(others)]
        tracked += [layer_tracking(table) for table in tables]
        writers = {id(part): _writer(part) for entry in tracked for part in entry.parts}
        self._overlay = overlay_of(tracked, writers, accesses) if self.restores else None
        changes = {access.name: KeyedChanges(access) for access in accesses}
        return Collector(tracked, source=lambda _: source, tables=changes)

    def _make_publisher(self, collector: Collector) -> Publisher:
        return Publisher(self._store, collector, self._timer, self._clock, self._overlay)


def _writer(part: VariablePart) -> Write:
    variable = part.variable

    def write(_: Any, ids: Array, values: Array) -> None:
        if part.shape and len(ids) < part.rows:
            whole = np.array(variable.numpy())
            whole[ids] = values
            values = whole
        variable.assign(values)

    return write
