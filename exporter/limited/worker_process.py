"""Work in a process of its own, with limits: `python worker_process.py CONFIG`.

A damaged file can keep a library busy for ever, make it allocate without measure, or crash it; so can a graph
that TensorFlow runs. Here that ends this process alone, which limits its own memory and the time of each
step: the kernel ends it when the library does not return. It starts quickly, because it imports little
besides the library and numpy.

`config["program"]` names a module with `LIBRARY`, what is imported for it, and `opened(config)`, a context
whose value answers a request with blocks of bytes: `answer(request, deadline)`.

A request is one line of JSON on stdin; `body_bytes` bytes follow if it says so, which become its `body`. The
answer is on stdout; it begins with a line of JSON, or the request says how long it is. A process that cannot
answer writes the reason on stderr, in JSON, and ends with `REFUSED`. `worker.py` is the other side. Without a
request for a while the process ends: it holds files that their trainer may have removed.
"""

from __future__ import annotations

import json
import math
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

REFUSED = 3  # the exit code of a process that said why it cannot answer
BLOCK_BYTES = 4 << 20

_LIBRARY_ERRORS = (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError, AttributeError)
_UNKNOWN_SIZE = 4 << 30  # of what is mapped already, where there is no /proc


class Refused(Exception):
    """An error that the parent is to raise: the name of its class, and its message after the file's name."""

    def __init__(self, kind: str, message: str, cause: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.document = {"kind": kind, "message": message, "cause": cause, "hint": hint}


class Deadline:
    """Ends the process by SIGXCPU or SIGALRM if one step takes too long."""

    def __init__(self, cpu_seconds: int, seconds: float) -> None:
        self._cpu_seconds, self._seconds = cpu_seconds, seconds

    def start(self) -> None:
        """Give the next step its time: an object of the file, or a block of values."""
        _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + self._cpu_seconds)
        signal.setitimer(signal.ITIMER_REAL, self._seconds)  # a library that waits for ever computes nothing

    def lift(self) -> None:
        """Let the step that began take as long as it likes, as one that only reads and writes values may."""
        self.stop()
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))

    def stop(self) -> None:
        """Stop the clock while the parent works: it may do much with each block."""
        signal.setitimer(signal.ITIMER_REAL, 0)


def _serve(reader: Any, config: Mapping[str, Any], answers: int) -> None:
    _limit_memory(config["memory_bytes"])
    deadline = Deadline(config["cpu_seconds"], config["step_seconds"])
    waiting = select.poll()
    waiting.register(0, select.POLLIN)
    deadline.start()
    with reader.opened(config) as answer:
        deadline.stop()
        while waiting.poll(config["idle_seconds"] * 1000) and (line := sys.stdin.buffer.readline()):
            request = json.loads(line)
            if "body_bytes" in request:
                request["body"] = sys.stdin.buffer.read(request["body_bytes"])
            deadline.start()
            for block in answer(request, deadline):
                deadline.stop()
                left = memoryview(block)
                while left:
                    left = left[os.write(answers, left) :]
                deadline.start()
            deadline.stop()


def _require(library: str) -> None:
    """Import a library, or raise Refused, so that a broken one is not taken for damage of the file."""
    try:
        import_module(library)
    except (Exception, SystemExit) as error:  # a module that is broken raises what it likes
        cause = f"{type(error).__name__}: {error}"
        hint = f"install {library} again, in the environment of this command"
        raise Refused(
            "CheckpointError", f" cannot be read: {library} cannot be imported", cause, hint
        ) from error


def _reason(error: BaseException, config: Mapping[str, Any]) -> Refused:
    """The error that the parent raises for one of the library."""
    if isinstance(error, Refused):
        return error
    kind, name = config["kind"], config["kind"].partition(" ")[0]
    if isinstance(error, MemoryError):
        what = f"the {name} library asked for more than {config['memory_bytes'] >> 20} MiB of memory"
        return Refused("UnsafeArchive", f" is refused as an {kind}", what)
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "truncated" in text:
        return Refused("TruncatedFile", f" is an {kind} cut off", text)
    return Refused("CorruptFile", f" is damaged as an {kind}", text)


def _limit_memory(more_bytes: int) -> None:
    """Let the process grow by `more_bytes` beyond what its libraries have mapped already."""
    try:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        mapped = _UNKNOWN_SIZE
    with suppress(OSError, ValueError):  # a system that does not limit it
        _limit(resource.RLIMIT_AS, mapped + more_bytes)


def _limit(what: int, most: int) -> None:
    """Lower the soft limit of a resource; it may be raised again, up to the limit that we began with."""
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def main(config: Mapping[str, Any]) -> None:
    """Answer requests until stdin ends or stays silent; exits with REFUSED after an error."""
    # a damaged file may crash the library: no core file of it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers, reasons, nowhere = os.dup(1), os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # a library may print, and that is not an answer
    os.dup2(nowhere, 2)
    try:
        reader = import_module(config["program"])
        _require(reader.LIBRARY)
        _serve(reader, config, answers)
    except (Refused, MemoryError, *_LIBRARY_ERRORS) as error:
        os.write(reasons, json.dumps(_reason(error, config).document).encode())
        sys.exit(REFUSED)


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    sys.path[:] = asked["path"]
    from exporter.limited import worker_process  # programs raise the errors of this one

    worker_process.main(asked)
