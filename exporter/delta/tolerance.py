"""Approximate deltas: which changed rows are sent, which are rounded, which are held back, and what is told.

Each changed row has a *distance*: the Euclidean norm of what is to be served less what is. Rows below
`--min-change` are held back; with a budget the nearest ones are, as many as must be for the others to fit.
One threshold divides the rows of all tables: it is the given one, or chooses itself. What is held back is
remembered, with the time since when, and competes again with its whole distance.

All is done only if asked for, and what is published says how far served values may be from the trainer's.
A row whose distance is NaN or infinite is always sent, and so is what has no distance: variables that are
served whole, tables of other types than floating point, and rows of new keys.

*Ranking.* A row's score is its distance for each byte that it takes. A pass over the rows keeps it as a
float32. Positive floats are in the order of their bits, so that two histograms, of the upper and of the lower
16, find the threshold for any number of rows of any sizes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from exporter.delta.compare_rows import differing_rows
from exporter.delta.deviation import LeftOut, Rounded, Tolerance, Used, WildRows
from exporter.delta.format import Change, Rows, Schema, ServedVariable
from exporter.delta.layered_state import LayeredState
from exporter.delta.packing import ChosenRows, round_rows, shrinks
from exporter.delta.residual import Waiting
from exporter.delta.row_spill import ROWS_AT_ONCE, spilled
from exporter.errors import WildValues
from exporter.options import DeltaDtype, OnWild
from exporter.wire.dtypes import Array
from exporter.wire.int8_codes import values_of

_ROWS = 1 << 12  # at a time: of 64 floats, their differences in float64 stay in a processor's cache
_SAME, _HELD = -2.0, -1.0
"""Scores of rows that are served already as they would be sent, and of those that are held back anyway."""
_FURTHEST = sys.float_info.max  # infinity is no number of JSON


class Divided(Struct, frozen=True):
    """The `changes` to send: without the rows that are held back, others rounded.

    By table, `held_back` has the rows left out, as the trainer has them, `since` when each waits, if that
    counts, and `stale` the numbers int64 [n] of all rows that will not be the trainer's. `left_out`,
    `rounded` and `used` are None if there is nothing to say.
    """

    changes: dict[str, Change]
    left_out: LeftOut | None
    rounded: Rounded | None
    used: Used | None
    wild: tuple[WildRows, ...]
    held_back: Mapping[str, Rows]
    since: Mapping[str, Array]
    stale: Mapping[str, Array]


def divide(
    changes: Mapping[str, Change],
    published: LayeredState,
    schema: Schema,
    allowed: Tolerance,
    scratch: Path,
    waiting: Waiting,
    *,
    coded: Collection[str] = (),
    first: Mapping[str, Array] | None = None,
) -> Divided:
    """Divide `changes` into what is sent, some of it rounded, and what is held back, given what is published.

    Rows that are served already as they would be sent are left out, too, and not counted as such. The
    checksums of what is published are compared first: a damaged row would give a wrong distance. The tables
    `coded` hold rows in 8 bits. Of a table the rows `first` are sent in any case.

    Raises:
        WildValues: rows are beyond their bound, and that is to be refused.
        CheckpointError: a published value cannot be read, or is damaged.
        DiskFull, PublishError: the scratch file cannot be written.
    """
    sieves: dict[str, _Sieve] = {}
    whole: dict[str, Change] = {}
    for variable in (each for each in schema.variables if each.name in changes):
        name, change = variable.name, changes[variable.name]
        is_coded = name in coded and (allowed.room is not None or bool(allowed.norms))
        if isinstance(change, Rows) and (variable.dtype.is_floating or is_coded):
            sieves[name] = _Sieve(variable, change, published, allowed, is_coded=is_coded)
        else:
            whole[name] = change
    published.check(sieves)
    for name, sieve in sieves.items():
        sieve.measure(waiting, (first or {}).get(name))
    wild = tuple(found for sieve in sieves.values() if (found := sieve.wild) is not None)
    if wild and allowed.on_wild is OnWild.REFUSE:
        raise _refused(wild)
    base = _fixed_bytes(schema) + sum(map(_bytes_of, whole.values()))
    due = base + sum(sieve.due_rows * sieve.row_bytes for sieve in sieves.values())
    cut = _Cut() if allowed.room is None else _Cut.of(sieves.values(), allowed.room - due)
    for sieve in sieves.values():
        sieve.send(cut, scratch)
    sent = {name: sieve.sent for name, sieve in sieves.items() if sieve.sent is not None}
    held = {name: sieve.held_back for name, sieve in sieves.items() if sieve.held_back is not None}
    since = {name: waiting.since_of(name, held[name].ids) for name in held if allowed.counts_time}
    used = None if allowed.room is None else _used(sieves.values(), base, due)
    return Divided(
        {
            variable.name: (sent | whole)[variable.name]
            for variable in schema.variables
            if variable.name in sent | whole
        },
        _left_out(sieves.values(), allowed, min((float(each.min()) for each in since.values()), default=0.0)),
        _rounded(sieves.values(), allowed),
        used,
        wild,
        held,
        since,
        {name: np.concatenate(sieve.stale) for name, sieve in sieves.items() if sieve.stale},
    )


def row_distances(a: Array, b: Array, dtype: Any = np.float64) -> Array:
    """The Euclidean distances [n] of the rows of two arrays [n, ...] of one shape, computed in `dtype`."""
    with np.errstate(invalid="ignore", over="ignore"):
        return row_norms(np.subtract(a, b, dtype=_at_least_single(dtype), casting="unsafe"), dtype)


def row_norms(rows: Array, dtype: Any = np.float64) -> Array:
    """The Euclidean norms [n] of rows [n, ...], computed in `dtype`."""
    flat = rows.reshape(len(rows), math.prod(rows.shape[1:])).astype(_at_least_single(dtype), copy=False)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(np.sqrt(np.einsum("ij,ij->i", flat, flat)))


def _at_least_single(dtype: Any) -> Any:
    """The dtype, or float32 for one of 16 bits, whose squares would be infinite from 256 on."""
    return dtype if np.dtype(dtype) in (np.float32, np.float64) else np.float32


class _Cut:
    """The score up from which rows are sent, and the bytes for those that have just this score."""

    def __init__(self, score: float = 0.0, room: int = sys.maxsize) -> None:
        self._score, self._room = np.float32(score), room

    @classmethod
    def of(cls, sieves: Iterable[_Sieve], room: int) -> _Cut:
        """The lowest score from which on all rows that are not due fit into `room` bytes."""
        room = max(0, room)
        pools = [(sieve.competing.view(np.uint32), sieve.row_bytes) for sieve in sieves]
        if sum(len(bits) * size for bits, size in pools) <= room:
            return cls()
        score = 0
        for shift in (16, 0):
            weights = np.zeros(1 << 16, np.int64)
            for bits, size in pools:
                weights += size * np.bincount(bits >> shift & 0xFFFF, minlength=1 << 16)
            above = np.cumsum(weights[::-1])
            place = int(np.searchsorted(above, room, side="right"))
            room -= int(above[place - 1]) if place else 0
            score = score << 16 | 0xFFFF - place
            pools = [(bits[bits >> shift == score], size) for bits, size in pools]
        return cls(float(np.uint32(score).view(np.float32)), room)

    def passes(self, scores: Array, row_bytes: int) -> Array:
        """A mask of the rows that are sent."""
        sent = scores > self._score
        level = np.flatnonzero(scores == self._score)[: self._room // row_bytes]
        sent[level] = True
        self._room -= len(level) * row_bytes
        return np.asarray(sent)


class _Sieve:
    """The changed rows of one table: measured, then divided into those that are sent and the others."""

    def __init__(
        self,
        variable: ServedVariable,
        change: Rows,
        published: LayeredState,
        allowed: Tolerance,
        *,
        is_coded: bool,
    ) -> None:
        self._variable, self._change, self._published, self._allowed = variable, change, published, allowed
        self._is_coded = is_coded
        packs = allowed.delta_dtype and shrinks(allowed.delta_dtype, variable.dtype, variable.shape[1:])
        self._round_to = allowed.delta_dtype if packs else None
        self.row_bytes = _row_bytes(variable, self._round_to)
        self._scores = np.full(len(change.ids), _SAME, np.float32)
        self.sent: Rows | None = None
        self.held_back: Rows | None = None
        self.stale: list[Array] = []
        self.furthest = 0.0
        self.moved, self.moved_and_sent = 0.0, 0.0
        self.wild_held = 0
        self.rounded_rows = 0
        self.largest_error = 0.0
        self._wild_rows, self._wildest = 0, (0.0, 0)

    @property
    def competing(self) -> Array:
        """The scores of the rows that are neither due nor held back anyway."""
        return self._scores[(self._scores >= 0) & (self._scores < np.inf)]

    @property
    def changed_rows(self) -> int:
        """How many rows would be sent without a budget."""
        return int(np.count_nonzero(self._scores >= 0))

    @property
    def due_rows(self) -> int:
        """How many rows are sent whatever the budget."""
        return int(np.count_nonzero(self._scores == np.inf))

    @property
    def wild(self) -> WildRows | None:
        """What is to say of rows beyond the table's bound; None without any."""
        if not self._wild_rows:
            return None
        norm, row = self._wildest
        name, is_held = self._variable.name, self._allowed.on_wild is OnWild.HOLD_ROW
        return WildRows(name, self._wild_rows, row, norm, self._allowed.norms[name], is_held)

    def measure(self, waiting: Waiting, first: Array | None) -> None:
        """Give each row its score, and note those that are served rounded already."""
        step = ROWS_AT_ONCE if self._published.is_remote(self._variable.name) else _ROWS
        for start in range(0, len(self._change.ids), step):
            ids, values = self._change.ids[start : start + step], self._change.values[start : start + step]
            before = self._published.rows_at(self._variable.name, ids)
            distances = self._distances(values, before)
            same = np.flatnonzero(~(distances > 0))  # nothing moved; or NaN, which has no distance
            same = np.delete(same, differing_rows(before[same], values[same]))
            moved: Array | slice = slice(None)
            if len(same):
                moved = np.flatnonzero(~_mask(same, len(ids)))
                ids, values, before, distances = ids[moved], values[moved], before[moved], distances[moved]
            scores = self._score(ids, values, distances, waiting, first)
            if self._round_to is not None:
                is_same = ~_mask(differing_rows(before, round_rows(values, self._round_to)), len(ids))
                scores[is_same] = _SAME
                self._note_rounded(ids[is_same], values[is_same], before[is_same])
            finite = scores[(scores >= 0) & (scores < np.inf)]
            self.moved += float(finite.sum(dtype=np.float64)) * self.row_bytes
            self._scores[start : start + step][moved] = scores

    def _distances(self, a: Array, b: Array) -> Array:
        """The distances of rows; where no number of them counts, of float32 in float32, which is quicker."""
        if self._is_coded:
            a, b = values_of(a), values_of(b)
        is_bounded = self._allowed.bound or self._allowed.norms
        return row_distances(a, b, np.float64 if is_bounded else a.dtype)

    def _score(
        self, ids: Array, values: Array, distances: Array, waiting: Waiting, first: Array | None
    ) -> Array:
        allowed, name = self._allowed, self._variable.name
        with np.errstate(over="ignore"):
            scores = (distances / self.row_bytes).astype(np.float32)
        scores[~np.isfinite(scores)] = np.inf
        held = distances < (0.0 if self._is_coded else allowed.bound)
        if allowed.overdue is not None or first is not None:
            is_due = np.isin(ids, [] if first is None else first)
            if allowed.overdue is not None:
                is_due |= waiting.since_of(name, ids) <= allowed.overdue
            held &= ~is_due
            scores[is_due] = np.inf
        if (bound := allowed.norms.get(name)) is not None:
            norms = row_norms(values_of(values) if self._is_coded else values)
            wild = norms > bound
            if wild.any():
                largest = int(np.argmax(np.where(wild, norms, 0)))
                worst = (min(float(norms[largest]), _FURTHEST), int(ids[largest]))
                self._wildest = max(self._wildest, worst)
                self._wild_rows += int(np.count_nonzero(wild))
                if allowed.on_wild is OnWild.HOLD_ROW:
                    held |= wild
                    self.wild_held += int(np.count_nonzero(wild))
        self.furthest = max(self.furthest, min(float(distances[held].max(initial=0.0)), _FURTHEST))
        scores[held] = _HELD
        return scores

    def send(self, cut: _Cut, scratch: Path) -> None:
        """Divide the rows by their scores; fills the other fields."""
        goes = cut.passes(self._scores, self.row_bytes)
        stays = ~goes & (self._scores >= _HELD)
        self.sent, self.held_back = self._chosen(goes), self._chosen(stays)
        if self.sent is not None:
            gone = self._scores[goes]
            self.moved_and_sent = float(gone[gone < np.inf].sum(dtype=np.float64)) * self.row_bytes
            if self._round_to is not None:
                self.sent = spilled(self._variable, scratch, self._rounded(self.sent, self._round_to))
        if self.held_back is not None:
            self.stale.append(self.held_back.ids)
            self.furthest = max(self.furthest, float(self._scores[stays].max()) * self.row_bytes)

    def _chosen(self, mask: Array) -> Rows | None:
        if not mask.any() or mask.all():
            return self._change if mask.any() else None
        places = np.flatnonzero(mask)
        return Rows(self._change.ids[places], ChosenRows(self._change.values, places))

    def _rounded(self, rows: Rows, to: DeltaDtype) -> Iterator[tuple[Array, Array]]:
        for start in range(0, len(rows.ids), _ROWS):
            ids, values = rows.ids[start : start + _ROWS], rows.values[start : start + _ROWS]
            image = round_rows(values, to)
            self._note_rounded(ids, values, image)
            yield ids, image

    def _note_rounded(self, ids: Array, values: Array, image: Array) -> None:
        """Count the rows that are served as `image`, where that is not what the trainer has."""
        rounded = differing_rows(image, values)
        if len(rounded):
            self.stale.append(ids[rounded])
            self.rounded_rows += len(rounded)
            errors = np.abs(image[rounded].astype(np.float64) - values[rounded].astype(np.float64))
            self.largest_error = max(self.largest_error, float(errors.max(initial=0.0)))


