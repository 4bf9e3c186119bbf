"""A dynamic table as the trainer has it: its full checkpoint with what increments touched since."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from exporter.catalog import Catalog
from exporter.checkpoint.admission import EVERYONE, Admission, admitted
from exporter.checkpoint.cast_values import cast_values
from exporter.checkpoint.embedding_variables import EmbeddingVariable, read_keys
from exporter.checkpoint.tensor_values import checked_map
from exporter.delta.keyed_rows import KeyedRows
from exporter.integer_sets import among
from exporter.wire.dtypes import DType

Array = np.ndarray[Any, Any]


_NONE = np.empty(0, np.int64)


class TrainedTable(Struct, frozen=True, eq=False):
    """The admitted keys of a table, and where their rows are.

    `places` counts through the rows of all `parts` in the full checkpoint, then through `touched`, which are
    as they are served, in `dtype`.
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
        """The table, every checksum verified; what was touched and removed since is laid over it.

        A touched key counts as recent, and its frequency is the newest.

        Raises:
            CorruptFile: the table is damaged, see `embedding_variables`.
            CheckpointChanged: a shard vanished or shrank since the catalog was read.
            MappingError: a value does not fit the dtype.
        """
        keys = read_keys(catalog, variable)
        mask = admitted(catalog, variable, admission, catalog.step)
        parts = tuple(checked_map(catalog, part.values) for part in variable.parts)
        places = np.arange(len(keys))
        if touched is None:
            chosen = slice(None) if mask is None else mask
            return cls(variable, dtype, keys[chosen], places[chosen], parts, None)
        touched = in_dtype(touched, dtype)
        enough = np.broadcast_to(admission.enough(touched.freqs), len(touched))
        is_old = (touched.rows_of(keys) < 0) & ~among(keys, np.sort(removed))
        kept = is_old if mask is None else is_old & mask
        keys = np.concatenate([keys[kept], touched.keys[enough]])
        places = np.concatenate([places[kept], len(is_old) + np.flatnonzero(enough)])
        return cls(variable, dtype, keys, places, parts, touched)

    @property
    def dim(self) -> int:
        """The length of its rows."""
        return self.variable.dim

    @property
    def bytes_(self) -> int:
        """Bytes of its rows as they are served."""
        return len(self.keys) * self.variable.dim * self.dtype.numpy.itemsize

    def values(self, places: Array) -> Array:
        """The rows of the keys at these places of `keys`, in the dtype that is served."""
        wanted = self.places[places]
        values = np.empty((len(wanted), self.variable.dim), self.dtype.numpy)
        start = 0
        for part in self.parts:
            inside = (wanted >= start) & (wanted < start + len(part))
            if inside.any():
                rows = part[wanted[inside] - start]
                values[inside] = cast_values(rows, self.dtype, self.variable.name)
            start += len(part)
        if self.touched is not None:
            inside = wanted >= start
            values[inside] = self.touched.values[wanted[inside] - start]
        return values


def in_dtype(rows: KeyedRows, dtype: DType) -> KeyedRows:
    """The rows as they are served.

    Raises:
        MappingError: a value does not fit the dtype.
    """
    values = cast_values(np.asarray(rows.values), dtype, rows.name)
    return KeyedRows(rows.name, rows.keys, values, rows.freqs)
