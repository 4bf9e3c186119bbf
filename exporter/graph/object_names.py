"""Variables' own names in an object-based SavedModel, where the graph's node names say little.

TensorFlow may capture one variable under several handles called `kernel_1` or `Variable_7`. Its restore
function pairs each handle with a key of the object graph (`layers/1/kernel/.ATTRIBUTES/VARIABLE_VALUE`),
and the object that the key's path leads to has the variable's name as the program gave it.
(Source: tensorflow/core/protobuf/saved_object_graph.proto; tensorflow/python/checkpoint/trackable_view.py.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from exporter.graph.nodes import GraphIndex, attr, const_value, data_inputs, endpoint
from exporter.protos import Proto

_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
_ESCAPED = {"..": ".", ".S": "/"}


def variable_names(meta_graph: Proto, index: GraphIndex) -> dict[str, str]:
    """The name of each variable that the restore function restores, by its handle's node."""
    children = [{c.local_name: c.node_id for c in o.children} for o in meta_graph.object_graph_def.nodes]
    names = {}
    for handle, key in _restored_keys(meta_graph, index):
        found = _object_at(children, key.removesuffix(_VALUE)) if key.endswith(_VALUE) else None
        if found is not None and meta_graph.object_graph_def.nodes[found].variable.name:
            names[handle] = meta_graph.object_graph_def.nodes[found].variable.name
    return names


def _object_at(children: list[dict[str, int]], path: str) -> int | None:
    """The object that a checkpoint key leads to from the root; `.` and `/` are escaped in its parts."""
    found = 0
    for part in path.split("/"):
        name = re.sub(r"\.[.S]", lambda match: _ESCAPED[match.group()], part)
        following = children[found].get(name) if found < len(children) else None
        if following is None:
            return None
        found = following
    return found if found < len(children) else None


def _restored_keys(meta_graph: Proto, index: GraphIndex) -> Iterator[tuple[str, str]]:
    """(handle's node, key) for each assignment in the restore function."""
    call = index.nodes.get(endpoint(meta_graph.saver_def.restore_op_name).node)
    callee = attr(call, "f") if call is not None else None
    function = index.functions.get(callee.func.name) if callee is not None else None
    if call is None or function is None:
        return
    handles = dict(zip((a.name for a in function.signature.input_arg), data_inputs(call), strict=False))
    nodes = {node.name: node for node in function.node_def}
    for node in nodes.values():
        if node.op == "AssignVariableOp" and len(node.input) > 1 and node.input[0] in handles:
            key = _key_of(nodes, node.input[1])
            if key is not None:
                yield handles[node.input[0]].node, key


def _key_of(nodes: dict[str, Proto], text: str) -> str | None:
    """Which name RestoreV2 reads for a value such as `Identity_3:output:0`."""
    name, _, output = text.partition(":")
    node = nodes.get(name)
    if node is not None and node.op == "Identity" and node.input:
        name, _, output = node.input[0].partition(":")
        node = nodes.get(name)
    if node is None or node.op != "RestoreV2" or len(node.input) < 2:
        return None
    source = nodes.get(node.input[1].partition(":")[0])
    names = const_value(source) if source is not None else None
    position = output.rpartition(":")[2]
    if names is None or not position.isdecimal() or int(position) >= names.size:
        return None
    return bytes(names.ravel()[int(position)]).decode("utf-8", "surrogateescape")
