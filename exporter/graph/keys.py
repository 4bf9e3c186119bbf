"""Find how a checkpoint stores each variable of a graph: its name, a part's box in the whole, the row order.

*Names* (`variable_keys`) come from the first of three places: the graph's own Saver (its restore nodes), the
VariableDefs in the collections (partitions), the variable's name.

In an object-based SavedModel node names say little: TensorFlow may capture one variable under several handles
called `kernel_1` or `Variable_7`. The object graph lists, for each function, the objects that it captures;
calls of the function have their handles as last inputs, in that order. Its restore function pairs handles
with keys of the object graph (`layers/1/kernel/.ATTRIBUTES/VARIABLE_VALUE`), which are used for variables
that no function captures. They may differ: Keras 3's variables are saved under one handle, and used in
computations under another, so that TensorFlow Serving itself does not find them. A variable's object has the
name that the program gave it. (Source: tensorflow/core/protobuf/saved_object_graph.proto;
tensorflow/python/saved_model/load.py; tensorflow/python/checkpoint/trackable_view.py.)

*Row order* (`lookup_strategies`). `embedding_lookup` over n parts assigns ids to parts, sends them there by
DynamicPartition, and gathers in each part. By `mod` the part is `id % n` (FloorMod); by `div` it is the
larger of two divisions (Maximum), see tensorflow/python/ops/embedding_ops.py. The checkpoint is the same in
both cases: only the graph shows the order. A part that is read but never gathered from has been concatenated:
its order is the rows' order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress

from google.protobuf.message import DecodeError

from exporter.catalog import SliceSpec
from exporter.checkpoint.object_graph import SUFFIX, TABLE_SUFFIX, ObjectGraph, TrackedObject, TrackedVariable
from exporter.graph.inference_graph import GraphVariable, PartitionStrategy
from exporter.graph.nodes import (
    ENTERS,
    SWITCHES,
    Endpoint,
    GraphIndex,
    attr,
    attr_text,
    closure,
    const_texts,
    control_inputs,
    data_inputs,
    endpoint,
    tensor_behind,
    through_identities,
)
from exporter.graph.servable import called_functions
from exporter.graph.source_graph import VariableKey
from exporter.wire import protos
from exporter.wire.protos import Proto

_ASSIGNED_BY = {
    **dict.fromkeys(("FloorMod", "Mod", "TruncateMod"), PartitionStrategy.MOD),
    "Maximum": PartitionStrategy.DIV,
}
_GATHERS = frozenset({"Gather", "GatherV2", "ResourceGather"})
_SAME_VALUE = frozenset({"Identity", "ReadVariableOp", "RefIdentity"}) | SWITCHES | ENTERS
_SAME_IDS = frozenset({"Identity", "Cast", "Reshape"}) | SWITCHES | ENTERS


def lookup_strategies(graph_def: Proto, variables: Iterable[GraphVariable]) -> dict[str, PartitionStrategy]:
    """Return {variable's key: the strategy by which its rows are divided among parts}.

    A partitioned variable has MOD or DIV, or NONE if no rows are gathered from its parts and no called
    function takes one. A whole variable
    has DIV if rows of it are gathered, else NONE, and is left out if a called function takes it. A variable
    of unknown strategy is left out. GraphError if two nodes have the same name, or one has none.
    """
    parts: dict[str, list[str]] = {}
    whole: list[GraphVariable] = []
    for variable in variables:
        if variable.part is not None:
            parts.setdefault(variable.key, []).append(variable.node)
        else:
            whole.append(variable)
    index = GraphIndex(graph_def)
    found = _strategies(index, parts)
    for variable in whole:
        if not _is_passed_on(index, variable.node):
            gathered = _gathered_ids(index, variable.node)
            found[variable.key] = PartitionStrategy.DIV if gathered else PartitionStrategy.NONE
    return found


def trained_strategies(meta_graph: Proto) -> dict[str, PartitionStrategy]:
    """Return {variable's key: MOD, DIV or NONE} for the partitioned variables of a trainer's graph.

    NONE: no rows are gathered from the parts. Variables of unknown order are left out. GraphError if two
    nodes have the same name, or one has none.
    """
    index = GraphIndex.of(meta_graph)
    parts: dict[str, list[str]] = {}
    for node, key in variable_keys(meta_graph, index).items():
        if key.part is not None:
            parts.setdefault(key.key, []).append(node)
    return _strategies(index, parts)


def _strategies(index: GraphIndex, parts: dict[str, list[str]]) -> dict[str, PartitionStrategy]:
    found = {}
    for key, nodes in parts.items():
        seen = {_assignment(index, ids) for node in nodes for ids in _gathered_ids(index, node)}
        if not seen:
            if not any(_is_passed_on(index, node) for node in nodes):
                found[key] = PartitionStrategy.NONE
        elif len(seen) == 1 and (strategy := seen.pop()) is not None:
            found[key] = strategy
    return found


def _same_values(index: GraphIndex, variable: str) -> Collection[str]:
    """Return the nodes that forward a variable's handle or value, the variable among them."""

    def forwarding(name: str) -> Iterator[str]:
        consumers = index.consumers.get(name, ())
        return (reader for reader, at in consumers if at == 0 and index.nodes[reader].op in _SAME_VALUE)

    return closure([variable], forwarding)


def _gathered_ids(index: GraphIndex, variable: str) -> list[Endpoint]:
    """Return the ids of each gather from a variable or part, also behind nodes that forward its value."""
    readers = (each for name in _same_values(index, variable) for each in index.consumers.get(name, ()))
    gathers = (index.nodes[reader] for reader, at in readers if at == 0)
    inputs = (data_inputs(gather) for gather in gathers if gather.op in _GATHERS)
    return [given[1] for given in inputs if len(given) > 1]


def _is_passed_on(index: GraphIndex, variable: str) -> bool:
    """True if a node that calls a function, or names one in an attribute, takes the variable or its value.

    Uses in functions are not followed.
    """
    readers = {r for name in _same_values(index, variable) for r, _ in index.consumers.get(name, ())}
    called = (called_functions(index.nodes[reader]) for reader in readers)
    return any(len(names) > 1 or not names.isdisjoint(index.functions) for names in called)


def _assignment(index: GraphIndex, ids: Endpoint) -> PartitionStrategy | None:
    """Return the strategy, MOD or DIV, by which gathered `ids` were assigned to a part; None if neither."""
    partition = _origin(index, ids.node)
    if partition is None or partition.op != "DynamicPartition" or len(data_inputs(partition)) < 2:
        return None
    assigned = _origin(index, data_inputs(partition)[1].node)
    return _ASSIGNED_BY.get(assigned.op) if assigned is not None else None


def _origin(index: GraphIndex, name: str) -> Proto | None:
    return index.nodes.get(through_identities(index.nodes, name, _SAME_IDS))


def saved_objects(meta_graph: Proto, index: GraphIndex) -> ObjectGraph:
    """Return the objects of a SavedModel under the numbers of its object graph.

    A SavedModel without objects gives one empty object. `tensor` of a variable and `table` of an object are
    the nodes of their handles. An object whose handle is unknown counts as one without a variable. `index` is
    the index of the same graph.
    """
    nodes = meta_graph.object_graph_def.nodes
    edges = [{child.local_name: child.node_id for child in node.children} for node in nodes]
    known = [
        {name: child for name, child in children.items() if 0 <= child < len(nodes)} for children in edges
    ]
    bare = ObjectGraph(tuple(map(TrackedObject, known)) or (TrackedObject({}),))
    handles: dict[int, str] = {}
    for handle, (key,) in _restored_in_function(meta_graph, index, _ASSIGNS, count=1):
        found = bare.at(key.removesuffix(SUFFIX)) if key.endswith(SUFFIX) else None
        if found is not None:
            handles[found] = handle
    handles |= _captured(meta_graph, index)
    tables: dict[int, str] = {}
    for handle, (keys, _) in _restored_in_function(meta_graph, index, TABLE_IMPORTS, count=2):
        found = bare.at(keys.removesuffix(f"{TABLE_SUFFIX}-keys"))
        if found is not None:
            tables[found] = through_identities(index.nodes, handle)
    return ObjectGraph(
        tuple(
            TrackedObject(children, TrackedVariable(nodes[number].variable.name, handles[number]))
            if number in handles
            else TrackedObject(children, table=tables.get(number, ""))
            for number, children in enumerate(known)
        )
        or (TrackedObject({}),)
    )


def _captured(meta_graph: Proto, index: GraphIndex) -> dict[int, str]:
    """Return {variable's object number: its handle's node} for variables that called functions capture."""
    objects = meta_graph.object_graph_def
    captures = {name: function.bound_inputs for name, function in objects.concrete_functions.items()}
    found = {}
    for node in index.nodes.values():
        for name in called_functions(node) & captures.keys():
            for number, handle in zip(reversed(captures[name]), reversed(data_inputs(node)), strict=False):
                is_known = 0 <= number < len(objects.nodes) and handle.node in index.nodes
                if is_known and index.nodes[handle.node].op in VARIABLE_OPS:
                    found[number] = handle.node
    return found


def _restored_in_function(
    meta_graph: Proto, index: GraphIndex, ops: Collection[str], *, count: int
) -> Iterator[tuple[str, list[str]]]:
    """Yield (handle's node, names of `count` tensors) for each operation of `ops` in the restore function.

    The restore function is the one that the restore op calls; nothing is yielded without one. The names are
    those in checkpoints. `count` is the number of tensors that an operation of `ops` takes after the handle;
    an operation with fewer known names is left out.
    """
    call = index.nodes.get(endpoint(meta_graph.saver_def.restore_op_name).node)
    function = index.functions.get(attr(call, "f").func.name) if call is not None else None
    if call is None or function is None:
        return
    handles = dict(zip((a.name for a in function.signature.input_arg), data_inputs(call), strict=False))
    nodes = {node.name: node for node in function.node_def}
    restored: dict[str, list[str]] = {}
    for node in nodes.values():
        if node.op in ops and len(node.input) > count and node.input[0] in handles:
            keys = [_key_of(nodes, restored, text) for text in node.input[1 : count + 1]]
            found = [key for key in keys if key is not None]
            if len(found) == count:
                yield handles[node.input[0]].node, found


def _key_of(nodes: dict[str, Proto], restored: dict[str, list[str]], text: str) -> str | None:
    """Return the tensor name that RestoreV2 reads for a value in a function, such as `Identity_3:output:0`.

    None if RestoreV2 does not make the value. `nodes` are the function's, by name; `restored` caches each
    RestoreV2's names, and gets new entries.
    """
    name, _, output = text.partition(":")
    node = nodes.get(name)
    if node is not None and node.op == "Identity" and node.input:
        name, _, output = node.input[0].partition(":")
        node = nodes.get(name)
    if node is None or node.op != "RestoreV2" or len(node.input) < 2:
        return None
    if name not in restored:  # one node may restore thousands: its list is read only once
        restored[name] = const_texts(nodes.get(node.input[1].partition(":")[0])) or []
    position = output.rpartition(":")[2]
    if not position.isdecimal() or int(position) >= len(restored[name]):
        return None
    return restored[name][int(position)]


VARIABLE_OPS = frozenset({"Variable", "VariableV2", "VarHandleOp"})
_COLLECTIONS = (
    "variables",
    "trainable_variables",
    "model_variables",
    "moving_average_variables",
    "local_variables",
    "metric_variables",
)
_ASSIGNS = frozenset({"Assign", "AssignVariableOp"})
TABLE_IMPORTS = frozenset({"LookupTableImport", "LookupTableImportV2"})
_PASS_THROUGH = frozenset({"Identity", "Reshape", "Cast"})


def variable_keys(meta_graph: Proto, index: GraphIndex) -> dict[str, VariableKey]:
    """Return {variable's node: its name in checkpoints, with its box if it is a part} for all variables.

    The graph's Saver has precedence over its collections, and these over names of objects and nodes.
    """
    # In a graph for sessions the checkpoint's name is the node's name; in an object-based SavedModel it is
    # the object's name, or the handle's `shared_name`.
    has_objects = meta_graph.HasField("object_graph_def")
    objects = saved_objects(meta_graph, index).objects if has_objects else ()
    own_names = {item.variable.tensor: item.variable.name for item in objects if item.variable}
    keys = {}
    for node in index.nodes.values():
        if node.op in VARIABLE_OPS:
            shared = attr_text(node, "shared_name") if has_objects else ""
            keys[node.name] = VariableKey(own_names.get(node.name) or shared or node.name)
    # each further source has precedence over the previous ones
    keys |= {node: key for node, key in _from_collections(meta_graph) if node in keys}
    restored = _from_restore(meta_graph, index, _ASSIGNS, count=1)
    keys |= {node: key for node, (key,) in restored if node in keys}
    return keys


def _from_collections(meta_graph: Proto) -> Iterator[tuple[str, VariableKey]]:
    """Yield (node, name and box in checkpoints) for each part of a partitioned variable in the collections.

    Source: tensorflow/core/framework/variable.proto.
    """
    for variable in collected_variables(meta_graph, _COLLECTIONS):
        info = variable.save_slice_info_def
        if info.full_name:
            box = SliceSpec(tuple(info.full_shape), tuple(info.var_offset), tuple(info.var_shape))
            yield endpoint(variable.variable_name).node, VariableKey(info.full_name, box)


def collected_variables(meta_graph: Proto, collections: Iterable[str]) -> Iterator[Proto]:
    """Yield the `VariableDef`s in the given collections, in order.

    Collections that the graph lacks, and values that are not `VariableDef`s, are skipped.
    """
    for name in collections:
        if name not in meta_graph.collection_def:
            continue
        for serialized in meta_graph.collection_def[name].bytes_list.value:
            with suppress(DecodeError):  # a user's own collection of that name
                yield protos.VariableDef.FromString(serialized)


def restored_names(
    meta_graph: Proto, index: GraphIndex, ops: Collection[str], *, count: int
) -> Iterator[tuple[str, list[str]]]:
    """Yield (handle's node, names of its `count` tensors in checkpoints) for each operation that restores.

    An operation of `ops` restores if the restore op waits for it, or if it is in the function that the
    restore op calls. `count` is the number of tensors that it takes after the handle: 1 for an assignment, 2
    for the import of a table (keys, values). An operation for which fewer names are known is left out.
    """
    for node, keys in _from_restore(meta_graph, index, ops, count=count):
        yield node, [key.key for key in keys]
    yield from _restored_in_function(meta_graph, index, ops, count=count)


def _from_restore(
    meta_graph: Proto, index: GraphIndex, ops: Collection[str], *, count: int
) -> Iterator[tuple[str, list[VariableKey]]]:
    """Yield (handle's node, `count` keys) for each operation of `ops` that the restore op waits for.

    A key is the name and box of a tensor that the operation takes after the handle. An operation with fewer
    known keys is left out.
    """
    restore = endpoint(meta_graph.saver_def.restore_op_name).node
    restored: dict[str, list[VariableKey]] = {}

    def before(name: str) -> list[str]:
        node = index.nodes.get(name)
        return control_inputs(node) if node is not None and node.op not in ops else []

    def keys(source: Endpoint) -> list[VariableKey]:
        if source.node not in index.nodes or index.nodes[source.node].op != "RestoreV2":
            return []
        if source.node not in restored:  # one node may restore all variables: its lists are read only once
            names, boxes = (_strings(index, source.node, position) for position in (1, 2))
            pairs = zip(names, boxes, strict=False)
            restored[source.node] = [VariableKey(name, parse_slice_spec(box)) for name, box in pairs]
        return restored[source.node][source.output : source.output + 1]

    for node in (index.nodes.get(name) for name in closure([restore], before)):
        if node is not None and node.op in ops:
            inputs = data_inputs(node)
            sources = (tensor_behind(index.nodes, tensor, _PASS_THROUGH) for tensor in inputs[1 : count + 1])
            found = [key for source in sources for key in keys(source)]
            if len(found) == count:
                yield inputs[0].node, found


def _strings(index: GraphIndex, node: str, position: int) -> list[str]:
    inputs = data_inputs(index.nodes[node])
    source = index.nodes.get(inputs[position].node) if position < len(inputs) else None
    return const_texts(source) or []


def parse_slice_spec(text: str) -> SliceSpec | None:
    """Return the part that a text of RestoreV2 describes; None for "" (a whole tensor) and for other texts.

    For instance `"6 4 0,3:-"` is rows 0 to 2 of a tensor [6, 4], with all columns. Source:
    tensorflow/core/framework/tensor_slice.h.
    """
    *full, boxes = text.split(" ") if text else [""]
    if not full:
        return None
    try:
        shape = tuple(int(size) for size in full)
        spans = [
            (0, size) if span == "-" else tuple(int(number) for number in span.split(","))
            for size, span in zip(shape, boxes.split(":"), strict=True)
        ]
        starts, lengths = zip(*spans, strict=True)
    except ValueError:
        return None
    return SliceSpec(shape, starts, lengths)
