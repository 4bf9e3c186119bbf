"""Choose an engine by its name.

`LocalEngine` needs no library: threads of this process, which wait for disks and networks, and compute
outside the GIL. The others run in a process of their own: see `exporter.jobs.engines.process`.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait

from exporter.errors import UsageError
from exporter.jobs.engines import Engine
from exporter.jobs.engines.process import Asked, ProcessEngine
from exporter.jobs.execute import execute
from exporter.options import EngineName
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


def choose_engine(
    name: str, workers: int = 0, address: str = "", options: Mapping[str, str] | None = None
) -> Engine:
    """The engine of a name.

    Raises:
        UsageError: there is none, its library is not installed, or `local` is given an address or options.
    """
    if name not in [*EngineName]:
        raise UsageError(f"there is no engine {name!r}", hint=f"one of {', '.join(EngineName)}")
    if name != EngineName.LOCAL:
        return ProcessEngine(Asked(name, workers, address, options or {}))
    if address or options:
        raise UsageError("the engine local takes neither an address nor options", hint="add --engine ray")
    return LocalEngine(workers)
