"""Graphs that look up in many tables, and what their variables hold, joined or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from exporter.graph.graph_files import read_saved_model
from exporter.graph.inference_graph import InferenceGraph
from exporter.graph.lookup_tables import with_table_shapes
from exporter.graph.nodes import all_before, drop_nodes
from exporter.graph.signatures import SignatureEnds
from exporter.graph.table_marks import marked_tables
from exporter.wire import protos
from tests.support.dynamic_values import Rows, table_values

Array = np.ndarray[Any, Any]
Signatures = Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]]


def is_joined(version: Path) -> bool:
    """True if a published version has joined lookups."""
    nodes = read_saved_model(version).meta_graphs[0].graph_def.node
    return any(node.name == "joined_tables/keys" for node in nodes)


def sized_graph(
    build: Callable[[], Signatures], contents: Mapping[str, Rows]
) -> tuple[InferenceGraph, dict[str, Array]]:
    """A graph with tables of these contents, sized as an export does it; its variables' values by key."""
    import tensorflow as tf

    meta_graph = protos.MetaGraphDef()
    with tf.Graph().as_default() as apart:
        for name, ends in build().items():
            signature = meta_graph.signature_def[name]
            for infos, tensors in zip((signature.inputs, signature.outputs), ends, strict=True):
                for alias, tensor in tensors.items():
                    infos[alias].name = tensor.name
        meta_graph.graph_def.MergeFromString(apart.as_graph_def().SerializeToString())
    nodes = {node.name: node for node in meta_graph.graph_def.node}
    ends = map(SignatureEnds.of, meta_graph.signature_def.values())
    needed = all_before(nodes, [tensor for each in ends for tensor in (*each.inputs, *each.outputs)])
    drop_nodes(meta_graph.graph_def.node, nodes.keys() - needed.keys())
    tables = marked_tables(meta_graph.graph_def)
    values: dict[str, Array] = {}
    for table in tables:
        values |= table_values(table, contents[table.name])
    graph = InferenceGraph("built here", meta_graph, (), dynamic_tables=tables)
    return with_table_shapes(graph, {name: value.shape for name, value in values.items()}), values


def held(graph: InferenceGraph, values: Mapping[str, Array]) -> dict[str, Array]:
    """The values of a graph's variables by the nodes of their handles, joined ones together."""
    parts: dict[str, dict[int, Array]] = {}
    for variable in graph.variables:
        home = graph.joined.get(variable.node)
        node, first = (home.node, home.first) if home else (variable.node, 0)
        parts.setdefault(node, {})[first] = values[variable.key]
    return {node: np.concatenate([found[n] for n in sorted(found)]) for node, found in parts.items()}


def loaded_session(graph: InferenceGraph, values: Mapping[str, Array]) -> Any:
    """A session in which a graph's variables have their values; as in servers, feeds have any shape."""
    import tensorflow as tf

    v1 = tf.compat.v1
    drawn = v1.GraphDef.FromString(graph.meta_graph.graph_def.SerializeToString())
    for node in drawn.node:
        if node.op == "Placeholder":
            node.attr["shape"].shape.CopyFrom(tf.TensorShape(None).as_proto())
    session = v1.Session(graph=tf.Graph())
    with session.graph.as_default():
        v1.import_graph_def(drawn, name="")
        for node, value in held(graph, values).items():
            fed = v1.placeholder(value.dtype, value.shape)
            handle = session.graph.get_tensor_by_name(f"{node}:0")
            session.run(tf.raw_ops.AssignVariableOp(resource=handle, value=fed), {fed: value})
    return session
