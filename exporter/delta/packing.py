"""Round rows to bfloat16 or int8, and store rows in fewer bits inside a delta.

    bfloat16   the values as bfloat16: by way of float32 to the nearest, ties to even
    int8       codes q from -127 to 127 and a float32 scale for the row; a value is q * scale, in float32

Two things are kept apart. *Rounding* changes values, and only if a user asks for it. *Packing* is how rows
are stored, and never changes a bit: a row is packed if unpacking restores it exactly, and else stored
exactly. Rows that were rounded always pack, also when they are merged or reverted later.

Codes are those of `exporter.wire.int8_codes`: unpacked values pack into the same ones. A row that holds NaN
or infinity, or would, is not rounded. Tables of 16 bits, and those whose rows would not shrink, are not
rounded either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from exporter.options import DeltaDtype
from exporter.wire.dtypes import Array, DType
from exporter.wire.int8_codes import LARGEST_SCALE as LARGEST_SCALE
from exporter.wire.int8_codes import SMALLEST_SCALE as SMALLEST_SCALE
from exporter.wire.int8_codes import to_codes

_WIDE = {DType.FLOAT, DType.DOUBLE}
_ROWS_AT_ONCE = 1 << 14


def shrinks(packing: DeltaDtype, dtype: DType, element_shape: tuple[int, ...]) -> bool:
    """True if rows of this dtype and shape take fewer bytes when packed.

    False for dtypes other than float32 and float64.
    """
    size = math.prod(element_shape)
    packed = 2 * size if packing is DeltaDtype.BFLOAT16 else size + 4  # 4 bytes for the row's scale
    return dtype in _WIDE and packed < size * dtype.numpy.itemsize


class Codes(Struct, frozen=True):
    """Rows as codes [n, ...], for int8 with `scales` float32 [n].

    `fits` bool [n] is False where codes fail.
    """

    codes: Array
    scales: Array | None
    fits: Array


def encode(rows: Array, packing: DeltaDtype) -> Codes:
    """Return the codes nearest to rows [n, ...] of float32 or float64.

    `fits` is False for rows with NaN, infinity, or values beyond what codes can represent. With bfloat16,
    subnormal values become 0; with int8, rows that do not fit have codes and a scale of 0.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # such rows do not fit, as `fits` says
        return _to_bfloat16(rows) if packing is DeltaDtype.BFLOAT16 else Codes(*to_codes(rows))


def decode(codes: Array, scales: Array | None, dtype: np.dtype[Any]) -> Array:
    """Return the rows, in `dtype`, that codes [n, ...] represent.

    `scales` (float32 [n]) are for int8, None for bfloat16.
    """
    values = codes.astype(np.float32)
    if scales is not None:
        values *= scales.reshape(-1, *[1] * (codes.ndim - 1))
    return np.asarray(values.astype(dtype, copy=False))


def round_rows(rows: Array, packing: DeltaDtype) -> Array:
    """Return rows [n, ...] rounded to the values of their codes, as a copy.

    Rows that codes do not fit are unchanged.
    """
    found = encode(rows, packing)
    rounded = decode(found.codes, found.scales, rows.dtype)
    rounded[~found.fits] = rows[~found.fits]
    return rounded


def pack_rows(rows: Array, packing: DeltaDtype) -> Codes:
    """Return the codes of rows [n, ...].

    `fits` is False also for rows that codes do not give back bit for bit.
    """
    found = encode(rows, packing)
    word = f"u{rows.dtype.itemsize}"
    given_back = decode(found.codes, found.scales, rows.dtype).view(word)
    same = _flat(given_back == np.ascontiguousarray(rows).view(word)).all(axis=1)
    return replace(found, fits=found.fits & same)


