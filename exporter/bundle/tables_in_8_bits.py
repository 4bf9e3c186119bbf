"""Choose the tables that are stored in 8 bits: tables of which the graph does nothing but gather rows."""

from __future__ import annotations

from copy import deepcopy

from msgspec import Struct
from msgspec.structs import replace

from exporter.bundle.mapped_tables import SEVERAL_HANDLES, taken_whole
from exporter.bundle.variables import why_not_by_rows
from exporter.errors import few
from exporter.graph.inference_graph import InferenceGraph
from exporter.graph.signatures import signature_nodes
from exporter.graph.variable_uses import read_rows_only, readings
from exporter.mapping.build import VariableMapping
from exporter.mapping.tensor_source import TensorSource
from exporter.wire.int8_codes import SCALE_BYTES

_SHOWN = 5


class ChosenFor8Bits(Struct, frozen=True):
    """A graph that reads tables by rows, and the mapping without the casts to int8 that are impossible."""

    graph: InferenceGraph
    mapping: VariableMapping


def choose_for_8_bits(graph: InferenceGraph, mapping: VariableMapping) -> ChosenFor8Bits:
    """Return graph and mapping without the casts to int8 that are impossible.

    A variable can be cast if it is a table whose rows would shrink, and if the graph reads it only by rows. A
    note in the mapping names the others. The graph is a copy, rewritten to read tables by rows; without casts
    to int8 both are returned unchanged.
    """
    if not any(source.is_in_8_bits for source in mapping.sources):
        return ChosenFor8Bits(graph, mapping)
    meta_graph = deepcopy(graph.meta_graph)
    read_rows_only(meta_graph.graph_def, signature_nodes(meta_graph))
    read = readings(meta_graph.graph_def)
    sources: list[TensorSource] = []
    left = []
    for source in mapping.sources:
        if source.is_in_8_bits:
            why = taken_whole(source, read) or _why_no_table(source) or why_not_by_rows(source)
            if not why and any(read[variable.node].handles > 1 for variable in source.variables):
                why = SEVERAL_HANDLES
            if why:
                source = replace(source, cast=None)
                left.append(f"{source.key} ({why})")
        sources.append(source)
    notes = mapping.notes
    if left:
        notes += (f"--cast int8 leaves as they are: {few(left, _SHOWN)}",)
    mapping = replace(mapping, sources=tuple(sources), notes=notes)
    return ChosenFor8Bits(replace(graph, meta_graph=meta_graph), mapping)


def _why_no_table(source: TensorSource) -> str:
    shape = source.tensor.shape
    if len(shape) != 2:
        return f"it has {len(shape)} dimensions, a table has 2"
    stored = shape[1] + SCALE_BYTES
    if stored >= shape[1] * (source.tensor.dtype.itemsize or 0):
        return f"its rows of {shape[1]} would not shrink"
    return ""
