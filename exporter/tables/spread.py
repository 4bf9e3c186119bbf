"""Choose seeds for groups of keys, so that no two keys share a slot.

Groups with the most keys choose first, while their windows are emptiest; all groups of one size try the same
seed at once. The few that many seeds do not fit try alone, thousands of seeds at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from exporter.tables.geometry import WINDOW, places_of, seeds

Array = np.ndarray[Any, Any]

_ROUNDS = 48
_ALONE = 24
"""Groups that are too few to be worth a round together."""
_MOST_TRIES = 1 << 21


class Crowded(Exception):
    """No seed was found for a group with this many keys."""


_SEEDS = seeds(0, _ROUNDS)


def spread(keys: Array, counts: Array, windows: Array, occupied: Array) -> tuple[Array, Array]:
    """A seed for each group, and a slot for each key; the slots are marked in `occupied`.

    `keys` are those of the first group, then of the second and so on; `counts` is how many each has,
    `windows` its first slot. Slots are counted in `occupied`, which may be a part of the table.

    Raises:
        Crowded: a group's keys do not fit.
    """
    chosen = np.full(len(counts), _SEEDS[0], np.int64)
    slots = np.empty(len(keys), np.int64)
    owner = np.empty(len(occupied), np.int32)
    starts = np.cumsum(counts) - counts
    if not len(counts):
        return chosen, slots
    if counts.max() > WINDOW:
        raise Crowded(int(counts.max()))
    order = np.argsort(counts, kind="stable")
    sizes, firsts = np.unique(counts[order], return_index=True)
    for size, groups in zip(sizes[::-1], np.split(order, firsts[1:])[::-1], strict=True):
        if size:
            places = starts[groups][:, None] + np.arange(size)
            _spread_size(keys, places, groups, windows, occupied, owner, chosen, slots)
    return chosen, slots


def _spread_size(
    keys: Array,
    places: Array,
    groups: Array,
    windows: Array,
    occupied: Array,
    owner: Array,
    chosen: Array,
    slots: Array,
) -> None:
    """Seeds for groups of one size: row i of `places` says where the keys of `groups[i]` are."""
    for seed in _SEEDS:
        if len(groups) <= _ALONE:
            break
        found = windows[groups][:, None] + places_of(keys[places], seed)
        won = ~occupied[found].any(axis=1)
        candidates = found[won]
        numbers = np.arange(candidates.size, dtype=np.int32).reshape(candidates.shape)
        owner[candidates] = numbers
        won[won] = (owner[candidates] == numbers).all(axis=1)
        taken = found[won]
        occupied[taken] = True
        slots[places[won]] = taken
        chosen[groups[won]] = seed
        groups, places = groups[~won], places[~won]
    for group, place in zip(groups, places, strict=True):
        seed, taken = _spread_alone(keys[place], windows[group], occupied)
        occupied[taken] = True
        slots[place] = taken
        chosen[group] = seed


def _spread_alone(keys: Array, window: int, occupied: Array) -> tuple[np.int64, Array]:
    """The first seed that fits one group, and the slots that it leads to."""
    first, count = 0, 64
    while first < _MOST_TRIES:
        tried = seeds(first, count)
        found = window + places_of(keys, tried[:, None])
        fits = np.flatnonzero(~occupied[found].any(axis=1))
        distinct = np.diff(np.sort(found[fits], axis=1), axis=1).all(axis=1)
        if distinct.any():
            best = fits[distinct.argmax()]
            return tried[best], found[best]
        first, count = first + count, min(count * 4, 1 << 16)
    raise Crowded(len(keys))
