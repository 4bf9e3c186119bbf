"""`IncrementCallback`: write full checkpoints and increments of `model.fit`, in one process.

    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    manager = tf.train.CheckpointManager(checkpoint, ckpt_dir, max_to_keep=3)
    model.fit(..., callbacks=[IncrementCallback(manager, save_increment_steps=100)])

Variables have the names that the full checkpoint gives them. Those of rank 2 and more are compared, row by
row, with the values that were written last, which are kept in memory: the increments are exact, whatever the
optimizer does. Tables by keys (`exporter.tables.trainable_table`) note which keys got and lost rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from msgspec import Struct

from exporter.catalog import Catalog
from exporter.checkpoint.tensor_bundle import OBJECT_GRAPH, read_array
from exporter.errors import UsageError
from exporter.increments.changed_tables import TableRows
from exporter.options import given
from exporter.storage.local_paths import trained_path
from exporter.terminal.progress import human_bytes
from exporter.training.change_tracking import TrackingMode, VariablePart, VariableTracking
from exporter.training.chief import callback_base
from exporter.training.collector import Collector
from exporter.training.event_time import EventClock, EventTime
from exporter.training.hook import schedule
from exporter.training.publisher import Publisher
from exporter.training.store import FullCheckpoint, Store
from exporter.wire import protos
from exporter.wire.dtypes import DType

Array = np.ndarray[Any, Any]
Session = Any
log = logging.getLogger(__name__)


def IncrementCallback(
    manager: Any,
    save_increment_secs: float | None = None,
    save_increment_steps: int | None = None,
    *,
    save_checkpoint_steps: int | None = None,
    incremental_save_restore: bool = False,
    event_time: EventTime | None = None,
) -> Any:
    """A Keras callback (Keras 3 or tf-keras).

    It saves full checkpoints by `manager` (`tf.train.CheckpointManager`) when `fit` begins and ends, and
    every `save_checkpoint_steps` if given, and increments in between. The step is the optimizer's
    `iterations`. `event_time` gives the time of the newest event that was trained on
    (`exporter.training.event_time`).

    With `incremental_save_restore`, `fit` itself restores the newest full checkpoint and the increments after
    it, and continues where the last increment ended. Without it, `fit` continues with the values that the
    model has: if the program has restored the newest full checkpoint, increments go on from that one.

    Raises:
        UsageError: the arguments contradict each other; later, from `fit`: the model is not built, or its
            variables are spread over several processes.
        PublishError: an increment could not be written three times in a row, or not at the end.
    """
    import tensorflow as tf

    secs, steps = schedule(save_increment_secs, steps=save_increment_steps)
    if not hasattr(manager, "directory") or not hasattr(manager, "checkpoint"):
        hint = "IncrementCallback(tf.train.CheckpointManager(checkpoint, ckpt_dir, max_to_keep=3), ...)"
        raise given.wrong("manager", manager, "a tf.train.CheckpointManager", hint)
    timer = tf.compat.v1.train.SecondOrStepTimer(every_secs=secs, every_steps=steps)
    clock = EventClock(event_time)
    increments = _Fit(manager, timer, save_checkpoint_steps, incremental_save_restore, clock)

    class Callback(callback_base()):  # type: ignore[misc]  # Keras is untyped
        """Passes the calls of `fit` on."""

        def on_train_begin(self, logs: Any = None) -> None:
            increments.begin(self.model)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            increments.after_batch()

        def on_train_end(self, logs: Any = None) -> None:
            increments.end()

    return Callback()


class _Fit:
    """The increments of a callback, which may serve several calls of `fit`, one after the other."""

    def __init__(
        self, manager: Any, timer: Any, save_checkpoint_steps: int | None, restores: bool, clock: EventClock
    ) -> None:
        self._manager = manager
        self._timer = timer
        self._save_checkpoint_steps = save_checkpoint_steps
        self._restores = restores
        self._clock = clock
        self._store = Store(trained_path("the CheckpointManager's directory", manager.directory))
        self._last_full = 0

    def begin(self, model: Any) -> None:
        """Restore if that is asked for; save a full checkpoint unless the newest one holds these values.

        UsageError if the directory holds none then with a step in its name.
        """
        _check(model)
        self._iterations = model.optimizer.iterations
        full = self._store.newest_full()
        if full is not None and self._restores:
            self._manager.checkpoint.restore(str(full.prefix)).assert_existing_objects_matched()
        elif full is None or not self._is_at(full):
            self._save_full()
        newest = self._store.newest_full()
        if newest is None:
            raise UsageError(f"{self._manager.directory} holds no full checkpoint with a step in its name")
        collector = _collector(self._manager.checkpoint, newest.catalog())
        self._publisher = Publisher(
            self._store,
            collector,
            self._timer,
            restores=self._restores,
            clock=self._clock,
        )
        self._publisher.begin_session(None, self._step)
        collector.remember(None)
        self._last_full = newest.id.step

    def after_batch(self) -> None:
        """Save a full checkpoint, an increment, both or none, as they are due."""
        step = self._step
        if self._save_checkpoint_steps and step - self._last_full >= self._save_checkpoint_steps:
            self._save_full()
        self._publisher.notice(self._step)
        if self._publisher.is_due(step):
            self._publisher.save(None, step)

    def end(self) -> None:
        """Save a full checkpoint, and the increment that equals it."""
        if self._step != self._last_full:
            self._save_full()
        self._publisher.notice(self._step)
        self._publisher.finish(None, self._step)

    def _is_at(self, full: FullCheckpoint) -> bool:
        """True if all variables have a checkpoint's values, as after the program has restored it.

        To save it again would give it another identity, and cut it from the increments that lead to it.
        """
        import tensorflow as tf

        if full.id.step != self._step:
            return False
        catalog, checkpoint = full.catalog(), self._manager.checkpoint
        objects = tf.train.TrackableView(checkpoint).descendants()
        try:
            variables = [*_by_key(checkpoint, catalog, objects)]
        except ValueError:  # other objects than the checkpoint has
            return False
        return all(_is_equal(catalog, name, variable) for name, variable in variables)

    @property
    def _step(self) -> int:
        return int(self._iterations.numpy())

    def _save_full(self) -> None:
        self._last_full = self._step
        self._manager.save(checkpoint_number=self._last_full)


def _is_equal(catalog: Catalog, name: str, variable: Any) -> bool:
    """True if a variable has a checkpoint's value, bit by bit."""
    if name not in catalog.tensors:
        return False
    stored, value = read_array(catalog, catalog.tensors[name]), np.asarray(variable.numpy())
    if (stored.shape, stored.dtype) != (value.shape, value.dtype):
        return False
    return stored.tobytes() == value.tobytes() if stored.dtype != object else bool((stored == value).all())


