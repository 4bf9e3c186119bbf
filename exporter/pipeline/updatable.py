"""Make a base that takes deltas: a graph with the incremental subgraph, a lineage, a new log."""

from __future__ import annotations

import secrets
from copy import deepcopy
from pathlib import Path

from msgspec import Struct
from msgspec.structs import asdict, replace

from exporter.bundle.made_up_warmup import made_up_requests
from exporter.bundle.warmup_requests import MAX_RECORDS, WarmupRequest, parse_request
from exporter.errors import NotServable, UsageError
from exporter.graph.cast_variables import cast_variables
from exporter.graph.inference_graph import GraphVariable, InferenceGraph
from exporter.increments.trained import TrainerVersion
from exporter.mapping.build import VariableMapping
from exporter.mapping.mapping_spec import MappingSpec
from exporter.options import Updates
from exporter.publish.commit import ReservedPosition
from exporter.publish.manifest import BaseEntry
from exporter.subgraph.make_updatable import CATCH_UP_REQUEST, IncrementalOptions, make_updatable, schema_of


class UpdatableBase(Struct, frozen=True):
    """What takes the place of the planned graph and mapping; `warmup` is all that servers play."""

    graph: InferenceGraph
    mapping: VariableMapping
    lineage: str
    entry: BaseEntry
    place: ReservedPosition
    warmup: tuple[WarmupRequest, ...]


def make_base(
    graph: InferenceGraph,
    mapping: VariableMapping,
    mapping_spec: MappingSpec,
    trained: TrainerVersion,
    step: int | None,
    place: ReservedPosition,
    updates: Updates,
    scratch: Path,
    warmup: tuple[WarmupRequest, ...] | None,
) -> UpdatableBase:
    """The base of a new log that begins at `place`.

    Its warm-up catches up with the log before a server lets the version answer, first and last: the requests
    between, `warmup` or without any made-up ones, may take seconds in which more is published.

    Raises:
        NotServable: the graph cannot take deltas.
        UsageError: more requests than a server plays.
        MappingError: a variable cannot be cast.
    """
    graph, mapping = as_served(graph, mapping)
    schema = schema_of(graph)
    lineage = secrets.token_hex(16)
    requests = made_up_requests(graph) if warmup is None else warmup
    options = IncrementalOptions(
        lineage=lineage,
        log=place.position,
        position=place.position,
        step=step or 0,
        **asdict(updates),
        warmed=frozenset(request.signature for request in requests),
    )
    updatable = make_updatable(graph, options, scratch)
    entry = BaseEntry(place.position, schema, mapping_spec, trained, updates)
    catch_up = parse_request(CATCH_UP_REQUEST, updatable.meta_graph.signature_def)
    records = (catch_up, *requests, catch_up) if requests else (catch_up,)
    if len(records) > MAX_RECORDS:
        raise UsageError(
            f"{len(requests)} warm-up requests; a base that takes deltas has room for {MAX_RECORDS - 2}",
            hint="leave some out: one of a kind is enough",
        )
    return UpdatableBase(updatable, mapping, lineage, entry, place, records)


_LARGEST_TABLE_BYTES = 64 << 20


def _refuse_large_tables(mapping: VariableMapping) -> None:
    """Deltas hold the whole of a lookup table whenever it changed, and servers read all of it at once."""
    sizes = {source.key: source.tensor.bytes_ for source in mapping.sources if not source.variables}
    for table in mapping.tables:
        size = sizes[table.keys] + sizes[table.values]
        if size > _LARGEST_TABLE_BYTES:
            raise NotServable(
                f"lookup table {table.node!r} holds {size} bytes; deltas carry up to {_LARGEST_TABLE_BYTES}",
                cause="each delta after a checkpoint in which it changed would hold all of them",
                hint="publish full versions: leave --incr or --updatable out; or keep vectors in a variable "
                "and only row numbers in the table",
            )


def update_notes(graph: InferenceGraph, mapping: VariableMapping) -> tuple[str, ...]:
    """What a person should know, before the base is made, about the deltas that it will take.

    Raises:
        NotServable: the graph cannot take deltas.
        MappingError: a variable cannot be cast.
    """
    _refuse_large_tables(mapping)
    return schema_of(as_served(graph, mapping)[0]).notes


def as_served(graph: InferenceGraph, mapping: VariableMapping) -> tuple[InferenceGraph, VariableMapping]:
    """The graph and mapping with the variables in the dtypes that they are stored in: casts come first.

    The graph's lookup tables get the names and shapes that they are stored in.
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

    def cast(variable: GraphVariable) -> GraphVariable:
        return replace(variable, dtype=stored.get(variable.node, variable.dtype))

    meta_graph = deepcopy(graph.meta_graph)
    cast_variables(meta_graph.graph_def, stored)
    sources = tuple(
        replace(source, variables=tuple(map(cast, source.variables))) for source in mapping.sources
    )
    variables = tuple(map(cast, graph.variables))
    return replace(graph, meta_graph=meta_graph, variables=variables), replace(mapping, sources=sources)
