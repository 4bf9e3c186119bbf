"""Dynamic tables in a graph: variables whose numbers of buckets and rows only a checkpoint tells."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy

from msgspec.structs import replace

from exporter.errors import ShapeMismatch
from exporter.graph.inference_graph import GraphDynamicTable, GraphVariable, InferenceGraph
from exporter.graph.nodes import shape_proto
from exporter.tables.geometry import TableGeometry
from exporter.tables.lookup import set_sizes


def with_table_shapes(graph: InferenceGraph, shapes: Mapping[str, tuple[int, ...]]) -> InferenceGraph:
    """The graph with its dynamic tables' variables among the others; `shapes` are theirs, by served name.

    From here on they are variables as any other. `graph` itself stays as it is.

    Raises:
        ShapeMismatch: no table has variables of these shapes.
    """
    if not graph.dynamic_tables:
        return graph
    meta_graph = deepcopy(graph.meta_graph)
    nodes = {node.name: node for node in meta_graph.graph_def.node}
    variables, geometries = list[GraphVariable](), {}
    for table in graph.dynamic_tables:
        sized = [replace(variable, shape=shapes[variable.key]) for variable in table.variables]
        for variable in sized:
            nodes[variable.node].attr["shape"].shape.CopyFrom(shape_proto(variable.shape))
            nodes[variable.node].attr.pop("_output_shapes", None)
        variables += sized
        geometries[table.name] = _geometry(table, [variable.shape for variable in sized])
    set_sizes(meta_graph.graph_def, geometries)
    return replace(graph, meta_graph=meta_graph, variables=(*graph.variables, *variables))


def _geometry(table: GraphDynamicTable, shapes: list[tuple[int, ...]]) -> TableGeometry:
    (groups,), (slots,), (capacity,), _ = shapes
    try:
        return TableGeometry.of_shapes(groups, slots, capacity, len(table.defaults))
    except ValueError as error:
        raise ShapeMismatch(
            f"the variables of table {table.name!r} do not fit each other", cause=str(error)
        ) from error


def tables_among(
    tables: tuple[GraphDynamicTable, ...], nodes: Mapping[str, object]
) -> tuple[GraphDynamicTable, ...]:
    """The tables that a graph with these nodes reads."""
    return tuple(table for table in tables if any(node in nodes for node in table.nodes))
