"""Lay out the dynamic tables of a graph: find them in the checkpoint, and set their sizes in the graph."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from exporter.catalog import Catalog, SliceSpec, TensorRef
from exporter.checkpoint.admission import Admission
from exporter.checkpoint.embedding_variables import EmbeddingVariable, embedding_variables, find_variable
from exporter.delta.row_reader import RowReader
from exporter.errors import CheckpointError, MappingError, MissingTensors, ShapeMismatch, UsageError
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
from exporter.wire.dtypes import DType
from exporter.wire.int8_codes import beside_codes, to_codes

DEFAULT_HEAD_ROOM = 0.25


class WrittenTables(Struct, frozen=True):
    """A mapping to written tensors, including indexes of tables, and the job that built these."""

    mapping: VariableMapping
    job: Job


def lay_out_tables(
    graph: InferenceGraph,
    catalog: Catalog,
    rules: MappingRules,
    admission: Admission,
    head_room: float | None,
) -> tuple[InferenceGraph, TableLayout | None]:
    """Size the graph's dynamic tables by the checkpoint; return the graph, and a layout if tables need one.

    Tables of a published version, given as checkpoint, do not. `admission` says which keys get a row.
    `head_room` is the room for more keys, as a share of the present ones; None: a quarter.

    Raises:
        UsageError: there are options about tables without any, or the head room is negative, or a table would
            be too large.
        MissingTensors, ShapeMismatch, MappingError: the checkpoint has no such table, or other rows.
        CheckpointError: the tables are damaged, or cannot be read.
        OSError: the directory with DeepRec's increments cannot be listed.
        GraphError: the graph's tables are damaged.
    """
    known = embedding_variables(catalog) if graph.dynamic_tables else {}
    served = _published(graph, known, catalog, rules)
    for table in graph.dynamic_tables:
        if table.name in served:
            _check_rows(table, catalog, served[table.name][-1])
    tables = tuple(replace(table, is_laid_out=table.name in served) for table in graph.dynamic_tables)
    graph = replace(graph, dynamic_tables=tables)
    shapes = {
        variable.key: ref.shape
        for table in tables
        for variable, ref in zip(table.variables, served.get(table.name, ()), strict=False)
    }
    wanted = [table for table in tables if not table.is_laid_out]
    if not wanted:
        if not admission.is_everyone:
            raise UsageError(
                "--keys chooses keys of dynamic tables, and there are none to lay out",
                hint="leave them out",
            )
        if head_room is not None:
            raise UsageError("--table-head-room is for dynamic tables, and there are none to lay out")
        return with_table_shapes(graph, shapes), None
    head_room = DEFAULT_HEAD_ROOM if head_room is None else head_room
    if not 0 <= head_room < math.inf:
        raise UsageError(
            f"--table-head-room {head_room}: expected how many times more keys to have room for",
            hint="--table-head-room 0.25 has room for a quarter more",
        )
    awaited = _awaited_keys(catalog)
    plans = [_plan(table, known, catalog, rules, head_room, awaited) for table in wanted]
    admission.require_recorded(catalog, tuple(plan.variable for plan in plans))
    layout = lay_out(catalog, plans)
    return with_table_shapes(graph, {**layout.shapes, **shapes}), layout


def map_laid_out(
    graph: InferenceGraph, catalog: Catalog, layout: TableLayout | None, rules: MappingRules
) -> VariableMapping:
    """Map a graph's variables, including variables of laid out tables, to tensors, and return the mapping.

    `layout` is None without laid out tables. Raises MappingError and subclasses if a variable has no certain
    tensor, CheckpointError if the checkpoint's object graph is damaged or cannot be read.
    """
    if layout is None:
        return build_mapping(graph, catalog, rules)
    # A table's slices are in the order of its rows.
    ordered = dict.fromkeys(layout.shapes, PartitionStrategy.DIV)
    named = {name: name for name in layout.shapes}  # object-based checkpoints do not have them as objects
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

    `admission` says which keys get a row. The files are written under `directory`, which must not exist, or
    where the runner keeps jobs. Waits for all tasks. Raises CheckpointError if tables are damaged,
    PublishError if they cannot be written, EngineFailed if the runner's engine fails.
    """
    with writing(directory):
        directory.mkdir()
    catalog, job = layout.write(directory, admission, runner, progress)
    return WrittenTables(mapping.over(catalog), job)


def unmatched_with(graph: InferenceGraph, catalog: Catalog, rules: MappingRules) -> Unmatched:
    """Return the unmatched variables and tensors; a table counts as all tensors of which it consists.

    Raises CheckpointError if the checkpoint's tables are damaged or cannot be read, AmbiguousRename if two
    rules rename a table.
    """
    known = embedding_variables(catalog) if graph.dynamic_tables else {}
    served = _published(graph, known, catalog, rules)
    lost, taken = [], {ref.name for refs in served.values() for ref in refs}
    for table in graph.dynamic_tables:
        found = find_variable(known, rules.renamed(table.name) or table.name)
        if found is not None and (found.dim, found.value_dtype) == (table.dim, table.value_dtype):
            own = [found, *(each for each in known.values() if each.slot_of == found.name)]
            taken |= {name for each in own for part in each.parts for name in part.tensor_names}
        elif table.name not in served:
            lost.append(table)
    free = {name: ref for name, ref in catalog.tensors.items() if name not in taken}
    left = find_unmatched(graph, replace(catalog, tensors=free), rules)
    tables = tuple(_leftover(table, known) for table in lost)
    matched = left.matched + len(graph.dynamic_tables) - len(lost)
    reason = left.reason or (f"{len(lost)} tables are not in the checkpoint" if lost else "")
    return replace(left, variables=(*left.variables, *tables), matched=matched, reason=reason)


