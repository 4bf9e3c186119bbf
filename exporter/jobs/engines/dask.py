"""Dask: worker processes on this machine, or a scheduler that runs. Lost workers and nodes do no harm.

Options are those of `Client.submit`, like `retries`, `resources` and `workers`.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from typing import Any

from exporter.jobs.engines.bundles import Bundles, by_value
from exporter.jobs.engines.engine_options import require_known
from exporter.jobs.engines.process import Asked

LIBRARY = "distributed"

_OPTIONS = {"allow_other_workers", "fifo_timeout", "priority", "resources", "retries", "workers"}
_NO_WORKER = {"distributed.scheduler.no-workers-timeout": "60s"}  # else a task that no worker may do waits on
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
