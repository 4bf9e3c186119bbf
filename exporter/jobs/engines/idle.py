"""Run works by threads of a process of idle priority, which gets the processor and disk time others leave.

A merge in a copy runs so, beside the servers that it must not slow down. It is a process of its own because a
thread of this priority could hold Python's lock while servers keep it from running.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path

from exporter.jobs.engines.process import Asked
from exporter.jobs.runner import LocalEngine

LIBRARY = "exporter"


def run(works: Iterator[bytes], asked: Asked) -> Generator[bytes, None, None]:
    """Run works by threads at idle priority and yield their outcomes, in any order.

    At the call, the priority of this process is lowered for good; from then on a SIGTERM removes
    `asked.files` and kills the process and its group at once.
    """
    signal.signal(signal.SIGTERM, lambda *_: _end(asked))  # the command is gone, or wants no more of it
    _give_way()
    return LocalEngine(asked.workers).run(works)


def _give_way() -> None:
    with suppress(AttributeError, OSError):  # Linux alone has it, also for the disk
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):  # to its scheduler a session is one, idle or not: this process began its own
        Path("/proc/self/autogroup").write_text("19")


def _end(asked: Asked) -> None:
    """Remove the engine's files and kill this process and its group by SIGKILL.

    At once, because a task may take an hour, and its output has no name yet.
    """
    shutil.rmtree(asked.files, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
