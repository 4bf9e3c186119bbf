"""A delta's changes: rows per table, and the rows that moved furthest from the values before."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from exporter.delta.format import Rows
from exporter.delta.layered_state import LayeredState
from exporter.publish.delta_log import DeltaLog, LogDelta
from exporter.publish.variable_change import Mover, VariableChange
from exporter.wire.dtypes import Array

MOST_BYTES = 256 << 20
"""Of a larger delta only rows are counted: distances need the values before, which would have to be read."""
_MOVERS = 3
_CHUNK_BYTES = 16 << 20


def what_changed(log: DeltaLog, delta: LogDelta) -> tuple[VariableChange, ...]:
    """Return the changes of a delta by variable, those with the most rows first, then by name.

    Distances are left out (None) for a delta of more than `MOST_BYTES`; for smaller ones the values before
    are read.

    Raises:
        PositionError: the delta is of another log, or (PositionUnknown) no base leads to the values
            before.
        CheckpointError: the delta, or the values before, are damaged.
        ManifestError, VerificationError: a manifest cannot be read, or a signed file differs.
        OSError: a signed file cannot be read.
    """
    changes = log.open(delta).changes
    is_small = delta.manifest.bytes_ <= MOST_BYTES
    before = log.state(delta.start, only=set(changes)) if is_small else None
    found = [_of_variable(name, change, before) for name, change in changes.items()]
    return tuple(sorted(found, key=lambda one: (-(one.rows or 0), one.variable)))


def _of_variable(name: str, change: Rows | Array, before: LayeredState | None) -> VariableChange:
    if not isinstance(change, Rows):
        value = np.asarray(change)
        if before is None or not _is_number(value.dtype):
            return VariableChange(name, None, None)
        old = before.whole(name)
        same = old.shape == value.shape
        return VariableChange(name, None, _norm(value, old) if same else None)
    if before is None:
        return VariableChange(name, len(change.ids), None)
    norms = np.concatenate([np.empty(0), *_norms(name, change, before)])
    if len(norms) < len(change.ids):
        return VariableChange(name, len(change.ids), None)
    # A row whose distance is not finite comes first.
    order = np.argsort(np.where(np.isfinite(norms), -norms, -np.inf), kind="stable")[:_MOVERS]
    movers = tuple(Mover(int(change.ids[at]), _finite(norms[at])) for at in order if norms[at] != 0)
    return VariableChange(name, len(change.ids), _finite(np.sqrt(np.sum(norms**2))), movers)


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _norms(name: str, change: Rows, before: LayeredState) -> Iterator[Array]:
    """Yield the norms (float64) of the changed rows' differences from `before`, in parts, in order.

    Nothing is yielded if values are not numbers.
    """
    row = max(1, int(np.prod(change.values.shape[1:])) * 8)
    step = max(1, _CHUNK_BYTES // row)
    for start in range(0, len(change.ids), step):
        new = np.asarray(change.values[start : start + step])
        if not _is_number(new.dtype):
            return
        old = before.rows_at(name, np.asarray(change.ids[start : start + step]))
        # float64: squares of large float32 values would be infinite, and unsigned integers would wrap around
        difference = new.astype(np.float64) - old.astype(np.float64)
        yield np.sqrt(np.sum(difference.reshape(len(new), -1) ** 2, axis=1))


def _norm(new: Array, old: Array) -> float | None:
    difference = np.asarray(new).astype(np.float64) - old.astype(np.float64)
    return _finite(np.sqrt(np.sum(difference**2)))


def _is_number(dtype: np.dtype[np.generic]) -> bool:
    return dtype.kind in "iuf" or dtype.name in ("bfloat16", "float16")
