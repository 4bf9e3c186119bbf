"""Approximate deltas: hold back rows below `--min-change`, round others; and report the difference.

Both are done only if asked for, and what is published says how far served values may be from the trainer's.
Distances are Euclidean norms, of rows as they are served, in float64; a row whose distance is NaN is always
sent. Tables of other types than floating point, and variables that are served whole, are not touched.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
from msgspec import Struct

from exporter.checkpoint.tensor_bundle import check_tensor
from exporter.delta.compare_rows import differing_rows
from exporter.delta.delta_files import read_delta, write_delta
from exporter.delta.deviation import LeftOut, Rounded, Tolerance
from exporter.delta.format import Change, DeltaHeader, Rows, Schema, ServedVariable
from exporter.delta.layered_state import Changes, LayeredState
from exporter.delta.packing import round_rows, shrinks
from exporter.delta.row_spill import ROWS_AT_ONCE, RowSpill
from exporter.errors import CheckpointError
from exporter.storage.layout import RESIDUAL_PREFIX
from exporter.wire.dtypes import Array


class Tolerated(Struct, frozen=True):
    """The `changes` to send: without the rows that moved less than the bound, others rounded.

    By table, `held_back` has the rows left out, as the trainer has them, and `stale` the numbers int64 [n] of
    all rows that will not be the trainer's. `left_out` and `rounded` are None if there are none.
    """

    changes: dict[str, Change]
    left_out: LeftOut | None
    rounded: Rounded | None
    held_back: Mapping[str, Rows]
    stale: Mapping[str, Array]


def apply_tolerance(
    changes: Mapping[str, Change], published: LayeredState, schema: Schema, allowed: Tolerance, scratch: Path
) -> Tolerated:
    """Leave rows out of `changes` that need not be sent, given what is published, and round the others.

    Rows that are served already as they would be sent are left out, too, and not counted as such. The
    checksums of what is published are compared first: a damaged row would give a wrong distance.

    Raises:
        CheckpointError: a published value cannot be read, or is damaged.
        DiskFull, PublishError: the scratch file cannot be written.
    """
    kept: dict[str, Change] = {}
    sieves: dict[str, _Sieve] = {}
    inexact = [variable.name for variable in schema.variables if variable.dtype.is_floating]
    published.check(name for name in inexact if isinstance(changes.get(name), Rows))
    for variable in (each for each in schema.variables if each.name in changes):
        send: Change | None = changes[variable.name]
        if isinstance(send, Rows) and variable.dtype.is_floating:
            sieve = sieves[variable.name] = _Sieve(variable, published, allowed)
            send = sieve.run(send, scratch)
        if send is not None:
            kept[variable.name] = send
    held_back = {name: sieve.held_back for name, sieve in sieves.items() if sieve.held_back is not None}
    stale = {name: np.concatenate(sieve.stale) for name, sieve in sieves.items() if sieve.stale}
    rows = sum(len(found.ids) for found in held_back.values())
    furthest = max((sieve.furthest for sieve in sieves.values()), default=0.0)
    left_out = LeftOut(allowed.bound, rows, furthest) if rows else None
    return Tolerated(kept, left_out, _rounded(sieves.values(), allowed), held_back, stale)


def row_distances(a: Array, b: Array) -> Array:
    """The Euclidean distances, float64 [n], of the rows of two arrays [n, ...] of one shape."""
    with np.errstate(invalid="ignore", over="ignore"):
        moved = (a.astype(np.float64) - b.astype(np.float64)).reshape(len(a), math.prod(a.shape[1:]))
        return np.asarray(np.sqrt(np.einsum("ij,ij->i", moved, moved)))


def save_residual(
    directory: Path, schema: Schema, header: DeltaHeader, state: str, held_back: Mapping[str, Rows]
) -> None:
    """Write the trainer's values of rows that the delta `header` left out as a delta; remove older ones.

    `state` distinguishes the delta from another one at its position. The file is a cache of the exporter's:
    if it is lost or damaged, states are compared instead.

    Raises:
        DiskFull, PublishError: it cannot be written.
    """
    directory.mkdir(exist_ok=True)
    name = f"{RESIDUAL_PREFIX}{header.to_position}-{state}"
    write_delta(directory / name, schema, header, held_back)
    for path in directory.glob(f"{RESIDUAL_PREFIX}*"):
        if path.name.partition(".")[0] != name:
            path.unlink(missing_ok=True)


def load_residual(
    directory: Path, schema: Schema, *, lineage: str, position: int, state: str
) -> Changes | None:
    """The rows that `save_residual` wrote for a state of a log; None if they are lost or damaged."""
    try:
        found = read_delta(directory / f"{RESIDUAL_PREFIX}{position}-{state}", schema)
        for ref in found.catalog.tensors.values():
            check_tensor(found.catalog, ref)
    except CheckpointError:
        return None
    header = found.header
    return found.changes if (header.lineage, header.to_position) == (lineage, position) else None


class _Sieve:
    """Decides which changed rows of one table are sent, and counts the others."""

    def __init__(self, variable: ServedVariable, published: LayeredState, allowed: Tolerance) -> None:
        self._variable, self._published, self._bound = variable, published, allowed.bound
        packs = allowed.delta_dtype and shrinks(allowed.delta_dtype, variable.dtype, variable.shape[1:])
        self._round_to = allowed.delta_dtype if packs else None
        self.held_back: Rows | None = None
        self.stale: list[Array] = []
        self.furthest = 0.0
        self.rounded_rows = 0
        self.largest_error = 0.0

    def run(self, change: Rows, scratch: Path) -> Rows | None:
        """The rows to send, rounded; None without any. Fills the other fields."""
        with RowSpill(self._variable, scratch) as send, RowSpill(self._variable, scratch) as held_back:
            for start in range(0, len(change.ids), ROWS_AT_ONCE):
                piece = slice(start, start + ROWS_AT_ONCE)
                self._sift(change.ids[piece], change.values[piece], send, held_back)
            self.held_back = held_back.rows()
            return send.rows()

    def _sift(self, ids: Array, values: Array, send: RowSpill, held_back: RowSpill) -> None:
        before = self._published.rows_at(self._variable.name, ids)
        moved = differing_rows(before, values)
        ids, values, before = ids[moved], values[moved], before[moved]
        image = values if self._round_to is None else round_rows(values, self._round_to)
        is_new = _mask(differing_rows(before, image), len(ids))
        distances = row_distances(values, before)
        is_held_back = is_new & (distances < self._bound)
        rounded = ~is_held_back & _mask(differing_rows(image, values), len(ids))
        send.add(ids[is_new & ~is_held_back], image[is_new & ~is_held_back])
        held_back.add(ids[is_held_back], values[is_held_back])
        self.stale.append(ids[is_held_back | rounded])
        self.furthest = max(self.furthest, float(distances[is_held_back].max(initial=0.0)))
        self.rounded_rows += int(np.count_nonzero(rounded))
        errors = np.abs(image[rounded].astype(np.float64) - values[rounded].astype(np.float64))
        self.largest_error = max(self.largest_error, float(errors.max(initial=0.0)))


def _rounded(sieves: Collection[_Sieve], allowed: Tolerance) -> Rounded | None:
    rows = sum(sieve.rounded_rows for sieve in sieves)
    if allowed.delta_dtype is None or not rows:
        return None
    return Rounded(allowed.delta_dtype, rows, max(sieve.largest_error for sieve in sieves))


def _mask(places: Array, count: int) -> Array:
    """True at these places of `count`."""
    mask = np.zeros(count, bool)
    mask[places] = True
    return mask
