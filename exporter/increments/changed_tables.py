"""Tables by keys in increments: keys with new rows, and keys removed since the full checkpoint.

In an increment's bundle a table `<name>` that is trained with stock TensorFlow has

    <name>/ids       int64 [n]        numbers of the rows that changed, strictly increasing
    <name>/keys      int64 [n]        the keys of these rows, no key twice
    <name>/values    dtype [n, dim]   the rows
    <name>/removed   int64 [m]        keys that had rows before and have none any more, increasing

The numbers of the rows are the trainer's: optimizers' slots use them. Removed keys are applied first: a key
that is also among `keys` got a row again.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from msgspec import Struct

from exporter.catalog import Catalog
from exporter.checkpoint.admission import EVERYONE, Admission, admitted
from exporter.checkpoint.embedding_variables import EmbeddingVariable, read_keys
from exporter.checkpoint.tensor_bundle import read_array
from exporter.checkpoint.tensor_values import cast_values, checked_map
from exporter.delta.table_changes import KeyedRows
from exporter.errors import CorruptFile
from exporter.tables.integer_sets import among, distinct
from exporter.wire.dtypes import Array, DType
from exporter.wire.json_documents import Count, DtypeLabel, Text, doc

_NONE = np.empty(0, np.int64)


class TrainedTable(Struct, frozen=True, eq=False):
    """The keys of a trainer's table that are to be served, and the places of their rows.

    `places` counts through the rows of all `parts` in the full checkpoint, then through `touched`. All are in
    the trainer's form; `values` returns rows in the served `dtype`.
    """

    variable: EmbeddingVariable
    dtype: DType
    keys: Array
    places: Array
    parts: tuple[Array, ...]
    touched: KeyedRows | None

    @classmethod
    def read(
        cls,
        catalog: Catalog,
        variable: EmbeddingVariable,
        dtype: DType,
        admission: Admission = EVERYONE,
        touched: KeyedRows | None = None,
        removed: Array = _NONE,
    ) -> TrainedTable:
        """Read a trainer's table, checksums verified, with `touched` rows on top and without `removed` keys.

        `dtype` is the dtype of the served rows, which `values` casts to. Keys that `admission` does not admit
        are left out. `touched` are newer rows by key: they replace stored rows and follow them in `keys`.
        `removed` are keys, ignored without `touched`. Stored rows stay memory maps.

        Raises:
            CorruptFile: a checksum is wrong, or the keys are damaged.
            CheckpointChanged: a shard vanished or shrank since the catalog was read.
            CheckpointError: a shard cannot be read, or fetched from a store.
            DiskFull, PublishError: bytes fetched from a store cannot be written.
        """
        # A touched key counts as recent, and its frequency is the newest.
        keys = read_keys(catalog, variable)
        mask = admitted(catalog, variable, admission, catalog.step)
        parts = tuple(checked_map(catalog, part.values) for part in variable.parts)
        places = np.arange(len(keys))
        if touched is None:
            chosen = slice(None) if mask is None else mask
            return cls(variable, dtype, keys[chosen], places[chosen], parts, None)
        enough = np.broadcast_to(admission.enough(touched.freqs), len(touched))
        is_old = (touched.rows_of(keys) < 0) & ~among(keys, np.sort(removed))
        kept = is_old if mask is None else is_old & mask
        keys = np.concatenate([keys[kept], touched.keys[enough]])
        places = np.concatenate([places[kept], len(is_old) + np.flatnonzero(enough)])
        return cls(variable, dtype, keys, places, parts, touched)

    def values(self, places: Array) -> Array:
        """Return the rows of the keys with the indices `places` in `keys`, cast to the served dtype.

        They are in the order of `places`. Raises MappingError if a value is too large for the dtype; for
        int8, NotFinite if a row has no code (it holds NaN, infinity or too large a value).
        """
        wanted = self.places[places]
        values = np.empty((len(wanted), self.variable.dim), self.variable.value_dtype.numpy)
        start = 0
        touched = () if self.touched is None else (self.touched.values,)
        for part in (*self.parts, *touched):
            inside = (wanted >= start) & (wanted < start + len(part))
            if inside.any():
                values[inside] = part[wanted[inside] - start]
            start += len(part)
        return cast_values(values, self.dtype, self.variable.name)


def in_dtype(rows: KeyedRows, dtype: DType) -> KeyedRows:
    """Return `rows` with their values cast to `dtype`, in which they are served; int8 rows become codes.

    Arrays that need no cast are shared with `rows`. Raises MappingError if a value is too large for the
    dtype; for int8, NotFinite if a row has no code (it holds NaN, infinity or too large a value).
    """
    values = cast_values(np.asarray(rows.values), dtype, rows.name)
    return KeyedRows(rows.name, rows.keys, values, rows.freqs)


class ChangedTable(Struct, frozen=True, rename={"label": "dtype"}):
    """A table by keys in an increment's manifest."""

    name: Annotated[Text, doc("its name in checkpoints")]
    label: Annotated[DtypeLabel, doc("TensorFlow's name of its rows' dtype")]
    dim: Annotated[Count, doc("the length of its rows")]
    capacity: Annotated[Count, doc("the number of rows that the trainer has room for")]
    rows: Annotated[Count, doc("the number of its rows in the increment")]
    removed: Annotated[Count, doc("the number of keys that were removed")]

    @property
    def dtype(self) -> DType:
        """The dtype of the table's rows."""
        return DType.of(self.label)

    @property
    def keys(self) -> tuple[str, str, str, str]:
        """The names of the table's tensors: row numbers, keys, rows, removed keys."""
        return f"{self.name}/ids", f"{self.name}/keys", f"{self.name}/values", f"{self.name}/removed"


