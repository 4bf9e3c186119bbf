"""A dynamic table in a model for stock TensorFlow: `DynamicTable` in graphs, `DynamicEmbedding` in Keras.

In an export's builder a table is four variables without values; the export fills them from the checkpoint's
table of the same name. `rows` turns ids into row numbers of `values`, an ordinary variable, so that
everything that TensorFlow does with a variable's rows works with a dynamic table's:

    table = DynamicTable("user_embedding", dim=16)
    tf.nn.embedding_lookup(table.values, table.rows(ids))
    tf.nn.embedding_lookup_sparse(table.values, table.rows(sparse_ids), weights, combiner="mean")

`DynamicEmbedding` is a layer of Keras 3 or tf-keras around one, for builders that return models.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from exporter.errors import UsageError
from exporter.late_names import tf
from exporter.tables.arguments import default_rows, known_combiner, row_dtype
from exporter.tables.geometry import TableGeometry
from exporter.tables.lookup import DEFAULTS, PART, TABLE, TableLookups, add_rows
from exporter.tables.parts import PARTS
from exporter.wire import protos, tensor_proto
from exporter.wire.dtypes import Array, DType


def dynamic_embedding(
    name: str, dim: int, dtype: str = "float32", default: Any = 0.0, combiner: str | None = None
) -> Any:
    """Return a Keras layer that looks up ids in the table `name`, whose rows are `dim` numbers of `dtype`.

    An absent id reads `default`: a number, a row, or an array [d, dim], of which id k reads row `k mod d`.
    With a `combiner` ("sum", "mean" or "sqrtn") the rows along the last dimension of the ids are combined, as
    in `tf.nn.embedding_lookup_sparse`; in a dense tensor every id counts. With None they are not combined.
    Raises UsageError if `default` has another shape, or for an unknown `dtype` or `combiner`.
    """
    table = DynamicTable(name, dim, dtype, default)
    return _layer(table, known_combiner(name, combiner), name.replace("/", "_"))


class ServedEmbedding:
    """Replaces a `trainable_embedding` when a model is made from its config for serving."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Any:
        """Return the layer of `dynamic_embedding` that the config of a `trainable_embedding` describes.

        Raises ValueError if a field is missing, UsageError if the default does not fit `dim`, or for an
        unknown dtype or combiner.
        """
        missing = {"table", "dim", "dtype", "default", "combiner", "name"} - config.keys()
        if missing:
            raise ValueError(f"a trainable_embedding's config has no {', '.join(sorted(missing))}")
        dtype = _keras().dtype_policies.get(config["dtype"]).variable_dtype
        table = DynamicTable(config["table"], config["dim"], dtype, config["default"])
        return _layer(table, known_combiner(table.name, config["combiner"]), config["name"])


def _layer(table: DynamicTable, combiner: str | None, name: str) -> Any:
    keras = _keras()

    class DynamicEmbedding(keras.layers.Layer):  # type: ignore[name-defined, misc]  # Keras is untyped
        """Looks up rows of a dynamic table, which come from the checkpoint; nothing is trained here."""

        def call(self, ids: Any) -> Any:
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

    # Without autocast: Keras would round ids that come as floats to the layer's dtype.
    return DynamicEmbedding(name=name, dtype=table.dtype.label, autocast=False)


def _keras() -> Any:
    """Return the Keras module to make layers with: `tf_keras` or `tf.keras`.

    It is `tf_keras` if the program has imported it and not `keras`.
    """
    if "tf_keras" in sys.modules and "keras" not in sys.modules:
        return sys.modules["tf_keras"]
    return tf.keras


Tensor = Any

_HANDLES = ("seeds", "rows", "keys", "values")


