"""Train a dynamic table with stock TensorFlow: a new key gets a row when it is looked up.

`TrainableTable` is for TF1-style graphs, also on parameter servers. It looks up like `DynamicTable`; `remove`
removes keys. It is an index of keys (`exporter.tables.key_index`) beside an ordinary variable of rows, for
which optimizers keep slots as for others. A Saver stores it as an embedding variable, `<name>-keys` and
`<name>-values`, with `<name>-rows`, the numbers of these rows in the slots, which are stored whole. So an
export reads it like one of DeepRec's.

`trainable_embedding` is a layer of Keras, for `fit`, `evaluate` and `predict`:

    embedding = trainable_embedding("user", 16, capacity=1_000_000)

`fit` assigns rows to new keys; for `evaluate` and `predict` absent keys read `default`, as in the served
model. `tf.train.Checkpoint` stores the table as an embedding variable, in the form of `TrainableTable`, so
that an export finds it; `.keras` and `.weights.h5` files hold it, too, under the same names. The layer is for
one process: strategies with several replicas, or with parameter servers, are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

from exporter.checkpoint.embedding_variables import KEYS, ROWS, VALUES, name_in_object
from exporter.errors import UsageError
from exporter.late_names import tf
from exporter.tables.arguments import default_rows, known_combiner, row_dtype
from exporter.tables.key_index import KeyIndex
from exporter.tables.lookup import TableLookups
from exporter.wire.dtypes import DType

Tensor = Any
Variable = Any

COLLECTION = "exporter_trainable_tables"
"""The collection of the names of a graph's trainable tables."""
UPKEEP = "_table_upkeep"
"""The attribute of operations by which the table itself writes rows; its index records these rows."""

_FRESH_ROWS = 1024
_UNKNOWN = -1
"""The step of a row whose last lookup is unknown."""


