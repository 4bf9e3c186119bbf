"""Rows in 8 bits: codes q from -127 to 127 and one float32 scale a row; a value is q * scale, in float32.

A scale has 17 significant bits and is the least such that no code exceeds 127: so q * scale is exact in
float32, on any machine and in any order, and values that were read back have the same codes. Nothing
subnormal is ever made: TensorFlow's kernels flush it to zero, so it is rounded to zero here.

*Beside its codes* a served row has its scale: `[rows, dim + 4]` int8, of which the last four bytes are the
scale in little endian. One gather reads both, and for all code that moves, maps or checks rows it is one
table like any other.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# Multiplied by any code except 0, they give float32 values that are normal and finite.
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-126, 2.0**120

SCALE_BYTES = 4
_LARGEST_CODE = 127
_SPARE_BITS = 7  # of a float32's 24: the bits that a code of seven bits adds to a product


def to_codes(rows: Array) -> tuple[Array, Array, Array]:
    """Return the nearest codes int8 [n, ...], scales float32 [n], and a mask [n] of the rows that fit.

    `rows` are [n, ...]. A row fits if it is finite and its greatest magnitude is at most 127 *
    `LARGEST_SCALE`; all other rows get codes and a scale of 0. A row whose scale would be less than
    `SMALLEST_SCALE` gets zeros, too, but fits.
    """
    flat = rows.reshape(len(rows), math.prod(rows.shape[1:])).astype(np.float64)
    largest = np.abs(flat).max(axis=1, initial=0)
    # a magnitude beyond float32 gets an infinite scale, and NaN stays NaN: neither row fits
    with np.errstate(over="ignore", invalid="ignore"):
        scales = _rounded_up((largest / _LARGEST_CODE).astype(np.float32))
        fits = np.asarray(np.isfinite(largest) & (scales <= LARGEST_SCALE))
        # nothing subnormal: TensorFlow's kernels flush it to zero
        scales[~fits | (scales < SMALLEST_SCALE)] = 0
        is_zero = scales == 0
        codes = np.rint(flat / np.where(is_zero, 1, scales)[:, np.newaxis])
        codes[is_zero] = 0
        return codes.astype(np.int8).reshape(rows.shape), scales, fits


def _rounded_up(scales: Array) -> Array:
    """Return positive float32 values, rounded up to 17 significant bits."""
    spare = np.uint32((1 << _SPARE_BITS) - 1)
    # a carry out of the fraction goes into the exponent, and makes the next power of two; infinity stays
    return np.asarray(((scales.view(np.uint32) + spare) & ~spare).view(np.float32))


def beside_codes(codes: Array, scales: Array) -> Array:
    """Return served rows int8 [n, dim + 4], given codes int8 [n, dim] and their scales [n]."""
    # on disk little endian, whatever the machine
    return np.concatenate([codes, scales.astype("<f4")[:, np.newaxis].view(np.int8)], axis=1)


def values_of(served: Array) -> Array:
    """Return the values float32 [n, dim] of served rows int8 [n, dim + 4]."""
    # numpy views other item sizes only of contiguous rows
    scales = np.ascontiguousarray(served[:, -SCALE_BYTES:]).view("<f4")
    return np.asarray(served[:, :-SCALE_BYTES].astype(np.float32) * scales)
