"""Read variables' own names from an object-based SavedModel, whose node names say little.

TensorFlow may capture one variable under several handles called `kernel_1` or `Variable_7`. Its restore
function pairs each handle with a key of the object graph (`layers/1/kernel/.ATTRIBUTES/VARIABLE_VALUE`),
and the object that the key's path leads to has the variable's name as the program gave it.
(Source: tensorflow/core/protobuf/saved_object_graph.proto; tensorflow/python/checkpoint/trackable_view.py.)
"""

from __future__ import annotations

from collections.abc import Iterator

from exporter.checkpoint.object_graph import SUFFIX, ObjectGraph, TrackedObject, TrackedVariable
from exporter.graph.nodes import GraphIndex, attr, const_texts, data_inputs, endpoint
from exporter.wire.protos import Proto


def variable_names(meta_graph: Proto, index: GraphIndex) -> dict[str, str]:
    """The name of each variable that the restore function restores, by its handle's node."""
    objects = saved_objects(meta_graph, index).objects
    variables = (item.variable for item in objects if item.variable)
    return {variable.tensor: variable.name for variable in variables if variable.name}


def saved_objects(meta_graph: Proto, index: GraphIndex) -> ObjectGraph:
    """The objects of a SavedModel; a variable's `tensor` is the node of its handle."""
    nodes = meta_graph.object_graph_def.nodes
    edges = [{child.local_name: child.node_id for child in node.children} for node in nodes]
    known = [
        {name: child for name, child in children.items() if 0 <= child < len(nodes)} for children in edges
    ]
    bare = ObjectGraph(tuple(map(TrackedObject, known)) or (TrackedObject({}),))
    handles: dict[int, str] = {}
    for handle, key in _restored_keys(meta_graph, index):
        found = bare.at(key.removesuffix(SUFFIX)) if key.endswith(SUFFIX) else None
        if found is not None:
            handles[found] = handle
    return ObjectGraph(
        tuple(
            TrackedObject(children, TrackedVariable(nodes[number].variable.name, handles[number]))
            if number in handles
            else TrackedObject(children)
            for number, children in enumerate(known)
        )
        or (TrackedObject({}),)
    )


def _restored_keys(meta_graph: Proto, index: GraphIndex) -> Iterator[tuple[str, str]]:
    """(handle's node, key) for each assignment in the restore function."""
    call = index.nodes.get(endpoint(meta_graph.saver_def.restore_op_name).node)
    function = index.functions.get(attr(call, "f").func.name) if call is not None else None
    if call is None or function is None:
        return
    handles = dict(zip((a.name for a in function.signature.input_arg), data_inputs(call), strict=False))
    nodes = {node.name: node for node in function.node_def}
    restored: dict[str, list[str]] = {}
    for node in nodes.values():
        if node.op == "AssignVariableOp" and len(node.input) > 1 and node.input[0] in handles:
            key = _key_of(nodes, restored, node.input[1])
            if key is not None:
                yield handles[node.input[0]].node, key


def _key_of(nodes: dict[str, Proto], restored: dict[str, list[str]], text: str) -> str | None:
    """Which name RestoreV2 reads for a value such as `Identity_3:output:0`.

    `restored` keeps the names by node: one node restores thousands.
    """
    name, _, output = text.partition(":")
    node = nodes.get(name)
    if node is not None and node.op == "Identity" and node.input:
        name, _, output = node.input[0].partition(":")
        node = nodes.get(name)
    if node is None or node.op != "RestoreV2" or len(node.input) < 2:
        return None
    if name not in restored:
        restored[name] = const_texts(nodes.get(node.input[1].partition(":")[0])) or []
    position = output.rpartition(":")[2]
    if not position.isdecimal() or int(position) >= len(restored[name]):
        return None
    return restored[name][int(position)]
