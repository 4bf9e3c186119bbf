"""Dask: worker processes on this machine, or a scheduler that runs. Lost workers and nodes do no harm.

Options are those of `Client.submit`, like `retries`, `resources` and `workers`.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from itertools import islice
from typing import Any

from exporter.jobs.engines.process import Asked
from exporter.jobs.execute import execute

LIBRARY = "distributed"

_AHEAD = 16  # works for each thread of a worker that are given to Dask: enough to keep it busy


def run(works: Iterator[bytes], asked: Asked) -> Generator[bytes, None, None]:
    """See `ProcessEngine`."""
    import distributed as dask

    options = {"retries": 3, **asked.values()}
    with ExitStack() as stack:
        scheduler: Any = asked.address
        if not scheduler:
            own = {"host": "127.0.0.1", "dashboard_address": None, "silence_logs": logging.CRITICAL}
            own |= {"n_workers": asked.cores, "threads_per_worker": 1, "local_directory": asked.files}
            scheduler = stack.enter_context(dask.LocalCluster(**own))
        client = stack.enter_context(dask.Client(scheduler))
        calls = (client.submit(execute, work, pure=False, **options) for work in works)
        threads = sum(client.nthreads().values())
        ahead = (asked.workers if asked.address else 0) or _AHEAD * max(1, threads)
        done = dask.as_completed(islice(calls, ahead))
        try:
            for batch in done.batches():
                for future in batch:
                    yield future.result()
                done.update(islice(calls, len(batch)))
        finally:
            client.cancel(list(done.futures), force=True)
