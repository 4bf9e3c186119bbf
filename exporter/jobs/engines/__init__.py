"""Engines: what runs the tasks of a job, and where. Each is a scheduler; none knows what a task is."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Protocol


class Engine(Protocol):
    """Runs work that `exporter.jobs.execute.execute` can do."""

    name: str

    def run(self, works: Iterable[bytes]) -> Generator[bytes, None, None]:
        """Do the works and yield their outcomes, in any order, at least one of each.

        `works` is read as far as is needed. A worker that is lost is the engine's to replace. Closing the
        iterator cancels what has not begun, and leaves no process behind.
        """
