"""How old what is served is: from the commit of an increment to the first answer that has it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from exporter.terminal.progress import count
from tests.benchmarks.harness import Benchmark, Lab, job
from tests.benchmarks.rows import Quantity, Row, bounded, cost, seconds, share

_EVERY_S = 0.2
"""Seconds between increments when the recording is played: five a second."""


def commit_to_served(lab: Lab) -> Iterator[Row]:
    """Increments of a cluster, recorded and played again at their pace beside everything that serves.

    Exporter, agent, replicas and clients are real processes. No increment is lost, no position goes back,
    and each replica ends with what the cluster had.
    """
    increments, replicas = (5, 1) if lab.quick else (1000, 3)
    recorded = lab.once(
        f"recorded-{increments}",
        lambda path: job("jobs_freshness:record", path, increments),
    )
    found = job("jobs_freshness:commit_to_served", recorded, replicas, _EVERY_S).result
    versions = job("jobs_freshness:full_version", recorded, 1 if lab.quick else 10).result
    full = seconds(statistics.median(versions))
    made = ", ".join(
        (
            f"{found['increments'][0]:,} increments",
            f"{found['deltas'][0]:,} deltas",
            count(replicas, "replica"),
        )
    )
    yield bounded(
        f"increment written to served, p50; {made}; stock: the same as a full version",
        _at(found["served"], 50),
        stock=full,
        at_most=seconds(0.1),
    )
    yield bounded("  p99", _at(found["served"], 99), at_most=seconds(0.3))
    yield Row("  longest", seconds(max(found["served"])), stock=seconds(max(versions)))
    yield Row("  of it until the delta is published, p50", _at(found["published"], 50))
    yield Row("  of it from there to the first answer, p50", _at(found["applied"], 50))
    yield cost(
        "  predict meanwhile, open loop, p99; stock: before it",
        _at(found["busy"], 99),
        _at(found["idle"], 99),
    )
    for name in ("exporter", "agent", "server 0", "client"):
        resting, working = found[f"cpu of {name}"]
        what = f"  one processor's share of the {name}; stock: while nothing is trained"
        yield Row(what, share(working), stock=share(resting))


def _at(values: Sequence[float], percent: int) -> Quantity:
    ordered = sorted(values)
    return seconds(ordered[min(len(ordered) - 1, len(ordered) * percent // 100)])


BENCHMARKS: tuple[Benchmark, ...] = (commit_to_served,)
