"""Choose seeds for groups of keys, so that no two keys share a slot.

Groups with the most keys choose first, while their windows are emptiest; all groups of one size try the same
seed at once. The fewer groups are left, the more seeds they try at a time. For keys that crowd in one place
of an index, the error is `TableFull`, with the room that would spread them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from exporter.errors import TableFull
from exporter.tables.geometry import MAX_ROWS, OFFSET, WINDOW, WINDOW_BITS, TableGeometry, hashes_of, seeds
from exporter.wire.dtypes import Array

_EASY = WINDOW // 4  # keys that a window easily takes beside those of other groups
_AT_ONCE = 1 << 12  # keys in a try; fewer keys are tried under several seeds, which hardly takes longer
_MOST_TRIES = 1 << 21  # a group that finds no seed has then taken some seconds


class Crowded(Exception):
    """No seed was found for a group with these keys; `twice` is one of them that occurs twice, or None."""

    def __init__(self, keys: Array) -> None:
        super().__init__(f"{len(keys)} keys")
        self.keys = np.sort(keys)
        again = self.keys[1:][self.keys[1:] == self.keys[:-1]]
        self.twice = int(again[0]) if len(again) else None


def spread(keys: Array, counts: Array, windows: Array, occupied: Array) -> tuple[Array, Array]:
    """Choose a seed for each group so that no two keys share a slot.

    Return the seeds by group, and the slots by key. Both are int64. `keys` (int64) are those of the first
    group, then of the second and so on; `counts` is their number by group, `windows` the first slot of each
    group's window. Slots are numbered within `occupied`, a mask of the table's slots or of a part of them,
    which is updated in place. Raises Crowded if a group finds no seed.
    """
    chosen = np.full(len(counts), seeds(0, 1)[0], np.int64)
    slots = np.empty(len(keys), np.int64)
    if not len(keys):
        return chosen, slots
    ends = np.cumsum(counts)
    largest = int(counts.argmax())
    if counts[largest] > WINDOW:
        raise Crowded(keys[ends[largest] - counts[largest] : ends[largest]])
    firsts = ends - counts
    by_size = np.argsort(counts.astype(np.uint8), kind="stable")  # numpy sorts small integers by radix
    owner = np.empty(len(occupied), np.int32)  # not cleared: only slots just written are read
    how_many = np.bincount(counts)
    for size in np.flatnonzero(how_many)[::-1].tolist():
        if size:
            last = int(how_many[: size + 1].sum())
            groups = by_size[last - how_many[size] : last]
            left = _Groups.of(keys, size, groups, firsts[groups], windows[groups])
            _spread_size(left, occupied, owner, chosen, slots)
    return chosen, slots


class _Groups(Struct):
    """Groups of one size without a seed: numbers, first keys, windows; `keys` [size, groups] with offset."""

    groups: Array
    firsts: Array
    windows: Array
    keys: Array

    @classmethod
    def of(cls, keys: Array, size: int, groups: Array, firsts: Array, windows: Array) -> _Groups:
        """Select the keys of groups that have `size` keys each.

        `keys` are all keys; `groups`, `firsts` and `windows` are each group's number, the place of its first
        key in `keys`, and its first slot.
        """
        shifted = keys.view(np.uint64).take(firsts + np.arange(size)[:, None])
        shifted += np.uint64(OFFSET)
        return cls(groups, firsts, windows, shifted)

    def without(self, placed: Array) -> _Groups:
        """Return the groups except those at these places of `groups`."""
        is_left = np.ones(len(self.groups), bool)
        is_left[placed] = False
        left = np.flatnonzero(is_left)
        return _Groups(self.groups[left], self.firsts[left], self.windows[left], self.keys.take(left, axis=1))

    def under(self, seed: Array) -> Array:
        """Return each key's slot under one seed, or under each of several.

        The result is [size, groups] for a scalar, [size, seeds, groups] for a vector. Seeds are uint64.
        """
        keys = self.keys[:, None, :] if seed.ndim else self.keys
        found = (keys * (seed[:, None] if seed.ndim else seed)) >> np.uint64(64 - WINDOW_BITS)
        return np.asarray(found.view(np.int64) + self.windows)


def _spread_size(left: _Groups, occupied: Array, owner: Array, chosen: Array, slots: Array) -> None:
    """Choose seeds and slots for groups of one size, and write them in place.

    `chosen` gets seeds by group, `slots` slots by key; `occupied` marks them. `owner` is scratch memory,
    int32, with an element for each slot. Raises Crowded if a group has a key twice or finds no seed.
    """
    tried = 0
    while len(left.groups):
        count = max(1, _AT_ONCE // left.keys.size)
        trial = seeds(tried, count)
        tried += count
        if count == 1:
            found = left.under(trial.view(np.uint64)[0])
            places = np.flatnonzero(~_any(occupied.take(row) for row in found))
            found, seed = found.take(places, axis=1), np.broadcast_to(trial, len(places))
        else:
            places, found, seed = _first_that_fits(left, trial, occupied)
        alone = _take(found, occupied, owner)
        places, found = places[alone], found.take(alone, axis=1)
        slots[left.firsts[places] + np.arange(len(found))[:, None]] = found
        chosen[left.groups[places]] = seed[alone]
        left = left.without(places)
        # A round that places nothing: where many groups have a key twice, only those are left at some time.
        is_late = count > 1 and (tried >= _MOST_TRIES or tried == count)
        if len(left.groups) and (is_late or not len(places)):
            _refuse(left, tried)


def _first_that_fits(left: _Groups, trial: Array, occupied: Array) -> tuple[Array, Array, Array]:
    """Return the places in `left` of groups that some seed of `trial` fits, their slots, and the seeds.

    The slots, [size, found], and the seed are those of the first seed that fits: the group's slots are free
    and differ from one another. `occupied` is read only.
    """
    found = left.under(trial.view(np.uint64))
    fits = np.logical_not(occupied.take(found).any(axis=0))
    which, places = np.nonzero(fits)
    ordered = np.sort(found[:, which, places], axis=0)
    fits[which, places] = (ordered[1:] != ordered[:-1]).all(axis=0)
    places = np.flatnonzero(fits.any(axis=0))
    first = fits.argmax(axis=0)[places]
    return places, found[:, first, places], trial[first]


def _take(found: Array, occupied: Array, owner: Array) -> Array:
    """Mark the slots of groups that own all of theirs; return the places of these groups in `found`.

    Of several groups that want one slot, only the last one owns it. `found` has the slots of each group,
    [size, groups]. Changes `occupied`; `owner` is scratch memory for a number per slot.
    """
    # The last writer owns a slot: a group that reads another number than its own has lost a slot.
    numbers = np.arange(found.size, dtype=np.int32).reshape(found.shape)
    owner[found] = numbers
    alone = np.flatnonzero(
        ~_any(owner.take(row) != number for row, number in zip(found, numbers, strict=True))
    )
    occupied[found.take(alone, axis=1)] = True
    return alone


def _refuse(left: _Groups, tried: int) -> None:
    """Raise Crowded if a group has a key twice, or if `tried` seeds are the most allowed; else do nothing."""
    keys = (left.keys - np.uint64(OFFSET)).view(np.int64)
    ordered = np.sort(keys, axis=0)
    twice = (ordered[1:] == ordered[:-1]).any(axis=0)
    if twice.any():
        raise Crowded(keys[:, twice.argmax()])
    if tried >= _MOST_TRIES:
        raise Crowded(keys[:, 0])


def _any(masks: Any) -> Array:
    """Return a mask of the places where any of the masks is true; needs at least one.

    The first mask is changed in place.
    """
    masks = iter(masks)
    found: Array = next(masks)  # much quicker than `any` along a short axis
    for mask in masks:
        found |= mask
    return found


# --- keys that crowd ---------------------------------------------------------------------------------------


def table_full(geometry: TableGeometry, keys: Array) -> TableFull:
    """Return the error to raise for keys of one group, in ascending order, that have no place together.

    Its hint names the room that would spread them, if there is one.
    """
    found = TableFull(
        f"{len(keys)} of a table's keys fall in one place of its index and do not fit there",
        cause=f"the table has {geometry.groups} places for {geometry.usable_rows} keys",
    )
    room = _room_to_spread(geometry, keys)
    if room is not None:
        found.hint = f"publish a base with more room: a full export with --table-head-room {room}"
    else:
        found.hint = (
            f"no room spreads keys like {keys[0]} and {keys[-1]}, which seem to be made to collide: "
            "train the table with other ids, such as hashes of these with a secret"
        )
    return found


def _room_to_spread(geometry: TableGeometry, keys: Array) -> int | None:
    """Return the least `--table-head-room` of 4, 8, 16, ... that spreads these keys (int64).

    Then these keys can be placed easily. None if the table would exceed the maximum number of rows.
    """
    hashed = np.sort(hashes_of(keys))
    near = WINDOW // geometry.stride  # groups whose windows overlap
    for more in range(1, 64 - geometry.group_bits):
        if geometry.usable_rows << (more + 1) > MAX_ROWS:
            break
        groups = (hashed >> np.uint64(64 - geometry.group_bits - more)).view(np.int64)
        if (groups[_EASY:] > groups[:-_EASY] + near).all():
            return int(2 << more)
    return None
