"""Train a dynamic table with stock TensorFlow, in a TF1-style graph, also on parameter servers.

`TrainableTable` looks up as `DynamicTable` does, and a key that it meets first gets a row; `remove` takes
keys away. It is an index of keys (`exporter.tables.key_index`) beside an ordinary variable of rows, for which
optimizers keep slots as for others. A Saver stores it as an embedding variable, `<name>-keys` and
`<name>-values`, with `<name>-rows`, the numbers of these rows in the slots, which are stored whole. So an
export takes it as it takes DeepRec's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from exporter.errors import UsageError
from exporter.tables.key_index import KeyIndex
from exporter.tables.lookup import TableLookups
from exporter.wire.dtypes import DType

Tensor = Any
Variable = Any

COLLECTION = "exporter_trainable_tables"
"""The collection of the names of a graph's trainable tables."""
UPKEEP = "_table_upkeep"
"""The attribute of operations that write rows by the table's own choice; its index has those rows."""

_FRESH_ROWS = 1024
_UNKNOWN = -1
"""The step of a row that was looked up at an unknown time."""


class TrainableTable(TableLookups):
    """Rows of `dim` numbers for up to `capacity` keys at a time, any 64-bit integers.

    New rows have the values that `initializer` gives; `name` is what checkpoints call the table. With
    `records_steps` it keeps, in 8 bytes a row, at which global step each key was looked up last, which
    `remove_unseen` needs.
    """

    def __init__(
        self,
        name: str,
        dim: int,
        capacity: int,
        dtype: str = "float32",
        initializer: Any = None,
        *,
        records_steps: bool = False,
    ) -> None:
        import tensorflow as tf

        if tf.executing_eagerly():
            raise UsageError(
                f"dynamic table {name!r} is trained in a graph", hint="open one: with tf.Graph().as_default()"
            )
        v1 = tf.compat.v1
        if name in v1.get_collection(COLLECTION):
            raise UsageError(f"dynamic table {name!r} is made twice in one graph", hint="share one")
        self.name, self.dim, self.capacity, self.dtype = name, dim, capacity, DType.of(dtype)
        initializer = initializer or tf.keras.initializers.TruncatedNormal(stddev=0.05)
        self._start = initializer([capacity, dim], tf.as_dtype(dtype))
        self._graph = v1.get_default_graph()
        self.values = self._variable("rows", lambda: self._start, v1.GraphKeys.TRAINABLE_VARIABLES)
        saved = self._graph.get_collection_ref(v1.GraphKeys.SAVEABLE_OBJECTS)
        others = list(saved)
        with self._at_home():
            # Rows that begin again have the values of these: all of them are not in memory any more.
            self._fresh = self._variable("fresh_rows", lambda: self._start[:_FRESH_ROWS])
            unknown = tf.fill([capacity], tf.constant(_UNKNOWN, tf.int64))
            self._seen = self._variable("seen", lambda: unknown) if records_steps else None
            self.index = KeyIndex(name, capacity, self._variable, self._at_home, self._begin_anew)
            saved[:] = others  # the keys are enough; without `checkpoint` each session would have its own
            # One at a time: a worker that has just seen no values would else take back what others changed.
            with self._upkeep():
                made = self.index.locked(self._make)
        v1.add_to_collection(v1.GraphKeys.TABLE_INITIALIZERS, made.op)
        v1.add_to_collection(v1.GraphKeys.SAVEABLE_OBJECTS, _saveable(self))
        v1.add_to_collection(COLLECTION, name)

    def remove(self, keys: Any, slots: Iterable[Variable] | None = None) -> Any:
        """Take keys away; how many of them were there.

        A removed key reads as one that was never seen; when it is met again it starts over. The rows of
        optimizers' `slots` start over as well, with the values that the slot's first row had: by default of
        those that `tf.compat.v1.train` has made for the table so far, so call this after `minimize`.
        """
        import tensorflow as tf

        chosen = list(self._slots() if slots is None else slots)
        with self._at_home():  # before anything is removed: the worker may die
            firsts = [tf.identity(_first_row(slot)) for slot in chosen]

        def begin_anew(rows: Tensor) -> list[Any]:
            return [
                slot.scatter_update(tf.IndexedSlices(tf.repeat(first, tf.size(rows), 0), rows))
                for slot, first in zip(chosen, firsts, strict=True)
            ]

        with self._at_home():
            distinct, _ = tf.unique(tf.reshape(tf.cast(keys, tf.int64), [-1]))
            return self.index.remove(distinct, begin_anew)

    def remove_unseen(self, max_age_steps: int, slots: Iterable[Variable] | None = None) -> Any:
        """Take keys away that were not looked up in this many global steps; how many these were.

        Like `remove`, but it looks at all rows: run it now and then. Ages are not saved: after a restore they
        count from when this is first run.

        Raises:
            UsageError: the table does not record steps.
        """
        import tensorflow as tf

        if self._seen is None:
            raise UsageError(
                f"dynamic table {self.name!r} does not know when its keys were looked up last",
                hint=f"TrainableTable({self.name!r}, ..., records_steps=True)",
            )
        step = self._step()
        with self._at_home():
            rows, keys = self.index.in_use()
            seen = tf.gather(self._seen, rows)
            begun = tf.boolean_mask(rows, seen < 0)
            noted = self._seen.scatter_update(tf.IndexedSlices(tf.fill([tf.size(begun)], step), begun))
            with tf.control_dependencies([noted]):
                old = tf.boolean_mask(keys, (seen >= 0) & (seen < step - max_age_steps))
        return self.remove(old, slots)

    def lay_over(self, keys: Tensor, rows: Tensor, values: Tensor, removed: Tensor) -> Any:
        """The operation that takes keys away and gives others rows and values."""
        import tensorflow as tf

        with self._at_home(), self._upkeep():
            written = self.values.scatter_update(tf.IndexedSlices(values, rows))
            with tf.control_dependencies([written]):
                return self.index.lay_over(keys, rows, removed)

    def _rows_of(self, ids: Tensor) -> Tensor:
        """The row number of each id; new keys get rows."""
        import tensorflow as tf

        keys, places = tf.unique(tf.reshape(ids, [-1]))
        with self._upkeep():
            found = self.index.find_or_add(keys)
        if self._seen is not None:
            steps = tf.fill([tf.size(found)], self._step())
            with (
                self._at_home(),
                tf.control_dependencies([self._seen.scatter_update(tf.IndexedSlices(steps, found))]),
            ):
                found = tf.identity(found)
        return tf.reshape(tf.gather(found, places), tf.shape(ids))

    def _step(self) -> Tensor:
        import tensorflow as tf

        return tf.cast(tf.convert_to_tensor(tf.compat.v1.train.get_or_create_global_step()), tf.int64)

    def _begin_anew(self, rows: Tensor) -> Any:
        import tensorflow as tf

        values = tf.gather(self._fresh, rows % min(_FRESH_ROWS, self.capacity))
        with tf.control_dependencies(self._forget_steps(rows)):
            return self.values.scatter_update(tf.IndexedSlices(values, rows))

    def _forget_steps(self, rows: Tensor) -> list[Any]:
        """Operations that set the time of these rows' last lookup to unknown."""
        import tensorflow as tf

        if self._seen is None:
            return []
        unknown = tf.fill([tf.size(rows)], tf.constant(_UNKNOWN, tf.int64))
        return [self._seen.scatter_update(tf.IndexedSlices(unknown, rows))]

    def _restore(self, keys: Tensor, rows: Tensor, values: Tensor) -> Any:
        import tensorflow as tf

        def put() -> list[Any]:
            begun = [self.values.assign(self._start), *self._forget_steps(tf.range(self.capacity))]
            with tf.control_dependencies(begun):
                return [self.values.scatter_update(tf.IndexedSlices(values, rows))]

        with self._at_home(), self._upkeep():
            return self.index.restore(keys, rows, put)

    def _slots(self) -> list[Variable]:
        import tensorflow as tf

        beside = f"{self.values.op.name}/"
        variables = tf.compat.v1.global_variables()
        return [
            each
            for each in variables
            if each.op.name.startswith(beside) and each.shape[:1] == self.values.shape[:1]
        ]

    def _at_home(self) -> AbstractContextManager[Any]:
        return self._graph.colocate_with(self.values.handle)  # type: ignore[no-any-return]  # it is untyped

    def _upkeep(self) -> AbstractContextManager[Any]:
        import tensorflow as tf

        mark = tf.compat.v1.AttrValue(b=True)
        return self._graph._attr_scope({UPKEEP: mark})  # type: ignore[no-any-return]  # it is untyped

    def _variable(self, part: str, value: Callable[[], Tensor], *collections: str) -> Variable:
        import tensorflow as tf

        v1 = tf.compat.v1
        return v1.Variable(
            value(),
            trainable=bool(collections),
            name=f"{self.name}/{part}",
            use_resource=True,
            # Not a global variable: those a Saver stores whole, and a session without it would miss.
            collections=[f"{COLLECTION}/variables", *collections],
        )

    def _make(self) -> Tensor:
        """Initialise the variables that were not restored."""
        import tensorflow as tf

        def settled(variable: Variable) -> Tensor:
            def make() -> Tensor:  # not by `initializer`: an operation outside of a branch would always run
                with tf.control_dependencies([variable.assign(variable.initial_value)]):
                    return tf.constant(0)

            return tf.cond(variable.is_initialized(), lambda: tf.constant(0), make)

        own = (self.values, self._fresh, *([] if self._seen is None else [self._seen]))
        return tf.stack(list(map(settled, (*own, *self.index.variables))))


