"""Tables by keys for `inspect`: how large they are, and how their keys are spread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from exporter.catalog import Catalog
from exporter.checkpoint.embedding_variables import bucket_sizes, embedding_variables
from exporter.checkpoint.tensor_bundle import memory_map
from exporter.delta.table_changes import ServedTable
from exporter.errors import CorruptFile
from exporter.publish.delta_log import DeltaLog
from exporter.tables.change_index import ArrayState, TableState, live_rows
from exporter.tables.geometry import PARTS, TableGeometry
from exporter.tables.lookup import first_defaults
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto

Array = np.ndarray[Any, Any]


class EmbeddingTable(Struct, frozen=True):
    """An embedding variable: a table whose rows have arbitrary integers as keys."""

    name: str
    """The variable's name, without its part."""
    key_dtype: str
    """The type of its keys."""
    dtype: str
    """The type of its rows."""
    dimension: int
    """How many numbers a row has."""
    keys: int
    """How many keys have a row."""
    bytes: int
    """Bytes of the rows."""
    filtered_keys: int
    """How many more keys were seen, but too seldom to get a row."""
    parts: int
    """In how many parts it is stored."""
    slots: tuple[str, ...]
    """The optimizer's slots beside it."""
    keys_by_remainder: tuple[int, ...]
    """For 0 to 999: how many keys have this remainder of a division by 1000."""


def embedding_tables(catalog: Catalog) -> Iterator[EmbeddingTable]:
    """The embedding variables of a checkpoint; slots are listed with the variable that they belong to.

    Raises:
        CheckpointError: one is damaged, or has rows outside the checkpoint's tensors.
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


class ServedTableView(Struct, frozen=True):
    """A dynamic table as it is served: rows have arbitrary integers as keys."""

    name: str
    """Its name."""
    dtype: str
    """The type of its rows."""
    dimension: int
    """How many numbers a row has."""
    keys: int
    """How many keys it holds."""
    free_rows: int
    """How many new keys there is room for."""
    load_factor: float
    """Which part of its index's places is taken."""
    bytes: int
    """Bytes of its rows, free ones among them."""
    index_bytes: int
    """Bytes of what leads from keys to rows."""


def tables_of_bundle(catalog: Catalog, graphs: Iterable[Proto]) -> Iterator[ServedTableView]:
    """The tables of a SavedModel's graphs, as its variables hold them.

    Raises:
        CheckpointError: they cannot be read.
    """
    firsts = {name: first for graph in graphs for name, first in first_defaults(graph.graph_def).items()}
    for name, first in sorted(firsts.items()):
        found = [catalog.tensors.get(f"{name}/{part}") for part in PARTS]
        seeds, rows, keys, values = found
        if seeds is None or rows is None or keys is None or values is None:
            continue
        geometry = _geometry(name, seeds.shape, rows.shape, keys.shape, first)
        empty = np.empty(0, np.int64)
        state = ArrayState(empty, memory_map(catalog, rows), empty)
        yield _view(name, values.dtype, values.shape[1], geometry, state)


def tables_of_log(log: DeltaLog) -> Iterator[ServedTableView]:
    """The dynamic tables of a log at its newest position.

    Raises:
        CheckpointError: they cannot be read.
    """
    tables = log.base.entry.mapping_spec.dynamic
    if tables:
        state = log.state(only={key for table in tables for key in table.keys})
        for table in tables:
            served = ServedTable.of(table, log.schema, state)
            yield _view(table.name, served.row_values.dtype, table.dim, served.geometry, served)


def _geometry(
    name: str, seeds: Sequence[int], rows: Sequence[int], keys: Sequence[int], first_default: int
) -> TableGeometry:
    try:
        return TableGeometry.of_shapes(seeds[0], rows[0], keys[0], keys[0] - first_default)
    except (ValueError, IndexError) as error:
        raise CorruptFile(f"the variables of table {name!r} are no table's: {error}") from None


def _view(name: str, dtype: DType, dim: int, geometry: TableGeometry, state: TableState) -> ServedTableView:
    try:
        keys = int(np.count_nonzero(live_rows(geometry, state)))
    except IndexError:
        raise CorruptFile(f"the index of table {name!r} leads to rows that it does not have") from None
    return ServedTableView(
        name=name,
        dtype=dtype.label,
        dimension=dim,
        keys=keys,
        free_rows=geometry.usable_rows - keys,
        load_factor=round(keys / geometry.slots, 3),
        bytes=geometry.capacity * dim * (dtype.itemsize or 0),
        index_bytes=geometry.index_bytes,
    )
