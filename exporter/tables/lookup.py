"""Look up keys in a dynamic table, inside the served graph: a dozen stock operations, of which four gather.

Lookups in many tables may share these operations (`add_joined_rows`): see `graph.joined_lookups`.

The nodes are added to a GraphDef, so that graphs which TensorFlow cannot load get them, too. They need the
table's sizes, which only a checkpoint determines: these are constants with the attribute `SIZE`, and
`set_sizes` fills them in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from msgspec import Struct

from exporter.errors import GraphError
from exporter.late_names import tf
from exporter.tables.geometry import MULTIPLIER, OFFSET, WINDOW, WINDOW_BITS, TableGeometry
from exporter.wire import tensor_proto
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto, all_nodes

Tensor = Any


class TableLookups(ABC):
    """Looks up ids in a table with the rows of the variable `values`."""

    values: Any

    @abstractmethod
    def _rows_of(self, ids: Tensor) -> Tensor:
        """Return the row number of each id (int64, any shape) in a tensor of the same shape."""

    def rows(self, ids: Any) -> Any:
        """Return the row number of each id, in the form of `ids`.

        That is a tensor of any shape, a SparseTensor or a RaggedTensor. Ids are cast to int64. A
        `TrainableTable` gives new ids rows, and fails with InvalidArgumentError of TensorFlow, when it runs,
        if it is full. A `DynamicTable` raises UsageError outside of a graph, or if something else has the
        name of one of its variables.
        """
        if isinstance(ids, tf.SparseTensor):
            return tf.SparseTensor(ids.indices, self.rows(ids.values), ids.dense_shape)
        if isinstance(ids, tf.RaggedTensor):
            return ids.with_flat_values(self.rows(ids.flat_values))
        return self._rows_of(tf.cast(ids, tf.int64))

    def lookup(self, ids: Any) -> Any:
        """Return the row of each id: a tensor of shape `ids.shape + [dim]`, or a RaggedTensor for ragged ids.

        SparseTensors need `lookup_sparse`. New ids, and errors, are as in `rows`.
        """
        if isinstance(ids, tf.RaggedTensor):
            return ids.with_flat_values(self.lookup(ids.flat_values))
        return tf.nn.embedding_lookup(self.values, self.rows(ids))

    def lookup_sparse(self, ids: Any, weights: Any = None, combiner: str = "mean") -> Any:
        """Return the combined rows of the ids in each row of a SparseTensor: [n, dim].

        n is the number of rows of the SparseTensor `ids`. `combiner` is "sum", "mean" or "sqrtn"; `weights`
        is a SparseTensor of the same indices, or None for 1 each. New ids, and errors, are as in `rows`.
        """
        return tf.nn.embedding_lookup_sparse(self.values, self.rows(ids), weights, combiner=combiner)


TABLE = "_dynamic_table"
"""The attribute of a node with the name of the table that it belongs to."""

SIZE = "_dynamic_table_size"
"""The attribute of a constant with the kind of its table's size that it holds."""

PART = "_dynamic_table_part"
"""The attribute of a VarHandleOp with its member of `parts.PARTS`; it has `TABLE`, too."""

DEFAULTS = "_dynamic_table_defaults"
"""The attribute of the values' VarHandleOp with the default rows, a tensor [d, dim]."""

JOINED = "_dynamic_table_lookup"
"""The attribute of a node that counts a joined lookup's ids: the lookup's own scope. It has `TABLE`, too."""

_UNSET = 1  # until `set_sizes`


class RowNodes(Struct, frozen=True):
    """The nodes of a lookup: `rows` (int32), which are default rows where `found` (bool) is false."""

    rows: str
    found: str


