"""Train a dynamic table with stock TensorFlow, in a TF1-style graph, also on parameter servers.

`TrainableTable` looks up as `DynamicTable` does, and a key that it meets first gets a row. It is a hash table
from keys to row numbers beside an ordinary variable of rows, for which optimizers keep slots as for others. A
Saver stores it as an embedding variable, `<name>-keys` and `<name>-values` with the rows in use alone, so an
export takes it as it takes DeepRec's. Keys are never removed.
"""

from __future__ import annotations

from typing import Any

from exporter.errors import UsageError
from exporter.tables.keyed_lookups import TableLookups
from exporter.wire.dtypes import DType

Tensor = Any

COLLECTION = "exporter_trainable_tables"
"""The collection of the names of a graph's trainable tables."""


class TrainableTable(TableLookups):
    """Rows of `dim` numbers for up to `capacity` keys, any 64-bit integers.

    New rows have the values that `initializer` gives; `name` is what checkpoints call the table.
    """

    def __init__(
        self, name: str, dim: int, capacity: int, dtype: str = "float32", initializer: Any = None
    ) -> None:
        import tensorflow as tf

        if tf.executing_eagerly():
            raise UsageError(
                f"dynamic table {name!r} is trained in a graph", hint="open one: with tf.Graph().as_default()"
            )
        v1 = tf.compat.v1
        self.name, self.dim, self.capacity, self.dtype = name, dim, capacity, DType.of(dtype)
        initializer = initializer or tf.keras.initializers.TruncatedNormal(stddev=0.05)
        self._start = initializer([capacity, dim], tf.as_dtype(dtype))
        graph = v1.get_default_graph()
        self.values = self._variable("rows", self._start, v1.GraphKeys.TRAINABLE_VARIABLES)
        with graph.colocate_with(self.values.handle):
            self._keys = self._variable("row_keys", tf.zeros([capacity], tf.int64))
            self._count = self._variable("row_count", tf.zeros([], tf.int64))
            saved = graph.get_collection_ref(v1.GraphKeys.SAVEABLE_OBJECTS)
            others = list(saved)
            self._index = tf.lookup.experimental.MutableHashTable(
                tf.int64, tf.int64, -1, name=f"{name}/index", experimental_is_anonymous=False
            )
            saved[:] = others  # the keys are enough; without `checkpoint` each session would have its own
            self._lock = tf.CriticalSection(shared_name=f"{name}/lock")
        # One at a time: a worker that has just seen no values would else take those back that others changed.
        made = self._lock.execute(self._make)
        v1.add_to_collection(v1.GraphKeys.TABLE_INITIALIZERS, made.op)
        v1.add_to_collection(v1.GraphKeys.SAVEABLE_OBJECTS, _saveable(self, self._start))
        v1.add_to_collection(COLLECTION, name)

    def _rows_of(self, ids: Tensor) -> Tensor:
        """The row number of each id; new keys get rows."""
        import tensorflow as tf

        keys, places = tf.unique(tf.reshape(ids, [-1]))
        found = self._index.lookup(keys)
        all_found = tf.cond(
            tf.reduce_any(found < 0), lambda: self._lock.execute(lambda: self._insert(keys)), lambda: found
        )
        return tf.reshape(tf.gather(all_found, places), tf.shape(ids))

    def _insert(self, keys: Tensor) -> Tensor:
        """Rows for those keys that still have none, and the rows of all; one caller at a time."""
        import tensorflow as tf

        new = tf.boolean_mask(keys, self._index.lookup(keys) < 0)
        first = self._count.read_value()
        rows = first + tf.range(tf.size(new, tf.int64))
        full = tf.debugging.assert_less_equal(
            first + tf.size(new, tf.int64),
            tf.constant(self.capacity, tf.int64),
            message=f"dynamic table {self.name!r} is full: give it more capacity",
        )
        with tf.control_dependencies([full]):
            noted = self._keys.scatter_update(tf.IndexedSlices(new, rows))
        with tf.control_dependencies([noted]):
            counted = self._count.assign_add(tf.size(new, tf.int64))
        with tf.control_dependencies([counted]):
            inserted = self._index.insert(new, rows)
        with tf.control_dependencies([inserted]):
            return self._index.lookup(keys)

    def _variable(self, part: str, value: Tensor, *collections: str) -> Any:
        import tensorflow as tf

        v1 = tf.compat.v1
        return v1.Variable(
            value,
            trainable=bool(collections),
            name=f"{self.name}/{part}",
            use_resource=True,
            # Not a global variable: those a Saver stores whole, and a session without it would miss.
            collections=[f"{COLLECTION}/variables", *collections],
        )

    def _make(self) -> Tensor:
        """Initialise the variables that were not restored."""
        import tensorflow as tf

        def settled(variable: Any, value: Tensor) -> Tensor:
            def make() -> Tensor:  # not by `initializer`: an operation outside of a branch would always run
                with tf.control_dependencies([variable.assign(value)]):
                    return tf.constant(0)

            return tf.cond(variable.is_initialized(), lambda: tf.constant(0), make)

        keys, count = tf.zeros([self.capacity], tf.int64), tf.zeros([], tf.int64)
        values = ((self.values, self._start), (self._keys, keys), (self._count, count))
        return tf.stack([settled(variable, value) for variable, value in values])


def _saveable(table: TrainableTable, start: Tensor) -> Any:
    """What a Saver stores of a table, and how it restores it."""
    import tensorflow as tf
    from tensorflow.python.training.saving import saveable_object

    class Saveable(saveable_object.SaveableObject):  # type: ignore[misc]  # TensorFlow is untyped
        """`-keys`, `-values` and the empty `-versions` of an embedding variable."""

        def __init__(self) -> None:
            with tf.compat.v1.get_default_graph().colocate_with(table.values.handle):
                count = table._count.read_value()
                with tf.control_dependencies([count]):
                    tensors = {
                        "-keys": table._keys.read_value()[:count],
                        "-values": table.values.read_value()[:count],
                        "-versions": tf.zeros([0], tf.int64),
                    }
            specs = [
                saveable_object.SaveSpec(tensor, "", table.name + suffix, device=table.values.device)
                for suffix, tensor in tensors.items()
            ]
            super().__init__(table.values.handle, specs, table.name)

        def restore(self, restored_tensors: list[Tensor], restored_shapes: Any) -> Tensor:
            keys, values, _ = restored_tensors
            count = tf.size(keys, tf.int64)
            fits = tf.debugging.assert_less_equal(
                count,
                tf.constant(table.capacity, tf.int64),
                message=f"{table.name!r} has too little capacity",
            )
            with tf.control_dependencies([fits]):
                all_keys = tf.concat([keys, tf.zeros([table.capacity - count], tf.int64)], 0)
                restored = [
                    table.values.assign(tf.concat([values, start[count:]], 0)),
                    table._keys.assign(all_keys),
                    table._count.assign(count),
                    tf.raw_ops.LookupTableImportV2(
                        table_handle=table._index.resource_handle, keys=keys, values=tf.range(count)
                    ),
                ]
            return tf.group(restored)

    return Saveable()
