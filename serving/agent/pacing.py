"""The pace at which a replica applies deltas: slower while predictions suffer, but never beyond a delay.

A prober sends the replica predictions at a steady rate (`serving.agent.probe`). With pacing, deltas are
applied one by one, the parts instead of a merged delta, with a pause between calls:

    | p99 of the probes since the pause was chosen                | pause                            |
    |-------------------------------------------------------------|----------------------------------|
    | unknown: too few probes while idle, or while applying       | unchanged                        |
    | above the limit                                             | twice as long, 20 ms at first    |
    | within the limit                                            | half as long, none below 20 ms   |
    | any, but a delta has waited for `longest_delay_s`           | none, and everything in one call |

Before the first delta, the idle replica is measured for about a second (50 probes). The limit is `factor`
times the p99 of the idle replica, and at least 1 ms above it. The p99 covers the whole time in which deltas
are applied, pauses included, because clients see that, and pauses lower it. A pause does not reduce the cost
of a single delta.

This module reads no clock and no network.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from msgspec import Struct

from exporter.publish.model import Log
from exporter.publish.served import Served

FIRST_PAUSE_S = 0.02  # the period of probes by default: a shorter pause may have none in it
LEAST_PROBES = 50  # of fewer than 100 values the p99 is the largest
_NOISE_S = 0.001


class PacePolicy(Struct, frozen=True):
    """The limits of pacing.

    `factor` limits the p99 of probes, as a multiple of the idle replica's; `longest_delay_s` a delta's wait;
    `probe_s` is the time between two probes; of an idle replica with enough probes, ten times that. In
    seconds.
    """

    factor: float
    longest_delay_s: float = 5.0
    probe_s: float = 0.02


class Latencies(Struct, frozen=True):
    """Seconds that probes took: while idle, and while deltas were applied since the pause was chosen."""

    idle: Sequence[float] = ()
    applying: Sequence[float] = ()

    @property
    def idle_p99_s(self) -> float | None:
        """Return the p99 of probes of the idle replica in seconds; None for fewer than 50 probes."""
        return p99(self.idle)

    @property
    def applying_p99_s(self) -> float | None:
        """Return the p99 of probes while deltas are applied in seconds; None for fewer than 50 probes."""
        return p99(self.applying)


def p99(values: Sequence[float]) -> float | None:
    """Return the smallest value that 99 % of the values do not exceed; None for fewer than 50 values."""
    if len(values) < LEAST_PROBES:
        return None
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


def next_pause(pause_s: float, found: Latencies, policy: PacePolicy) -> float:
    """Return the next pause between two deltas in seconds, 0 for none; see the module's table.

    `pause_s` is the present pause; `found` are the latencies of the last probes, `policy` has the limits.
    """
    idle, applying = found.idle_p99_s, found.applying_p99_s
    if idle is None or applying is None:
        return pause_s
    if applying > max(policy.factor * idle, idle + _NOISE_S):
        return min(max(FIRST_PAUSE_S, 2 * pause_s), policy.longest_delay_s)
    shorter = pause_s / 2
    return shorter if shorter >= FIRST_PAUSE_S else 0.0


class Waiting:
    """The times for which deltas have been pending for a version; deltas beyond the hold are not pending."""

    def __init__(self) -> None:
        self._since: dict[tuple[int, int], float] = {}

    def longest_s(self, pairs: Iterable[tuple[Served, Log]], now: float) -> float:
        """Return the seconds since the oldest pending delta was first seen here; 0 if none is pending.

        `pairs` are all versions with their logs, `now` is in monotonic seconds. Records the pending deltas.
        """
        ends = {
            (version.number, span.end)
            for version, log in pairs
            if version.position is not None
            for span in log.beyond(version.position)
            if span.end <= log.newest
        }
        self._since = {end: self._since.get(end, now) for end in ends}
        return now - min(self._since.values(), default=now)