class TableRows(Struct, frozen=True, eq=False):
    """The tensors of one table in an increment; see the module."""

    ids: Array
    keys: Array
    values: Array
    removed: Array


def read_table(catalog: Catalog, table: ChangedTable) -> TableRows:
    """Read a table's four tensors from an increment's bundle into memory, every checksum verified.

    Raises CorruptFile if a checksum is wrong, a key is there twice, or the tensors do not fit `table`, their
    entry in the manifest; CheckpointChanged if a shard vanished, other CheckpointErrors if it cannot be read.
    """
    count = (table.rows,)
    shapes = (count, count, (table.rows, table.dim), (table.removed,))
    dtypes = (DType.INT64, DType.INT64, table.dtype, DType.INT64)
    tensors = zip(table.keys, dtypes, shapes, strict=True)
    found = TableRows(*(read_listed(catalog, key, dtype, shape) for key, dtype, shape in tensors))
    check_ids(catalog, table.name, found.ids, table.capacity)
    for keys in (found.keys, found.removed):
        if len(distinct(keys)) != len(keys):
            raise CorruptFile(f"{catalog.prefix}: a key of {table.name!r} is there twice")
    return found


def read_listed(catalog: Catalog, key: str, dtype: DType, shape: tuple[int | None, ...]) -> Array:
    """Read the tensor `key` of an increment's bundle into memory, checksum verified.

    `dtype` and `shape` are the manifest's. Raises CorruptFile if the tensor is absent or damaged, or has
    another dtype or shape; CheckpointChanged if its shard vanished, other CheckpointErrors if it cannot be
    read.
    """
    ref = catalog.tensors.get(key)
    if ref is None or ref.dtype is not dtype or ref.shape != shape:
        found = "not there" if ref is None else f"{ref.dtype.label}{list(ref.shape)}"
        expected = f"{dtype.label}{list(shape)}"
        raise CorruptFile(f"{catalog.prefix}: {key!r} is {found}, its manifest says {expected}")
    return read_array(catalog, ref)


def check_ids(catalog: Catalog, name: str, ids: Array, rows: int, *, of: object = None) -> None:
    """Raise CorruptFile unless `ids` are strictly increasing row numbers within [0, rows).

    The message names `catalog` and the variable `name`, and shows `of` instead of `rows` if it is given.
    """
    is_inside = not len(ids) or (ids[0] >= 0 and ids[-1] < rows)
    if not is_inside or (ids[1:] <= ids[:-1]).any():
        raise CorruptFile(f"{catalog.prefix}: the ids of {name!r} are not rows of {of or rows}")
