"""Convert values to the dtype that they are stored in, and refuse those that it has no number for."""

from __future__ import annotations

from typing import Any

import numpy as np

from exporter.errors import MappingError
from exporter.wire.dtypes import DType

Array = np.ndarray[Any, Any]


def cast_values(values: Array, dtype: DType, name: str) -> Array:
    """The values of variable `name` in `dtype`; the array itself if it has the dtype already.

    Raises:
        MappingError: a finite value is too large for `dtype`.
    """
    if dtype is DType.STRING or values.dtype == dtype.numpy:
        return values
    with np.errstate(over="ignore"):  # found below, and reported with the variable's name
        converted = values.astype(dtype.numpy)
    if np.isfinite(converted).all():
        return converted
    lost = np.isfinite(values) & ~np.isfinite(converted)
    if lost.any():
        raise MappingError(
            f"variable {name!r} holds {values[lost][0]:g}, which is too large for {dtype.label}",
            hint="cast it to bfloat16, or leave that variable out of --cast; a model that takes deltas then "
            "begins a new log: --full-on-mismatch",
        )
    return converted
