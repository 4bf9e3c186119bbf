"""Works that are handed to an engine together, where handing one over takes longer than doing it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice

from exporter.jobs.execute import execute

_CALL_SECONDS = 0.05  # what a call should take
_MOST_WORKS = 16  # of a call: they are lost together


class Bundles:
    """Works put together into calls of about `_CALL_SECONDS`, going by the last ones done."""

    def __init__(self, works: Iterator[bytes]) -> None:
        self._works = works
        self._size = 1

    def take(self, count: int) -> list[list[bytes]]:
        """The next calls, so many at most."""
        return [some for _ in range(count) if (some := list(islice(self._works, self._size)))]

    def note(self, seconds: float) -> None:
        """How long a work took that was done."""
        self._size = max(1, min(_MOST_WORKS, int(_CALL_SECONDS / max(seconds, 1e-6))))


def execute_all(works: list[bytes]) -> tuple[list[bytes], float]:
    """The outcomes, and how long each took (s)."""
    began = time.perf_counter()
    outcomes = [execute(work) for work in works]
    return outcomes, (time.perf_counter() - began) / len(works)


def by_value() -> Callable[[list[bytes]], tuple[list[bytes], float]]:
    """`execute_all` as a function that is sent as its code: importing this module can fail in it alone."""

    def call(works: list[bytes]) -> tuple[list[bytes], float]:
        from exporter.jobs.engines.bundles import execute_all

        return execute_all(works)

    return call
