"""Ask a library that reads files, in a process of its own with limits of memory and time.

`library_process.py` is the other side: there it says what is asked, and how.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from msgspec import Struct

from exporter import errors
from exporter.checkpoint.file_range import FileRange
from exporter.checkpoint.library_process import BLOCK_BYTES, REFUSED
from exporter.errors import CheckpointError, CorruptFile, UnsafeArchive

_PROGRAM = Path(__file__).with_name("library_process.py")
_IDLE_SECONDS = 5.0  # then a process that is asked nothing ends by itself
_MAX_LIST_BYTES = 256 << 20
_SETTINGS = {  # no threads, no arenas of memory for each, and no plug-ins
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
    "HDF5_PLUGIN_PRELOAD": "::",
}
# The process whose file is likely to be asked for again. Threads read, too: it is taken in one step.
_idle: deque[Library] = deque()


class Reading(Struct, frozen=True):
    """What a process reads, and its limits.

    `source` is opened for it; `reader` is its module, `kind` what errors call the file, as in "an HDF5
    file". It may have `memory_bytes` beyond what it needs to start, and for each object or block of values
    `cpu_seconds` of computing and `step_seconds` of waiting. `details` are the reader's own.
    """

    source: FileRange
    reader: str
    kind: str
    memory_bytes: int
    cpu_seconds: int
    step_seconds: float
    details: Mapping[str, Any] = {}


@contextmanager
def library(reading: Reading) -> Iterator[Library]:
    """A process with the files open: an idle one, or else a new one. It is ended if the block fails."""
    with reading.source.open() as descriptor:
        library = _take(reading) or Library(reading, descriptor)
    try:
        yield library
    except BaseException:
        library.end()  # the rest of an answer is still in its pipe
        raise
    # kept: starting one takes 0.2 s, and a file may have hundreds of packed datasets
    library.idle_since = time.monotonic()
    _end_idle()
    _idle.append(library)


def _take(reading: Reading) -> Library | None:
    """The idle process, if it has `source` open; None, and another one stays idle."""
    with suppress(IndexError):
        if (library := _idle.popleft()).is_for(reading):
            return library
        _idle.append(library)
    return None


@atexit.register
def _end_idle() -> None:
    with suppress(IndexError):
        while True:
            _idle.popleft().end()


class Library:
    """A library with files open, in a process that limits itself: see `library_process.py`."""

    def __init__(self, reading: Reading, descriptor: int) -> None:
        self.idle_since = 0.0
        self._reading = reading
        source = reading.source
        self._owner = os.getpid()  # a fork of this process has the same pipes: it must leave them alone
        config = {
            "path": [*filter(None, sys.path), os.fspath(_PROGRAM.parents[2])],
            "reader": reading.reader,
            "kind": reading.kind,
            "descriptor": descriptor,
            "offset": source.offset,
            "size": source.size,
            "memory_bytes": reading.memory_bytes,
            "cpu_seconds": reading.cpu_seconds,
            "step_seconds": reading.step_seconds,
            "idle_seconds": _IDLE_SECONDS,
            **reading.details,
        }
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", os.fspath(_PROGRAM), json.dumps(config)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(descriptor,),
                env=os.environ | _SETTINGS,
            )
        except OSError as error:
            raise CheckpointError(
                f"cannot read {source.path}", cause=f"no process to read it can be started: {error}"
            ) from None

    def is_for(self, reading: Reading) -> bool:
        """True if it has these files open, and waits for a request."""
        is_fresh = time.monotonic() - self.idle_since < _IDLE_SECONDS / 2  # it ends by itself
        is_ours = self._owner == os.getpid() and self._process.poll() is None
        return is_fresh and is_ours and self._reading == reading

    def contents(self, wanted: Mapping[str, Any]) -> Any:
        """The document that the reader makes of the whole; waits for it.

        UnsafeArchive if it is too long; the CheckpointError of the process if that ends before.
        """
        self._ask({"list": wanted})
        assert self._process.stdout is not None
        line = self._process.stdout.readline(_MAX_LIST_BYTES)
        if len(line) == _MAX_LIST_BYTES:
            raise UnsafeArchive(
                f"{self._reading.source.path} is refused as an {self._reading.kind}: its list has more than "
                f"{len(line)} bytes"
            )
        if not line.endswith(b"\n"):
            raise self._ending()
        return json.loads(line)

    def values(self, path: str, size: int) -> Iterator[bytes]:
        """Yield the `size` bytes of an array; raises the process's CheckpointError if it ends before."""
        self._ask({"values": path})
        assert self._process.stdout is not None
        for start in range(0, size, BLOCK_BYTES):
            block = self._process.stdout.read(wanted := min(BLOCK_BYTES, size - start))
            if len(block) < wanted:
                raise self._ending()
            yield block

    def end(self) -> None:
        """Kill the process: the library may be where no request reaches it."""
        if self._owner == os.getpid():
            self._process.kill()
            with suppress(BrokenPipeError):
                self._process.communicate()

    def _ask(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # stderr, or how it ended, says why
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def _ending(self) -> CheckpointError:
        """Wait for the process to end; returns the error that says why it did."""
        assert self._process.stderr is not None
        said, code = self._process.stderr.read(), self._process.wait()
        path, kind = self._reading.source.path, self._reading.kind
        if code == REFUSED:
            found = json.loads(said)
            error: type[CheckpointError] = getattr(errors, found["kind"])
            return error(f"{path}{found['message']}", cause=found["cause"], hint=found["hint"])
        if code in (-signal.SIGXCPU, -signal.SIGALRM):
            computing = code == -signal.SIGXCPU
            seconds = self._reading.cpu_seconds if computing else self._reading.step_seconds
            limit = f"{seconds:g} s{' of computing' * computing}"
            cause = f"the {kind.partition(' ')[0]} library came to no end with one object of it in {limit}"
            return UnsafeArchive(f"{path} is refused as an {kind}", cause=cause)
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        cause = f"the process that read it ended {how}"
        return CorruptFile(f"{path} is damaged as an {kind}", cause=cause)
