"""Check what users give for a table by keys: the type of its rows, the combiner, the default rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from exporter.checkpoint.recommenders_addons import VALUE_DTYPES
from exporter.errors import UsageError, nearest
from exporter.wire.dtypes import Array, DType

_COMBINERS = ("sum", "mean", "sqrtn")


def row_dtype(table: str, dtype: object) -> DType:
    """Return the type of the rows of a table, given by TensorFlow's name of it, in any case.

    Raises UsageError, which names the `table`, for another type than a float.
    """
    names = {name: known for known in VALUE_DTYPES for name in (known.name.lower(), known.label)}
    found = names.get(str(dtype).lower())
    if found is None:
        raise _unknown(table, "dtype", dtype, [known.label for known in VALUE_DTYPES])
    return found


def known_combiner(table: str, combiner: str | None) -> str | None:
    """Return `combiner`; UsageError, which names the `table`, if it is neither None nor a known one."""
    if combiner is not None and combiner not in _COMBINERS:
        raise _unknown(table, "combiner", combiner, _COMBINERS)
    return combiner


def default_rows(table: str, default: Any, dim: int, dtype: DType) -> Array:
    """Return the default rows, an array [d, dim] of `dtype`, for a number, a row, or several rows.

    Raises UsageError, which names the `table`, for another shape, an empty array, or something else than
    numbers.
    """
    expected = f"expected a number, a row of {dim} numbers, or several rows"
    try:
        given = np.asarray(default)
        if given.dtype == object:
            raise TypeError(f"found {type(default).__name__}")
        given = given.astype(np.float64)
    except (TypeError, ValueError) as error:
        text = f"dynamic table {table!r}: default {default!r:.99} is not a number"
        raise UsageError(text, cause=f"{expected}: {error}", hint="default=0.0") from error
    if given.ndim > 2 or (given.ndim and given.shape[-1] != dim) or not given.size:
        text = f"dynamic table {table!r}: default of shape {list(given.shape)}"
        raise UsageError(text, cause=expected, hint="default=0.0")
    rows = given if given.ndim == 2 else np.broadcast_to(given, (1, dim))
    return np.ascontiguousarray(rows.astype(dtype.numpy))


def _unknown(table: str, argument: str, found: object, known: Sequence[str]) -> UsageError:
    return UsageError(
        f"dynamic table {table!r}: {argument} {found!r:.99}",
        cause=f"expected one of {', '.join(known)}",
        hint=f'{argument}="{nearest(str(found), known) or known[0]}"',
    )
