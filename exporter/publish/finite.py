"""Keep NaN and infinity out of a log whose model refuses them.

A base that was exported with `--add nan-check` refuses, inside its graph, each delta that holds either. A
server gets past such a delta only by one that spans it and holds newer, finite values: so none is published.
Each delta published since is marked as checked; earlier releases published without a check.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from exporter.catalog import Catalog
from exporter.checkpoint.tensor_values import memory_map
from exporter.delta.format import Change, Rows
from exporter.delta.packing import RowValues
from exporter.delta.row_spill import ROWS_AT_ONCE
from exporter.delta.spans import Span
from exporter.errors import NotFinite
from exporter.publish.delta_log import DeltaLog, LogDelta
from exporter.tables.integer_sets import among, distinct

Array = np.ndarray[Any, Any]

_VALUES_AT_ONCE = 1 << 20  # so that the mask takes a megabyte, however large the tensor
_WHOLE = np.zeros(1, np.int64)
"""The row numbers of a variable that is not a table: it counts as one row."""


def require_finite(log: DeltaLog, changes: Mapping[str, Change], span: Span, hint: str) -> None:
    """Raise NotFinite if the log's model wants finite values, and a change holds NaN or infinity.

    `changes` are by variable name. `span` and `hint` are for the error: the delta that would be published,
    and the advice.
    """
    if log.base.entry.updates.finite:
        for name, rows in _not_finite(log, changes):
            raise _refused(name, rows, span, hint)


def require_base_finite(catalog: Catalog) -> None:
    """Refuse a new base that holds NaN or infinity; `catalog` is its bundle's.

    Its model would refuse deltas with such values. Every floating-point value is read; checksums are not
    verified.

    Raises:
        NotFinite: a tensor holds NaN or infinity.
        CheckpointChanged: the trainer removed a shard meanwhile.
        CheckpointError: a shard cannot be read.
        DiskFull, PublishError: bytes fetched from a store cannot be kept.
    """
    for name, ref in catalog.tensors.items():
        for part in ref.slices or (None,) if ref.dtype.is_floating else ():
            values = memory_map(catalog, ref, part).reshape(-1)
            for start in range(0, len(values), _VALUES_AT_ONCE):
                if not np.isfinite(values[start : start + _VALUES_AT_ONCE]).all():
                    raise NotFinite(
                        f"{name!r} holds NaN or infinity, which the model refuses (--add nan-check)",
                        cause=f"the new base would serve it from {catalog.prefix.name} on",
                        hint="export a checkpoint from before, or train on until these values are finite",
                    )


def require_merger_finite(log: DeltaLog, run: Sequence[LogDelta], span: Span, hint: str = "") -> None:
    """Refuse a merger of the deltas in `run` (oldest first) that the log's model would refuse.

    `span` and `hint` are for the error: the merger's span, and the advice. Deltas marked as checked are read
    only while rows of unchecked ones before them are not finite.

    Raises:
        NotFinite: the newest value of something in the deltas is not finite, and the model wants that.
        ManifestError, VerificationError: a delta's manifest cannot be read, or a signed file differs.
        CheckpointError, PositionError, OSError: a delta is damaged, of another log, or cannot be read.
    """
    if log.base.entry.updates.finite:
        for name, rows in lasting(log, run).items():
            raise _refused(name, rows, span, hint)


def lasting(log: DeltaLog, run: Iterable[LogDelta]) -> dict[str, Array]:
    """The numbers of the rows that hold NaN or infinity after a run of deltas, by variable name.

    `run` is oldest first. The numbers (int64) are ascending; the number of a variable that is not a table is
    0. Variables without such rows are left out. A delta that is marked as checked is read only while a row
    before it is not finite.

    Raises:
        ManifestError, VerificationError: a delta's manifest cannot be read, or a signed file differs.
        CheckpointError, PositionError, OSError: a delta is damaged, of another log, or cannot be read.
    """
    left: dict[str, Array] = {}
    for delta in run:
        if delta.entry.finite and not left:
            continue
        changes = log.open(delta).changes
        # first out, then in: values that this delta replaces do not last, its own may
        for name, change in changes.items():
            if name in left:
                ids = change.ids if isinstance(change, Rows) else _WHOLE
                left[name] = left[name][~among(left[name], ids)]
        if not delta.entry.finite:
            for name, rows in _not_finite(log, changes):
                left[name] = distinct(np.concatenate([left.get(name, rows[:0]), rows]))
        left = {name: rows for name, rows in left.items() if len(rows)}
    return left


def unchecked(deltas: Sequence[LogDelta]) -> tuple[LogDelta, ...]:
    """The deltas that were not checked for finite values and that no checked delta spans, in their order.

    ManifestError if a manifest cannot be read.
    """
    checked = [delta for delta in deltas if delta.entry.finite]
    others = (delta for delta in deltas if not delta.entry.finite)
    return tuple(
        each for each in others if not any(by.start <= each.start and each.end <= by.end for by in checked)
    )


def refused(log: DeltaLog, delta: LogDelta) -> bool:
    """True if the log's model refuses a delta because of NaN or infinity.

    A delta marked as checked is not read.

    Raises:
        ManifestError, VerificationError: its manifest cannot be read, or a signed file differs.
        CheckpointError, PositionError, OSError: the delta is damaged, of another log, or cannot be read.
    """
    wanted = log.base.entry.updates.finite and not delta.entry.finite
    return wanted and any(True for _ in _not_finite(log, log.open(delta).changes))


def _not_finite(log: DeltaLog, changes: Mapping[str, Change]) -> Iterator[tuple[str, Array]]:
    """Yield each variable with a NaN or infinite value: its name, and the numbers of its rows with one.

    The number of a variable that is not a table is 0. Variables that are not floating-point are skipped.
    """
    for variable in log.schema.variables:
        change = changes.get(variable.name)
        if change is None or not variable.dtype.is_floating:
            continue
        if isinstance(change, Rows):
            found = _places(change.values)
            rows = np.asarray(change.ids)[found]
        else:
            rows = _WHOLE if not np.isfinite(change).all() else _WHOLE[:0]
        if len(rows):
            yield variable.name, rows


def _places(values: RowValues) -> Array:
    """The indices (int64, ascending) of the rows of values [n, ...] that hold NaN or infinity.

    A bounded number of rows is read at a time.
    """
    found = [np.empty(0, np.int64)]
    for start in range(0, len(values), ROWS_AT_ONCE):
        piece = values[start : start + ROWS_AT_ONCE]
        finite = np.isfinite(piece)
        if not finite.all():
            found.append(start + np.flatnonzero(~finite.reshape(len(piece), -1).all(axis=1)))
    return np.concatenate(found)


def _refused(name: str, rows: Array, span: Span, hint: str) -> NotFinite:
    several = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
    return NotFinite(
        f"{name!r} holds NaN or infinity, and the model refuses such deltas (--add nan-check)",
        cause=f"row {rows[0]}{several} of what would lead to position {span.end}",
        hint=hint,
    )
