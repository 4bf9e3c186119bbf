"""Examine the tables by keys of a checkpoint, a SavedModel, or a log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from exporter.catalog import Catalog
from exporter.checkpoint.embedding_variables import bucket_sizes, embedding_variables
from exporter.checkpoint.tensor_bundle import memory_map
from exporter.delta.table_changes import ServedTable
from exporter.errors import CheckpointError, CorruptFile
from exporter.mapping.extras import classify_extras
from exporter.pipeline.inspected import CheckpointView, EmbeddingTable, ServedTableView
from exporter.publish.delta_log import DeltaLog
from exporter.tables.change_index import ArrayState, TableState, live_rows
from exporter.tables.geometry import TableGeometry
from exporter.tables.lookup import first_defaults
from exporter.tables.parts import PARTS
from exporter.wire.dtypes import DType
from exporter.wire.int8_codes import SCALE_BYTES
from exporter.wire.protos import Proto


def inspect_checkpoint(catalog: Catalog) -> CheckpointView:
    """Return the view of a checkpoint; if its tables by keys are damaged, the error is its `problem`."""
    kinds = tuple(classify_extras(catalog))
    try:
        return CheckpointView(catalog, kinds, tuple(embedding_tables(catalog)))
    except CheckpointError as error:
        return CheckpointView(catalog, kinds, problem=error)


def embedding_tables(catalog: Catalog) -> Iterator[EmbeddingTable]:
    """Yield the embedding variables of a checkpoint; slots are listed with their variable, not by themselves.

    Raises, while iterated, CheckpointError and subclasses if their tensors are damaged or of an unknown
    layout, or cannot be read.
    """
    variables = embedding_variables(catalog)
    for variable in variables.values():
        if variable.slot_of is None:
            below = f"{variable.name}/"
            slots = (name for name, other in variables.items() if other.slot_of == variable.name)
            yield EmbeddingTable(
                name=variable.name,
                key_dtype=variable.key_dtype.label,
                dtype=variable.value_dtype.label,
                dimension=variable.dim,
                keys=variable.rows,
                bytes=variable.bytes_,
                filtered_keys=variable.filtered_keys,
                parts=len(variable.parts),
                slots=tuple(name.removeprefix(below) for name in slots),
                keys_by_remainder=tuple(bucket_sizes(catalog, variable).tolist()),
            )


def tables_of_bundle(catalog: Catalog, graphs: Iterable[Proto]) -> Iterator[ServedTableView]:
    """Yield the dynamic tables of a SavedModel's graphs, sorted by name, from the variables in `catalog`.

    `catalog` has the variables by their names in the graphs. Tables without all four variables are left out.
    Raises, while iterated, CorruptFile if variables are inconsistent, GraphError if a graph is damaged,
    CheckpointChanged if a shard vanished.
    """
    firsts = {name: first for graph in graphs for name, first in first_defaults(graph.graph_def).items()}
    for name, first in sorted(firsts.items()):
        found = [catalog.tensors.get(f"{name}/{part}") for part in PARTS]
        seeds, rows, keys, values = found
        if seeds is None or rows is None or keys is None or values is None:
            continue
        try:
            (groups,), (slots,), (capacity,), (_, width) = seeds.shape, rows.shape, keys.shape, values.shape
            geometry = TableGeometry.of_shapes(groups, slots, capacity, capacity - first)
        except ValueError as error:
            raise CorruptFile(f"the variables of table {name!r} are inconsistent: {error}") from None
        empty = np.empty(0, np.int64)
        state = ArrayState(empty, memory_map(catalog, rows), empty)
        yield _view(name, values.dtype, width, geometry, state)


def tables_of_log(log: DeltaLog) -> Iterator[ServedTableView]:
    """Yield the dynamic tables of a log at its newest position, in the order of the base's manifest.

    All of a table's index is read. Nothing is raised before the result is iterated.

    Raises:
        CheckpointError: the tables cannot be read.
        VerificationError, PositionError: manifests cannot be read, a signed file differs, or deltas are
            missing.
    """
    tables = log.base.entry.mapping_spec.dynamic
    if tables:
        state = log.state(only={key for table in tables for key in table.keys})
        for table in tables:
            served = ServedTable.of(table, log.schema, state)
            values = served.row_values
            yield _view(table.name, values.dtype, values.shape[1], served.geometry, served)


def _view(name: str, dtype: DType, width: int, geometry: TableGeometry, state: TableState) -> ServedTableView:
    """Return the view of a table whose rows are stored as `width` numbers of `dtype`; all its index is read.

    `geometry` has the table's sizes, `state` reads its index. Rows of int8 are codes followed by a scale:
    trainers' tables of integers are not served by keys. Raises CorruptFile if the index points to rows that
    do not exist.
    """
    try:
        keys = int(np.count_nonzero(live_rows(geometry, state)))
    except IndexError:
        raise CorruptFile(f"the index of table {name!r} leads to rows that it does not have") from None
    return ServedTableView(
        name=name,
        dtype=dtype.label,
        dimension=width - SCALE_BYTES if dtype is DType.INT8 else width,
        keys=keys,
        free_rows=geometry.usable_rows - keys,
        load_factor=round(keys / geometry.slots, 3),
        bytes=geometry.capacity * width * (dtype.itemsize or 0),
        index_bytes=geometry.index_bytes,
    )
