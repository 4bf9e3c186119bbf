"""A dynamic table that Keras trains: a layer whose keys come and go, for `fit`, `evaluate` and `predict`.

    embedding = trainable_embedding("user", 16, capacity=1_000_000)

Keys that `fit` meets get rows; `evaluate` and `predict` give absent keys `default`, as the served model does.
`tf.train.Checkpoint` stores the table as an embedding variable, as `TrainableTable` is stored, so that an
export finds it; `.keras` and `.weights.h5` files hold it, too, under the same names. The layer is for one
process: strategies with several replicas, or with parameter servers, are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

from exporter.checkpoint.embedding_variables import KEYS, ROWS, VALUES, name_in_object
from exporter.errors import UsageError
from exporter.tables.key_index import KeyIndex
from exporter.wire.dtypes import DType

Tensor = Any
Variable = Any

_FRESH_ROWS = 1024


def trainable_embedding(
    name: str,
    dim: int,
    capacity: int,
    dtype: str = "float32",
    default: float = 0.0,
    combiner: str | None = None,
    initializer: Any = "uniform",
) -> Any:
    """A layer of Keras 3 that gives ids their rows in the table `name`, and new ones a row while it trains.

    In the model that is exported `dynamic_embedding` of the same name takes its place; with a `combiner` the
    rows along the last dimension are combined, as there. `layer.remove(keys, optimizer)` takes keys away.
    """
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
    """The layer's class, for `custom_objects={"TrainableEmbedding": ...}` of `keras.saving.load_model`."""
    import keras
    import tensorflow as tf

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
            super().__init__(**{**options, "autocast": False})
            self.supports_jit = False
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
            return tf.math.divide_no_nan(total, tf.broadcast_to(by, tf.shape(total)))

        def compute_output_shape(self, input_shape: Any) -> Any:
            kept = input_shape if self.combiner is None else input_shape[:-1]
            return (*kept, self.dim)

        def remove(self, keys: Any, optimizer: Any = None) -> int:
            """Take keys away; how many were there. Slots of `optimizer` begin again with the rows."""
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
    import tensorflow as tf

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
    """The slots that an optimizer keeps for the rows: they are called after them."""
    stem = f"{rows.path.replace('/', '_')}_"
    found = [each for each in optimizer.variables if each.path.rpartition("/")[2].startswith(stem)]
    return [each.value for each in found if tuple(each.shape[:1]) == tuple(rows.shape[:1])]


def _refuse_clusters(name: str) -> None:
    """Refuse strategies that the table would not follow.

    Raises:
        UsageError: there are several replicas, or parameter servers.
    """
    import tensorflow as tf

    strategy = tf.distribute.get_strategy()
    servers = isinstance(strategy, tf.distribute.experimental.ParameterServerStrategy)
    if servers or strategy.num_replicas_in_sync > 1:
        raise UsageError(
            f"layer {name!r} is trained in one process, not under {type(strategy).__name__}",
            cause="a strategy spreads or copies variables, and leaves the hash table behind that finds rows",
            hint="on parameter servers train a TF1-style graph with exporter.tables.TrainableTable",
        )
