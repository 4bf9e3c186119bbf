"""How old what is served is: from the commit of a delta to the first answer that has it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from tests.benchmarks.harness import Benchmark, Lab, job
from tests.benchmarks.rows import Row, bounded, seconds


def commit_to_served(lab: Lab) -> Iterator[Row]:
    """Trainer, exporter, agent, replicas and clients are real processes; no position ever goes back."""
    deltas, replicas = (5, 1) if lab.quick else (1000, 3)
    found = job("jobs_freshness:commit_to_served", deltas, 0.2, replicas).result
    versions = job("jobs_freshness:full_version", 1 if lab.quick else 10).result
    served, full = sorted(found["served"]), seconds(statistics.median(versions))
    what = f"commit of a delta to served, {replicas} replicas, agent"
    p99 = served[min(len(served) - 1, len(served) * 99 // 100)]
    yield bounded(
        f"{what}, p50; stock: a full version",
        seconds(statistics.median(served)),
        stock=full,
        at_most=seconds(0.1),
    )
    yield bounded("  p99", seconds(p99), at_most=seconds(0.3))
    yield Row(f"  longest of {len(served):,}", seconds(served[-1]))


BENCHMARKS: tuple[Benchmark, ...] = (commit_to_served,)
