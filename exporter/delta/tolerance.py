"""Approximate deltas: which changed rows are sent, rounded or held back, and the report on them.

Each changed row has a *distance*: the Euclidean norm of its new value less the served one. Rows below
`--delta-budget change=X` are held back; with a size the nearest rows are held back until the others fit. One
threshold divides the rows of all tables: the given one, or the lowest that fits the size. Rows that are held
back are remembered, with the time when they began to wait, and compete again with their whole distance.

All is done only if asked for, and each publication says how far served values may be from the trainer's. A
row whose distance is NaN or infinite is always sent, and so are changes without a distance: variables that
are served whole, tables of other types than floating point, and rows of new keys.

*Ranking.* A row's score is its distance for each byte that it takes. A pass over the rows keeps it as a
float32. Positive floats sort in the order of their bits, so that two histograms, of the upper and of the
lower 16, find the threshold for any number of rows of any sizes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from exporter.delta.compare_rows import differing_rows
from exporter.delta.deviation import Divided, LeftOut, Rounded, Tolerance, Used, WildRows
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
_SAME, _WILD, _HELD = -3.0, -2.0, -1.0
"""Scores of rows that are served already in the form in which they would be sent, and of rows that are held
back in any case: beyond their norm, or below `--delta-budget change=X`."""
_FURTHEST = sys.float_info.max  # infinity is no number of JSON


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
    """Divide `changes` into rows that are sent, some of them rounded, and rows that are held back.

    `allowed` sets the limits. Rows that are served already in the form in which they would be sent are left
    out, too, and not counted as held back. The checksums of published values are verified first: a damaged
    row would give a wrong distance. The tables `coded` hold rows in 8 bits. The rows `first` of a table
    (int64 numbers of rows of new keys) are sent unless their norm forbids it; None: there are none. `waiting`
    has the rows held back so far.

    Raises:
        WildValues: rows are beyond their bound and `on_wild` refuses them; or a variable that is served whole
            is, unless `on_wild` only warns.
        CheckpointError: a published value cannot be read, or is damaged.
        DiskFull, PublishError: bytes fetched from a store cannot be kept.
        OSError: the scratch file cannot be written.
    """
    sieves, whole = _sieves(changes, published, schema, allowed, coded, first or {})
    published.check(sieves)
    for sieve in sieves.values():
        sieve.measure(waiting)
    wild = _require_allowed(sieves.values(), whole, allowed)
    base = _fixed_bytes(schema) + sum(map(_bytes_of, whole.values()))
    due = base + sum(sieve.due_rows * sieve.row_bytes for sieve in sieves.values())
    cut = _Cut() if allowed.room is None else _Cut.of(sieves.values(), allowed.room - due)
    for sieve in sieves.values():
        sieve.send(cut, scratch)
    sent = whole | {name: sieve.sent for name, sieve in sieves.items() if sieve.sent is not None}
    held = {name: sieve.held_back for name, sieve in sieves.items() if sieve.held_back is not None}
    since = {name: sieves[name].since(waiting) for name in held if allowed.counts_time}
    used = None if allowed.room is None else _used(sieves.values(), base, due)
    sent_in_order = {each.name: sent[each.name] for each in schema.variables if each.name in sent}
    oldest = min((float(each.min()) for each in since.values()), default=math.inf)
    return Divided(
        sent_in_order,
        _left_out(sieves.values(), allowed, oldest),
        _rounded(sieves.values(), allowed),
        used,
        wild,
        held,
        since,
        {name: np.concatenate(sieve.stale) for name, sieve in sieves.items() if sieve.stale},
    )


def _sieves(
    changes: Mapping[str, Change],
    published: LayeredState,
    schema: Schema,
    allowed: Tolerance,
    coded: Collection[str],
    first: Mapping[str, Array],
) -> tuple[dict[str, _Sieve], dict[str, Change]]:
    """Return a sieve for each table whose rows may be held back or rounded, and the other changes.

    Both are by name. The other changes are sent whole. `coded` and `first` are as in `divide`.
    """
    sieves: dict[str, _Sieve] = {}
    whole: dict[str, Change] = {}
    for variable in (each for each in schema.variables if each.name in changes):
        name, change = variable.name, changes[variable.name]
        is_coded = name in coded and (allowed.room is not None or bool(allowed.norms))
        if isinstance(change, Rows) and (variable.dtype.is_floating or is_coded):
            new = first.get(name)
            sieves[name] = _Sieve(variable, change, published, allowed, new, is_coded=is_coded)
        else:
            whole[name] = change
    return sieves, whole


def _require_allowed(
    sieves: Iterable[_Sieve], whole: Mapping[str, Change], allowed: Tolerance
) -> tuple[WildRows, ...]:
    """Return the reports on rows beyond their bound.

    Tables come first, then variables that are served whole. Raises WildValues if `on_wild` refuses some of
    them, or if a variable that is served whole is beyond its bound and `on_wild` does not only warn.
    """
    rows = tuple(found for sieve in sieves if (found := sieve.wild) is not None)
    variables = tuple(_wild_whole(whole, allowed.norms))  # they cannot be held back
    refused = rows if allowed.on_wild is OnWild.REFUSE else ()
    if refused := refused + (() if allowed.on_wild is OnWild.WARN else variables):
        raise _refused(refused, can_hold=not variables)
    return rows + variables


def row_distances(a: Array, b: Array, dtype: Any = np.float64) -> Array:
    """Return the Euclidean distances [n] of the rows of two arrays [n, ...].

    They are computed in `dtype`, float32 or float64; for any other dtype in float32. NaN and infinite values
    give NaN or infinity.
    """
    # NaN and infinity are results, too: such rows are always sent.
    with np.errstate(invalid="ignore", over="ignore"):
        return row_norms(np.subtract(a, b, dtype=_at_least_single(dtype), casting="unsafe"), dtype)


def row_norms(rows: Array, dtype: Any = np.float64) -> Array:
    """Return the Euclidean norms [n] of rows [n, ...].

    They are computed in `dtype`, float32 or float64; for any other dtype in float32. They may be NaN or
    infinite.
    """
    flat = rows.reshape(len(rows), math.prod(rows.shape[1:])).astype(_at_least_single(dtype), copy=False)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(np.sqrt(np.einsum("ij,ij->i", flat, flat)))


def _at_least_single(dtype: Any) -> Any:
    """Return the dtype if it is float32 or float64, else float32.

    Squares of 16-bit floats would be infinite from 256 on.
    """
    return dtype if np.dtype(dtype) in (np.float32, np.float64) else np.float32


class _Cut:
    """The score above which rows are sent, and the bytes left for rows with exactly this score."""

    def __init__(self, score: float = 0.0, room: int = sys.maxsize) -> None:
        self._score, self._room = np.float32(score), room

    @classmethod
    def of(cls, sieves: Iterable[_Sieve], room: int) -> _Cut:
        """Return the cut with the lowest score above which all competing rows fit into `room` bytes.

        The cut also has the bytes that are left for rows with exactly its score; it has no limit if all rows
        fit. A negative room counts as 0.
        """
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
        """Return a mask of a table's rows that are sent, given their scores.

        `row_bytes` is the size of a row in the delta. Rows with exactly the cut's score are sent, first ones
        first, while they fit; they use up its room.
        """
        sent = scores > self._score
        level = np.flatnonzero(scores == self._score)[: self._room // row_bytes]
        sent[level] = True
        self._room -= len(level) * row_bytes
        return np.asarray(sent)


class _Sieve:
    """The changed rows of one table: measured, then divided into rows to send and rows to hold back."""

    def __init__(
        self,
        variable: ServedVariable,
        change: Rows,
        published: LayeredState,
        allowed: Tolerance,
        first: Array | None,
        *,
        is_coded: bool,
    ) -> None:
        self._variable, self._change, self._published, self._allowed = variable, change, published, allowed
        self._first, self._is_coded = np.sort([] if first is None else first), is_coded
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
        """The scores, float32, of the rows that are neither due nor held back in any case."""
        return self._scores[(self._scores >= 0) & (self._scores < np.inf)]

    @property
    def changed_rows(self) -> int:
        """The number of rows that would be sent without a limit of the delta's size."""
        return int(np.count_nonzero(self._scores >= 0))

    @property
    def due_rows(self) -> int:
        """The number of rows that are sent whatever the budget."""
        return int(np.count_nonzero(self._scores == np.inf))

    @property
    def wild(self) -> WildRows | None:
        """A report on the rows beyond the table's bound; None if there are none.

        Only complete after `measure`.
        """
        if not self._wild_rows:
            return None
        norm, row = self._wildest
        name, is_held = self._variable.name, self._allowed.on_wild is OnWild.HOLD_ROW
        return WildRows(name, self._wild_rows, row, norm, self._allowed.norms[name], is_held)

    def measure(self, waiting: Waiting) -> None:
        """Compute each row's score; record rows that are served rounded already, and rows beyond their norm.

        `waiting` has the rows held back so far. Raises CheckpointError and subclasses if published rows
        cannot be read, DiskFull or PublishError if rows fetched from a store cannot be kept.
        """
        # From a store each step is a round of requests.
        step = ROWS_AT_ONCE if self._published.is_remote(self._variable.name) else _ROWS
        for start in range(0, len(self._change.ids), step):
            ids, values = self._change.ids[start : start + step], self._change.values[start : start + step]
            before = self._published.rows_at(self._variable.name, ids)
            distances = self._distances(values, before)
            same = np.flatnonzero(~(distances > 0))  # 0 or NaN: only a comparison of bits shows a change
            same = np.delete(same, differing_rows(before[same], values[same]))
            moved: Array | slice = slice(None)
            if len(same):
                moved = np.flatnonzero(~_mask(same, len(ids)))
                ids, values, before, distances = ids[moved], values[moved], before[moved], distances[moved]
            scores = self._score(ids, values, distances, waiting)
            if self._round_to is not None:
                is_same = ~_mask(differing_rows(before, round_rows(values, self._round_to)), len(ids))
                scores[is_same] = _SAME
                self._note_rounded(ids[is_same], values[is_same], before[is_same])
            finite = scores[(scores >= 0) & (scores < np.inf)]
            self.moved += float(finite.sum(dtype=np.float64)) * self.row_bytes
            self._scores[start : start + step][moved] = scores

    def _distances(self, a: Array, b: Array) -> Array:
        """Return the Euclidean distance of each row of `a` from the same row of `b`.

        Rows in 8 bits are decoded first. Rows of float32 are computed in float32, which is faster, unless a
        bound or norms are set.
        """
        if self._is_coded:
            a, b = values_of(a), values_of(b)
        is_bounded = self._allowed.bound or self._allowed.norms
        return row_distances(a, b, np.float64 if is_bounded else a.dtype)

    def _score(self, ids: Array, values: Array, distances: Array, waiting: Waiting) -> Array:
        allowed, name, is_new = self._allowed, self._variable.name, self._is_new(ids)
        with np.errstate(over="ignore"):
            scores = (distances / self.row_bytes).astype(np.float32)
        scores[~np.isfinite(scores)] = np.inf
        held = distances < (0.0 if self._is_coded else allowed.bound)
        if allowed.overdue is not None or len(self._first):
            is_due = is_new.copy()
            if allowed.overdue is not None:
                is_due |= waiting.since_of(name, ids) <= allowed.overdue
            held &= ~is_due
            scores[is_due] = np.inf
        scores[held] = _HELD
        if (bound := allowed.norms.get(name)) is not None:
            # NaN is greater than no bound, infinity than every one.
            norms = np.nan_to_num(row_norms(values_of(values) if self._is_coded else values), nan=np.inf)
            wild = norms > bound
            if wild.any():
                largest = int(np.argmax(np.where(wild, norms, 0)))
                worst = (min(float(norms[largest]), _FURTHEST), int(ids[largest]))
                self._wildest = max(self._wildest, worst)
                self._wild_rows += int(np.count_nonzero(wild))
                if allowed.on_wild is OnWild.HOLD_ROW:
                    held |= wild
                    scores[wild] = _WILD
                    self.wild_held += int(np.count_nonzero(wild))
                    # A new key beyond its norm is served as zeros: its norm is its distance from them.
                    distances = np.where(wild & is_new, norms, np.nan_to_num(distances, nan=np.inf))
        self.furthest = max(self.furthest, min(float(distances[held].max(initial=0.0)), _FURTHEST))
        return scores

    def _is_new(self, ids: Array) -> Array:
        """Return a mask, bool [n], of the rows with the numbers `ids`: True for rows of new keys."""
        return _is_among(ids, self._first)

    def since(self, waiting: Waiting) -> Array:
        """Return when each held-back row began to wait, in seconds since 1970: float64, in the rows' order.

        Infinite for rows beyond their norm, which are never overdue. Call it only after `send`, and if rows
        are held back.
        """
        assert self.held_back is not None
        ids = self.held_back.ids
        is_wild = _is_among(ids, self._change.ids[self._scores == _WILD])
        return np.where(is_wild, np.inf, waiting.since_of(self._variable.name, ids))

    def send(self, cut: _Cut, scratch: Path) -> None:
        """Divide the rows by their scores into `sent` and `held_back`, and set the fields for the report.

        Each is None if it has no rows. Rows with exactly the cut's score use up its room. Rows of new keys
        beyond their norm are sent as zeros, and held back as well. Raises OSError if a file in `scratch`
        cannot be written.
        """
        goes = cut.passes(self._scores, self.row_bytes)
        stays = ~goes & (self._scores > _SAME)  # _SAME is the lowest: rows with it need not be sent
        # The served row of a new key has another key's values: if its own are beyond the norm, send zeros.
        blank = self._is_new(self._change.ids) & (self._scores == _WILD)
        self.sent, self.held_back = self._chosen(goes | blank), self._chosen(stays)
        if self.sent is not None and blank.any():
            self.sent = spilled(self._variable, scratch, _blanked(self.sent, self._change.ids[blank]))
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
        """Record as rounded the rows whose served form, `image`, differs from the trainer's `values`.

        The rounded rows count as stale, too. `ids` are the numbers of all rows in `values`. The largest error
        is updated.
        """
        rounded = differing_rows(image, values)
        if len(rounded):
            self.stale.append(ids[rounded])
            self.rounded_rows += len(rounded)
            errors = np.abs(image[rounded].astype(np.float64) - values[rounded].astype(np.float64))
            self.largest_error = max(self.largest_error, float(errors.max(initial=0.0)))


