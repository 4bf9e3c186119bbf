"""`IncrementHook`: write increments between the full checkpoints of a monitored session.

    hook = IncrementHook(ckpt_dir, save_increment_secs=10, is_chief=is_chief)
    with tf.compat.v1.train.MonitoredTrainingSession(..., checkpoint_dir=ckpt_dir, hooks=[hook]) as session:

Every worker has the hook, and records the rows that it writes. The chief's hook collects and publishes them.
`MonitoredTrainingSession` here is the stock one with such a hook, for the arguments that DeepRec has.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from msgspec import Struct

from exporter.errors import UsageError
from exporter.options import given
from exporter.storage.local_paths import trained_path
from exporter.tables.trainable_table import is_trainable_table, trainable_tables
from exporter.terminal.progress import human_bytes
from exporter.training.access import Recording, TableAccess, counts_every_step, record, table_access
from exporter.training.change_tracking import TrackingMode, VariableTracking, plan_tracking
from exporter.training.collector import Collector
from exporter.training.event_time import EventClock, EventTime
from exporter.training.publisher import Publisher
from exporter.training.session_hook import SessionHook
from exporter.training.store import Store

Session = Any

log = logging.getLogger(__name__)

READY_SECONDS = 600.0
"""How long a worker waits until the chief has initialized the recording."""

_POLL_SECONDS = 0.1
_UNRECORDED_STEPS = 64
"""Steps that may be missing without an error: a step that is under way, or whose worker died, is counted as
recorded before the global step has it."""


class _Chief(Struct, frozen=True):
    """The chief's own part of the hook."""

    publisher: Publisher
    global_step: Any
    tables: tuple[TableAccess, ...]


