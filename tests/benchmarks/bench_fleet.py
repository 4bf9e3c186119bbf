"""A fleet: one agent with hundreds of servers, each 100 ms away; and hundreds of copies of one bucket.

The servers are one process that speaks their protocol. It shares the processors with the agent, so that a
burst of calls takes longer here than it does for an agent alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.benchmarks.harness import Benchmark, Lab, job
from tests.benchmarks.rows import Row, Target, bounded, bytes_, count, seconds, share

_ONE_WAY_S = 0.1
"""How long a call is on its way to a server, and its answer back."""
_STORE_S = 0.05
"""Seconds until a store answers."""
_HOUR = 3600
_READ, _LISTING = 0.0004 / 1000, 0.005 / 1000
"""Dollars a request, as S3 Standard lists them in us-east-1: GET, and LIST or PUT."""


def directory(lab: Lab) -> Iterator[Row]:
    """Deltas in a directory that the agent sees: to the last server, with a dead and with a slow tenth."""
    servers, times, idle_s = (10, 3, 1) if lab.quick else (300, 20, 10)
    found = job("jobs_fleet:follow", lab.fresh("fleet"), servers, times, idle_s, _ONE_WAY_S).result
    yield from _to_the_last(
        f"a delta in a directory to the last of {servers} servers", found["delays"], at_most=1
    )
    yield from _to_the_last("  while a tenth is dead, to the last of the others", found["dead"])
    yield from _to_the_last("  while a tenth takes 2 s a call, to the last of the others", found["slow"])
    yield from _to_the_last("  and to the last of those", found["slow ones"])
    yield from _burdens(found, at_most=0.1)


def store(lab: Lab) -> Iterator[Row]:
    """Deltas in a store, which the agent fetches."""
    servers, times, idle_s = (10, 3, 1) if lab.quick else (300, 10, 10)
    arguments = (lab.fresh("pulled"), servers, times, idle_s, _ONE_WAY_S, _STORE_S)
    found = job("jobs_fleet:pulled", *arguments).result
    what = f"a delta in a store to the last of {servers} servers, polled each second"
    yield from _to_the_last(what, found["delays"])
    yield Row("  the agent's requests to the store a minute", count(found["requests while idle"] * 60))
    yield Row("  and for each delta", count(found["requests of a publication"]))
    yield from _burdens(found, at_most=None)


def thousand(lab: Lab) -> Iterator[Row]:
    """More servers than one agent should have."""
    servers, times, idle_s = (20, 2, 1) if lab.quick else (1000, 3, 10)
    found = job("jobs_fleet:alone", lab.fresh("thousand"), servers, times, idle_s, _ONE_WAY_S).result
    yield from _to_the_last(f"a delta in a directory to the last of {servers:,} servers", found["delays"])
    yield from _burdens(found, at_most=None)


def copies(lab: Lab) -> Iterator[Row]:
    """What hundreds of copies of one bucket ask for, and what that costs."""
    number, watch_s = (3, 10) if lab.quick else (300, 10)
    found = job("jobs_fleet:copies", lab.fresh("copies"), number, watch_s).result
    for what in ("first", "delta"):
        asked = found[what]
        assert asked["writes"] == 0
        yield Row(
            f"requests of {number} copies: {what}", count(number * (asked["listings"] + asked["reads"]))
        )
    delta = found["delta"]
    for every_s, deltas in ((1, 60), (10, 60), (1, _HOUR)):
        idle, per_hour = found[f"every {every_s} s"], dict[str, float]()
        for kind in ("reads", "listings"):  # a look that finds a delta reads the head, too, as any other
            looks = every_s * idle[kind] if kind == "reads" else 0
            per_hour[kind] = number * (_HOUR * idle[kind] + deltas * (delta[kind] - looks))
        label = f"  an hour, a look every {every_s} s, {deltas:,} deltas"
        yield Row(label, count(sum(per_hour.values())))
        dollars = per_hour["reads"] * _READ + per_hour["listings"] * _LISTING
        yield Row("    cents at list prices", count(100 * dollars))


def _to_the_last(what: str, delays: Sequence[Sequence[float]], at_most: float | None = None) -> Iterator[Row]:
    last = sorted(max(each) for each in delays)
    limit = None if at_most is None else Target(seconds(at_most))
    yield Row(f"{what}, p50 of {len(last)} deltas", seconds(last[len(last) // 2]))
    yield Row("    p99", seconds(last[min(len(last) - 1, len(last) * 99 // 100)]), target=limit)


def _burdens(found: dict[str, float], *, at_most: float | None) -> Iterator[Row]:
    """What the agent takes: a publication a minute is the usual pace, for which there is a limit."""
    idle, each = found["idle"], found["a publication"]
    usual = share(idle + each / 60)
    yield Row("  the agent's share of a processor while nothing is published", share(idle))
    what = "  with a delta a minute"
    yield Row(what, usual) if at_most is None else bounded(what, usual, at_most=share(at_most))
    yield Row("  its processor time for each delta", seconds(each))
    yield Row("  its memory", bytes_(found["memory"]))
    yield Row("  its threads", count(found["threads"]))


BENCHMARKS: tuple[Benchmark, ...] = (directory, store, thousand, copies)