def _left_out(sieves: Collection[_Sieve], allowed: Tolerance, since: float) -> LeftOut | None:
    rows = sum(len(sieve.held_back.ids) for sieve in sieves if sieve.held_back is not None)
    if not rows:
        return None
    furthest, wild = max(sieve.furthest for sieve in sieves), sum(sieve.wild_held for sieve in sieves)
    is_within = furthest < allowed.bound
    # A score is rounded to float32: the bound is to be above what it was made of.
    bound = (
        allowed.bound if is_within else min(float(np.nextafter(furthest * (1 + 2**-22), np.inf)), _FURTHEST)
    )
    found = LeftOut(bound, rows, furthest, wild=wild)
    if not allowed.counts_time:
        return found
    return replace(found, since=datetime.fromtimestamp(since, timezone.utc))


def _rounded(sieves: Collection[_Sieve], allowed: Tolerance) -> Rounded | None:
    rows = sum(sieve.rounded_rows for sieve in sieves)
    if allowed.delta_dtype is None or not rows:
        return None
    return Rounded(allowed.delta_dtype, rows, max(sieve.largest_error for sieve in sieves))


def _used(sieves: Collection[_Sieve], base: int, due: int) -> Used:
    sent = sum(len(sieve.sent.ids) * sieve.row_bytes for sieve in sieves if sieve.sent is not None)
    changes = sum(sieve.changed_rows * sieve.row_bytes for sieve in sieves)
    moved, gone = sum(sieve.moved for sieve in sieves), sum(sieve.moved_and_sent for sieve in sieves)
    return Used(base + sent, base + changes, due, min(1.0, gone / moved) if moved else 1.0)


