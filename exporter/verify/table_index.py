"""Check the index of staged dynamic tables: the checkpoint's keys must be found at their rows."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from msgspec import Struct

from exporter.catalog import Catalog, Extent, TensorRef
from exporter.checkpoint.source_shard import open_shard
from exporter.errors import CheckpointChanged, VerificationError
from exporter.tables.change_index import find_rows
from exporter.tables.geometry import TablePlan
from exporter.tables.lay_out import TableLayout
from exporter.tables.parts import INDEX_ROWS, INDEX_SEEDS, KEYS

Array = np.ndarray[Any, Any]

_ASKED = 1024  # keys looked up in each table: each takes four small reads


def verify_tables(layout: TableLayout, staged: Catalog, *, is_filtered: bool) -> None:
    """Look up about a thousand keys of each table of the checkpoint in the staged tables, as the graph does.

    The keys are evenly spread over the table's parts. `layout` has the tables and the checkpoint's catalog,
    `staged` is the catalog of the staged bundle. With `is_filtered`, an admission filter left keys out, and
    absent keys are accepted.

    Raises:
        VerificationError: a key is absent, or is at the row of another key.
        CheckpointChanged: a shard vanished or shrank since the catalog was read.
        CheckpointError: a shard cannot be opened.
        DiskFull, PublishError: bytes fetched from a store cannot be kept.
    """
    for table in layout.tables:
        named = {part: staged.tensors[f"{table.name}/{part}"] for part in (INDEX_SEEDS, INDEX_ROWS, KEYS)}
        state = _Staged(*(_Elements.of(staged, ref) for ref in named.values()))
        first = 0
        for part in table.variable.parts:
            if part.rows:
                keys = _Elements.of(layout.source, part.keys)
                asked = np.linspace(0, part.rows - 1, -(-_ASKED // len(table.variable.parts)))
                _check(table, state, keys, asked.astype(np.int64), first, is_filtered=is_filtered)
            first += part.rows


def _check(
    table: TablePlan, state: _Staged, stored: _Elements, asked: Array, first: int, *, is_filtered: bool
) -> None:
    keys = stored.at(asked).astype(np.int64)
    found = find_rows(table.geometry, state, keys)
    wrong = found != asked + first
    if is_filtered:
        wrong &= found >= 0  # a key that a filter left out is rightly absent
    if wrong.any():
        place = int(wrong.argmax())
        raise VerificationError(
            f"key {keys[place]} of table {table.name!r} is at row {found[place]} of the staged index, "
            f"expected row {asked[place] + first}"
        )


class _Elements(Struct, frozen=True):
    """The elements of a tensor of one dimension: its slices' extents, and each slice's first element."""

    catalog: Catalog
    dtype: np.dtype[Any]
    starts: Array
    extents: tuple[Extent, ...]

    @classmethod
    def of(cls, catalog: Catalog, ref: TensorRef) -> _Elements:
        if ref.extent is not None:
            return cls(catalog, ref.dtype.numpy, np.zeros(1, np.int64), (ref.extent,))
        ordered = sorted(ref.slices, key=lambda part: part.spec.starts)
        starts = np.array([part.spec.starts[0] for part in ordered])
        extents = tuple(part.extent for part in ordered if part.extent is not None)
        return cls(catalog, ref.dtype.numpy, starts, extents)

    def at(self, ids: Array) -> Array:
        """Read the elements with the numbers `ids`, in their order; each is read on its own.

        Raises CheckpointChanged if a file vanished or became shorter, CheckpointError if it cannot be opened.
        """
        values, size = np.empty(len(ids), self.dtype), self.dtype.itemsize
        # "right": an empty slice begins where the next one does, and that one has the element
        owners = np.searchsorted(self.starts, ids, side="right") - 1
        for number, extent in enumerate(self.extents):
            ours = np.flatnonzero(owners == number)
            offsets = (extent.offset + (ids[ours] - self.starts[number]) * size).tolist()
            with open_shard(self.catalog.path_of(extent), extent) as descriptor:
                # one by one: a map of a large file would read far more around each
                read = b"".join([os.pread(descriptor, size, offset) for offset in offsets])
            if len(read) < size * len(ours):
                path = self.catalog.path_of(extent)
                raise CheckpointChanged(f"{path} became shorter after its index was read")
            values[ours] = np.frombuffer(read, self.dtype, len(ours))
        return values


class _Staged(Struct, frozen=True):
    """A staged table, as a `TableState`."""

    index_seeds: _Elements
    index_rows: _Elements
    row_keys: _Elements

    def seeds(self, groups: Array) -> Array:
        return self.index_seeds.at(groups)

    def rows(self, slots: Array) -> Array:
        return self.index_rows.at(slots)

    def keys(self, rows: Array) -> Array:
        return self.row_keys.at(rows)
