"""Lay out the dynamic tables of a graph: find them in the checkpoint, and give the graph their sizes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from exporter.catalog import Catalog, TensorRef
from exporter.checkpoint.admission import Admission
from exporter.checkpoint.embedding_variables import EmbeddingVariable, embedding_variables, find_variable
from exporter.errors import CheckpointError, MissingTensors, ShapeMismatch, UsageError
from exporter.graph.inference_graph import GraphDynamicTable, GraphVariable, InferenceGraph, PartitionStrategy
from exporter.graph.lookup_tables import with_table_shapes
from exporter.increments.keyed_changes import keys_to_come
from exporter.jobs.runner import Job, Runner
from exporter.mapping.build import VariableMapping, build_mapping
from exporter.mapping.mapping_rules import MappingRules
from exporter.mapping.unmatched import Leftover, Unmatched, find_unmatched
from exporter.storage.files import writing
from exporter.tables.geometry import TablePlan
from exporter.tables.lay_out import TableLayout, lay_out
from exporter.terminal.progress import Progress

DEFAULT_HEAD_ROOM = 0.25


class WrittenTables(Struct, frozen=True):
    """A mapping to tensors that are written, indexes of tables among them, and the job that built these."""

    mapping: VariableMapping
    job: Job


def lay_out_tables(
    graph: InferenceGraph,
    catalog: Catalog,
    rules: MappingRules,
    admission: Admission,
    head_room: float | None,
) -> tuple[InferenceGraph, TableLayout | None]:
    """Size the graph's dynamic tables by the checkpoint; return the graph, and a layout if it has tables.

    UsageError for options about tables that it lacks, or a head room that is negative.
    """
    if not graph.dynamic_tables:
        if not admission.is_everyone:
            raise UsageError(
                "--min-freq and --max-age-steps choose keys of dynamic tables, and the graph has none",
                hint="leave them out",
            )
        if head_room is not None:
            raise UsageError("--table-head-room is for dynamic tables, and the graph has none")
        return graph, None
    head_room = DEFAULT_HEAD_ROOM if head_room is None else head_room
    if not 0 <= head_room < math.inf:
        raise UsageError(
            f"--table-head-room {head_room}: expected how many times more keys to have room for",
            hint="--table-head-room 0.25 has room for a quarter more",
        )
    known = embedding_variables(catalog)
    awaited = _awaited_keys(catalog)
    plans = [_plan(table, known, catalog, rules, head_room, awaited) for table in graph.dynamic_tables]
    admission.require_recorded(catalog, tuple(plan.variable for plan in plans))
    layout = lay_out(catalog, plans)
    return with_table_shapes(graph, layout.shapes), layout


def map_laid_out(
    graph: InferenceGraph, catalog: Catalog, layout: TableLayout | None, rules: MappingRules
) -> VariableMapping:
    """Map a graph's variables, those of its laid out tables among them."""
    if layout is None:
        return build_mapping(graph, catalog, rules)
    # A table's slices are in the order of its rows.
    ordered = dict.fromkeys(layout.shapes, PartitionStrategy.DIV)
    named = {name: name for name in layout.shapes}  # no object of an object-based checkpoint holds them
    rules = replace(rules, trained={**rules.trained, **ordered}, tensors={**rules.tensors, **named})
    return build_mapping(graph, layout.catalog, rules)


def write_tables(
    layout: TableLayout,
    mapping: VariableMapping,
    admission: Admission,
    directory: Path,
    runner: Runner,
    progress: Progress,
) -> WrittenTables:
    """Write the tables' indexes, and rows that cannot be linked; return the mapping with these tensors.

    They are written under `directory`, which is made, or where the runner keeps jobs.
    """
    with writing(directory):
        directory.mkdir()
    catalog, job = layout.write(directory, admission, runner, progress)
    return WrittenTables(mapping.over(catalog), job)


def unmatched_with(graph: InferenceGraph, catalog: Catalog, rules: MappingRules) -> Unmatched:
    """Find unmatched variables and tensors; a table stands for all tensors that it is made of."""
    known = embedding_variables(catalog) if graph.dynamic_tables else {}
    lost, taken = [], set[str]()
    for table in graph.dynamic_tables:
        found = find_variable(known, rules.renamed(table.name) or table.name)
        if found is not None and (found.dim, found.value_dtype) == (table.dim, table.value_dtype):
            own = [found, *(each for each in known.values() if each.slot_of == found.name)]
            taken |= {name for each in own for part in each.parts for name in part.tensor_names}
        else:
            lost.append(table)
    free = {name: ref for name, ref in catalog.tensors.items() if name not in taken}
    left = find_unmatched(graph, replace(catalog, tensors=free), rules)
    tables = tuple(_leftover(table, known) for table in lost)
    matched = left.matched + len(graph.dynamic_tables) - len(lost)
    reason = left.reason or (f"{len(lost)} tables are not in the checkpoint" if lost else "")
    return replace(left, variables=(*left.variables, *tables), matched=matched, reason=reason)


def _leftover(table: GraphDynamicTable, known: Mapping[str, EmbeddingVariable]) -> Leftover:
    """Return a table that the checkpoint lacks, with the embedding variables of its kind."""
    like = [
        variable
        for variable in known.values()
        if variable.slot_of is None and (variable.dim, variable.value_dtype) == (table.dim, table.value_dtype)
    ]
    rows = [
        TensorRef(variable.name, variable.value_dtype, (variable.rows, variable.dim), None)
        for variable in like
    ]
    wanted = GraphVariable(table.nodes[-1], table.name, table.value_dtype, (-1, table.dim))
    return Leftover(wanted, tuple(rows))


def _plan(
    table: GraphDynamicTable,
    known: Mapping[str, EmbeddingVariable],
    catalog: Catalog,
    rules: MappingRules,
    head_room: float,
    awaited: Mapping[str, int],
) -> TablePlan:
    """Plan a table with room for more keys; MissingTensors, or ShapeMismatch, if none is its like."""
    name = rules.renamed(table.name) or table.name
    found = find_variable(known, name)
    if found is None:
        near = get_close_matches(name, known, n=3, cutoff=0.4) or list(known)[:3]
        raise MissingTensors(
            f"{catalog.prefix.name} has no embedding variable {name!r}",
            cause=f"it has {', '.join(map(repr, near))}" if near else "it has none at all",
        )
    if (found.dim, found.value_dtype) != (table.dim, table.value_dtype):
        raise ShapeMismatch(
            f"table {table.name!r} has rows of {table.value_dtype.label}[{table.dim}] in the graph, "
            f"{found.value_dtype.label}[{found.dim}] in {catalog.prefix.name}",
            cause="the checkpoint is of another model, or the graph was built with other sizes",
        )
    return TablePlan.of(table.name, found, table.defaults, head_room, awaited.get(found.name, 0))


def _awaited_keys(catalog: Catalog) -> Counter[str]:
    """Count the keys of each table in the increments on top of a checkpoint; 0 if these are damaged.

    Some may be new: without room for them a base could not take its first delta.
    """
    try:
        return keys_to_come(catalog)
    except CheckpointError:
        return Counter()
