"""Look keys up in a dynamic table, inside the served graph: a dozen stock operations, of which four gather.

The nodes are added to a GraphDef, so that graphs which TensorFlow cannot load get them, too. They need the
table's sizes, which only a checkpoint tells: those are constants with the attribute `SIZE`, and `set_sizes`
fills them in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from exporter.late_names import tf
from exporter.tables.geometry import MULTIPLIER, OFFSET, WINDOW, WINDOW_BITS, TableGeometry
from exporter.wire import tensor_proto
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto, all_nodes

Tensor = Any


class TableLookups(ABC):
    """Looks ids up in a table whose rows are those of the variable `values`."""

    values: Any

    @abstractmethod
    def _rows_of(self, ids: Tensor) -> Tensor:
        """The row number of each id of an int64 tensor, in its shape."""

    def rows(self, ids: Any) -> Any:
        """The row number of each id, of a tensor of any shape, a SparseTensor or a RaggedTensor."""
        if isinstance(ids, tf.SparseTensor):
            return tf.SparseTensor(ids.indices, self.rows(ids.values), ids.dense_shape)
        if isinstance(ids, tf.RaggedTensor):
            return ids.with_flat_values(self.rows(ids.flat_values))
        return self._rows_of(tf.cast(ids, tf.int64))

    def lookup(self, ids: Any) -> Any:
        """The rows of ids, of shape `ids.shape + [dim]`; ragged for ragged ids."""
        if isinstance(ids, tf.RaggedTensor):
            return ids.with_flat_values(self.lookup(ids.flat_values))
        return tf.nn.embedding_lookup(self.values, self.rows(ids))

    def lookup_sparse(self, ids: Any, weights: Any = None, combiner: str = "mean") -> Any:
        """The combined rows of each row of a SparseTensor; `combiner` is "sum", "mean" or "sqrtn"."""
        return tf.nn.embedding_lookup_sparse(self.values, self.rows(ids), weights, combiner=combiner)


TABLE = "_dynamic_table"
"""The attribute of a node that names the table which it belongs to."""

SIZE = "_dynamic_table_size"
"""The attribute of a constant that says which size of its table it is."""

PART = "_dynamic_table_part"
"""The attribute of a VarHandleOp that says which of `parts.PARTS` it is; `TABLE` is there, too."""

DEFAULTS = "_dynamic_table_defaults"
"""The attribute of the values' VarHandleOp with the default rows, a tensor [d, dim]."""

_UNSET = 1  # until `set_sizes`


class RowNodes(Struct, frozen=True):
    """The nodes of a lookup: `rows` (int32), which are default rows where `found` (bool) is false."""

    rows: str
    found: str


def add_rows(
    graph_def: Proto, name: str, table: str, handles: Sequence[str], ids: str, *, defaults: int = 1
) -> RowNodes:
    """Add nodes under `name/` that find the rows of `ids`, int64 of any shape, in a table.

    `handles` are the tensors of its variables in the order of `parts.PARTS`, `defaults` is the number of
    its default rows. The rows index the values.
    """
    nodes = _Nodes(graph_def, name, table)
    seeds, index_rows, keys, _ = handles
    key = nodes.add("key", "AddV2", ids, nodes.constant("offset", _signed(OFFSET)))
    hashed = nodes.add("hash", "Mul", key, nodes.constant("multiplier", _signed(MULTIPLIER)))
    upper = nodes.add("upper", "RightShift", hashed, nodes.size("group_shift"))
    group = nodes.add("group", "BitwiseAnd", upper, nodes.size("group_mask"))
    seed = nodes.gather("seed", seeds, group, of=DType.INT64)
    spread = nodes.add("spread", "Mul", key, seed)
    shifted = nodes.add("place_bits", "RightShift", spread, nodes.constant("place_shift", 64 - WINDOW_BITS))
    place = nodes.add("place", "BitwiseAnd", shifted, nodes.constant("place_mask", WINDOW - 1))
    window = nodes.add("window", "Mul", group, nodes.size("stride"))
    slot = nodes.add("slot", "AddV2", window, place)
    row = nodes.gather("row", index_rows, slot, of=DType.INT32)
    held = nodes.gather("held", keys, row, of=DType.INT64, by=DType.INT32)
    found = nodes.add("found", "Equal", held, ids)
    default = nodes.size("first_default", DType.INT32)
    if defaults > 1:
        number = nodes.add("default_number", "FloorMod", ids, nodes.constant("defaults", defaults))
        number = nodes.cast("default_number_int32", number, DType.INT64, DType.INT32)
        default = nodes.add("default_row", "AddV2", number, default, of=DType.INT32)
    return RowNodes(nodes.add("rows", "SelectV2", found, row, default, of=DType.INT32), found)


