"""Dask: worker processes on this machine, or a scheduler that runs. Lost workers and nodes do no harm.

Options are those of `Client.submit`, like `retries`, `resources` and `workers`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from itertools import islice
from typing import Any

from exporter.jobs.engines.engine_options import require_known
from exporter.jobs.engines.process import Asked
from exporter.jobs.execute import execute

LIBRARY = "distributed"

_OPTIONS = {"allow_other_workers", "fifo_timeout", "priority", "resources", "retries", "workers"}
_NO_WORKER = {"distributed.scheduler.no-workers-timeout": "60s"}  # else a task that no worker may do waits on
_CALL_SECONDS = 0.05  # what a call should take
_MOST_WORKS = 16  # of a call: they are lost together
_AHEAD = 16  # calls for each thread of a worker that are given to Dask: enough to keep it busy


def run(works: Iterator[bytes], asked: Asked) -> Generator[bytes, None, None]:
    """See `ProcessEngine`."""
    options = {"retries": 3, **asked.values()}
    require_known("Dask", options, _OPTIONS)
    import distributed as dask
    from dask.config import set as dask_settings

    with ExitStack() as stack:
        scheduler: Any = asked.address
        if not scheduler:
            own = {"host": "127.0.0.1", "dashboard_address": None, "silence_logs": logging.CRITICAL}
            own |= {"n_workers": asked.cores, "threads_per_worker": 1, "local_directory": asked.files}
            stack.enter_context(dask_settings(_NO_WORKER))
            scheduler = stack.enter_context(dask.LocalCluster(**own))
        client = stack.enter_context(dask.Client(scheduler))
        threads = sum(client.nthreads().values())
        ahead = (asked.workers if asked.address else 0) or _AHEAD * max(1, threads)
        bundles = Bundles(works)
        call = by_value()  # a worker that cannot import what comes dies, and Dask waits

        def begun(count: int) -> list[Any]:
            """The next calls, submitted to Dask together."""
            calls = bundles.take(count)
            return client.map(call, calls, pure=False, **options) if calls else []

        done = dask.as_completed(begun(ahead))
        try:
            for batch in done.batches():
                for outcomes, seconds in client.gather(batch):
                    bundles.note(seconds)
                    yield from outcomes
                done.update(begun(len(batch)))
        finally:
            client.cancel(list(done.futures), force=True)


class Bundles:
    """Puts works together into calls of about `_CALL_SECONDS`, going by the last ones done."""

    # To hand a work over takes Dask longer than most works take.

    def __init__(self, works: Iterator[bytes]) -> None:
        self._works = works
        self._size = 1

    def take(self, count: int) -> list[list[bytes]]:
        """The next calls, at most `count`, each a list of works."""
        return [some for _ in range(count) if (some := list(islice(self._works, self._size)))]

    def note(self, seconds: float) -> None:
        """Let the next calls be as large as a work that took so many seconds suggests."""
        self._size = max(1, min(_MOST_WORKS, int(_CALL_SECONDS / max(seconds, 1e-6))))


def execute_all(works: list[bytes]) -> tuple[list[bytes], float]:
    """Do works one after the other: their outcomes, and the mean time of one in seconds."""
    began = time.perf_counter()
    outcomes = [execute(work) for work in works]
    return outcomes, (time.perf_counter() - began) / len(works)


def by_value() -> Callable[[list[bytes]], tuple[list[bytes], float]]:
    """`execute_all` as a function that is sent as its code, so that a failing import fails in the call."""

    def call(works: list[bytes]) -> tuple[list[bytes], float]:
        from exporter.jobs.engines.dask import execute_all  # a name of this module would be imported at once

        return execute_all(works)

    return call
