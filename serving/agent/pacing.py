"""How fast one replica may take deltas: slower while its predictions suffer, but never too late.

A prober asks the replica for a prediction at a steady rate (`serving.agent.probe`). With pacing, deltas are
applied one by one, parts rather than their merger, with a pause between two calls:

    | p99 of the probes since the pause was chosen                  | pause                           |
    |---------------------------------------------------------------|---------------------------------|
    | not known: too few probes, then or when nothing was applied   | as it is                        |
    | above the limit                                               | twice as long, at first 20 ms   |
    | within the limit                                              | half as long, below 20 ms none  |
    | whatever, but a delta has waited for `longest_delay_s`        | none, and everything in one call |

Before the first delta, an idle replica is measured for about a second (50 probes). The limit is `factor`
times the p99 of when nothing is applied, and 1 ms above it at least. The p99 is over all the time in which
deltas are applied, pauses included: it is what clients see, and pauses lower it. What one single delta costs,
no pause makes less.

Nothing here reads a clock or the network.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from msgspec import Struct

from serving.agent.rollout import PublishedLog, Version

FIRST_PAUSE_S = 0.02
LEAST_PROBES = 50
_NOISE_S = 0.001


class PacePolicy(Struct, frozen=True):
    """How much slower predictions may become, how long a delta may wait for that, and how often to probe."""

    factor: float
    longest_delay_s: float = 5.0
    probe_s: float = 0.02


class Latencies(Struct, frozen=True):
    """Seconds that probes took: when nothing was applied, and since the last choice while deltas were."""

    idle: Sequence[float] = ()
    applying: Sequence[float] = ()

    @property
    def idle_p99_s(self) -> float | None:
        """None with too few probes."""
        return p99(self.idle)

    @property
    def applying_p99_s(self) -> float | None:
        """None with too few probes."""
        return p99(self.applying)


def p99(values: Sequence[float]) -> float | None:
    """The value that 99 of 100 do not exceed; None of too few to tell."""
    if len(values) < LEAST_PROBES:
        return None
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


def next_pause(pause_s: float, found: Latencies, policy: PacePolicy) -> float:
    """The pause between two deltas from now on; see the module's table."""
    idle, applying = found.idle_p99_s, found.applying_p99_s
    if idle is None or applying is None:
        return pause_s
    if applying > max(policy.factor * idle, idle + _NOISE_S):
        return min(max(FIRST_PAUSE_S, 2 * pause_s), policy.longest_delay_s)
    shorter = pause_s / 2
    return shorter if shorter >= FIRST_PAUSE_S else 0.0


class Waiting:
    """Since when deltas wait that a version may take: what a hold keeps back does not wait yet."""

    def __init__(self) -> None:
        self._since: dict[tuple[int, int], float] = {}

    def longest_s(self, pairs: Iterable[tuple[Version, PublishedLog]], now: float) -> float:
        """Seconds that the one waits which waits longest, of versions and their logs; 0 if there is none."""
        ends = {
            (version.number, span.end)
            for version, log in pairs
            if version.position is not None
            for span in log.beyond(version.position)
            if span.end <= log.newest
        }
        self._since = {end: self._since.get(end, now) for end in ends}
        return now - min(self._since.values(), default=now)