class DynamicTable(TableLookups):
    """A table of rows of `dim` numbers, looked up by any 64-bit integers; in a graph, for inference.

    `name` is the table's name in the checkpoint. A key that it does not hold reads `default`: a number, a
    row, or an array [d, dim], of which key k reads row `k mod d`. UsageError if it has another shape, or if
    `dtype` is not the name of a float.
    """

    def __init__(self, name: str, dim: int, dtype: str = "float32", default: Any = 0.0) -> None:
        self.name, self.dim, self.dtype = name, dim, row_dtype(name, dtype)
        self._defaults = default_rows(name, default, dim, self.dtype)
        self._made: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()

    @property
    def values(self) -> Any:
        """The variable of the rows, [capacity, dim], made in the graph that is being built if missing.

        A checkpoint determines its first dimension later. Raises UsageError outside of a graph, or if
        something else has the name of one of the table's variables.
        """
        return self._variables()[-1]

    def _rows_of(self, ids: Tensor) -> Tensor:
        found = self._import(ids)
        found.set_shape(ids.shape)
        return found

    def _import(self, ids: Tensor) -> Tensor:
        """Add the nodes of a lookup of `ids` (int64, any shape) to the graph that is being built.

        Return the tensor of row numbers. Raises UsageError outside of a graph, or if something else in the
        graph has a name of the table's variables.
        """
        tensors = [*(variable.handle for variable in self._variables()), ids]
        graph_def = protos.GraphDef()
        for name, dtype in [*((name, DType.RESOURCE) for name in _HANDLES), ("ids", DType.INT64)]:
            graph_def.node.add(name=name, op="Placeholder").attr["dtype"].type = int(dtype)
        nodes = add_rows(graph_def, "find", self.name, _HANDLES, "ids", defaults=len(self._defaults))
        given = dict(zip((f"{name}:0" for name in (*_HANDLES, "ids")), map(_captured, tensors), strict=True))
        # As bytes: TensorFlow's messages are of another descriptor pool, and the two do not mix.
        message = tf.compat.v1.GraphDef.FromString(graph_def.SerializeToString())
        scope = f"{self.name.rpartition('/')[2]}_lookup"
        (rows,) = tf.graph_util.import_graph_def(message, given, [f"{nodes.rows}:0"], name=scope)
        return rows

    def _variables(self) -> list[Any]:
        """Return the table's four variables, in the order of `PARTS`; they are made once in each graph.

        Raises UsageError outside of a graph, or if something else in it has the name of one of them.
        """
        # Outside of functions: they capture the variables of the one graph around them.
        with tf.init_scope():
            if tf.executing_eagerly():
                raise UsageError(
                    f"dynamic table {self.name!r} is used outside of a graph",
                    hint="make the model in a builder: export-model --model file.py:builder",
                )
            graph = tf.compat.v1.get_default_graph()
            if graph not in self._made:
                self._made[graph] = [self._variable(graph, part) for part in PARTS]
        return self._made[graph]

    def _variable(self, graph: Any, part: str) -> Any:
        from tensorflow.python.ops.resource_variable_ops import UninitializedVariable

        size = TableGeometry.unset(len(self._defaults))
        shapes = dict(zip(PARTS, ((size.groups,), (size.slots,), (size.capacity,)), strict=False))
        dtypes = dict(zip(PARTS, ("int64", "int32", "int64"), strict=False))
        name = f"{self.name}/{part}"
        marks = {TABLE: self.name.encode(), PART: part.encode()}
        attributes = {key: tf.compat.v1.AttrValue(s=value) for key, value in marks.items()}
        if part == PARTS[-1]:
            attributes[DEFAULTS] = tf.compat.v1.AttrValue(tensor=_tensor(self._defaults))
        # "" leaves all scopes: the checkpoint has the variable under exactly this name.
        with graph._attr_scope(attributes), tf.name_scope(""):
            variable = UninitializedVariable(
                trainable=False,
                shape=shapes.get(part, (size.capacity, self.dim)),
                dtype=dtypes.get(part, self.dtype.label),
                name=name,
            )
        # It has no initialiser that a collection could name.
        collected = graph.get_collection_ref(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES)
        collected[:] = [each for each in collected if each is not variable]
        if variable.handle.op.name != name:
            raise UsageError(
                f"dynamic table {self.name!r} is made twice in one graph, or something else is called so",
                hint="share one DynamicTable, or give the tables different names",
            )
        return variable


def _captured(tensor: Tensor) -> Tensor:
    """Return the tensor as an input of the function that is being traced, or the tensor itself if none is."""
    # Importing nodes captures nothing by itself.
    graph = tf.compat.v1.get_default_graph()
    return graph.capture(tensor) if hasattr(graph, "capture") else tensor


def _tensor(array: Array) -> Any:
    message = protos.TensorProto()
    tensor_proto.fill(message, array)
    # The class of TensorFlow's own pool, which AttrValue demands.
    return tf.make_tensor_proto(0).FromString(message.SerializeToString())
