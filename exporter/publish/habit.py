"""How often a model is usually published, learned from the times of its publications.

A day on which training stood still is not a habit, and a few quick publications after a start are none
either: of the last intervals the largest few do not count, and without enough of them nothing is expected.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from itertools import pairwise

_LAST, _LEAST = 64, 8
"""How many intervals count, and how many there must be."""
_ONE_IN = 20
"""Of so many intervals one may be a pause."""
_TIMES, _SHORTEST_S = 3.0, 60.0
"""A publisher is silent after so many of its usual intervals, and not before a minute."""


def longest_silence_s(times: Iterable[datetime]) -> float | None:
    """The seconds after which a publisher is silent for longer than usual; None with too few times."""
    newest = sorted(set(times))[-_LAST - 1 :]
    intervals = sorted((later - earlier).total_seconds() for earlier, later in pairwise(newest))
    if len(intervals) < _LEAST:
        return None
    usual = intervals[-1 - len(intervals) // _ONE_IN]
    return max(_SHORTEST_S, _TIMES * usual)
