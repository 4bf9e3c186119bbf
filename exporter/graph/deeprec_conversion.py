"""Rewrite lookups in DeepRec's embedding variables to lookups in dynamic tables, which stock TensorFlow runs.

What outputs need of an embedding variable is a handle and gathers; each becomes this, under its own name:

    KvVarHandleOp, or one for each part      four VarHandleOps: the variables of a dynamic table
    KvResourceGather(handle, ids)            ResourceGather(values, the row of each id)
    the partition of ids over P parts,
      P gathers and their stitch             one such lookup: the parts are served as one table

Lookups of whole groups of tables are taken apart first (`exporter.graph.deeprec_groups`).
Everything around them (unique, combiners, weights) is stock and stays. What initialises, saves, restores,
exports or trains embedding variables stays where it is, too: no output needs it, so it is not served. What an
output does need and is not converted, `exporter.graph.servable` refuses by name.

Source: DeepRec, tensorflow/core/ops/kv_variable_ops.cc, tensorflow/python/ops/{kv_variable,embedding}_ops.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from msgspec import Struct, field

from exporter.errors import NotServable
from exporter.graph.deeprec_defaults import AbsentKeys, default_rows
from exporter.graph.deeprec_groups import group_handles, take_groups_apart
from exporter.graph.deeprec_ops import GATHERS, HANDLE, INITIALISERS, is_deeprecs
from exporter.graph.deeprec_parts import parted_lookups, uses_default
from exporter.graph.deeprec_stages import read_through_stages
from exporter.graph.inference_graph import GraphDynamicTable
from exporter.graph.keys import collected_variables
from exporter.graph.new_nodes import free_name, new_node, put_nodes
from exporter.graph.nodes import (
    Endpoint,
    GraphIndex,
    attr,
    attr_dtype,
    attr_shape,
    attr_text,
    control_inputs,
    data_inputs,
    endpoint,
    through_identities,
)
from exporter.graph.reach import all_before
from exporter.graph.signature_tensors import SignatureEnds
from exporter.graph.table_lookup import Lookup, lookup_nodes
from exporter.tables.geometry import PARTS
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto

_PART = re.compile(r"(.+)/part_([0-9]+)", re.ASCII)
_COLLECTIONS = ("variables", "trainable_variables", "embedding_variables")
_KEYS = (DType.INT64, DType.INT32)
_VALUES = (DType.FLOAT, DType.DOUBLE, DType.HALF, DType.BFLOAT16)


class Converted(Struct, frozen=True):
    """What a graph's embedding variables have become, and what a person should know about it."""

    tables: tuple[GraphDynamicTable, ...] = ()
    notes: tuple[str, ...] = ()


class _EmbeddingVariable(Struct):
    """An embedding variable of the graph: its handles, one for each part that there is."""

    name: str
    handles: list[Proto] = field(default_factory=list)


def convert_deeprec(meta_graph: Proto, absent_keys: Mapping[str, str]) -> Converted:
    """Rewrite, in place, the lookups that the signatures' outputs need.

    Raises:
        NotServable: an embedding variable is of a kind that cannot be served from a dynamic table.
        UsageError: `absent_keys` matches no table, or has no numbers.
    """
    if not absent_keys and not is_deeprecs(meta_graph.graph_def.node):
        return Converted()
    index = GraphIndex.of(meta_graph)
    read_through_stages(index, _inputs(meta_graph))
    index = take_groups_apart(meta_graph, index, _needed(index.nodes, meta_graph))
    found = _embedding_variables(meta_graph, index)
    numbers = AbsentKeys(absent_keys, found.keys())
    if not found:
        return Converted()
    needed = _needed(index.nodes, meta_graph)
    owners = {handle.name: variable for variable in found.values() for handle in variable.handles}
    conversion = _Conversion(index, owners, numbers)
    for parted in list(parted_lookups(index, conversion.name_of)):
        if parted.stitch in needed:
            conversion.rewrite(index.nodes[parted.stitch], parted.handle, parted.ids, parted.default)
    nodes = conversion.nodes
    for name in _needed(nodes, meta_graph):
        node = nodes[name]
        if node.op not in GATHERS:
            continue
        handle = conversion.handle_of(node)
        if handle is not None:
            inputs = data_inputs(node)
            conversion.rewrite(node, handle, inputs[1], inputs[2] if uses_default(node) else None)
    if conversion.tables:
        _place(meta_graph.graph_def, conversion)
    tables = (conversion.tables[name] for name in found if name in conversion.tables)
    return Converted(tuple(tables), tuple(conversion.notes))


