"""Dynamic tables in a graph: variables whose numbers of buckets and rows only a checkpoint tells."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from exporter.graph.inference_graph import GraphDynamicTable, InferenceGraph
from exporter.graph.nodes import shape_proto
from exporter.wire import protos


def with_table_shapes(graph: InferenceGraph, shapes: Mapping[str, tuple[int, ...]]) -> InferenceGraph:
    """The graph with its dynamic tables' variables among the others; `shapes` are theirs, by served name.

    From here on they are variables as any other. `graph` itself stays as it is.
    """
    if not graph.dynamic_tables:
        return graph
    variables = [
        replace(variable, shape=shapes[variable.key])
        for table in graph.dynamic_tables
        for variable in table.variables
    ]
    by_node = {variable.node: variable for variable in variables}
    meta_graph = protos.MetaGraphDef()
    meta_graph.CopyFrom(graph.meta_graph)
    for node in meta_graph.graph_def.node:
        if node.name in by_node:
            node.attr["shape"].shape.CopyFrom(shape_proto(by_node[node.name].shape))
            node.attr.pop("_output_shapes", None)
    return replace(graph, meta_graph=meta_graph, variables=(*graph.variables, *variables))


def tables_among(
    tables: tuple[GraphDynamicTable, ...], nodes: Mapping[str, object]
) -> tuple[GraphDynamicTable, ...]:
    """The tables that a graph with these nodes reads."""
    return tuple(table for table in tables if any(node in nodes for node in table.nodes))
