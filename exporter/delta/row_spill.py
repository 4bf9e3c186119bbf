"""Rows of a table that are found one after another: in memory, or in a file if they are many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from exporter.delta.format import Rows, ServedVariable
from exporter.wire.dtypes import Array

ROWS_AT_ONCE = 1 << 16
"""The number of a table's rows that are processed at a time."""
SPILL_BYTES = 256 << 20
"""The bytes of a table's rows in memory above which they are written to the scratch file."""


class RowSpill:
    """Collects rows of a table in ascending order, in a file if they are many; a context manager."""

    # The file has no name and is closed at the end; the map in the result of `rows` keeps it alive.

    def __init__(self, variable: ServedVariable, scratch: Path, limit: int = SPILL_BYTES) -> None:
        self._variable, self._scratch, self._limit = variable, scratch, limit
        self._ids: list[Array] = []
        self._values: list[Array] = []
        self._in_memory = 0
        self._spilled = 0
        self._file: Any = None

    def __enter__(self) -> RowSpill:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, ids: Array, values: Array) -> None:
        """Add rows, whose ids (ascending) follow all ids added before.

        `values` [n, ...] must not be changed afterwards. If the values in memory exceed `limit` bytes, they
        are written to the file. Raises OSError if that fails.
        """
        if not len(ids):
            return
        self._ids.append(ids)
        self._values.append(values)
        self._in_memory += values.nbytes
        if self._in_memory > self._limit:
            self._spill()

    def rows(self) -> Rows | None:
        """Return all rows that were added, as arrays or a map of the file, which outlives the context.

        None if no rows were added. Raises OSError if the file cannot be written.
        """
        if not self._ids:
            return None
        ids = np.concatenate(self._ids)
        if self._file is None:
            return Rows(ids, np.concatenate(self._values))
        self._spill()
        self._file.flush()  # the map below does not see the writer's buffer
        shape = (len(ids), *self._variable.shape[1:])
        values = np.memmap(self._file, np.uint8, "r", shape=(self._spilled,))
        return Rows(ids, values.view(np.ndarray).view(self._variable.dtype.numpy).reshape(shape))

    def _spill(self) -> None:
        import tempfile

        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._scratch)  # noqa: SIM115  __exit__ closes it
        for values in self._values:
            self._file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
            self._spilled += values.nbytes
        self._values, self._in_memory = [], 0


def spilled(variable: ServedVariable, scratch: Path, found: Iterable[tuple[Array, Array]]) -> Rows | None:
    """Return the ids and values that `found` yields in ascending order, as rows of a table.

    None if there are none. They are a map of an unnamed file in `scratch` if they are many. Raises OSError if
    it cannot be written.
    """
    with RowSpill(variable, scratch) as spill:
        for ids, values in found:
            spill.add(ids, values)
        return spill.rows()


def in_pieces(ids: Array) -> Iterator[Array]:
    """Yield an array in consecutive pieces of at most `ROWS_AT_ONCE` elements."""
    return (ids[start : start + ROWS_AT_ONCE] for start in range(0, len(ids), ROWS_AT_ONCE))