def looked_up(meta_graph: Proto, index: GraphIndex) -> tuple[str, ...]:
    """The names of the embedding variables that a graph gathers from; its slots are not among them."""
    found = _embedding_variables(meta_graph, index)
    owners = {handle.name: variable.name for variable in found.values() for handle in variable.handles}
    gathers = [node for node in index.nodes.values() if node.op in GATHERS and data_inputs(node)]
    read = [data_inputs(node)[0].node for node in gathers]
    read += [handle for node in index.nodes.values() for handle in group_handles(node)]
    handles = (through_identities(index.nodes, name) for name in read)
    return tuple(dict.fromkeys(owners[handle] for handle in handles if handle in owners))


class _Conversion:
    """The rewriting of one graph, in place. `handles` and `before`, by rewritten nodes, are to be added."""

    def __init__(
        self, index: GraphIndex, owners: Mapping[str, _EmbeddingVariable], numbers: AbsentKeys
    ) -> None:
        self._index, self._owners, self._numbers = index, owners, numbers
        self.tables: dict[str, GraphDynamicTable] = {}
        self.handles: list[Proto] = []
        self.before: dict[str, list[Proto]] = {}
        self._names = {*index.nodes}
        self.notes: list[str] = []

    @property
    def nodes(self) -> dict[str, Proto]:
        """The graph's nodes by name, new ones among them."""
        return {
            **self._index.nodes,
            **{node.name: node for before in self.before.values() for node in before},
        }

    def handle_of(self, gather: Proto) -> str | None:
        """The handle that a gather reads from; None if it does not come from one directly."""
        inputs = data_inputs(gather)
        handle = through_identities(self._index.nodes, inputs[0].node) if len(inputs) > 2 else ""
        return handle if handle in self._owners else None

    def name_of(self, gather: Proto) -> str | None:
        """The name of the variable that a gather reads from."""
        handle = self.handle_of(gather)
        return None if handle is None else self._owners[handle].name

    def rewrite(self, node: Proto, handle: str, ids: Endpoint, default: Endpoint | None) -> None:
        """Let a node be the lookup of `ids`."""
        variable = self._owners[through_identities(self._index.nodes, handle)]
        table = self._table(variable)
        if default is not None and self._is_filtered(variable):
            default = None  # a filter's constant goes first
        lookup = Lookup(
            name=node.name,
            table=table,
            ids=ids,
            default=default,
            after=tuple(control_inputs(node)),
        )
        *before, last = lookup_nodes(lookup, self._names)
        self.before[node.name] = before
        self._names |= {added.name for added in before}
        node.CopyFrom(last)

    def _table(self, variable: _EmbeddingVariable) -> GraphDynamicTable:
        if variable.name not in self.tables:
            self.tables[variable.name] = self._made(variable)
        return self.tables[variable.name]

    def _made(self, variable: _EmbeddingVariable) -> GraphDynamicTable:
        key_dtype, value_dtype, dim = _kind(variable)
        self._check_blocks(variable)
        given = self._numbers.of(variable.name)
        defaults = default_rows(self._index, variable.name, variable.handles, value_dtype, dim, given)
        if defaults.note:
            self.notes.append(defaults.note)
        names = [free_name(self._names, f"{variable.name}/{suffix}") for suffix in PARTS]
        self._names |= {*names}
        seeds, rows, keys, values = names
        table = GraphDynamicTable(
            variable.name, (seeds, rows, keys, values), key_dtype, value_dtype, dim, defaults.rows
        )
        for made in table.variables:
            self.handles.append(
                new_node(
                    made.node,
                    "VarHandleOp",
                    dtype=made.dtype,
                    shape=made.shape,
                    shared_name=made.node.encode(),
                )
            )
        return table

    def _initialisers(self, variable: _EmbeddingVariable) -> Iterator[Proto]:
        for handle in variable.handles:
            for reader, position in self._index.consumers[handle.name]:
                node = self._index.nodes[reader]
                if node.op in INITIALISERS and position == 0:
                    yield node

    def _is_filtered(self, variable: _EmbeddingVariable) -> bool:
        return any(attr(node, "filter_freq").i > 0 for node in self._initialisers(variable))

    def _check_blocks(self, variable: _EmbeddingVariable) -> None:
        for node in self._initialisers(variable):
            blocks = attr(node, "block_num").i
            if blocks > 1:
                raise NotServable(
                    f"embedding variable {variable.name!r} is a block of a dynamic-dimension variable",
                    cause=f"{node.op} {node.name!r} has block_num {blocks}",
                    hint="train it with one dimension for all keys",
                )


