"""Make a base that takes deltas, and where needed begin its log at the newest of the trainer's increments.

A base links the bytes of a full checkpoint, and its first delta brings the increments since. Servers answer
by the base until they have applied that delta. Where they already serve more than the checkpoint holds, that
would be a step back: there the increments are applied on top of the staged variables, which are rewritten.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path

import numpy as np
from msgspec import Struct
from msgspec.structs import asdict, replace

from exporter.bundle.made_up_requests import made_up_requests
from exporter.bundle.variables import (
    ShardOrigin,
    ShardReport,
    VariablesReport,
    over_bundle,
    write_variables,
)
from exporter.bundle.warmup import MAX_RECORDS, WarmupRequest, parse_request
from exporter.catalog import Catalog
from exporter.checkpoint.tensor_bundle import BundleWriter, read_catalog
from exporter.delta.format import ChangeKind, Schema, ServedVariable
from exporter.delta.layered_state import LayeredState
from exporter.delta.row_reader import served_in
from exporter.errors import NotServable, UsageError
from exporter.graph.cast_variables import cast_variables
from exporter.graph.inference_graph import GraphVariable, InferenceGraph
from exporter.increments.trained import TrainerVersion
from exporter.mapping.build import VariableMapping
from exporter.mapping.mapping_spec import MappingSpec
from exporter.options import Updates
from exporter.pipeline.table_deltas import told_changes
from exporter.pipeline.trainer_state import TrainerState, read_trainer
from exporter.publish.commit import ReservedPosition
from exporter.publish.manifest import BaseEntry
from exporter.storage.files import writing
from exporter.storage.layout import VARIABLES_DIRECTORY, VARIABLES_PREFIX
from exporter.subgraph.make_updatable import (
    NO_OVERLAYS,
    IncrementalOptions,
    first_requests,
    make_updatable,
    schema_of,
)
from exporter.verify.version_files import verify_bytes
from exporter.wire.dtypes import Array


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
    overlays: Mapping[str, int] = NO_OVERLAYS,
) -> UpdatableBase:
    """The base of a new log that begins at `place`.

    Its warm-up catches up with the log before a server lets the version answer, first and last: the requests
    between may take seconds in which more is published. They are those of the base's own signatures, and
    `warmup`, or generated ones if that is None. `overlays` are the mapped tables, as `make_updatable` takes
    them.
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
    updatable = make_updatable(graph, options, scratch, overlays)
    entry = BaseEntry.of(place.position, schema, mapping_spec, trained, updates)
    signatures = updatable.meta_graph.signature_def
    own = [parse_request(text, signatures) for text in first_requests(schema, signatures)]
    records = (*own, *requests, own[0])
    if len(records) > MAX_RECORDS:
        room = MAX_RECORDS - len(own) - 1
        raise UsageError(
            f"{len(requests)} warm-up requests; a base that takes deltas has room for {room}",
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
    """What a person should know, before the base is made, about the deltas that it will take."""
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


_CHUNK_BYTES = 4 << 20


def write_merged(mapping_spec: MappingSpec, schema: Schema, state: LayeredState, bundle: Path) -> None:
    """Write `variables/` of a bundle with the values of a state, which the caller has checked."""
    prefix = bundle / VARIABLES_PREFIX
    prefix.parent.mkdir()
    variables = {variable.name: variable for variable in schema.variables}
    with BundleWriter(prefix) as writer:
        for source in mapping_spec.sources():
            if not source.variables:  # the keys or values of a lookup table
                writer.add(source.key, state.whole(source.key))
            for part in source.variables:
                variable, box = variables[part.served_name], part.part and source.stored(part.part)
                if variable.kind is ChangeKind.DENSE:
                    writer.add(source.key, state.whole(variable.name), box)
                else:
                    rows = row_blocks(state, variable)
                    writer.add_chunks(source.key, variable.dtype, variable.shape, rows, box)


def row_blocks(state: LayeredState, variable: ServedVariable) -> Iterator[Array]:
    """The rows of a table, a bounded number at a time."""
    row_bytes = max(1, int(np.prod(variable.shape[1:])) * variable.dtype.numpy.itemsize)
    step = max(1, _CHUNK_BYTES // row_bytes)
    for start in range(0, variable.shape[0], step):
        yield state.rows(variable.name, start, min(start + step, variable.shape[0]))


class BaseState(Struct, frozen=True):
    """The trainer's state that a base begins with; `increments` are not in its staged variables yet."""

    trained: TrainerVersion
    step: int | None
    increments: TrainerState | None = None


def newest_state(
    full: BaseState,
    prefix: Path,
    graph: InferenceGraph,
    mapping: VariableMapping,
    mapping_spec: MappingSpec,
    *,
    beyond: int,
) -> BaseState:
    """The state of a checkpoint with the increments since, if the step `beyond` is later than it."""
    if full.step is None or beyond <= full.step:
        return full
    schema = schema_of(as_served(graph, mapping)[0])
    trainer = read_trainer(prefix, mapping_spec, schema, full.trained)
    plan = trainer.plan
    if not plan.is_known or not plan.increments or plan.target.checkpoint != full.trained.checkpoint:
        return full
    return BaseState(plan.target, plan.step, trainer)


def lay_increments_over(
    entry: BaseEntry, trainer: TrainerState, mapping: VariableMapping, bundle: Path, scratch: Path
) -> VariablesReport:
    """Write the staged variables of a base once more, with the trainer's increments applied on top.

    Memory is bounded; what was staged goes to `scratch`. Tables that `mapping` maps get files of their own
    again.
    """
    before = scratch / "full"
    with writing(bundle):
        before.mkdir()
        (bundle / VARIABLES_DIRECTORY).rename(before / VARIABLES_DIRECTORY)
    staged = read_catalog(before / VARIABLES_PREFIX)
    verify_bytes(staged)
    spec, schema = entry.mapping_spec, entry.schema
    stored = {found.name: found for source in spec.sources() for found in served_in(staged, source)}
    told = told_changes(spec, schema, LayeredState(stored), trainer, None)
    state = LayeredState(stored, (*trainer.layers(), told))
    is_mapped = any(source.is_mapped for source in mapping.sources)
    merged = scratch / "merged" if is_mapped else bundle
    with writing(merged):
        merged.mkdir(exist_ok=True)
        write_merged(spec, schema, state, merged)
    written = read_catalog(merged / VARIABLES_PREFIX)
    if is_mapped:
        written = write_variables(over_bundle(mapping, written), bundle).catalog
    return _report(written)


def _report(written: Catalog) -> VariablesReport:
    why = "increments applied on top of the checkpoint"
    sizes = zip(written.shards, written.shard_sizes, strict=True)
    shards = (ShardReport(path, None, ShardOrigin.REWRITTEN, why, size) for path, size in sizes)
    return VariablesReport(written, tuple(shards))
