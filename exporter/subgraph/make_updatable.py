"""Make a graph take deltas: add the signatures that update it, and isolate its own signatures.

`make_updatable` transforms an InferenceGraph before it is written as a SavedModel. The graph keeps its nodes
and their names, and the signatures their names and inputs. Afterwards the graph reads tables by rows
(`variable_uses`), every signature is isolated from updates (`isolation`), and it has these signatures, too:

    incremental_update   up_to int64 [n] -> position, step, rows, deltas int64 [n], status string [n]
    incremental_status   probe int64 [n] -> position, step, unsettled int64 [n], lineage string [n]
                         (with mapped tables also mapped_tables, tables_to_map, overlay_percent int64 [n])
    incremental_digest   rows int64 [n] -> digest string [n], position_before, position_after int64 [n]
                         (with `digest`)

Lineage, log and schema are constants of the graph. The path of its asset gives the model's directory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path

from msgspec.structs import replace

from exporter.delta.chunk_digest import cheapest_chunk
from exporter.delta.format import OPEN, ChangeKind, Schema, ServedVariable, TableContents, TableSide, log_name
from exporter.errors import NotServable
from exporter.graph.editor import GraphEditor
from exporter.graph.inference_graph import Asset, GraphTable, GraphVariable, InferenceGraph
from exporter.graph.lookup_tables import makers
from exporter.graph.overlaid_reads import SCATTERED, overlay_joined_reads, overlay_reads
from exporter.graph.signatures import rename_tensors, signature_nodes, tensors_of
from exporter.graph.variable_uses import Use, read_rows_only, uses
from exporter.options import Isolation, Updates
from exporter.storage.layout import UPDATABLE_NAME
from exporter.subgraph.isolation import isolate, order_handles
from exporter.subgraph.overlay import COUNTER, add_overlays
from exporter.subgraph.state import StateNodes, add_state
from exporter.subgraph.update_signatures import (
    OVERLAY_OUTPUTS,
    PREDICT_METHOD,
    STAMPS,
    HowToUpdate,
    Served,
    add_digest,
    add_init,
    add_stamps,
    add_status,
    add_update,
)
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto

UPDATE_SIGNATURE = "incremental_update"
STATUS_SIGNATURE = "incremental_status"
DIGEST_SIGNATURE = "incremental_digest"
CATCH_UP_REQUEST = '{"signature_name": "incremental_update", "inputs": {"up_to": [-1]}}'
"""A warm-up request in REST's JSON: with it a server reaches the newest position before it answers."""

STATUS_REQUEST = '{"signature_name": "incremental_status", "inputs": {"probe": [0]}}'

NO_OVERLAYS: Mapping[str, int] = {}


class IncrementalOptions(Updates, frozen=True, kw_only=True):
    """The constants of a base's graph: its position in a log, and how it takes updates.

    `lineage` identifies the log, `log` is its first position; `position` and `step` are the base's own.
    `patience_seconds` limits a reader's wait for an update; it must exceed the time that the largest snapshot
    takes to write. `warmed` names the signatures whose first call is a warm-up record: it prepares everything
    they may need.
    """

    lineage: str
    log: int
    position: int
    step: int
    patience_seconds: float = 2.0
    warmed: frozenset[str] = frozenset()


