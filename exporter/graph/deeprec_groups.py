"""Split DeepRec's lookups in a group of tables into one lookup for each table.

`tf.nn.group_embedding_lookup` and `group_embedding_lookup_sparse` look up all tables of one dimension in one
operation. It is replaced by:

    for each table: KvResourceGather(handle, ids), or GatherV2 from an ordinary variable
        if ids are sparse: its rows x weights, UnsortedSegmentSum over the batch, / count
    IdentityN of these, under the name of the group

"mean" divides by the number of ids in a row of the batch and "sqrtn" by its square root, whatever the weights
are, unlike TensorFlow's own `embedding_lookup_sparse`; a row without ids is zero. A group is left as it is,
and refused by name, if it clips rows (`max_norm`), makes sequences, has default rows of its own, or if
outputs other than rows are used.

Source: DeepRec, tensorflow/core/ops/group_embedding_ops.cc and its CPU kernels,
tensorflow/core/kernels/group_embedding/group_embedding_lookup{,_sparse_forward}_ops.cc.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from msgspec import Struct

from exporter.graph.nodes import (
    Endpoint,
    GraphIndex,
    attr,
    attr_dtype,
    attr_text,
    constant,
    control_inputs,
    data_inputs,
    free_name,
    new_node,
    put_nodes,
)
from exporter.graph.signatures import SignatureEnds
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto

# Operations whose ids are the values of sparse tensors, and whether their tables are embedding variables.
_SPARSE = {"GroupEmbeddingVarLookup": True, "GroupVariableLookup": False}

_DENSE = {"GroupEmbeddingVarLookupDense": True, "GroupVariableLookupDense": False}
_KNOWN = _SPARSE | _DENSE
_COMBINERS = ("sum", "mean", "sqrtn")
_KEYS = (DType.INT64, DType.INT32)


def take_groups_apart(meta_graph: Proto, index: GraphIndex, needed: Collection[str]) -> GraphIndex:
    """Split, in place, the group lookups among the nodes `needed` into one lookup for each table.

    A lookup that cannot be split, or of which outputs other than rows are used, stays. Returns a new index of
    the graph, or `index` if no lookup was split. GraphError for an unknown type number.
    """
    read = _outputs_read(index, meta_graph, needed)
    groups = {
        name: group
        for name in needed
        if (group := _Group.of(index.nodes[name])) is not None
        and max(read.get(name, ()), default=0) < group.count
        and not _is_of_old_form(index, group)
    }
    if not groups:
        return index
    names, placed = {*index.nodes}, list[Proto]()
    for node in meta_graph.graph_def.node:
        if node.name in groups:
            placed += _Parts(groups[node.name], names).nodes()
        else:
            placed.append(node)
    put_nodes(meta_graph.graph_def.node, placed)
    _describe(meta_graph)
    return GraphIndex.of(meta_graph)


def group_handles(node: Proto) -> list[str]:
    """Return the names of the nodes from which a group lookup gets its variables' handles, in order.

    A node may forward the handle of an embedding variable. Empty for any other node, a group of ordinary
    variables, and a group that cannot be split. GraphError for an unknown type number.
    """
    group = _Group.of(node)
    return [tensor.node for tensor in group.tables] if group is not None and group.is_keyed else []


def is_convertible_group(node: Proto) -> bool:
    """True for a group lookup that can be split, by its own attributes and inputs.

    GraphError for an unknown type number.
    """
    return _Group.of(node) is not None


class _Group(Struct, frozen=True):
    """A lookup in `count` tables, with a list of each input; the last three are empty for dense ids."""

    node: Proto
    is_keyed: bool
    dtype: DType
    key_dtype: DType
    combiner: str
    tables: list[Endpoint]
    ids: list[Endpoint]
    indices: list[Endpoint]
    weights: list[Endpoint]
    shapes: list[Endpoint]
    default: Endpoint

    @classmethod
    def of(cls, node: Proto) -> _Group | None:
        """Return the group lookup that a node is; None if it is another operation, or cannot be split.

        A group cannot be split if it clips rows, makes sequences, has default rows of its own, or has
        unexpected types or inputs. GraphError for an unknown type number.
        """
        count, inputs = int(attr(node, "num_lookups").i), data_inputs(node)
        if node.op not in _KNOWN or count < 1:
            return None
        is_sparse = node.op in _SPARSE
        dtype, keys = attr_dtype(node, "dtype"), attr_dtype(node, "Tkeys")
        brings_defaults = _KNOWN[node.op] and attr(node, "is_use_default_value_tensor").b
        clips = "max_norm" in node.attr and attr(node, "max_norm").f >= 0
        if dtype is None or keys not in _KEYS or brings_defaults or clips or attr(node, "is_sequence").b:
            return None
        combiner = attr_text(node, "combiner")
        if len(inputs) != (5 if is_sparse else 2) * count + 1 or (is_sparse and combiner not in _COMBINERS):
            return None
        lists = [inputs[first : first + count] for first in range(0, len(inputs) - 1, count)]
        tables, ids, indices, weights, shapes = lists if is_sparse else [*lists, [], [], []]
        if attr(node, "ignore_weights").b:
            weights = []
        return cls(
            node, _KNOWN[node.op], dtype, keys, combiner, tables, ids, indices, weights, shapes, inputs[-1]
        )

    @property
    def count(self) -> int:
        return len(self.tables)


def _outputs_read(index: GraphIndex, meta_graph: Proto, needed: Collection[str]) -> Mapping[str, set[int]]:
    """Return {group lookup: the numbers of its outputs that the nodes `needed` or signatures use}."""
    read = [tensor for name in needed for tensor in data_inputs(index.nodes[name])]
    for signature in meta_graph.signature_def.values():
        ends = SignatureEnds.of(signature)
        read += [*ends.inputs, *ends.outputs]
    found: dict[str, set[int]] = {}
    for tensor in read:
        source = index.nodes.get(tensor.node)
        if source is not None and source.op in _KNOWN:
            found.setdefault(tensor.node, set()).add(tensor.output)
    return found


def _is_of_old_form(index: GraphIndex, group: _Group) -> bool:
    """True if a lookup of sparse ids takes one batch size for all tables, as the graph's own OpDef says."""
    described = index.op_def(group.node.op)
    arguments = described.input_arg if described is not None and group.shapes else ()
    return any(each.name == "dense_shape" and not each.number_attr for each in arguments)


