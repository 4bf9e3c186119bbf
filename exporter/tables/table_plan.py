"""What a table to serve needs: its sizes, its four tensors, and where in a new shard they are to lie."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from msgspec import Struct

from exporter.catalog import Extent, SliceRef, SliceSpec, TensorRef
from exporter.checkpoint.embedding_variables import EmbeddingVariable
from exporter.errors import UsageError
from exporter.tables.geometry import INDEX_ROWS, INDEX_SEEDS, KEYS, MAX_ROWS, VALUES, TableGeometry
from exporter.wire.dtypes import DType

Array = np.ndarray[Any, Any]

_ALIGNED = 64


class TablePlan(Struct, frozen=True, eq=False):
    """A table to serve: its name, where it comes from, its sizes, and its default rows [d, dim]."""

    name: str
    variable: EmbeddingVariable
    geometry: TableGeometry
    defaults: Array

    @classmethod
    def of(
        cls,
        name: str,
        variable: EmbeddingVariable,
        defaults: Array,
        head_room: float,
        awaited: int = 0,
    ) -> TablePlan:
        """The plan for all keys of a variable and `awaited` more, with room for `head_room` times as many.

        Raises:
            UsageError: more rows than row numbers.
        """
        geometry = TableGeometry.for_keys(variable.rows + awaited, head_room, len(defaults))
        if geometry.capacity > MAX_ROWS:
            raise UsageError(
                f"table {name!r} would have {geometry.capacity} rows, {MAX_ROWS} are possible",
                hint="leave less room for new keys: --table-head-room 0",
            )
        return cls(name, variable, geometry, defaults)

    def tensors(self, shard: int, offset: int) -> tuple[dict[str, TensorRef], int]:
        """Its four tensors by the last part of their names, and where the shard goes on behind them.

        What is to be written has no checksums yet.
        """
        size, place = self.geometry, _Allocation(shard, offset)
        parts, wide = self.variable.parts, self.variable.key_dtype is DType.INT64
        keys = [part.keys for part in parts] if wide else []
        dim, dtype = self.variable.dim, self.variable.value_dtype
        made = {
            INDEX_SEEDS: self._joined(INDEX_SEEDS, DType.INT64, (size.groups,), [], place),
            INDEX_ROWS: self._joined(INDEX_ROWS, DType.INT32, (size.slots,), [], place),
            KEYS: self._joined(KEYS, DType.INT64, (size.capacity,), keys, place),
            VALUES: self._joined(VALUES, dtype, (size.capacity, dim), [part.values for part in parts], place),
        }
        return made, place.offset

    def _joined(
        self, part: str, dtype: DType, shape: tuple[int, ...], stored: Iterable[TensorRef], place: _Allocation
    ) -> TensorRef:
        """The tensor that begins with stored ones; its other rows get a place in the new shard."""
        slices, row = [], 0
        for ref in stored:
            if ref.shape[0]:
                slices.append(SliceRef(row_box(shape, row, ref.shape[0]), ref.extent or _to_come(ref)))
                row += ref.shape[0]
        rest = row_box(shape, row, shape[0] - row)
        extent = place.take(int(np.prod(rest.lengths)) * (dtype.itemsize or 0))
        name = f"{self.name}/{part}"
        if not slices:
            return TensorRef(name, dtype, shape, extent)
        return TensorRef(name, dtype, shape, slices=(*slices, SliceRef(rest, extent)))


class _Allocation(Struct):
    """Hands out places in a shard, one behind the other."""

    shard: int
    offset: int

    def take(self, size: int) -> Extent:
        extent = Extent(self.shard, self.offset, size, 0)
        self.offset += -(-size // _ALIGNED) * _ALIGNED
        return extent


def _to_come(ref: TensorRef) -> Extent:
    """The extent of what is copied into a bundle before it is read: see `TableLayout.with_source`."""
    return Extent(-1, 0, ref.bytes_, 0)


def row_box(shape: tuple[int, ...], first: int, count: int) -> SliceSpec:
    """The box of some rows."""
    rest = shape[1:]
    return SliceSpec(shape, (first, *(0 for _ in rest)), (count, *rest))