def make_updatable(
    graph: InferenceGraph,
    options: IncrementalOptions,
    scratch: Path,
    overlays: Mapping[str, int] = NO_OVERLAYS,
) -> InferenceGraph:
    """Return a copy of the graph that takes deltas; its new asset is written into the directory `scratch`.

    An existing file of the asset's name is overwritten; `graph` is not changed.

    `overlays` maps the node of a mapped table's handle to the number of changed rows that its overlay holds.
    Variables must have the dtype in which they are served, so casts come first. Lookup tables must already
    have the names and shapes under which deltas store them.

    Raises:
        OSError: the asset cannot be written.
        NotServable: the graph has no variables; a signature has a reserved name or output, or cannot be
            isolated; variables that share a tensor differ; a table in `overlays` is read other than by
            gathers of rows.
    """
    meta_graph = deepcopy(graph.meta_graph)
    graph_def, signatures = meta_graph.graph_def, meta_graph.signature_def
    _refuse_reserved_names(signatures, options)
    named = frozenset(signature_nodes(meta_graph))
    read_rows_only(graph_def, named)
    served = _served(graph, uses(graph_def))
    schema, joined = Schema.of(served.keys()), graph.joined
    editor = GraphEditor.onto(graph_def, "incremental", f"{options.lineage}/{options.position}")
    state = add_state(editor)
    overlaid = add_overlays(editor, graph.variables, overlays)
    reads = {
        variable.node: overlaid[variable.node].reads(variable, named)
        for variable in graph.variables
        if variable.node in overlaid
    }
    overlay_joined_reads(meta_graph, reads)
    overlay_reads(graph_def, reads)
    handles = [node for nodes in served.values() for node in nodes if node not in overlaid]
    handles = [*dict.fromkeys(joined[node].node if node in joined else node for node in handles)]
    handles += dict.fromkeys(handle for table in reads.values() for handle in table.extra_handles)
    _isolate_signatures(editor, state, signatures, handles, options)
    largest = options.snapshot_max_rows if options.isolation is Isolation.SNAPSHOT else -1
    how = HowToUpdate(options.finite, largest)
    texts = {"log": log_name(options.log), "lineage": options.lineage}
    signatures[UPDATE_SIGNATURE].CopyFrom(add_update(editor, state, served, overlaid, joined, how, texts))
    signatures[STATUS_SIGNATURE].CopyFrom(add_status(editor, state, options.lineage, overlaid.values()))
    if options.digest:
        signatures[DIGEST_SIGNATURE].CopyFrom(add_digest(editor, state, served, overlaid, joined))
    asset = _add_asset(editor, scratch / UPDATABLE_NAME, schema, options)
    start = options.position, options.step
    init_op = add_init(editor, state, overlaid.values(), asset.node, graph.init_op, start)
    return replace(graph, meta_graph=meta_graph, assets=(*graph.assets, asset), init_op=init_op)


def first_requests(schema: Schema, signatures: Mapping[str, Proto]) -> tuple[str, ...]:
    """Return warm-up requests, in REST's JSON, for the signatures that a base adds.

    In the order to send them, they are the update to the newest position, the status, and, if `signatures`
    has the digest and `schema` a chunk, a digest of the cheapest chunk.
    """
    # The first call of a signature is prepared under a lock that all predictions take: 0.1 to 0.7 s. These
    # ask for all outputs, as agents and commands do; another choice of outputs would be prepared by itself. A
    # digest of one chunk prepares those of all variables. Without chunks every digest fails, so there is
    # none.
    chunk = cheapest_chunk(schema) if DIGEST_SIGNATURE in signatures else None
    if chunk is None:
        return CATCH_UP_REQUEST, STATUS_REQUEST
    digest = {"signature_name": DIGEST_SIGNATURE, "inputs": {"rows": [chunk]}}
    return CATCH_UP_REQUEST, STATUS_REQUEST, json.dumps(digest)


def mapped_counter(graph: InferenceGraph) -> str:
    """Return the node name of the variable that counts mapped tables; "" if the graph has no overlays.

    `graph` is a result of `make_updatable`.
    """
    outputs = graph.meta_graph.signature_def[STATUS_SIGNATURE].outputs
    scope = outputs["position"].name.partition("/")[0]
    return f"{scope}/{COUNTER}" if set(OVERLAY_OUTPUTS) <= set(outputs) else ""


def schema_of(graph: InferenceGraph) -> Schema:
    """Return the schema of the deltas that `make_updatable(graph, ...)` will take; the graph is not changed.

    NotServable if the graph has no variables or tables, or variables that share a tensor differ.
    """
    graph_def = deepcopy(graph.meta_graph.graph_def)
    read_rows_only(graph_def, signature_nodes(graph.meta_graph))
    return Schema.of(_served(graph, uses(graph_def)).keys())


def _lookups(graph: InferenceGraph) -> Served:
    """Return the keys and the values of each lookup table as two served variables, in this order.

    The variable of the keys is mapped to the nodes that make the table, that of the values to none.
    """
    served: dict[ServedVariable, tuple[str, ...]] = {}
    for table in graph.tables:

        def half(
            role: TableSide, name: str, dtype: DType, shape: tuple[int, ...] | None, table: GraphTable = table
        ) -> ServedVariable:
            contents = TableContents(table.node, role, table.has_all_buckets)
            return ServedVariable(name, dtype, (OPEN, *(shape or ())), ChangeKind.DENSE, contents)

        keys = half(TableSide.KEYS, table.keys, table.key_dtype, table.key_shape)
        values = half(TableSide.VALUES, table.values, table.value_dtype, table.value_shape)
        served |= {keys: makers(graph.meta_graph.graph_def, table.node), values: ()}
    return served