def _describe(meta_graph: Proto) -> None:
    """Add an OpDef of IdentityN, which replaced the groups, to the graph's own, in place, if they lack it."""
    described = meta_graph.meta_info_def.stripped_op_list.op
    if not any(op.name == "IdentityN" for op in described):
        made = described.add(name="IdentityN")
        made.input_arg.add(name="input", type_list_attr="T")
        made.output_arg.add(name="output", type_list_attr="T")
        made.attr.add(name="T", type="list(type)", has_minimum=True, minimum=1)


class _Parts:
    """Makes the nodes that replace a group lookup."""

    def __init__(self, group: _Group, names: set[str]) -> None:
        self._group, self._names, self._made = group, names, list[Proto]()

    def nodes(self) -> list[Proto]:
        """Return the nodes to replace the group; the last has its name and outputs.

        Their names are unique in the set `names` of the constructor and are added to it. To be called once.
        """
        group = self._group
        if group.shapes:
            self._zero = self._constant("zero", np.array(0, np.int32))
            self._one = self._constant("one", np.array(1, np.int32))
            self._last = self._constant("last", np.array(-1, np.int32))
        rows = [self._lookup(number) for number in range(group.count)]
        types, after = (group.dtype,) * group.count, control_inputs(group.node)
        return [*self._made, new_node(group.node.name, "IdentityN", rows, after=after, T=types)]

    def _lookup(self, number: int) -> str:
        """Add the lookup in table `number` of the group, and return its name.

        If ids are sparse, the rows of each row of the batch are combined.
        """
        group = self._group
        rows = self._rows(number)
        if not group.shapes:
            return rows
        dtype = group.dtype
        if group.weights:
            weights = self._expanded("weights", group.weights[number].as_input, dtype)
            rows = self._add("weighted", "Mul", rows, weights, T=dtype)
        segments = self._gather("segments", group.indices[number].as_input, self._one, DType.INT64)
        size = self._gather("batch_size", group.shapes[number].as_input, self._zero, DType.INT64)
        total = self._sum("sum", rows, segments, size, dtype)
        if group.combiner == "sum":
            return total
        ones = self._add("ones", "OnesLike", segments, T=DType.INT64)
        counts = self._sum("counts", ones, segments, size, DType.INT64)
        counts = self._add("counts_float", "Cast", counts, SrcT=DType.INT64, DstT=dtype)
        if group.combiner == "sqrtn":
            counts = self._add("roots", "Sqrt", counts, T=dtype)
        divisor = self._expanded("divisor", counts, dtype)
        return self._add("combined", "DivNoNan", total, divisor, T=dtype)

    def _rows(self, number: int) -> str:
        """Add the gather of each id's row in table `number` of the group; return its name."""
        group = self._group
        table, ids = group.tables[number].as_input, group.ids[number].as_input
        if group.is_keyed:
            inputs = table, ids, group.default.as_input
            return self._add("rows", "KvResourceGather", *inputs, dtype=group.dtype, Tkeys=group.key_dtype)
        axis = self._constant("axis", np.array(0, np.int32))
        types = {"Tparams": group.dtype, "Tindices": group.key_dtype, "Taxis": DType.INT32}
        return self._add("rows", "GatherV2", table, ids, axis, **types)

    def _gather(self, name: str, params: str, axis: str, dtype: DType) -> str:
        """Add the gather of element 0 along `axis` and return its name.

        The gather gives a matrix's first column, or a vector's first element.
        """
        types = {"Tparams": dtype, "Tindices": DType.INT32, "Taxis": DType.INT32}
        return self._add(name, "GatherV2", params, self._zero, axis, **types)

    def _sum(self, name: str, data: str, segments: str, size: str, dtype: DType) -> str:
        types = {"T": dtype, "Tindices": DType.INT64, "Tnumsegments": DType.INT64}
        return self._add(name, "UnsortedSegmentSum", data, segments, size, **types)

    def _expanded(self, name: str, tensor: str, dtype: DType) -> str:
        return self._add(name, "ExpandDims", tensor, self._last, T=dtype, Tdim=DType.INT32)

    def _constant(self, name: str, value: np.ndarray) -> str:
        return self._put(constant(self._free(name), value, DType.of(value.dtype.name)))

    def _add(self, name: str, op: str, *inputs: str, **attrs: Any) -> str:
        return self._put(new_node(self._free(name), op, inputs, **attrs))

    def _free(self, name: str) -> str:
        return free_name(self._names, f"{self._group.node.name}/{name}")

    def _put(self, node: Proto) -> str:
        self._names.add(node.name)
        self._made.append(node)
        return str(node.name)
