"""Send requests to a process with limits, whose code may never return, crash or take all memory: `worker`.

`worker_process.py` is the other side, and describes the requests. Callers turn an `Ended` into an error about
the file or graph that was worked on: libraries that read files (`exporter.checkpoint.library`), and
TensorFlow's runs of graphs (`exporter.graph.session`).
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from msgspec import Struct

from exporter.limited.worker_process import BLOCK_BYTES, REFUSED

_PROGRAM = Path(__file__).with_name("worker_process.py")
_IDLE_SECONDS = 5.0  # without a request for so long, a process ends by itself
_MAX_LINE_BYTES = 256 << 20
_SETTINGS = {  # no threads, no arenas of memory for each, and no plug-ins
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
    "HDF5_PLUGIN_PRELOAD": "::",
}
# The process of each program that is likely to be used again. Threads are safe: it is taken in one step.
_idle: dict[str, Worker] = {}


class LimitedWork(Struct, frozen=True):
    """The program of a process, and its limits.

    `program` is its module, see `worker_process.py`. Only equal works share a process; `key` tells apart
    works that are otherwise equal. The process may have `memory_bytes` beyond the memory that it needs to
    start, and for each step `cpu_seconds` of computing and `step_seconds` of wall time.

    `details` are the program's own configuration, by name; `settings` are variables of its environment.
    """

    program: str
    key: object
    memory_bytes: int
    cpu_seconds: int
    step_seconds: float
    details: Mapping[str, Any] = {}
    settings: Mapping[str, str] = {}


class Ended(Exception):
    """A process ended before it answered.

    `refusal` is the reason that it wrote, with the keys of `Refused.document`; None if it wrote none. `limit`
    is the exceeded time, in words, or ""; `how` says how the process ended, in words.
    """

    def __init__(self, how: str, *, limit: str = "", refusal: Mapping[str, str] | None = None) -> None:
        super().__init__(how)
        self.how, self.limit, self.refusal = how, limit, refusal


class NotStarted(Exception):
    """A process cannot be started; the message says why."""


@contextmanager
def worker(work: LimitedWork, descriptor: int | None = None) -> Iterator[Worker]:
    """Yield a process for this work: the idle process of its program if that does equal work, else a new one.

    After the block the process is kept as the idle one of its program. The process kept before is killed. An
    idle process ends by itself after five seconds. If the block fails, its process is killed. A new process
    inherits the open file `descriptor` (None: no file). NotStarted, on entry, if a new process cannot be
    started.
    """
    found = _take(work) or Worker(work, descriptor)
    try:
        yield found
    except BaseException:
        found.end()  # the rest of an answer is still in its pipe
        raise
    # kept: starting one takes 0.2 s and more, and a file may have hundreds of packed datasets
    found.idle_since = time.monotonic()
    if (before := _idle.pop(work.program, None)) is not None:
        before.end()
    _idle[work.program] = found


def _take(work: LimitedWork) -> Worker | None:
    """Return the program's idle process, no longer kept, if it does this work.

    Otherwise return None; an idle process that does not do this work stays kept.
    """
    found = _idle.pop(work.program, None)
    if found is None or found.does(work):
        return found
    _idle.setdefault(work.program, found)
    return None


def _working_directory() -> tuple[int, int]:
    """Return the device and inode of the working directory, which may be removed."""
    at = Path().stat()
    return at.st_dev, at.st_ino


@atexit.register
def _end_idle() -> None:
    while _idle:
        _idle.popitem()[1].end()


class Worker:
    """A process that works within limits that it sets itself: see `worker_process.py`.

    Making one starts the process; NotStarted if the system refuses.
    """

    def __init__(self, work: LimitedWork, descriptor: int | None = None) -> None:
        self.idle_since = 0.0
        self._work = work
        self._owner = os.getpid()  # a fork of this process has the same pipes: it must leave them alone
        self._directory = _working_directory()
        config = {
            "path": [*filter(None, sys.path), os.fspath(_PROGRAM.parents[2])],
            "program": work.program,
            "descriptor": descriptor,
            "memory_bytes": work.memory_bytes,
            "cpu_seconds": work.cpu_seconds,
            "step_seconds": work.step_seconds,
            "idle_seconds": _IDLE_SECONDS,
            **work.details,
        }
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", os.fspath(_PROGRAM), json.dumps(config)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=() if descriptor is None else (descriptor,),
                env={**os.environ, **_SETTINGS, **work.settings},
            )
        except OSError as error:
            raise NotStarted(str(error)) from None

    def does(self, work: LimitedWork) -> bool:
        """True if the process is alive, was idle for less than 2.5 seconds, and was started for equal work.

        False in a fork of the process that started it, and in another working directory: requests may hold
        relative paths.
        """
        is_fresh = time.monotonic() - self.idle_since < _IDLE_SECONDS / 2  # later it may be about to end
        is_ours = self._owner == os.getpid() and self._process.poll() is None
        is_here = self._directory == _working_directory()
        return is_fresh and is_ours and is_here and self._work == work

    def ask(self, request: Mapping[str, Any], body: bytes = b"") -> bytes:
        """Send a request with `body`, wait for the answer, and return its first line, with its line break.

        Ended if the process ends first. Only the first 256 MiB of a longer line are returned.
        """
        self._send(request, body)
        assert self._process.stdout is not None
        line = self._process.stdout.readline(_MAX_LINE_BYTES)
        if not line.endswith(b"\n") and len(line) < _MAX_LINE_BYTES:
            raise self._ending()
        return line

    def blocks(self, size: int, request: Mapping[str, Any] | None = None) -> Iterator[bytes]:
        """Yield the next `size` bytes of the answer in blocks of 4 MiB, the last one smaller; waits for each.

        `request`, if given, is sent when the first block is asked for. Ended, while iterating, if the process
        ends first.
        """
        if request is not None:
            self._send(request, b"")
        assert self._process.stdout is not None
        for start in range(0, size, BLOCK_BYTES):
            block = self._process.stdout.read(wanted := min(BLOCK_BYTES, size - start))
            if len(block) < wanted:
                raise self._ending()
            yield block

    def end(self) -> None:
        """Kill the process and wait for its end; do nothing in a fork of the process that started it."""
        if self._owner == os.getpid():
            self._process.kill()
            with suppress(BrokenPipeError):
                self._process.communicate()

    def _send(self, request: Mapping[str, Any], body: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the process ended: stderr or its exit code says why
            head = {**request, "body_bytes": len(body)} if body else request
            self._process.stdin.write(json.dumps(head).encode() + b"\n")
            self._process.stdin.write(body)
            self._process.stdin.flush()

    def _ending(self) -> Ended:
        """Wait for the process to end, and return the reason as an exception to raise."""
        assert self._process.stderr is not None
        said, code = self._process.stderr.read(), self._process.wait()
        if code == REFUSED:
            return Ended("with a reason", refusal=json.loads(said))
        limit = ""
        if code == -signal.SIGXCPU:
            limit = f"{self._work.cpu_seconds:g} s of computing"
        if code == -signal.SIGALRM:
            limit = f"{self._work.step_seconds:g} s"
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return Ended(how, limit=limit)