def _check(model: Any) -> None:
    import tensorflow as tf

    if not model.built:
        raise UsageError(
            "increments need a model whose variables exist", hint="call model.build(...) before model.fit"
        )
    strategy = getattr(model, "distribute_strategy", None)
    if isinstance(strategy, tf.distribute.experimental.ParameterServerStrategy):
        raise UsageError(
            "IncrementCallback cannot follow a ParameterServerStrategy: its variables move between steps",
            hint="write full checkpoints: they are compared row by row when they are exported",
        )
    model.optimizer.build(model.trainable_variables)


def _collector(checkpoint: Any, full: Catalog) -> Collector:
    import tensorflow as tf

    objects = tf.train.TrackableView(checkpoint).descendants()
    tables = {table.name: table for table in eager_tables(objects)}
    keyed = {name: table.table.rows for name, table in tables.items()}
    rows = {id(variable) for variable in keyed.values()}
    variables = {
        name: variable
        for name, variable in _by_key(checkpoint, full, objects)
        if id(getattr(variable, "_value", variable)) not in rows
    }
    ordinary = (_tracked(name, variables[name]) for name in sorted(variables))
    tracked = (*ordinary, *(table.tracked() for table in tables.values()))
    compared = sum(entry.bytes_ for entry in tracked if entry.mode is TrackingMode.COMPARED)
    log.info("increments: comparing by rows keeps %s in memory", human_bytes(compared))
    accesses = {id(entry.parts[0]): _EagerAccess(entry.parts[0]) for entry in tracked}
    source = _EagerSource(variables | keyed, tables)
    return Collector(tracked, (), accesses, lambda session: source, tables)