def _place(graph_def: Proto, conversion: _Conversion) -> None:
    """Add the new nodes where their order needs them."""
    placed = list(conversion.handles)
    for node in graph_def.node:
        placed += conversion.before.get(node.name, [])
        placed.append(node)
    put_nodes(graph_def.node, placed)


def _embedding_variables(meta_graph: Proto, index: GraphIndex) -> dict[str, _EmbeddingVariable]:
    """The embedding variables of a graph by name; parts go together."""
    told = dict(_from_collections(meta_graph))
    found: dict[str, dict[int, Proto]] = {}
    for node in index.nodes.values():
        if node.op == HANDLE:
            stored = attr_text(node, "shared_name") or node.name
            part = _PART.fullmatch(stored)
            name, number = told.get(node.name) or ((part[1], int(part[2])) if part else (stored, 0))
            found.setdefault(name, {}).setdefault(number, node)
    return {
        name: _EmbeddingVariable(name, [node for _, node in sorted(parts.items())])
        for name, parts in found.items()
    }


def _from_collections(meta_graph: Proto) -> Iterator[tuple[str, tuple[str, int]]]:
    """Handles of parts, each with the whole variable's name and its number (of a slice of one row)."""
    for variable in collected_variables(meta_graph, _COLLECTIONS):
        info = variable.save_slice_info_def
        if info.full_name and info.var_offset:
            yield endpoint(variable.variable_name).node, (info.full_name, int(info.var_offset[0]))


def _kind(variable: _EmbeddingVariable) -> tuple[DType, DType, int]:
    """The dtypes of keys and values, and the dimension.

    Raises:
        NotServable: they are of kinds that no dynamic table has, or differ between the parts.
    """
    kinds = set()
    for handle in variable.handles:
        keys, values = attr_dtype(handle, "Tkeys"), attr_dtype(handle, "dtype")
        shape = attr_shape(handle)
        if keys not in _KEYS or values not in _VALUES or shape is None or len(shape) != 1 or shape[0] < 1:
            shown = (
                f"keys {keys.label if keys else 'unknown'}, values {values.label if values else 'unknown'}"
            )
            raise NotServable(
                f"embedding variable {variable.name!r} cannot be served from a dynamic table",
                cause=f"{HANDLE} {handle.name!r} has {shown} of shape {list(shape) if shape else 'unknown'}; "
                "keys are to be int64 or int32, values vectors of floating-point numbers",
                hint="choose outputs that do not need it",
            )
        kinds.add((keys, values, shape[0]))
    if len(kinds) > 1:
        raise NotServable(
            f"the parts of embedding variable {variable.name!r} are of several kinds",
            cause="their dtypes or dimensions differ",
            hint="choose outputs that do not need it",
        )
    return kinds.pop()


def _inputs(meta_graph: Proto) -> set[Endpoint]:
    """The tensors that signatures take."""
    return {
        tensor
        for signature in meta_graph.signature_def.values()
        for tensor in SignatureEnds.of(signature).inputs
    }


def _needed(nodes: Mapping[str, Proto], meta_graph: Proto) -> dict[str, None]:
    """The nodes that some signature's outputs need, which its inputs do not give."""
    found: dict[str, None] = {}
    for signature in meta_graph.signature_def.values():
        ends = SignatureEnds.of(signature)
        found |= all_before(nodes, ends.outputs, ends.inputs)
    return found