def trainable_tables() -> tuple[TrainableTable, ...]:
    """The tables of the graph that is being built."""
    import tensorflow as tf

    v1 = tf.compat.v1
    saved = v1.get_collection(v1.GraphKeys.SAVEABLE_OBJECTS)
    return tuple(each.trainable_table for each in saved if is_trainable_table(each))


def is_trainable_table(saveable: Any) -> bool:
    """True for what a Saver stores of a table."""
    return isinstance(getattr(saveable, "trainable_table", None), TrainableTable)


def _first_row(slot: Variable) -> Tensor:
    """The first row that a slot had, where its initial value is made: that may be another machine."""
    import tensorflow as tf

    value = slot.initial_value
    with tf.control_dependencies(None), value.graph.colocate_with(value.op, ignore_existing=True):
        return value[:1]


def _saveable(table: TrainableTable) -> Any:
    """What a Saver stores of a table, and how it restores it."""
    import tensorflow as tf
    from tensorflow.python.training.saving import saveable_object

    class Saveable(saveable_object.SaveableObject):  # type: ignore[misc]  # TensorFlow is untyped
        """`-keys`, `-values`, the empty `-versions` of an embedding variable, and `-rows`."""

        trainable_table = table

        def __init__(self) -> None:
            rows, keys = table.index.in_use()
            with table._at_home():
                tensors = {
                    "-keys": keys,
                    "-rows": rows,
                    "-values": tf.gather(table.values, rows),
                    "-versions": tf.zeros([0], tf.int64),
                }
            specs = [
                saveable_object.SaveSpec(tensor, "", table.name + suffix, device=table.values.device)
                for suffix, tensor in tensors.items()
            ]
            super().__init__(table.values.handle, specs, table.name)

        def restore(self, restored_tensors: list[Tensor], restored_shapes: Any) -> Tensor:
            keys, rows, values, _ = restored_tensors
            return table._restore(keys, rows, values)

    return Saveable()