def _by_key(checkpoint: Any, full: Catalog, objects: list[Any]) -> Iterator[tuple[str, Any]]:
    """Variables by their keys in a full checkpoint, whose object graph has the order of `descendants`.

    The save counter is left out: it changes with every save, and would make an increment of each.
    """
    serialized = read_array(full, full.tensors[OBJECT_GRAPH]).item()
    nodes = protos.message_class("TrackableObjectGraph").FromString(serialized).nodes
    for node, trackable in zip(nodes, objects, strict=True):
        for attribute in node.attributes:
            if trackable is checkpoint.save_counter:
                continue
            if hasattr(trackable, "assign") and hasattr(trackable, "numpy"):
                yield attribute.checkpoint_key, trackable


def _tracked(name: str, variable: Any) -> VariableTracking:
    shape = tuple(variable.shape)
    dtype = DType.of(np.asarray(variable.numpy()).dtype.name)
    part = VariablePart(variable, shape, (0,) * len(shape), ())
    return VariableTracking(
        name, dtype, shape, (part,), TrackingMode.COMPARED if len(shape) > 1 else TrackingMode.WHOLE, ()
    )


class _EagerSource(Struct, frozen=True):
    """A `RowSource` of eager variables by name."""

    variables: Mapping[str, Any]
    tables: Mapping[str, EagerTableAccess]

    def rows(self, tracked: VariableTracking, ids: Array) -> Iterator[Array]:
        """See `RowSource`."""
        yield self._value(tracked)[ids]

    def all_rows(self, tracked: VariableTracking) -> Iterator[tuple[int, Array]]:
        """See `RowSource`."""
        yield 0, self._value(tracked)

    def wholes(self, tracked: Iterable[VariableTracking]) -> Iterator[tuple[VariableTracking, Array]]:
        """See `RowSource`."""
        return ((entry, self._value(entry)) for entry in tracked)

    def keyed(self, tracked: VariableTracking, ids: Array) -> tuple[Array, Array]:
        """See `RowSource`."""
        return self.tables[tracked.name].find(None, ids)

    def _value(self, tracked: VariableTracking) -> Array:
        return np.asarray(self.variables[tracked.name].numpy())


class _EagerAccess(Struct, frozen=True):
    """An `Access` to an eager variable."""

    part: VariablePart

    def write(self, session: Any, ids: Array, values: Array) -> None:
        """See `Access`."""
        variable = self.part.variable
        if self.part.shape and len(ids) < self.part.rows:
            whole = np.array(variable.numpy())
            whole[ids] = values
            values = whole
        variable.assign(values)


class EagerTableAccess(Struct, frozen=True):
    """A `KeyedAccess` to the table of a layer (`exporter.tables.trainable_table`)."""

    table: Any

    @property
    def name(self) -> str:
        """See `KeyedAccess`."""
        return str(self.table.name)

    def take_given(self, session: Session) -> Array:
        """See `KeyedAccess`."""
        return np.asarray(self.table.take_given().numpy())

    def take_removed(self, session: Session) -> Array:
        """See `KeyedAccess`."""
        return np.asarray(self.table.take_removed().numpy())

    def rows_of(self, session: Session, keys: Array) -> Array:
        """See `KeyedAccess`."""
        rows = self.table.index.find(_tensor(keys)).numpy()
        return np.asarray(rows[rows >= 0])

    def find(self, session: Session, rows: Array) -> tuple[Array, Array]:
        """See `KeyedAccess`. The layer's last row belongs to no key."""
        rows = rows[rows < self.table.index.capacity]
        is_used, keys = (each.numpy() for each in self.table.index.is_in_use(_tensor(rows)))
        return rows[is_used], keys[is_used]

    def write(self, session: Session, change: TableRows) -> None:
        """See `KeyedAccess`."""
        self.table.lay_over(_tensor(change.keys), _tensor(change.ids), change.values, _tensor(change.removed))

    def tracked(self) -> VariableTracking:
        """The table's tracking: by its keys, and by comparing rows."""
        shape = tuple(self.table.rows.shape)
        part = VariablePart(self.table.rows, shape, (0, 0), ())
        mode = TrackingMode.COMPARED
        return VariableTracking(self.name, self.table.dtype, shape, (part,), mode, (), is_keyed=True)


def eager_tables(objects: Iterable[Any]) -> Iterator[EagerTableAccess]:
    """The tables among the objects of a checkpoint. From now on they note which keys are removed."""
    for trackable in objects:
        if getattr(trackable, "is_dynamic_table", False):
            trackable.index.is_recorded.assign(True)
            yield EagerTableAccess(trackable)


def _tensor(numbers: Array) -> Any:
    import tensorflow as tf

    return tf.constant(numbers, tf.int64)
