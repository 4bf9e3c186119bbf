"""A copy of a bucket takes a base, also beside a server; the same bytes by `cp`."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from exporter.transfer.pull import pull
from exporter.transfer.push import plan_push, push
from tests.benchmarks.job import Timer
from tests.benchmarks.jobs_mapped_servers import CLIENTS, Asked, p99_of, served


def take(timer: Timer, environment: str, url: str, copy: str, version: str) -> dict[str, Any]:
    """Pull into a copy that has all but this version."""
    os.environ |= json.loads(environment)
    _without(copy, version)
    with timer:
        done = pull(url, Path(copy))
    assert done.fetched == (version,)
    return {"fetched": done.bytes_, "spared": sum(each.bytes_ for each in done.spared)}


def _without(copy: str, version: str) -> None:
    shutil.rmtree(Path(copy) / version, ignore_errors=True)
    (Path(copy) / ".pushed").unlink(missing_ok=True)


def beside(
    timer: Timer,
    environment: str,
    url: str,
    copy: str,
    version: str,
    model: str,
    workers: str,
    rounds: str,
    window_s: str,
) -> dict[str, Any]:
    """Ask a server for rows by a clock, in turns beside nothing and beside a pull: the median p99 of each."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    os.environ |= json.loads(environment)
    command = [sys.executable, "-m", "exporter", "pull", url, copy, "--workers", workers]
    stop, asked = threading.Event(), [Asked() for _ in range(CLIENTS)]
    idle, merging, took = [], [], []
    place = Path(model)
    with served(place) as (_, address):
        threads = [threading.Thread(target=one.follow, args=(address, place.name, stop)) for one in asked]
        for thread in threads:
            thread.start()
        try:
            time.sleep(float(window_s))  # the first calls of a server are slow
            for _ in range(int(rounds)):
                _without(copy, version)
                os.sync()
                begin = time.monotonic()
                time.sleep(float(window_s))
                started = time.monotonic()
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                end = time.monotonic()
                idle.append((begin, started))
                merging.append((started, end))
                took.append(end - started)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert len(set().union(*(one.answers for one in asked))) == 1
    latencies = [each for one in asked for each in one.latencies]
    p99 = [statistics.median(p99_of(latencies, *each) for each in spans) for spans in (idle, merging)]
    return {"p99": p99, "took": statistics.median(took)}


def cp(timer: Timer, source: str, target: str) -> None:
    """Copy the base, and wait until it is on disk, as a pull does."""
    with timer:
        subprocess.run(["cp", "-r", source, target], check=True)
        subprocess.run(["sync", *map(str, Path(target).rglob("*"))], check=True)


def send(timer: Timer, environment: str, model: str, url: str) -> int:
    """Push a model; the bytes that were uploaded."""
    os.environ |= json.loads(environment)
    with timer:
        return push(plan_push(Path(model), url)).bytes_