def add_rows(
    graph_def: Proto, name: str, table: str, handles: Sequence[str], ids: str, *, defaults: int = 1
) -> RowNodes:
    """Add nodes under `name/` that look up `ids` (a tensor's name; int64, any shape) in a table.

    Return the names of the results. `handles` are the names of the tensors with the handles of the table's
    four variables, in the order of `parts.PARTS`; `defaults` is the number of its default rows. `table` is
    its name, by which `set_sizes` fills in the sizes.
    """
    nodes = _Nodes(graph_def, name, table)
    seeds, index_rows, keys, _ = handles
    key = nodes.add("key", "AddV2", ids, nodes.constant("offset", _signed(OFFSET)))
    hashed = nodes.add("hash", "Mul", key, nodes.constant("multiplier", _signed(MULTIPLIER)))
    # The shift of an int64 copies the sign bit: hence the mask.
    upper = nodes.add("upper", "RightShift", hashed, nodes.size("group_shift"))
    group = nodes.add("group", "BitwiseAnd", upper, nodes.size("group_mask"))
    seed = nodes.gather("seed", seeds, group, of=DType.INT64)
    place = nodes.place(key, seed)
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


class JoinedLookup(Struct, frozen=True):
    """A lookup of ids, int64, in a table whose index is part of joined variables, from these elements on."""

    table: str
    scope: str  # of the nodes that do it by itself
    ids: str
    is_vector: bool  # certainly, for any request: then no reshaping is needed
    geometry: TableGeometry
    first_group: int
    first_slot: int
    first_row: int


def add_joined_rows(
    graph_def: Proto, name: str, handles: Sequence[str], lookups: Sequence[JoinedLookup], *, found: bool
) -> list[RowNodes]:
    """Add nodes under `name/` that look up several tensors of ids (at least one), each in its table, at once.

    Return the names of the results. The result has an item for each of `lookups`, in their order; its tensors
    are vectors, also for ids of other shapes. `handles` are the handles of the joined seeds, rows and keys,
    in the order of `parts.PARTS` without the values. Without `found`, the names of the `found` tensors are
    "".
    """
    # All ids are concatenated, each with the number of its lookup, by which the sizes of tables are gathered.
    # So the number of operations hardly depends on the number of tables.
    nodes, many = _Nodes(graph_def, name, ""), len(lookups)
    seeds, index_rows, keys = handles
    axis, flat = nodes.constant("axis", 0, DType.INT32), nodes.vector("flat", [-1], DType.INT32)
    vectors = [
        each.ids if each.is_vector else nodes.typed(f"ids_{n}", "Reshape", each.ids, flat, **_RESHAPED)
        for n, each in enumerate(lookups)
    ]
    counts = [
        nodes.typed(f"size_{n}", "Size", ids, T=DType.INT64, out_type=DType.INT32)
        for n, ids in enumerate(vectors)
    ]
    # By these marks the lookups are found when the graph is exported again.
    # The nodes of `counts` are the last ones: add none in between.
    for each, node in zip(lookups, graph_def.node[-many:], strict=True):
        node.attr[TABLE].s, node.attr[JOINED].s = each.table.encode(), each.scope.encode()
    sizes = nodes.typed("sizes", "Pack", *counts, T=DType.INT32, N=many)
    ids = nodes.typed("ids", "ConcatV2", *vectors, axis, T=DType.INT64, N=many, Tidx=DType.INT32)
    total = nodes.typed("total", "Sum", sizes, axis, T=DType.INT32, Tidx=DType.INT32)
    ends = nodes.typed("ends", "Cumsum", sizes, axis, T=DType.INT32, Tidx=DType.INT32)
    # Bincount ignores values from `total` on: lookups that
    # end there, the last one among them, begin no other.
    ended = nodes.typed(
        "ended", "Bincount", ends, total, nodes.vector("weights", [], DType.INT32), T=DType.INT32
    )
    number = nodes.typed("number", "Cumsum", ended, axis, T=DType.INT32, Tidx=DType.INT32)

    def of_each(which: str, values: Iterable[int], dtype: DType = DType.INT64) -> str:
        types = {"Tparams": dtype, "Tindices": DType.INT32, "Taxis": DType.INT32}
        held = nodes.vector(f"{which}_of", values, dtype)
        return nodes.typed(which, "GatherV2", held, number, axis, **types)

    key = nodes.add("key", "AddV2", ids, nodes.constant("offset", _signed(OFFSET)))
    hashed = nodes.add("hash", "Mul", key, nodes.constant("multiplier", _signed(MULTIPLIER)))
    # As uint64, whose shift needs no mask: each table has another one.
    shift = nodes.bitcast(
        "shift", of_each("group_shift", (64 - each.geometry.group_bits for each in lookups))
    )
    upper = nodes.add("upper", "RightShift", nodes.bitcast("bits", hashed), shift, of=DType.UINT64)
    own_group = nodes.bitcast("own_group", upper, DType.UINT64, DType.INT64)
    group = nodes.add(
        "group", "AddV2", own_group, of_each("first_group", (each.first_group for each in lookups))
    )
    seed = nodes.gather("seed", seeds, group, of=DType.INT64)
    place = nodes.place(key, seed)
    stride = of_each("stride", (each.geometry.stride for each in lookups))
    window = nodes.add("window", "Mul", group, stride)
    # `window` counts groups of all tables: take off those before this table.
    begins = (each.first_slot - each.first_group * each.geometry.stride for each in lookups)
    begin = nodes.add("begin", "AddV2", window, of_each("first_slot", begins))
    row = nodes.gather("row", index_rows, nodes.add("slot", "AddV2", begin, place), of=DType.INT32)
    first_row = of_each("first_row", (each.first_row for each in lookups))
    at = nodes.add("at", "AddV2", nodes.cast("row_int64", row, DType.INT32, DType.INT64), first_row)
    held = nodes.gather("held", keys, at, of=DType.INT64)
    is_found = nodes.add("found", "Equal", held, ids)
    default = of_each("first_default", (each.geometry.first_default for each in lookups), DType.INT32)
    if any(each.geometry.defaults > 1 for each in lookups):
        of = of_each("defaults", (each.geometry.defaults for each in lookups))
        chosen = nodes.add("default_number", "FloorMod", ids, of)
        chosen = nodes.cast("default_number_int32", chosen, DType.INT64, DType.INT32)
        default = nodes.add("default_row", "AddV2", chosen, default, of=DType.INT32)
    rows = nodes.add("rows", "SelectV2", is_found, row, default, of=DType.INT32)

    def split(which: str, tensor: str, dtype: DType) -> list[str]:
        types = {"T": dtype, "Tlen": DType.INT32, "num_split": many}
        node = nodes.typed(f"{which}_of_each", "SplitV", tensor, sizes, axis, **types)
        return [f"{node}:{n}" if n else node for n in range(many)]

    both = split("rows", rows, DType.INT32), split("found", is_found, DType.BOOL) if found else [""] * many
    return [RowNodes(*each) for each in zip(*both, strict=True)]


