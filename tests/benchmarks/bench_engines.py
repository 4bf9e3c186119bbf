"""Engines: what a task costs beyond its work, how jobs grow with workers, and what a kill costs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.benchmarks.harness import Benchmark, Lab, job
from tests.benchmarks.rows import Row, bounded, bytes_, cost, gain, seconds, share
from tests.benchmarks.sleeping_store import sleeping_store
from tests.support.engine_runs import (
    ENGINES,
    PYTHON,
    TABLES,
    EngineRuns,
    is_here,
    make_environment,
)


def overhead(lab: Lab) -> Iterator[Row]:
    """Tasks that read nothing, on every engine: where its extra is not installed, in an environment of it."""
    for engine in ENGINES[:1] if lab.quick else ENGINES:
        python = None
        if not is_here(engine):
            try:
                made = lab.once(f"environment-of-{engine}", partial(make_environment, engine))
            except subprocess.CalledProcessError:
                lab.say(f"the extra {engine} cannot be installed here: not measured")
                continue
            python = made / PYTHON
        found = job("jobs_engines:idle", engine, 50 if lab.quick else 2000, python=python).result
        yield bounded(f"{engine}: a task that does nothing", seconds(found["each"]), at_most=seconds(0.005))
        yield bounded(f"{engine}: until the first is done", seconds(found["first"]), at_most=seconds(60))


def terabyte(lab: Lab) -> Iterator[Row]:
    """Everything that a command does for 1 TB beside the reading: 16,384 tasks of 64 MB."""
    directory = lab.fresh("sparse-terabyte")
    directory.mkdir()
    found = job("jobs_engines:terabyte", directory, 16 if lab.quick else 1024)
    what = f"plan and fold {found.result:,} tasks of 64 MB"
    yield bounded(what, seconds(found.seconds), at_most=seconds(15))
    yield bounded("  peak memory", bytes_(found.peak_bytes), at_most=bytes_(200e6))


def copy(lab: Lab) -> Iterator[Row]:
    """Copy and both checksums, by tasks on threads, against cp."""
    directory = lab.fresh("copied-by-tasks")
    directory.mkdir()
    found = job("jobs_engines:copy", directory, 16 if lab.quick else 1024).result
    ours, stock = seconds(found["tasks_seconds"]), seconds(found["cp_seconds"])
    yield gain("copy with checksums by tasks, against cp", ours, stock, at_least=0.8)
    yield cost("  processor time", seconds(found["tasks_cpu"]), seconds(found["cp_cpu"]), at_most=1.6)


def scaling(lab: Lab) -> Iterator[Row]:
    """A store that sleeps: 20 MB a second for each connection."""
    tasks = 4 if lab.quick else 64
    with sleeping_store() as address:
        alone = job("jobs_engines:sleeping_store", address, 1, tasks).seconds
        for workers in (4,) if lab.quick else (4, 16):
            took = job("jobs_engines:sleeping_store", address, workers, tasks).seconds
            what = f"{workers} workers read {tasks} x 8 MB from a slow store, against one"
            yield gain(what, seconds(took), seconds(alone), at_least=0.9 * workers)


def kill(lab: Lab) -> Iterator[Row]:
    """The same command after a SIGKILL at a part of its tasks: what it does again."""
    for number, part in enumerate((0.25, 0.75)):
        directory = lab.fresh(f"killed-{number}")
        directory.mkdir()
        runs = EngineRuns("local", Path(sys.executable), directory)
        runs.at("before", int(part * TABLES), "kill")
        runs.run()
        again = share(runs.run()["works"] / TABLES)
        limit = share(1 - part + 2 / TABLES)  # two were under way
        yield bounded(f"killed at {part:.0%}: tasks that are done again", again, at_most=limit)


BENCHMARKS: tuple[Benchmark, ...] = (overhead, terabyte, copy, scaling, kill)