def _refused(wild: Collection[WildRows]) -> WildValues:
    worst = max(wild, key=lambda each: each.norm)
    more = f", and {len(wild) - 1} more tables" if len(wild) > 1 else ""
    return WildValues(
        f"{worst.rows} rows of {worst.table!r} have norms beyond {worst.bound:.3g} (--max-norm){more}",
        cause=f"row {worst.row} has the norm {worst.norm:.3g}",
    )


def _row_bytes(variable: ServedVariable, packing: DeltaDtype | None) -> int:
    """The bytes of a row in a delta, with its number; of a packed one, if it packs."""
    elements = math.prod(variable.shape[1:])
    if packing is None:
        return 8 + elements * variable.dtype.numpy.itemsize
    return 8 + (elements + 4 if packing is DeltaDtype.INT8 else 2 * elements)


def _bytes_of(change: Change) -> int:
    if isinstance(change, Rows):
        rows = change.values
        return len(change.ids) * (8 + math.prod(rows.shape[1:]) * rows.dtype.itemsize)
    return change.nbytes if change.dtype != object else sum(len(text) + 4 for text in change.reshape(-1))


def _fixed_bytes(schema: Schema) -> int:
    """The most that a delta's header, its index, and its manifest take, in bytes."""
    return 4096 + sum(320 + 3 * len(variable.name) * len(variable.keys) for variable in schema.variables)


def _mask(places: Array, count: int) -> Array:
    """True at these places of `count`."""
    mask = np.zeros(count, bool)
    mask[places] = True
    return mask