_RESHAPED = {"T": DType.INT64, "Tshape": DType.INT32}


def set_sizes(graph_def: Proto, tables: Mapping[str, TableGeometry]) -> None:
    """Fill in the sizes of tables in the constants of a graph and its functions, in place.

    `tables` has the sizes by the tables' names. Constants of tables that are not in `tables` stay as they
    are. Raises GraphError if a constant is damaged.
    """
    for node in all_nodes(graph_def):
        if SIZE in node.attr:
            with _damaged(node):
                geometry = tables.get(node.attr[TABLE].s.decode())
                if geometry is not None:
                    value = _sizes(geometry)[node.attr[SIZE].s.decode()]
                    _set_value(node, np.array(value, DType(node.attr["dtype"].type).numpy))


def first_defaults(graph_def: Proto) -> dict[str, int]:
    """Return the number of the first default row of each table of a graph, by the table's name.

    These are the tables that the graph looks up keys in. The numbers are read from constants of the graph and
    its functions. Raises GraphError if such a constant is damaged.
    """
    found = {}
    for node in all_nodes(graph_def):
        if SIZE in node.attr and node.attr[SIZE].s == b"first_default":
            with _damaged(node):
                value = tensor_proto.to_array(node.attr["value"].tensor)
                found[node.attr[TABLE].s.decode()] = int(value.item())
    return found