def _refuse_reserved_names(signatures: Mapping[str, Proto], options: IncrementalOptions) -> None:
    """Raise NotServable if a signature's name begins with `incremental_`, or an output has a stamp's name.

    Outputs are checked only if `options.stamp`, and only of Predict signatures, which alone get stamps.
    """
    for name, signature in signatures.items():
        if name.startswith("incremental_"):
            raise NotServable(
                f"the graph has a signature {name!r}, but names in incremental_ are reserved for updates",
                hint="rename the signature",
            )
        taken = sorted(set(STAMPS) & set(signature.outputs))
        if options.stamp and signature.method_name == PREDICT_METHOD and taken:
            raise NotServable(
                f"signature {name!r} has an output {taken[0]!r} of its own",
                hint="rename it, or leave out --add stamp",
            )


def _served(graph: InferenceGraph, found: Mapping[str, Use]) -> Served:
    """Return the variables and tables that deltas write, each with the nodes of its handles.

    `found` maps the node of each handle to its use. NotServable if there are none, or variables that share a
    tensor differ in shape or dtype.
    """
    found = {**found, **{node: found[part.node] for node, part in graph.joined.items()}}
    served = {**_variables(graph.variables, found), **_lookups(graph)}
    if not served:
        raise NotServable(
            "the model has no variables that an update could change",
            cause="its answers depend only on requests, constants and assets",
            hint="publish a plain version: leave --incr or --new-base out",
        )
    return served


def _variables(variables: tuple[GraphVariable, ...], found: Mapping[str, Use]) -> Served:
    """Return the variables that deltas write, each with the nodes of its handles.

    A tensor that is restored into several variables has several nodes. `found` maps the node of each handle
    to its use. NotServable if variables that share a tensor have different shapes or dtypes.
    """
    # A variable is a table if every use in the graph reads it by rows; any other is dense.
    by_name: dict[str, list[GraphVariable]] = {}
    for variable in variables:
        by_name.setdefault(variable.served_name, []).append(variable)
    served = {}
    for name, twins in by_name.items():
        first = twins[0]
        if any((twin.dtype, twin.shape) != (first.dtype, first.shape) for twin in twins):
            raise NotServable(f"{name!r} is restored into variables of different shapes or dtypes")
        by_rows = (
            first.dtype in SCATTERED and bool(first.shape) and all(found[t.node] is Use.ROWS for t in twins)
        )
        kind = ChangeKind.TABLE if by_rows else ChangeKind.DENSE
        served[ServedVariable(name, first.dtype, first.shape, kind)] = tuple(twin.node for twin in twins)
    return served


def _isolate_signatures(
    editor: GraphEditor,
    state: StateNodes,
    signatures: Mapping[str, Proto],
    handles: list[str],
    options: IncrementalOptions,
) -> None:
    """Isolate each signature if the options ask for snapshots; add stamps to Predict signatures with `stamp`.

    Changes the graph and `signatures` in place. `handles` are the nodes of the handles of all variables that
    updates write. NotServable if a node outputs a reference.
    """
    snapshot = options.isolation is Isolation.SNAPSHOT
    isolation = order_handles(editor, state, handles, options.patience_seconds) if snapshot else None
    for name in sorted(signatures):
        signature = signatures[name]
        outputs = tensors_of(signature.outputs)
        stamped = options.stamp and signature.method_name == PREDICT_METHOD
        position = None
        if isolation is not None:
            inputs, warmed = tensors_of(signature.inputs), name in options.warmed
            renamed, position = isolate(
                editor, isolation, name, inputs, outputs, with_position=stamped, warmed=warmed
            )
            for info in signature.outputs.values():
                rename_tensors(info, renamed)
        if stamped:
            add_stamps(editor, state, name, signature, position)


def _add_asset(editor: GraphEditor, path: Path, schema: Schema, options: IncrementalOptions) -> Asset:
    """Write the JSON file that describes this base's deltas to `path`; return it as an asset.

    Adds the asset's node to the graph. An existing file is overwritten; OSError if it cannot be written.
    """
    document = {
        "format_version": 1,
        "lineage": options.lineage,
        "log": options.log,
        "position": options.position,
        "step": options.step,
        "isolation": options.isolation.value,
        "schema_digest": schema.digest,
        "schema": schema.to_json(),
    }
    path.write_text(json.dumps(document) + "\n")
    return Asset(editor.constant("asset", UPDATABLE_NAME, DType.STRING), path)