class IncrementHook(SessionHook):
    """A `SessionRunHook` that writes increments into `<ckpt_dir>/increments`.

    `save_increment_secs` or `save_increment_steps` is the interval; DeepRec's names
    `save_incremental_checkpoint_secs` and `incremental_save_secs` mean the first. With
    `incremental_save_restore` the chief's sessions continue where the last increment ended, instead of at the
    last full checkpoint. `event_time`, a function or a variable (see `exporter.training.event_time`), gives
    the time of the newest event that was trained on; by default it is the time of the newest step. Pass the
    hook to every worker, in `hooks=`.

    Raises:
        UsageError: the arguments contradict each other. Later, from the session: there is no global step, a
            variable that increments cannot hold, no full checkpoint, or a worker without the hook; or the
            session did not restore the checkpoint that it should continue.
        PublishError: an increment could not be written three times in a row, or not at the end.
    """

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
        self._secs, self._steps = schedule(*secs, steps=save_increment_steps)
        if not ckpt_dir:
            raise UsageError(
                "increments need the directory of the full checkpoints",
                hint="IncrementHook(ckpt_dir, save_increment_secs=60)",
            )
        self._ckpt_dir = given.place("ckpt_dir", ckpt_dir, trained_path)
        self._is_chief = is_chief
        self._restores = incremental_save_restore
        self._clock = EventClock(event_time)
        self._chief: _Chief | None = None
        self._unrecorded = 0

    def begin(self) -> None:
        """Extend the graph before it is finalized; UsageError if it has no global step."""
        import tensorflow as tf

        v1 = tf.compat.v1
        global_step = v1.train.get_global_step()
        if global_step is None:
            raise UsageError(
                "increments need a global step", hint="call tf.compat.v1.train.get_or_create_global_step()"
            )
        tables = trainable_tables()
        tracked = plan_tracking(v1.global_variables(), {table.name: table.values for table in tables})
        self._recording: Recording = record(tracked, global_step)
        self._checks_steps = counts_every_step(global_step)
        if self._is_chief:
            saved = v1.get_collection(v1.GraphKeys.SAVEABLE_OBJECTS)
            _report(tracked, [each for each in saved if not is_trainable_table(each)])
            accesses = {table.name: table_access(table) for table in tables}
            collector = Collector.of_graph(tracked, self._recording, accesses)
            timer = v1.train.SecondOrStepTimer(every_secs=self._secs, every_steps=self._steps)
            publisher = Publisher(
                Store(self._ckpt_dir), collector, timer, restores=self._restores, clock=self._clock
            )
            self._chief = _Chief(publisher, global_step, tuple(accesses.values()))

    def after_create_session(self, session: Session, coord: Any) -> None:
        """Chief: initialize the recording, find out what state the session continues. Others: wait for it."""
        if self._chief is None:
            self._wait_until_ready(session, coord)
            return
        # Tables note removed keys from here on, and workers wait until the flags are initialized: no change
        # after `begin_session` has looked is missed.
        session.run([table.recorded for table in self._chief.tables])
        session.run(self._recording.plan.initializer)
        ready = session.run(self._recording.are_ready)
        missing = zip(self._recording.variables, ready, strict=True)
        session.run([variable.initializer for variable, is_ready in missing if not is_ready])
        self._chief.publisher.begin_session(session, self._step(session))
        self._unrecorded = self._count_unrecorded(session)

    def before_run(self, run_context: Any) -> Any:
        """Fetch the mark of each write that is fetched itself.

        The chief also fetches the step. None for nothing.
        """
        import tensorflow as tf

        marks = self._marks(run_context.original_args.fetches) if self._recording.marks else []
        step = None if self._chief is None else self._chief.global_step
        if step is None and not marks:
            return None
        return tf.compat.v1.train.SessionRunArgs({"marks": marks, "step": [] if step is None else [step]})

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Chief: publish an increment if one is due."""
        if self._chief is not None:
            # The run fetched the step before its own update or after it: the order is not defined.
            step = int(run_values.results["step"][0])
            self._chief.publisher.notice(step)
            if self._chief.publisher.is_due(step + 1):
                self.save_if_due(run_context.session)

    def save_if_due(self, session: Session) -> None:
        """Chief: publish an increment if it is due. Loops without a monitored session call this after a step.

        They also call `begin`, `after_create_session` and `end`, and save full checkpoints in this thread.
        """
        if self._chief is None:
            return
        step = self._step(session)
        self._chief.publisher.notice(step)
        if self._chief.publisher.is_due(step):
            self._check_recording(session)
            self._chief.publisher.save(session, step)

    def end(self, session: Session) -> None:
        """Chief: publish the last increment."""
        if self._chief is not None:
            step = self._step(session)
            self._chief.publisher.notice(step)
            self._chief.publisher.finish(session, step)

    def _marks(self, fetches: Any) -> list[Any]:
        import tensorflow as tf

        names = {_operation_name(fetch) for fetch in tf.nest.flatten(fetches)}
        return [mark for name, mark in self._recording.marks.items() if name in names]

    def _step(self, session: Session) -> int:
        if self._chief is None:
            raise UsageError("the hook has not begun", hint="pass it to a MonitoredTrainingSession")
        return int(session.run(self._chief.global_step))

    def _wait_until_ready(self, session: Session, coord: Any) -> None:
        """Wait until the chief has initialized the flags: a mark before that would be lost, or would fail.

        UsageError if it does not in time, or if its graph is another one. Ends early if `coord` stops.
        """
        deadline = time.monotonic() + READY_SECONDS
        while not session.run(self._recording.are_ready).all():
            if coord is not None and coord.should_stop():
                return
            if time.monotonic() > deadline:
                raise UsageError(
                    f"the chief has not initialized the recording of increments within {READY_SECONDS:g} s",
                    hint="give the chief an IncrementHook, too, with is_chief=True",
                )
            time.sleep(_POLL_SECONDS)
        if int(session.run(self._recording.plan_of_chief)) != self._recording.tracking_digest:
            raise UsageError(
                "this worker's graph writes to other variables, or in other ways, than the chief's",
                hint="build the same graph in every worker (between-graph replication)",
            )

    def _count_unrecorded(self, session: Session) -> int:
        """Global steps minus recorded steps.

        The global step is read first: steps that are recorded in between make the number smaller, so that
        they cannot be taken for unrecorded ones.
        """
        step = self._step(session)
        return step - int(session.run(self._recording.recorded_steps))

    def _check_recording(self, session: Session) -> None:
        if not self._checks_steps:
            return
        missing = self._count_unrecorded(session) - self._unrecorded
        if missing > _UNRECORDED_STEPS:
            raise UsageError(
                f"{missing} steps of this session were not recorded, so increments lack the rows they wrote",
                cause="a worker trains without IncrementHook",
                hint="pass an IncrementHook to every worker, in hooks= of its MonitoredTrainingSession",
            )


def schedule(*secs: float | None, steps: int | None) -> tuple[float | None, int | None]:
    """The interval of increments, (seconds, None) or (None, steps), from arguments of which one is given.

    Raises:
        UsageError: none or several of them are given, or the interval is not positive.
    """
    found, hint = [value for value in (*secs, steps) if value is not None], _INTERVALS
    if len(found) != 1 or not given.number("the interval of increments", found[0], hint) > 0:
        raise UsageError(
            f"give one positive interval for increments, in seconds or in steps; found {found or 'none'}",
            hint=hint,
        )
    return (None, steps) if steps is not None else (found[0], None)


_INTERVALS = "save_increment_secs=60, or save_increment_steps=1000"


def _operation_name(fetch: Any) -> str:
    if isinstance(fetch, str):
        return fetch.partition(":")[0]
    operation = getattr(fetch, "op", fetch)
    return str(getattr(operation, "name", ""))


def _report(tracked: tuple[VariableTracking, ...], saveables: list[Any]) -> None:
    for mode in TrackingMode:
        entries = [entry for entry in tracked if entry.mode is mode]
        log.info("increments: %d variables by %s (%s)", len(entries), mode.value, _size(entries))
    compared = [entry for entry in tracked if entry.mode is TrackingMode.COMPARED]
    if compared:
        log.warning(
            "increments: %s may change any row of %s: %s are kept in memory and compared each time. "
            "An optimizer that is lazy for sparse gradients changes only the rows that were looked up",
            " and ".join(sorted({kind for entry in compared for kind in entry.whole_writes})),
            ", ".join(entry.name for entry in compared),
            _size(compared),
        )
    for saveable in saveables:
        log.warning("increments: %s is in full checkpoints only", saveable.name)


def _size(entries: list[VariableTracking]) -> str:
    return human_bytes(sum(entry.bytes_ for entry in entries))


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
    """`tf.compat.v1.train.MonitoredTrainingSession` with an `IncrementHook`; `stock` are its other arguments.

    It accepts a scaffold and a saver of the caller's, as the stock session does. Without an interval for
    increments it is the stock session.

    Raises:
        UsageError: an interval is given, but full checkpoints are off or have no directory; or
            `incremental_save_restore` is on without an interval.
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