def _is_among(ids: Array, chosen: Array) -> Array:
    """Return a mask, bool [n], of the `ids` that are in `chosen`, which is ascending."""
    # not isin, which sorts both: `ids` are a piece of 4,096, `chosen` may be a million new keys
    return np.searchsorted(chosen, ids, side="right") > np.searchsorted(chosen, ids)


def _blanked(rows: Rows, blank: Array) -> Iterator[tuple[Array, Array]]:
    for start in range(0, len(rows.ids), _ROWS):
        ids, values = rows.ids[start : start + _ROWS], np.array(rows.values[start : start + _ROWS])
        values[_is_among(ids, blank)] = 0
        yield ids, values


def _wild_whole(whole: Mapping[str, Change], norms: Mapping[str, float]) -> Iterator[WildRows]:
    """Yield a report on each variable that is served whole and whose norm exceeds its bound in `norms`."""
    for name, value in whole.items():
        if name in norms and not isinstance(value, Rows):
            norm = float(np.nan_to_num(row_norms(value[np.newaxis]), nan=np.inf)[0])
            if norm > norms[name]:
                yield WildRows(name, 1, 0, min(norm, _FURTHEST), norms[name], held=False)


def _left_out(sieves: Collection[_Sieve], allowed: Tolerance, since: float) -> LeftOut | None:
    rows = sum(len(sieve.held_back.ids) for sieve in sieves if sieve.held_back is not None)
    if not rows:
        return None
    furthest, wild = max(sieve.furthest for sieve in sieves), sum(sieve.wild_held for sieve in sieves)
    is_within = furthest < allowed.bound
    # A score is rounded to float32: the bound must be above the distance that it was computed from.
    bound = (
        allowed.bound if is_within else min(float(np.nextafter(furthest * (1 + 2**-22), np.inf)), _FURTHEST)
    )
    found = LeftOut(bound, rows, furthest, wild=wild)
    if not allowed.counts_time or since == math.inf:
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


def _refused(wild: Collection[WildRows], *, can_hold: bool) -> WildValues:
    worst = max(wild, key=lambda each: each.norm)
    more = f", and {len(wild) - 1} more tables" if len(wild) > 1 else ""
    have = (
        f"{worst.rows} rows of {worst.table!r} have norms"
        if worst.rows > 1
        else f"a row of {worst.table!r} has a norm"
    )
    return WildValues(
        f"{have} beyond {worst.bound:.3g} (--max-norm){more}",
        cause=f"row {worst.row} has the norm {worst.norm:.3g}",
        hint="" if can_hold else "go back to a checkpoint before; to serve them: --on-wild warn",
    )


def _row_bytes(variable: ServedVariable, packing: DeltaDtype | None) -> int:
    """Return the bytes of a row in a delta, including its number; of a packed row if `packing` is given."""
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
    """Return an upper bound of the bytes that a delta's header, index and manifest take."""
    return 4096 + sum(320 + 3 * len(variable.name) * len(variable.keys) for variable in schema.variables)


def _mask(places: Array, count: int) -> Array:
    """Return a mask of `count` elements that is True at these places."""
    mask = np.zeros(count, bool)
    mask[places] = True
    return mask
