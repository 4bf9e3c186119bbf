"""The engine of one process: threads, which wait for disks and networks, and compute outside the GIL."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait

from exporter.jobs.execute import execute
from exporter.storage.waiting import workers

_AHEAD = 2  # works for each thread that are taken from the plan: enough to keep it busy


class LocalEngine:
    """Threads; as many as there are processors, if nothing else is said."""

    name = "local"

    def __init__(self, workers: int = 0) -> None:
        self._workers = workers or len(os.sched_getaffinity(0))

    def run(self, works: Iterable[bytes]) -> Generator[bytes, None, None]:
        """See `Engine`."""
        pending: set[Future[bytes]] = set()
        with workers(self._workers, "jobs") as pool:
            for work in works:
                pending.add(pool.submit(execute, work))
                if len(pending) > _AHEAD * self._workers:
                    yield from _finished(pending)
            while pending:
                yield from _finished(pending)


def _finished(pending: set[Future[bytes]]) -> Iterator[bytes]:
    done, _ = wait(pending, return_when=FIRST_COMPLETED)
    pending -= done
    for each in done:
        yield each.result()
