"""A dynamic table as a layer of Keras 3 or tf-keras, for the models that builders return."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from exporter.tables.dynamic_table import DynamicTable


def dynamic_embedding(
    name: str, dim: int, dtype: str = "float32", default: Any = 0.0, combiner: str | None = None
) -> Any:
    """A layer that gives ids their rows in the table `name`; see `DynamicTable` for the arguments.

    With a `combiner` ("sum", "mean" or "sqrtn") the rows along the last dimension of the ids are combined, as
    `tf.nn.embedding_lookup_sparse` does it; those of a dense tensor count all.
    """
    return _layer(DynamicTable(name, dim, dtype, default), combiner, name.replace("/", "_"))


class ServedEmbedding:
    """What takes the place of a `trainable_embedding` where a model is made from its config to be served."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Any:
        """The layer of `dynamic_embedding` for a layer's config.

        Raises:
            ValueError: it is no such config.
        """
        missing = {"table", "dim", "dtype", "default", "combiner", "name"} - config.keys()
        if missing:
            raise ValueError(f"a trainable_embedding's config has no {', '.join(sorted(missing))}")
        dtype = _keras().dtype_policies.get(config["dtype"]).variable_dtype
        table = DynamicTable(config["table"], config["dim"], dtype, config["default"])
        return _layer(table, config["combiner"], config["name"])


def _layer(table: DynamicTable, combiner: str | None, name: str) -> Any:
    keras = _keras()

    class DynamicEmbedding(keras.layers.Layer):  # type: ignore[name-defined, misc]  # Keras is untyped
        """Rows of a dynamic table, which the checkpoint has; nothing of it is trained here."""

        def call(self, ids: Any) -> Any:
            import tensorflow as tf

            if combiner is None:
                return table.lookup(ids)
            if isinstance(ids, tf.RaggedTensor):
                ids = ids.to_sparse()
            if isinstance(ids, tf.SparseTensor):
                return table.lookup_sparse(ids, combiner=combiner)
            rows = table.lookup(ids)
            total = tf.reduce_sum(rows, -2)
            size = tf.cast(tf.shape(ids)[-1], rows.dtype)
            return total / {"sum": tf.ones_like(size), "mean": size, "sqrtn": tf.sqrt(size)}[combiner]

        def compute_output_shape(self, input_shape: Any) -> Any:
            kept = input_shape if combiner is None else input_shape[:-1]
            return (*kept, table.dim)

    return DynamicEmbedding(name=name, dtype=table.dtype.label, autocast=False)


def _keras() -> Any:
    """The Keras that the program uses: the one that it has imported, else TensorFlow's own."""
    if "tf_keras" in sys.modules and "keras" not in sys.modules:
        return sys.modules["tf_keras"]
    import tensorflow as tf

    return tf.keras
