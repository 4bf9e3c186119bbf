"""Find the checkpoint name of each variable of a graph, and of a part its box in the whole.

Three places tell, the nearest to the checkpoint first: the graph's own Saver (its restore nodes), the
VariableDefs in the collections (partitions), the variable's name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress

from google.protobuf.message import DecodeError

from exporter.catalog import SliceSpec
from exporter.graph.nodes import (
    Endpoint,
    GraphIndex,
    attr_text,
    const_texts,
    control_inputs,
    data_inputs,
    endpoint,
)
from exporter.graph.object_names import variable_names
from exporter.graph.reach import closure
from exporter.graph.source_graph import VariableKey
from exporter.wire import protos
from exporter.wire.protos import Proto

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
_PASS_THROUGH = frozenset({"Identity", "Reshape", "Cast"})


def variable_keys(meta_graph: Proto, index: GraphIndex) -> dict[str, VariableKey]:
    """The key of every variable, by its node's name.

    In a graph made by sessions a checkpoint name is the node's name; in an object-based SavedModel the
    object's, or the handle's `shared_name`.
    """
    has_objects = meta_graph.HasField("object_graph_def")
    own_names = variable_names(meta_graph, index) if has_objects else {}
    keys = {}
    for node in index.nodes.values():
        if node.op in VARIABLE_OPS:
            shared = attr_text(node, "shared_name") if has_objects else ""
            keys[node.name] = VariableKey(own_names.get(node.name) or shared or node.name)
    keys |= {node: key for node, key in _from_collections(meta_graph) if node in keys}
    keys |= {node: key for node, key in _from_saver(meta_graph, index) if node in keys}
    return keys


def _from_collections(meta_graph: Proto) -> Iterator[tuple[str, VariableKey]]:
    """Parts of partitioned variables (source: tensorflow/core/framework/variable.proto)."""
    for variable in collected_variables(meta_graph, _COLLECTIONS):
        info = variable.save_slice_info_def
        if info.full_name:
            box = SliceSpec(tuple(info.full_shape), tuple(info.var_offset), tuple(info.var_shape))
            yield endpoint(variable.variable_name).node, VariableKey(info.full_name, box)


def collected_variables(meta_graph: Proto, collections: Iterable[str]) -> Iterator[Proto]:
    """The `VariableDef`s in these collections, some of which a graph may not have."""
    for name in collections:
        if name not in meta_graph.collection_def:
            continue
        for serialized in meta_graph.collection_def[name].bytes_list.value:
            with suppress(DecodeError):  # a user's own collection of that name
                yield protos.VariableDef.FromString(serialized)


def _from_saver(meta_graph: Proto, index: GraphIndex) -> Iterator[tuple[str, VariableKey]]:
    """What the Saver's restore nodes assign to each variable, under which name."""
    for node, (key,) in _from_restore(meta_graph, index, _ASSIGNS, count=1):
        yield node, key


def restored_names(
    meta_graph: Proto, index: GraphIndex, ops: Collection[str], *, count: int
) -> Iterator[tuple[str, list[str]]]:
    """What the Saver's nodes of these kinds restore: a node, and the names of the `count` tensors for it."""
    for node, keys in _from_restore(meta_graph, index, ops, count=count):
        yield node, [key.key for key in keys]


def _from_restore(
    meta_graph: Proto, index: GraphIndex, ops: Collection[str], *, count: int
) -> Iterator[tuple[str, list[VariableKey]]]:
    restore = endpoint(meta_graph.saver_def.restore_op_name).node
    restored: dict[str, list[VariableKey]] = {}
    for node in _restoring(index, restore, ops):
        inputs = data_inputs(node)
        sources = [_restored_from(index, tensor) for tensor in inputs[1 : count + 1]]
        found = []
        for source in sources:
            if source is None:
                break
            if source.node not in restored:  # one node restores all that a server holds: read its lists once
                restored[source.node] = _restored_by(index, source.node)
            found += restored[source.node][source.output : source.output + 1]
        if len(found) == count:
            yield inputs[0].node, found


def _restored_by(index: GraphIndex, node: str) -> list[VariableKey]:
    """What a restore node reads, in the order of its outputs."""
    names, boxes = (_strings(index, node, position) for position in (1, 2))
    return [VariableKey(name, parse_slice_spec(box)) for name, box in zip(names, boxes, strict=False)]


def _restoring(index: GraphIndex, restore: str, ops: Collection[str]) -> list[Proto]:
    """The nodes of these kinds that a restore op waits for."""

    def before(name: str) -> list[str]:
        node = index.nodes.get(name)
        return control_inputs(node) if node is not None and node.op not in ops else []

    nodes = (index.nodes.get(name) for name in closure([restore], before))
    return [node for node in nodes if node is not None and node.op in ops]


def _restored_from(index: GraphIndex, tensor: Endpoint) -> Endpoint | None:
    for _ in range(8):
        node = index.nodes.get(tensor.node)
        if node is None:
            return None
        if node.op == "RestoreV2":
            return tensor
        inputs = data_inputs(node)
        if node.op not in _PASS_THROUGH or not inputs:
            return None
        tensor = inputs[0]
    return None


def _strings(index: GraphIndex, node: str, position: int) -> list[str]:
    inputs = data_inputs(index.nodes[node])
    source = index.nodes.get(inputs[position].node) if position < len(inputs) else None
    return const_texts(source) or []


def parse_slice_spec(text: str) -> SliceSpec | None:
    """RestoreV2's `"6 4 0,3:-"` as a box, None for a whole tensor or for anything else.

    Source: tensorflow/core/framework/tensor_slice.h.
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
