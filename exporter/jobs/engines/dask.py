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
_NO_WORKER = {"distributed.scheduler.no-workers-timeout": "60s"}  # else a task waits for a worker for ever
_CALL_SECONDS = 0.05  # the desired duration of a call
_MOST_WORKS = 16  # in a call: they are lost together
_AHEAD = 16  # calls submitted to Dask for each thread of a worker: enough to keep it busy


def run(works: Iterator[bytes], asked: Asked) -> Generator[bytes, None, None]:
    """Run works on Dask and yield their outcomes, in any order.

    Without an address, worker processes are started here, and ended at the end. During the iteration:
    UsageError for unknown options, or more workers than fit into memory; errors of Dask pass.
    """
    options = {"retries": 3, **asked.values()}
    require_known("Dask", options, _OPTIONS)
    import distributed as dask
    from dask.config import set as dask_settings

    with ExitStack() as stack:
        scheduler: Any = asked.address
        if not scheduler:
            # Loopback alone: a scheduler runs the code of everybody who reaches it.
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
            """Submit the next calls to Dask together, and return them."""
            calls = bundles.take(count)
            # If it were pure, Dask would hash all bytes of each work to name the call.
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
    """Combines works into calls of about 0.05 s, given the durations of the calls done last.

    Dask takes longer to hand over a work than most works take.
    """

    def __init__(self, works: Iterator[bytes]) -> None:
        self._works = works
        self._size = 1

    def take(self, count: int) -> list[list[bytes]]:
        """Return the next calls, at most `count`, each a list of works.

        Fewer, or none, once no works are left.
        """
        return [some for _ in range(count) if (some := list(islice(self._works, self._size)))]

    def note(self, seconds: float) -> None:
        """Set the size of the next calls, given the mean seconds that one work took in a call."""
        self._size = max(1, min(_MOST_WORKS, int(_CALL_SECONDS / max(seconds, 1e-6))))


def execute_all(works: list[bytes]) -> tuple[list[bytes], float]:
    """Run works one after the other; return their outcomes, in order, and the mean time of one in seconds.

    There must be at least one.
    """
    began = time.perf_counter()
    outcomes = [execute(work) for work in works]
    return outcomes, (time.perf_counter() - began) / len(works)


def by_value() -> Callable[[list[bytes]], tuple[list[bytes], float]]:
    """Return a function with the effect of `execute_all`, which Dask sends as code, not by its name.

    So a worker that cannot import this program fails in the call.
    """

    def call(works: list[bytes]) -> tuple[list[bytes], float]:
        from exporter.jobs.engines.dask import execute_all  # late: a global is imported on unpickling

        return execute_all(works)

    return call