@contextmanager
def _damaged(node: Proto) -> Iterator[None]:
    """Convert errors of the block about a damaged constant to a GraphError that names the node.

    KeyError, TypeError, ValueError and OverflowError are converted.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise GraphError(f"the table's size {node.name!r} is damaged", cause=str(error)) from error


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
    """Adds nodes of one lookup to a graph; each method returns the new node's name."""

    graph_def: Proto
    scope: str
    table: str

    def add(self, name: str, op: str, *inputs: str, of: DType = DType.INT64) -> str:
        """Add a node with inputs of these names and the attribute `T` = `of`; return the node's name."""
        node = self._node(name, op, *inputs)
        node.attr["T"].type = int(of)
        return str(node.name)

    def cast(self, name: str, value: str, source: DType, target: DType) -> str:
        """Add a Cast of the tensor `value` from the type `source` to `target`, and return its name."""
        node = self._node(name, "Cast", value)
        node.attr["SrcT"].type, node.attr["DstT"].type = int(source), int(target)
        return str(node.name)

    def gather(self, name: str, handle: str, indices: str, *, of: DType, by: DType = DType.INT64) -> str:
        """Add a gather of elements of a variable, and return its name.

        `handle` and `indices`, of type `by`, are names of tensors; `of` is the type of the elements.
        """
        node = self._node(name, "ResourceGather", handle, indices)
        node.attr["dtype"].type, node.attr["Tindices"].type = int(of), int(by)
        return str(node.name)

    def constant(self, name: str, value: int, dtype: DType = DType.INT64) -> str:
        """Add a scalar constant of this value and dtype, and return its name."""
        node = self._node(name, "Const")
        node.attr["dtype"].type = int(dtype)
        _set_value(node, np.array(value, dtype.numpy))
        return str(node.name)

    def vector(self, name: str, values: Iterable[int], dtype: DType) -> str:
        """Add a constant vector of these values, in their order, and return its name."""
        node = self._node(name, "Const")
        node.attr["dtype"].type = int(dtype)
        _set_value(node, np.array([*values], dtype.numpy))
        return str(node.name)

    def typed(self, name: str, op: str, *inputs: str, **attrs: DType | int) -> str:
        """Add a node with these attributes, types or integers, by their names; return the node's name."""
        node = self._node(name, op, *inputs)
        for key, value in attrs.items():
            if isinstance(value, DType):
                node.attr[key].type = int(value)
            else:
                node.attr[key].i = value
        return str(node.name)

    def bitcast(
        self, name: str, value: str, source: DType = DType.INT64, target: DType = DType.UINT64
    ) -> str:
        """Add a Bitcast, which reads the bits of a tensor of type `source` as `target`; return its name."""
        return self.typed(name, "Bitcast", value, T=source, type=target)

    def place(self, key: str, seed: str) -> str:
        """Add nodes that compute each key's place in its group's window; return the name of the last.

        `key` (offset added) and `seed` are names of int64 tensors.
        """
        spread = self.add("spread", "Mul", key, seed)
        shift = self.constant("place_shift", 64 - WINDOW_BITS)
        # of an int64: it copies the sign bit, hence the mask
        shifted = self.add("place_bits", "RightShift", spread, shift)
        return self.add("place", "BitwiseAnd", shifted, self.constant("place_mask", WINDOW - 1))

    def size(self, which: str, dtype: DType = DType.INT64) -> str:
        """Add a scalar constant for one of the table's sizes, a key of `_sizes`, and return its name.

        `set_sizes` fills in the value later.
        """
        name = self.constant(which, _UNSET, dtype)
        node = self.graph_def.node[-1]  # the constant that was just added
        node.attr[TABLE].s, node.attr[SIZE].s = self.table.encode(), which.encode()
        return name

    def _node(self, name: str, op: str, *inputs: str) -> Proto:
        return self.graph_def.node.add(name=f"{self.scope}/{name}", op=op, input=inputs)
