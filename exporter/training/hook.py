"""`IncrementHook`: write increments between the full checkpoints of a monitored session.

    hook = IncrementHook(ckpt_dir, save_increment_secs=10, is_chief=is_chief)
    with tf.compat.v1.train.MonitoredTrainingSession(..., checkpoint_dir=ckpt_dir, hooks=[hook]) as session:

Every worker has the hook, and records the rows that it writes. The chief's hook collects and publishes them.
It extends the hook of `exporter.training.trainer_side` with tables by keys and restoring.

`MonitoredTrainingSession` here is the stock one with this hook, with the arguments that DeepRec has.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from exporter.errors import UsageError
from exporter.options import given
from exporter.storage.local_paths import trained_path
from exporter.tables.trainable_table import is_trainable_table, trainable_tables
from exporter.training import trainer_side
from exporter.training.keyed import KeyedChanges, TableAccess, table_access
from exporter.training.restoring import Publisher, overlay_of, writers_of
from exporter.training.session_hook import SessionHook, named, naming
from exporter.training.store import Store
from exporter.training.trainer_side import Collector, Recording, VariableTracking, plan_tracking

Session = Any
EventTime = Any
"""A function, or a variable or tensor, that gives the time of the newest event: see `EventClock`."""


@naming("begin", "after_create_session", "after_run", "save_if_due", "end")
class IncrementHook(SessionHook, trainer_side.IncrementHook):
    """A `SessionRunHook` that writes increments into `<ckpt_dir>/increments`.

    `save_increment_secs` or `save_increment_steps` is the interval; DeepRec's names
    `save_incremental_checkpoint_secs` and `incremental_save_secs` mean the first. With
    `incremental_save_restore` the chief's sessions continue where the last increment ended, instead of at the
    last full checkpoint. `event_time`, a function or a variable (see `trainer_side.EventClock`), gives the
    time of the newest event that was trained on; by default it is the time of the newest step. Pass the hook
    to every worker, in `hooks=`. Loops without hooks call its methods: see `trainer_side.IncrementHook`.

    Raises:
        UsageError: the arguments contradict each other. Later, from the session: there is no global step, a
            variable that increments cannot hold, no full checkpoint, or a worker without the hook; or the
            session did not restore the checkpoint that it should continue.
        PublishError: an increment could not be written three times in a row, or not at the end.
        MissingTensors, ShapeMismatch, CheckpointError: from a session that continues where the last increment
            ended: an increment does not fit the graph, is damaged or cannot be read. CheckpointError also
            from a session's end, if a full checkpoint of the last step cannot be read.
    """

    @named()
    def __init__(
        self,
        ckpt_dir: Path | str,
        save_increment_secs: float | None = None,
        save_increment_steps: int | None = None,
        *,
        is_chief: bool = True,
        incremental_save_restore: bool = False,
        save_incremental_checkpoint_secs: float | None = None,
        incremental_save_secs: float | None = None,
        event_time: EventTime | None = None,
    ) -> None:
        secs = (save_increment_secs, save_incremental_checkpoint_secs, incremental_save_secs)
        interval = schedule(*secs, steps=save_increment_steps)
        place = given.place("ckpt_dir", ckpt_dir, trained_path) if ckpt_dir else ""
        trainer_side.IncrementHook.__init__(self, place, *interval, is_chief=is_chief, event_time=event_time)
        self._restores = incremental_save_restore
        self._tables: tuple[TableAccess, ...] = ()

    def _track(self) -> tuple[VariableTracking, ...]:
        import tensorflow as tf

        rows = {table.name: table.values for table in trainable_tables()}
        return plan_tracking(tf.compat.v1.global_variables(), rows)

    def _is_known(self, saveable: Any) -> bool:
        return is_trainable_table(saveable)

    def _publisher(
        self, tracked: tuple[VariableTracking, ...], recording: Recording, timer: Any
    ) -> Publisher:
        self._tables = tuple(map(table_access, trainable_tables()))
        changes = {table.name: KeyedChanges(table) for table in self._tables}
        collector = Collector(tracked, recording.groups, tables=changes)
        overlay = overlay_of(tracked, writers_of(tracked), self._tables) if self._restores else None
        return Publisher(Store(self._ckpt_dir), collector, timer, self._clock, overlay)

    def after_create_session(self, session: Session, coord: Any = None) -> None:
        """Chief: initialize the recording and find the state that the session continues, or restore it.

        Others: wait for the chief, up to ten minutes. UsageError if that takes longer, or the graphs differ;
        PublishError if the chief cannot write its records. If it restores: UsageError if the session has not
        restored the full checkpoint, and MissingTensors, ShapeMismatch, CorruptFile or another
        CheckpointError if an increment does not fit the graph, is damaged or cannot be read.
        """
        # Tables record removed keys from here on: no change after the look of `begin_session` is missed.
        for table in self._tables:
            table.begin(session)
        super().after_create_session(session, coord)


def schedule(*secs: float | None, steps: int | None) -> tuple[float | None, int | None]:
    """Return the interval of increments, (seconds, None) or (None, steps), of which one is given.

    Raises:
        UsageError: none or several of them are given, or the interval is not a positive number.
    """
    for value in (*secs, steps):
        if value is not None:
            hint = "save_increment_secs=60, or save_increment_steps=1000"
            given.number("the interval of increments", value, hint)
    with named():
        return trainer_side.schedule(*secs, steps=steps)


def MonitoredTrainingSession(
    master: str = "",
    is_chief: bool = True,
    checkpoint_dir: str | None = None,
    scaffold: Any = None,
    hooks: Iterable[Any] | None = None,
    *,
    save_increment_secs: float | None = None,
    save_increment_steps: int | None = None,
    save_incremental_checkpoint_secs: float | None = None,
    incremental_save_restore: bool = False,
    event_time: EventTime | None = None,
    **stock: Any,
) -> Any:
    """Make a `tf.compat.v1.train.MonitoredTrainingSession` with an `IncrementHook`.

    The options of increments are those of the hook; the other arguments are TensorFlow's. A scaffold and a
    saver of the caller's are accepted. Without an interval for increments the result is TensorFlow's session,
    without a hook.

    Raises:
        UsageError: an interval is given, but full checkpoints are off or have no directory; several intervals
            are given, or one is not positive; or `incremental_save_restore` is on without an interval. Later,
            from the session: the graph has no global step, or a variable that increments cannot hold; there
            is no full checkpoint, or the session has not restored it; a worker trains without the hook.
        PublishError: from the session: an increment could not be written three times in a row, or not at the
            end.
    """
    import tensorflow as tf

    every_hook = list(hooks or ())
    intervals = (save_increment_secs, save_incremental_checkpoint_secs)
    if any(value is not None for value in (*intervals, save_increment_steps)):
        secs, steps = schedule(*intervals, steps=save_increment_steps)
        _check_full_checkpoints(checkpoint_dir, stock, every_hook)
        every_hook.append(
            IncrementHook(
                checkpoint_dir or "",
                secs,
                steps,
                is_chief=is_chief,
                incremental_save_restore=incremental_save_restore,
                event_time=event_time,
            )
        )
    elif incremental_save_restore:
        raise UsageError(
            "incremental_save_restore is on, but no increments are written",
            hint="give an interval: save_incremental_checkpoint_secs=60, or save_increment_steps=1000",
        )
    return tf.compat.v1.train.MonitoredTrainingSession(
        master, is_chief, checkpoint_dir, scaffold, every_hook, **stock
    )


def _check_full_checkpoints(checkpoint_dir: str | None, stock: dict[str, Any], hooks: list[Any]) -> None:
    import tensorflow as tf

    if not checkpoint_dir:
        raise UsageError("increments need a checkpoint_dir", hint="give MonitoredTrainingSession one")
    saves = [stock[name] for name in ("save_checkpoint_secs", "save_checkpoint_steps") if name in stock]
    savers = (*hooks, *(stock.get("chief_only_hooks") or ()))
    is_off = bool(saves) and not any(saves)  # the stock session saves unless both are None or 0
    if is_off and not any(isinstance(hook, tf.compat.v1.train.CheckpointSaverHook) for hook in savers):
        raise UsageError(
            "increments need full checkpoints, which are turned off",
            hint="give save_checkpoint_secs or save_checkpoint_steps a number",
        )