def set_sizes(graph_def: Proto, tables: Mapping[str, TableGeometry]) -> None:
    """Fill in the sizes of tables, by their names, in the constants of a graph and its functions."""
    for node in all_nodes(graph_def):
        if SIZE in node.attr:
            geometry = tables.get(node.attr[TABLE].s.decode())
            if geometry is not None:
                value = _sizes(geometry)[node.attr[SIZE].s.decode()]
                _set_value(node, np.array(value, DType(node.attr["dtype"].type).numpy))


def first_defaults(graph_def: Proto) -> dict[str, int]:
    """The first default row of each table that a graph looks keys up in, by the table's name."""
    return {
        node.attr[TABLE].s.decode(): int(tensor_proto.to_array(node.attr["value"].tensor).item())
        for node in all_nodes(graph_def)
        if SIZE in node.attr and node.attr[SIZE].s == b"first_default"
    }


def _sizes(geometry: TableGeometry) -> dict[str, int]:
    return {
        "group_shift": 64 - geometry.group_bits,
        "group_mask": geometry.groups - 1,
        "stride": geometry.stride,
        "first_default": geometry.first_default,
    }


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _set_value(node: Proto, value: np.ndarray[Any, Any]) -> None:
    node.attr["value"].tensor.Clear()
    tensor_proto.fill(node.attr["value"].tensor, value)


class _Nodes(Struct, frozen=True):
    """Adds nodes of one lookup to a graph; each method gives the new node's name."""

    graph_def: Proto
    scope: str
    table: str

    def add(self, name: str, op: str, *inputs: str, of: DType = DType.INT64) -> str:
        """Add a node whose operands have one type."""
        node = self._node(name, op, *inputs)
        node.attr["T"].type = int(of)
        return str(node.name)

    def cast(self, name: str, value: str, source: DType, target: DType) -> str:
        """Add a cast."""
        node = self._node(name, "Cast", value)
        node.attr["SrcT"].type, node.attr["DstT"].type = int(source), int(target)
        return str(node.name)

    def gather(self, name: str, handle: str, indices: str, *, of: DType, by: DType = DType.INT64) -> str:
        """Add a gather of a variable's rows."""
        node = self._node(name, "ResourceGather", handle, indices)
        node.attr["dtype"].type, node.attr["Tindices"].type = int(of), int(by)
        return str(node.name)

    def constant(self, name: str, value: int, dtype: DType = DType.INT64) -> str:
        """Add a scalar constant; returns its node's name."""
        node = self._node(name, "Const")
        node.attr["dtype"].type = int(dtype)
        _set_value(node, np.array(value, dtype.numpy))
        return str(node.name)

    def size(self, which: str, dtype: DType = DType.INT64) -> str:
        """Add a constant for a size of the table, which `set_sizes` fills in."""
        name = self.constant(which, _UNSET, dtype)
        node = self.graph_def.node[-1]
        node.attr[TABLE].s, node.attr[SIZE].s = self.table.encode(), which.encode()
        return name

    def _node(self, name: str, op: str, *inputs: str) -> Proto:
        return self.graph_def.node.add(name=f"{self.scope}/{name}", op=op, input=inputs)