def _leftover(table: GraphDynamicTable, known: Mapping[str, EmbeddingVariable]) -> Leftover:
    """Return the record of a table that the checkpoint lacks, with variables that have the same kind of rows.

    These are embedding variables of the checkpoint (`known`, by name), not slots, with rows of the table's
    dtype and dimension.
    """
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


def _published(
    graph: InferenceGraph,
    known: Mapping[str, EmbeddingVariable],
    catalog: Catalog,
    rules: MappingRules,
) -> dict[str, list[TensorRef]]:
    """Return the tensors (seeds, rows, keys, values) of the tables of a published version, by table name.

    `catalog` is the checkpoint: {} if it is not a published version. Tables that it also has as embedding
    variables (`known`), or of which it lacks a tensor, are left out. Raises AmbiguousRename if two rules
    rename a variable.
    """
    served = dict[str, list[TensorRef]]()
    for table in graph.dynamic_tables:
        names = [rules.renamed(variable.key) or variable.key for variable in table.variables]
        refs = [catalog.tensors[name] for name in names if name in catalog.tensors]
        is_trained = find_variable(known, rules.renamed(table.name) or table.name) is not None
        if not is_trained and len(refs) == len(names) and all(ref.content is None for ref in refs):
            served[table.name] = refs
    return served


def _check_rows(table: GraphDynamicTable, catalog: Catalog, values: TensorRef) -> None:
    """Raise an error if a published table, with the tensor `values`, differs from the graph's.

    ShapeMismatch for other rows, MappingError for other values of the rows for absent keys, CheckpointError
    if these cannot be read.
    """
    dtype, shape, count = values.dtype, values.shape, len(table.defaults)
    if dtype is not table.value_dtype or len(shape) != 2 or shape[1] != table.dim or shape[0] < count:
        raise _other_rows(table, dtype, shape[-1] if shape else 0, catalog)
    wanted = beside_codes(*to_codes(table.defaults)[:2]) if dtype is DType.INT8 else table.defaults
    rows = RowReader(values.name, catalog, values, SliceSpec.whole(shape), dtype)
    # As bytes: a NaN would differ from itself.
    if rows.rows(shape[0] - count, shape[0]).tobytes() != wanted.tobytes():
        raise MappingError(
            f"absent keys of table {table.name!r} read other rows in the graph than in {catalog.prefix}",
            cause="the checkpoint is a published version: its rows for absent keys are served as they are",
            hint="name the trainer's checkpoint by --ckpt-dir, or let --model be that version, too",
        )


def _other_rows(table: GraphDynamicTable, dtype: DType, dim: int, catalog: Catalog) -> ShapeMismatch:
    """Return the error for a table with rows of `dtype` and size `dim` in the checkpoint alone."""
    return ShapeMismatch(
        f"table {table.name!r} has rows of {table.value_dtype.label}[{table.dim}] in the graph, "
        f"{dtype.label}[{dim}] in {catalog.prefix.name}",
        cause="the checkpoint is of another model, or the graph was built with other sizes, or published "
        "with --cast",
    )


def _plan(
    table: GraphDynamicTable,
    known: Mapping[str, EmbeddingVariable],
    catalog: Catalog,
    rules: MappingRules,
    head_room: float,
    awaited: Mapping[str, int],
) -> TablePlan:
    """Plan a table by the checkpoint's embedding variable, with room for more keys.

    The room is for `head_room` times as many more keys as the variable has, and for the keys in increments.
    `known` are the checkpoint's embedding variables, `awaited` the numbers of keys in increments, both by
    name. Raises MissingTensors if the checkpoint has no such table, ShapeMismatch if it has other rows,
    AmbiguousRename if two rules rename the table, UsageError if the table would be too large.
    """
    name = rules.renamed(table.name) or table.name
    found = find_variable(known, name)
    if found is None:
        near = get_close_matches(name, known, n=3, cutoff=0.4) or list(known)[:3]
        raise MissingTensors(
            f"{catalog.prefix.name} has no embedding variable {name!r}",
            cause=f"it has {', '.join(map(repr, near))}" if near else "it has none at all",
        )
    if (found.dim, found.value_dtype) != (table.dim, table.value_dtype):
        raise _other_rows(table, found.value_dtype, found.dim, catalog)
    return TablePlan.of(table.name, found, table.defaults, head_room, awaited.get(found.name, 0))


def _awaited_keys(catalog: Catalog) -> Counter[str]:
    """Return the number of keys in a checkpoint's increments, by table; empty if an increment is damaged.

    Some may be new: without room for them a base could not apply its first delta. OSError if the
    directory with DeepRec's increments cannot be listed.
    """
    try:
        return keys_to_come(catalog)
    except CheckpointError:
        return Counter()
