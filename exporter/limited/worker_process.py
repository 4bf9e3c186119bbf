"""Work in a process with limits: `python worker_process.py CONFIG`.

A damaged file can keep a library busy for ever, make it allocate without limit, or crash it; so can a graph
that TensorFlow runs. Here that ends only this process, which limits its own memory and the time of each step:
the kernel ends it if the library does not return. It starts quickly, because it imports little besides the
library and numpy.

`config["program"]` names a module with `LIBRARY`, a module to import first, and `opened(config)`, a context
manager. Its value answers a request with blocks of bytes: `answer(request, deadline)`.

A request is one line of JSON on stdin, followed by as many bytes as its `body_bytes` says, which become its
`body`. The answer is on stdout; either it begins with a line of JSON, or the request determines its length. A
process that cannot answer writes the reason on stderr, in JSON, and exits with `REFUSED`. `worker.py` is the
other side. Without a request for `idle_seconds` the process ends: it holds files that their trainer may have
removed.
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
_UNKNOWN_SIZE = 4 << 30  # assumed for the memory that is mapped already, if there is no /proc


class Refused(Exception):
    """An error that the parent is to raise, as `document` for its answer.

    `kind` is the name of the error's class, and `message` is what follows the file's name.
    """

    def __init__(self, kind: str, message: str, cause: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.document = {"kind": kind, "message": message, "cause": cause, "hint": hint}


class Deadline:
    """Ends the process by SIGXCPU or SIGALRM if one step takes too long.

    A step may take `cpu_seconds` of computing, and `seconds` of wall time (0: any time).
    """

    def __init__(self, cpu_seconds: int, seconds: float) -> None:
        self._cpu_seconds, self._seconds = cpu_seconds, seconds

    def start(self) -> None:
        """Give the process a new step: `cpu_seconds` of computing and `seconds` of wall time from now.

        The limits replace those of the previous step. A step is one object of the file, one block of values
        or the like. The kernel ends the process when a limit is exceeded.
        """
        # the kernel counts whole seconds, from the start of the process
        _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + self._cpu_seconds)
        signal.setitimer(signal.ITIMER_REAL, self._seconds)  # a library that only waits uses no CPU time

    def lift(self) -> None:
        """Remove the limits from the current step, such as one that only reads and writes values."""
        self.stop()
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))

    def stop(self) -> None:
        """Stop the clock of wall time while the parent works, which may need long for each block.

        The limit of computing stays: nothing is computed meanwhile.
        """
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
    """Import the module `library`.

    Refused if that fails for any reason, so that a broken library is not reported as a damaged file.
    """
    try:
        import_module(library)
    except (Exception, SystemExit) as error:  # a broken module may raise anything
        cause = f"{type(error).__name__}: {error}"
        hint = f"install {library} again, in the environment of this command"
        raise Refused(
            "CheckpointError", f" cannot be read: {library} cannot be imported", cause, hint
        ) from error


def _reason(error: BaseException, config: Mapping[str, Any]) -> Refused:
    """Return the Refused by which the parent process learns the error that it raises for `error`.

    A Refused itself is returned unchanged. A MemoryError becomes UnsafeArchive, an error with "truncated" in
    the first line of its text TruncatedFile, and any other CorruptFile. `config["kind"]` names the kind of
    file.
    """
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
    """Limit the address space of this process to its present size plus `more_bytes`.

    Without /proc the present size is taken to be 4 GiB. On a system without such limits nothing is limited.
    """
    try:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        mapped = _UNKNOWN_SIZE
    with suppress(OSError, ValueError):  # some systems have no such limit
        _limit(resource.RLIMIT_AS, mapped + more_bytes)


def _limit(what: int, most: int) -> None:
    """Set the soft limit of a resource to `most`, or to the hard limit if that is lower.

    `what` is the RLIMIT constant of the resource. A soft limit, other than a hard one, can be raised again.
    OSError or ValueError if the system has no such limit.
    """
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def main(config: Mapping[str, Any]) -> None:
    """Answer requests on stdin until stdin ends or no request comes for `idle_seconds`.

    `config` is described in the module's docstring. From here on, whatever is printed to stdout or stderr is
    discarded. After a Refused, a MemoryError or an error of the library, the reason is written to the
    original stderr, in JSON, and SystemExit is raised with the code REFUSED.
    """
    # a damaged file may crash the library, which should leave no core file
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers, reasons, nowhere = os.dup(1), os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # a library may print, which must not mix with the answer
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
    from exporter.limited import worker_process  # not __main__: programs raise this module's errors

    worker_process.main(asked)
