"""Call functions at the same time, in threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """Their results, of calls in a thread each, which begin together."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        barrier.wait(60)
        return call()

    with ThreadPoolExecutor(len(calls)) as threads:
        return [found.result(300) for found in [threads.submit(run, call) for call in calls]]
