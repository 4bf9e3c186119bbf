"""Compare tables by keys for `diff`: which keys came or went, and whose rows differ.

A side's tables are the dynamic tables of a log at a position, or the embedding variables of a checkpoint,
wherever in them the keys stand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct

from exporter.catalog import Catalog
from exporter.checkpoint.embedding_variables import EmbeddingVariable, embedding_variables
from exporter.delta.compare_rows import differing_rows
from exporter.delta.table_changes import ServedTable
from exporter.increments.trained_table import TrainedTable
from exporter.integer_sets import among
from exporter.mapping.mapping_spec import MappingSpec
from exporter.publish.delta_log import DeltaLog
from exporter.wire.dtypes import DType

Array = np.ndarray[Any, Any]

_ROWS_AT_ONCE = 1 << 16


class TableDifference(Struct, frozen=True):
    """How a table differs: keys that one side lacks, and rows of the others.

    The Euclidean norm and the largest element are of the difference of the rows whose keys both sides have.
    """

    name: str
    keys: int
    only_a: int
    only_b: int
    changed_rows: int
    norm: float
    largest: float

    @property
    def is_empty(self) -> bool:
        """True if both sides hold the same keys and the same bits."""
        return not (self.only_a or self.only_b or self.changed_rows)


class ServedKeys(Struct, frozen=True, eq=False):
    """A published table as keys and their rows."""

    table: ServedTable
    rows: Array
    keys: Array

    @classmethod
    def read(cls, table: ServedTable) -> ServedKeys:
        """All keys, every checksum verified.

        Raises:
            CheckpointError: what is published is damaged.
        """
        table.check()
        return cls(table, *table.live())

    @property
    def dtype(self) -> DType:
        """The type of its rows."""
        return self.table.row_values.dtype

    @property
    def dim(self) -> int:
        """The length of its rows."""
        return self.table.row_values.shape[1]

    def values(self, places: Array) -> Array:
        """The rows of the keys at these places of `keys`."""
        return self.table.state.rows_at(self.table.row_values.name, self.rows[places])


Keyed: TypeAlias = "ServedKeys | TrainedTable"


def tables_of_log(log: DeltaLog, position: int) -> dict[str, Keyed]:
    """The dynamic tables at a position.

    Raises:
        CheckpointError: what is published is damaged.
    """
    spec, state = log.base.entry.mapping_spec, log.state(position)
    tables = (ServedTable.of(table, log.schema, state) for table in spec.dynamic)
    return {table.name: ServedKeys.read(table) for table in tables}


def tables_as_served(catalog: Catalog, log: DeltaLog) -> dict[str, Keyed]:
    """A checkpoint's embedding variables as a log would serve them.

    Raises:
        CheckpointError: one is damaged.
    """
    spec: MappingSpec = log.base.entry.mapping_spec
    known = embedding_variables(catalog) if spec.dynamic else {}
    dtypes = {variable.name: variable.dtype for variable in log.schema.variables}
    found: dict[str, Keyed] = {}
    for table in spec.dynamic:
        variable = known.get(spec.trained_name(table))
        if variable is not None and variable.dim == table.dim:
            dtype = dtypes[table.keys[3]]
            found[table.name] = TrainedTable.read(catalog, variable, dtype, spec.rules.admission)
    return found


def common_tables(a: Catalog, b: Catalog) -> tuple[dict[str, Keyed], dict[str, Keyed], set[str]]:
    """The embedding variables that two checkpoints have with rows of one kind, and all their tensors' names.

    Raises:
        CheckpointError: one is damaged.
    """
    ours, theirs = embedding_variables(a), embedding_variables(b)
    names = [
        name
        for name in ours
        if name in theirs
        and (ours[name].dim, ours[name].value_dtype) == (theirs[name].dim, theirs[name].value_dtype)
    ]
    tensors = {
        tensor
        for variable in (*map(ours.get, names), *map(theirs.get, names))
        if variable is not None
        for part in variable.parts
        for tensor in part.tensor_names
    }
    return _trained(a, ours, names), _trained(b, theirs, names), tensors


def compare_tables(a: Mapping[str, Keyed], b: Mapping[str, Keyed]) -> Iterator[TableDifference]:
    """The tables that both sides have with rows of one kind, in the order of the first."""
    for name, ours in a.items():
        theirs = b.get(name)
        if theirs is not None and ours.dtype is theirs.dtype:
            yield _compare(name, ours, theirs)


def _trained(catalog: Catalog, known: Mapping[str, EmbeddingVariable], names: list[str]) -> dict[str, Keyed]:
    return {name: TrainedTable.read(catalog, known[name], known[name].value_dtype) for name in names}


def _compare(name: str, a: Keyed, b: Keyed) -> TableDifference:
    ours, theirs = np.argsort(a.keys), np.argsort(b.keys)
    in_both, in_ours = among(a.keys[ours], b.keys[theirs]), among(b.keys[theirs], a.keys[ours])
    places_a, places_b = ours[in_both], theirs[in_ours]
    changed, squares, largest = 0, 0.0, 0.0
    for start in range(0, len(places_a), _ROWS_AT_ONCE):
        step = slice(start, start + _ROWS_AT_ONCE)
        before, after = a.values(places_a[step]), b.values(places_b[step])
        differ = differing_rows(before, after)
        moved = np.abs(after[differ].astype(np.float64) - before[differ].astype(np.float64))
        changed += len(differ)
        squares += float((moved**2).sum())
        largest = max(largest, float(moved.max(initial=0.0)))
    gone, come = int(np.count_nonzero(~in_both)), int(np.count_nonzero(~in_ours))
    return TableDifference(name, len(places_a), gone, come, changed, math.sqrt(squares), largest)
