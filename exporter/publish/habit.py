"""Learn from the times of publications how often a model is usually published.

One day's pause of training is not a habit, and neither are a few quick publications after a start: the
longest few of the last intervals do not count, and with too few intervals nothing is expected.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from itertools import pairwise

_LAST, _LEAST = 64, 8
"""The number of newest intervals that count, and the least number needed."""
_ONE_IN = 20
"""One in this many intervals may be a pause."""
_TIMES, _SHORTEST_S = 3.0, 60.0
"""A publisher is silent after this many of its usual intervals, but not before a minute (seconds)."""


def longest_silence_s(times: Iterable[datetime]) -> float | None:
    """The seconds without a publication from which a publisher is unusually silent; None with too few."""
    newest = sorted(set(times))[-_LAST - 1 :]
    intervals = sorted((later - earlier).total_seconds() for earlier, later in pairwise(newest))
    if len(intervals) < _LEAST:
        return None
    usual = intervals[-1 - len(intervals) // _ONE_IN]
    return max(_SHORTEST_S, _TIMES * usual)
