"""A graph with its variables in their stored form: after casts, and with lookup tables."""

from __future__ import annotations

from copy import deepcopy

from msgspec.structs import replace

from exporter.graph.cast_variables import cast_variables
from exporter.graph.inference_graph import GraphVariable, InferenceGraph
from exporter.mapping.build import VariableMapping


def as_served(graph: InferenceGraph, mapping: VariableMapping) -> tuple[InferenceGraph, VariableMapping]:
    """Return graph and mapping with variables in the dtypes and shapes that they are stored in.

    Neither argument is changed. The returned graph casts the values that it reads. Its lookup tables get the
    names and shapes that they are stored with. Raises MappingError if a variable that is to be cast is used
    in a way that forbids it.
    """
    graph = replace(graph, tables=mapping.tables)
    stored = {
        variable.node: source.dtype
        for source in mapping.sources
        for variable in source.variables
        if source.dtype != variable.dtype
    }
    if not stored:
        return graph, mapping

    shapes = {
        variable.node: source.as_stored(variable).shape
        for source in mapping.sources
        for variable in source.variables
    }

    def cast(variable: GraphVariable) -> GraphVariable:
        node = variable.node
        dtype, shape = stored.get(node, variable.dtype), shapes.get(node, variable.shape)
        return replace(variable, dtype=dtype, shape=shape)

    meta_graph = deepcopy(graph.meta_graph)
    cast_variables(meta_graph.graph_def, stored)
    sources = tuple(
        replace(source, variables=tuple(map(cast, source.variables))) for source in mapping.sources
    )
    variables = tuple(map(cast, graph.variables))
    return replace(graph, meta_graph=meta_graph, variables=variables), replace(mapping, sources=sources)