class TrainableTable(TableLookups):
    """Rows of `dim` numbers for up to `capacity` keys at a time, any 64-bit integers.

    New rows get the values of `initializer`; `name` is the table's name in checkpoints. With `records_steps`
    it keeps, in 8 bytes a row, the global step of each key's last lookup, which `remove_unseen` needs.
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
        if tf.executing_eagerly():
            raise UsageError(
                f"dynamic table {name!r} is trained in a graph", hint="open one: with tf.Graph().as_default()"
            )
        v1 = tf.compat.v1
        if name in v1.get_collection(COLLECTION):
            raise UsageError(f"dynamic table {name!r} is made twice in one graph", hint="share one")
        self.name, self.dim, self.capacity, self.dtype = name, dim, capacity, row_dtype(name, dtype)
        initializer = initializer or tf.keras.initializers.TruncatedNormal(stddev=0.05)
        self._start = initializer([capacity, dim], tf.as_dtype(self.dtype.label))
        self._graph = v1.get_default_graph()
        self.values = self._variable("rows", lambda: self._start, v1.GraphKeys.TRAINABLE_VARIABLES)
        saved = self._graph.get_collection_ref(v1.GraphKeys.SAVEABLE_OBJECTS)
        others = list(saved)
        with self._at_home():
            # Reused rows get values of these: the initial values of all rows are no longer in memory.
            self._fresh = self._variable("fresh_rows", lambda: self._start[:_FRESH_ROWS])
            unknown = tf.fill([capacity], tf.constant(_UNKNOWN, tf.int64))
            self._seen = self._variable("seen", lambda: unknown) if records_steps else None
            self.index = KeyIndex(name, capacity, self._variable, self._at_home, self._begin_anew)
            saved[:] = others  # the keys are enough; without `checkpoint` each session would have its own
            # One at a time: otherwise a worker that has just seen no values would overwrite others' changes.
            with self._upkeep():
                made = self.index.locked(self._make)
        v1.add_to_collection(v1.GraphKeys.TABLE_INITIALIZERS, made.op)
        v1.add_to_collection(v1.GraphKeys.SAVEABLE_OBJECTS, _saveable(self))
        v1.add_to_collection(COLLECTION, name)

    def remove(self, keys: Any, slots: Iterable[Variable] | None = None) -> Any:
        """Add nodes that remove keys (any integer tensor); return the number that existed, int64 [].

        Keys are removed when the result, a tensor, runs. A removed key reads like one that was never seen;
        when it is met again it starts over. The rows of optimizers' `slots` start over as well, with the
        values that the slot's first row had initially. With None these are the slots that
        `tf.compat.v1.train` has made for the table before this call, so call it after `minimize`.
        """
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
        """Add nodes that remove the keys not looked up in the last `max_age_steps` global steps.

        Return their number, an int64 scalar tensor. Slots, also with None, are treated as by `remove`. All
        rows are looked at: run it now and then. Ages are not saved: after a restore they count from the first
        run of this operation. Raises UsageError unless the table records steps.
        """
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
        """Add the operation that removes keys, then assigns `rows` and `values` to `keys`; return it.

        `keys`, `rows` and `removed` are int64 vectors, `values` is [n, dim]; keys may be new or existing
        ones.
        """
        with self._at_home(), self._upkeep():
            written = self.values.scatter_update(tf.IndexedSlices(values, rows))
            # First the values: from when the index has the key, a step may read its row.
            with tf.control_dependencies([written]):
                return self.index.lay_over(keys, rows, removed)

    def _rows_of(self, ids: Tensor) -> Tensor:
        """Return the row number of each id, in the shape of `ids`.

        New keys get rows, and the step of the lookup is recorded. Raises InvalidArgumentError of TensorFlow,
        when it runs, if the table is full.
        """
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
        return tf.cast(tf.convert_to_tensor(tf.compat.v1.train.get_or_create_global_step()), tf.int64)

    def _begin_anew(self, rows: Tensor) -> Any:
        values = tf.gather(self._fresh, rows % min(_FRESH_ROWS, self.capacity))
        with tf.control_dependencies(self._forget_steps(rows)):
            return self.values.scatter_update(tf.IndexedSlices(values, rows))

    def _forget_steps(self, rows: Tensor) -> list[Any]:
        """Add and return the operations that set the step of these rows' last lookup to unknown.

        Empty if steps are not recorded.
        """
        if self._seen is None:
            return []
        unknown = tf.fill([tf.size(rows)], tf.constant(_UNKNOWN, tf.int64))
        return [self._seen.scatter_update(tf.IndexedSlices(unknown, rows))]

    def _restore(self, keys: Tensor, rows: Tensor, values: Tensor) -> Any:
        def put() -> list[Any]:
            begun = [self.values.assign(self._start), *self._forget_steps(tf.range(self.capacity))]
            with tf.control_dependencies(begun):
                return [self.values.scatter_update(tf.IndexedSlices(values, rows))]

        with self._at_home(), self._upkeep():
            return self.index.restore(keys, rows, put)

    def _slots(self) -> list[Variable]:
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
        mark = tf.compat.v1.AttrValue(b=True)
        return self._graph._attr_scope({UPKEEP: mark})  # type: ignore[no-any-return]  # it is untyped

    def _variable(self, part: str, value: Callable[[], Tensor], *collections: str) -> Variable:
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
        """Add the operation that initialises the table's variables, except restored ones.

        Return its result.
        """

        def settled(variable: Variable) -> Tensor:
            def make() -> Tensor:  # not by `initializer`: an operation outside of a branch would always run
                with tf.control_dependencies([variable.assign(variable.initial_value)]):
                    return tf.constant(0)

            return tf.cond(variable.is_initialized(), lambda: tf.constant(0), make)

        own = (self.values, self._fresh, *([] if self._seen is None else [self._seen]))
        return tf.stack(list(map(settled, (*own, *self.index.variables))))


def trainable_tables() -> tuple[TrainableTable, ...]:
    """Return the trainable tables of the graph that is being built, in the order in which they were made."""
    v1 = tf.compat.v1
    saved = v1.get_collection(v1.GraphKeys.SAVEABLE_OBJECTS)
    return tuple(each.trainable_table for each in saved if is_trainable_table(each))


def is_trainable_table(saveable: Any) -> bool:
    """True if an object is the saveable of a `TrainableTable`; False for any other object."""
    return isinstance(getattr(saveable, "trainable_table", None), TrainableTable)


def _first_row(slot: Variable) -> Tensor:
    """Return the first row, [1, ...], of a slot's initial value.

    It is computed on the device where that value is made.
    """
    value = slot.initial_value
    with tf.control_dependencies(None), value.graph.colocate_with(value.op, ignore_existing=True):
        return value[:1]


def _saveable(table: TrainableTable) -> Any:
    """Return a new saveable object by which a Saver stores and restores a table.

    Its `trainable_table` is the table.
    """
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


def trainable_embedding(
    name: str,
    dim: int,
    capacity: int,
    dtype: str = "float32",
    default: float = 0.0,
    combiner: str | None = None,
    initializer: Any = "uniform",
) -> Any:
    """Return a Keras 3 layer that looks up ids in the table `name`; in training, new ids get rows.

    The table has rows of `dim` numbers for up to `capacity` keys; new rows get values of `initializer`, and
    absent ids read `default` outside of training. In the exported model `dynamic_embedding` of the same name
    replaces the layer; with a `combiner` ("sum", "mean" or "sqrtn") the rows along the last dimension are
    combined, as in `tf.nn.embedding_lookup_sparse`; with None they are not. `layer.remove(keys, optimizer)`
    removes keys. Raises UsageError for an unknown `combiner` or a `default` that is not a number; the layer,
    when it is built under a strategy of several replicas or of parameter servers, or with a `capacity` below
    1.
    """
    default_rows(name, default, dim, DType.FLOAT)
    known_combiner(name, combiner)
    return trainable_embedding_class()(
        table=name,
        dim=dim,
        capacity=capacity,
        default=default,
        combiner=combiner,
        initializer=initializer,
        name=name.replace("/", "_"),
        dtype=dtype,
    )


@cache
def trainable_embedding_class() -> Any:
    """Return the class of the layer that `trainable_embedding` makes.

    It is made once, and then registered with Keras. For `custom_objects` of `keras.saving.load_model` its key
    is "TrainableEmbedding".
    """
    import keras

    @keras.saving.register_keras_serializable("exporter")
    class TrainableEmbedding(keras.layers.Layer):  # type: ignore[misc]  # Keras is untyped
        """Rows by any 64-bit integers; see `trainable_embedding`."""

        def __init__(
            self,
            table: str,
            dim: int,
            capacity: int,
            default: float = 0.0,
            combiner: str | None = None,
            initializer: Any = "uniform",
            **options: Any,
        ) -> None:
            super().__init__(**{**options, "autocast": False})  # ids that come as floats are not rounded
            self.supports_jit = False  # XLA compiles no hash tables
            self.dim, self.capacity, self.default, self.combiner = dim, capacity, default, combiner
            self.initializer = keras.initializers.get(initializer)
            self.table_name = table

        def build(self, input_shape: Any) -> None:
            _refuse_clusters(self.table_name)
            # No key ever has the last row, so that optimizers' slots have there what they begin with.
            self.rows = self.add_weight(
                shape=(self.capacity + 1, self.dim), initializer=self.initializer, name="rows"
            )
            with tf.init_scope():
                self.table = _saved_table(self)
            self.built = True

        def call(self, ids: Any, training: bool | None = None) -> Any:
            ragged = isinstance(ids, tf.RaggedTensor)
            flat = tf.cast(ids.flat_values if ragged else ids, tf.int64)
            found = self.table.look_up(flat, bool(training))
            if ragged:
                found = ids.with_flat_values(found)
            if self.combiner is None:
                return found
            total = tf.reduce_sum(found, -2)
            size = ids.row_lengths(-1) if ragged else tf.shape(ids)[-1]
            size = tf.cast(size, total.dtype)[..., tf.newaxis] if ragged else tf.cast(size, total.dtype)
            by = {"sum": tf.ones_like(size), "mean": size, "sqrtn": tf.sqrt(size)}[self.combiner]
            # A ragged row may have no ids.
            return tf.math.divide_no_nan(total, tf.broadcast_to(by, tf.shape(total)))

        def compute_output_shape(self, input_shape: Any) -> Any:
            kept = input_shape if self.combiner is None else input_shape[:-1]
            return (*kept, self.dim)

        def remove(self, keys: Any, optimizer: Any = None) -> int:
            """Remove keys (any integers) and return the number of them that existed.

            The rows of the slots of `optimizer` start over with them; None leaves slots as they are.
            """
            slots = [] if optimizer is None else _slots(optimizer, self.rows)
            distinct, _ = tf.unique(tf.reshape(tf.cast(keys, tf.int64), [-1]))
            return int(self.table.remove(distinct, slots))

        def save_own_variables(self, store: Any) -> None:
            for part, value in self.table._serialize_to_tensors().items():
                store[part] = value.numpy()

        def load_own_variables(self, store: Any) -> None:
            keys, rows, values = (store[self.table.stem + part][:] for part in (KEYS, ROWS, VALUES))
            self.table.load(keys, rows, values)

        def get_config(self) -> dict[str, Any]:
            kept = {part: getattr(self, part) for part in ("dim", "capacity", "default", "combiner")}
            initializer = keras.initializers.serialize(self.initializer)
            return {**super().get_config(), **kept, "table": self.table_name, "initializer": initializer}

    return TrainableEmbedding


def _saved_table(layer: Any) -> Any:
    """Return a new index of a layer's keys, as an object that `tf.train.Checkpoint` tracks.

    Raises UsageError if the layer's capacity is below 1.
    """
    rows: Variable = layer.rows.value
    fresh = tf.Variable(rows[: min(_FRESH_ROWS, layer.capacity)], trainable=False)

    def variable(part: str, value: Callable[[], Tensor]) -> Variable:
        return tf.Variable(value(), trainable=False, name=f"{layer.table_name}/{part}")

    def begin_anew(taken: Tensor) -> Any:
        return rows.scatter_update(
            tf.IndexedSlices(tf.gather(fresh, taken % min(_FRESH_ROWS, layer.capacity)), taken)
        )

    index = KeyIndex(layer.table_name, layer.capacity, variable, nullcontext, begin_anew, shared=False)

    class EagerTable(tf.__internal__.tracking.Trackable):  # type: ignore[misc]  # TensorFlow is untyped
        """The table of a layer, as checkpoints see it."""

        is_dynamic_table = True

        def __init__(self) -> None:
            self.name, self.dtype = layer.table_name, DType.of(rows.dtype.name)
            self.stem = name_in_object(self.name)
            self.index, self.rows = index, rows
            self.take_given = tf.function(index.take_changed)
            self.take_removed = tf.function(index.take_removed)

        def look_up(self, ids: Tensor, adds: bool) -> Tensor:
            keys, places = tf.unique(tf.reshape(ids, [-1]))
            if adds:
                numbers = tf.gather(index.find_or_add(keys), places)
                return tf.nn.embedding_lookup(rows, tf.reshape(numbers, tf.shape(ids)))
            numbers = tf.reshape(tf.gather(index.find(keys), places), tf.shape(ids))
            found = tf.nn.embedding_lookup(rows, tf.maximum(numbers, 0))
            absent = tf.cast(layer.default, rows.dtype)
            return tf.where((numbers >= 0)[..., tf.newaxis], found, absent)

        @tf.function  # type: ignore[untyped-decorator]  # TensorFlow is untyped
        def remove(self, keys: Tensor, slots: list[Variable]) -> Tensor:
            def also(taken: Tensor) -> list[Any]:
                return [
                    slot.scatter_update(tf.IndexedSlices(tf.repeat(slot[-1:], tf.size(taken), axis=0), taken))
                    for slot in slots
                ]

            return index.remove(keys, also)

        def lay_over(self, keys: Tensor, numbers: Tensor, values: Any, removed: Tensor) -> None:
            rows.scatter_update(tf.IndexedSlices(tf.constant(values, rows.dtype), numbers))
            index.lay_over(keys, numbers, removed)

        def load(self, keys: Any, numbers: Any, values: Any) -> None:
            numbers = tf.constant(numbers, tf.int64)
            index.restore(tf.constant(keys, tf.int64), numbers)
            rows.scatter_update(tf.IndexedSlices(tf.constant(values, rows.dtype), numbers))

        def _serialize_to_tensors(self) -> dict[str, Tensor]:
            numbers, keys = index.in_use()
            parts = {"keys": keys, "rows": numbers, "values": tf.gather(rows, numbers)}
            parts["versions"] = tf.zeros([0], tf.int64)
            return {f"{self.stem}-{part}": value for part, value in parts.items()}

        def _restore_from_tensors(self, restored: dict[str, Tensor]) -> Any:
            # The rows are a weight, which is restored, too.
            return index.restore(restored[f"{self.stem}-keys"], restored[f"{self.stem}-rows"])

    return EagerTable()


def _slots(optimizer: Any, rows: Any) -> list[Variable]:
    """Return a Keras optimizer's variables for the weight `rows` that have as many rows as the weight."""
    stem = f"{rows.path.replace('/', '_')}_"
    found = [each for each in optimizer.variables if each.path.rpartition("/")[2].startswith(stem)]
    return [each.value for each in found if tuple(each.shape[:1]) == tuple(rows.shape[:1])]


def _refuse_clusters(name: str) -> None:
    """Raise UsageError if the current strategy has several replicas or parameter servers.

    `name` is the layer's.
    """
    strategy = tf.distribute.get_strategy()
    servers = isinstance(strategy, tf.distribute.experimental.ParameterServerStrategy)
    if servers or strategy.num_replicas_in_sync > 1:
        raise UsageError(
            f"layer {name!r} is trained in one process, not under {type(strategy).__name__}",
            cause="a strategy spreads or copies variables, and leaves the hash table behind that finds rows",
            hint="on parameter servers train a TF1-style graph with exporter.tables.TrainableTable",
        )
