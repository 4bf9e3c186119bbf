"""Engines run the tasks of a job. Each is a scheduler; none depends on the contents of a task."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Protocol


class Engine(Protocol):
    """Runs work that `exporter.jobs.execute.execute` can do."""

    name: str

    def run(self, works: Iterable[bytes]) -> Generator[bytes, None, None]:
        """Run the works and yield their outcomes, encoded, in any order, at least one for each.

        `works` is read only as far as needed. The engine replaces a worker that is lost. Closing the iterator
        cancels works that have not started, and leaves no process behind. If the engine cannot run the works:
        EngineFailed, or for a wrong request UsageError, as an outcome or raised during the iteration.
        """