class StoredRows:
    """The base class of rows in files, which are read on access: by slice or by places."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, which: slice | Array) -> Array:
        raise NotImplementedError

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self[:].astype(dtype or self.dtype, copy=False)

    def pieces(self) -> Iterator[Array]:
        """Yield all rows in order, a bounded number at a time."""
        return (self[piece] for piece in _pieces(len(self)))


class PackedRows(StoredRows):
    """Packed rows, which are unpacked on access.

    `exact` int64 [e], ascending, are the places of the rows that are in `values` [e, ...]; `codes` and
    `scales` hold the others, in their order.
    """

    def __init__(self, values: Array, exact: Array, codes: Array, scales: Array | None) -> None:
        self._values, self._exact, self._codes, self._scales = values, exact, codes, scales
        self.dtype = values.dtype
        self.shape = (len(exact) + len(codes), *values.shape[1:])

    def __getitem__(self, which: slice | Array) -> Array:
        places = np.arange(*which.indices(len(self))) if isinstance(which, slice) else np.asarray(which)
        before = np.searchsorted(self._exact, places)
        is_exact = np.searchsorted(self._exact, places, side="right") > before
        rows = np.empty((len(places), *self.shape[1:]), self.dtype)
        packed = (places - before)[~is_exact]
        scales = None if self._scales is None else self._scales[packed]
        rows[~is_exact] = decode(self._codes[packed], scales, self.dtype)
        rows[is_exact] = self._values[before[is_exact]]
        return rows


class SlicedRows(StoredRows):
    """Rows in several arrays that follow each other."""

    def __init__(self, parts: Sequence[Array]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts])
        self.dtype = parts[0].dtype
        self.shape = (int(self._ends[-1]), *parts[0].shape[1:])

    def __getitem__(self, which: slice | Array) -> Array:
        if isinstance(which, slice):
            start, stop, step = which.indices(len(self))
            if start >= stop:
                return np.empty((0, *self.shape[1:]), self.dtype)
            first, last = np.searchsorted(self._ends, (start, stop - 1), side="right")
            if first == last and step == 1:  # a view
                before = self._before(int(first))
                return np.asarray(self._parts[first][start - before : stop - before])
            which = np.arange(start, stop, step)
        places = np.asarray(which)
        rows = np.empty((len(places), *self.shape[1:]), self.dtype)
        owners = np.searchsorted(self._ends, places, side="right")
        for number in np.unique(owners).tolist():
            mine = owners == number
            rows[mine] = self._parts[number][places[mine] - self._before(number)]
        return rows

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(np.concatenate(self._parts).astype(dtype or self.dtype, copy=False))

    def _before(self, number: int) -> int:
        """Return the number of rows in the arrays before the one with this number."""
        return int(self._ends[number]) - len(self._parts[number])


class ChosenRows(StoredRows):
    """The rows at some places of other rows, copied on access."""

    def __init__(self, rows: RowValues, places: Array) -> None:
        self._rows, self._places = rows, places
        self.dtype = rows.dtype
        self.shape = (len(places), *rows.shape[1:])

    def __getitem__(self, which: slice | Array) -> Array:
        return np.asarray(self._rows[self._places[which]])


RowValues: TypeAlias = "Array | StoredRows"
"""Rows in memory or in one or several maps of files, perhaps packed."""


class Packing(Struct, frozen=True):
    """Rows by how they are stored: places `exact` unchanged, `packed` as codes, with int8's `scales`."""

    rows: RowValues
    dtype: DeltaDtype
    exact: Array
    packed: Array
    scales: Array | None

    @classmethod
    def of(cls, rows: RowValues, dtype: DeltaDtype) -> Packing:
        """Return rows divided into packed ones, whose codes give back every bit, and exact ones.

        All rows are read once, piece by piece.
        """
        found = [pack_rows(rows[piece], dtype) for piece in _pieces(len(rows))]
        fits = np.concatenate([np.empty(0, bool), *(piece.fits for piece in found)])
        scales = [piece.scales[piece.fits] for piece in found if piece.scales is not None]
        has_scales = dtype is DeltaDtype.INT8
        return cls(
            rows,
            dtype,
            np.flatnonzero(~fits),
            np.flatnonzero(fits),
            np.concatenate([np.empty(0, np.float32), *scales]) if has_scales else None,
        )

    def values(self) -> Iterator[Array]:
        """Yield the exact rows in order, in pieces; they are read again."""
        return (self.rows[self.exact[piece]] for piece in _pieces(len(self.exact)))

    def codes(self) -> Iterator[Array]:
        """Yield the codes of the packed rows in order, in pieces.

        They are computed again, as they were not kept in memory.
        """
        for piece in _pieces(len(self.packed)):
            yield encode(self.rows[self.packed[piece]], self.dtype).codes


def _pieces(count: int) -> Iterator[slice]:
    return (slice(start, start + _ROWS_AT_ONCE) for start in range(0, count, _ROWS_AT_ONCE))


def _to_bfloat16(rows: Array) -> Codes:
    bfloat16 = DType.BFLOAT16.numpy
    nearest = rows.astype(np.float32).astype(bfloat16).astype(np.float32)
    # TensorFlow's kernels flush subnormal values to zero, so they are rounded to it here; the sign stays.
    nearest[np.abs(nearest) < SMALLEST_SCALE] *= 0
    fits = np.asarray(_flat(np.isfinite(nearest)).all(axis=1))
    return Codes(nearest.astype(bfloat16), None, fits)


def _flat(rows: Array) -> Array:
    return rows.reshape(len(rows), math.prod(rows.shape[1:]))
