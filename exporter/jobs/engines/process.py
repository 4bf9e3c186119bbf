"""Engines that are libraries run in a process of their own: works go in and outcomes come out, line by line.

So their threads, signals, memory and prints stay out of the command, which imports none of them; and the
process ends with the command, however that ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import IO, Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from exporter.errors import EngineFailed, ExportError, UsageError, to_install
from exporter.jobs.engines.engine_options import require_reachable, why, workers_with_room
from exporter.jobs.execute import failed

_MAIN = f"from {__name__} import main; main()"  # not `-m`: workers find functions by their module's name
_END = b"\n"  # after the last work, and after the last outcome
_CANCEL_S = 60.0  # time for an engine to end its workers, wherever they are, before it is killed
_PR_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h
_GENERATIONS = 10  # killing one orphans the next, which this process adopts


class Asked(Struct, frozen=True):
    """A request to an engine: workers, address of a cluster ("": this machine), and the engine's own options.

    0 `workers` means as many as there are processors, fewer if memory is short; for a cluster, all its
    workers. `files` is a directory for the engine's files, which is removed at the end. Within `silent_s`
    seconds the engine must have started, or reached its cluster.
    """

    engine: str
    workers: int = 0
    address: str = ""
    options: Mapping[str, str] = {}
    files: str = ""
    silent_s: float = 120.0

    @property
    def cores(self) -> int:
        """The number of workers for this machine, each a process, at least 1.

        UsageError if the number that was asked for does not fit into memory.
        """
        room = workers_with_room(self.workers, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        return self.workers or min(len(os.sched_getaffinity(0)), room)

    def values(self) -> dict[str, Any]:
        """Return the options by name: decoded if the text is JSON (`2`, `true`, `{"a": 1}`), else as text."""
        found: dict[str, Any] = dict(self.options)
        for name, text in self.options.items():
            with suppress(msgspec.DecodeError):
                found[name] = msgspec.json.decode(text)
        return found


class ProcessEngine:
    """Runs an engine's module in a process; UsageError if its `LIBRARY` is not installed."""

    def __init__(self, asked: Asked) -> None:
        self.name = asked.engine
        self._asked = asked
        library = _module(asked.engine).LIBRARY
        if find_spec(library) is None:
            raise UsageError(
                f"--engine {self.name} needs {library}, which is not installed",
                hint=f"{to_install(self.name)}, here and on every worker",
            )

    def run(self, works: Iterable[bytes]) -> Generator[bytes, None, None]:
        """Run the works in the engine's process and yield their outcomes, in any order.

        Errors of the engine are outcomes, too. During the iteration: EngineFailed if the process ends before
        all works are done, OSError if it, or its temporary directory, cannot be made. At the end the process,
        its group and its files are removed, after waiting up to 60 s.
        """
        with TemporaryDirectory(prefix=f"{self.name}-") as files:
            talk = Path(files) / "talk"
            with _started(replace(self._asked, files=files), talk, works) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    if line == _END:
                        return
                    yield line.rstrip(b"\n")
            said = talk.read_text(errors="replace").strip().splitlines()
            raise EngineFailed(f"{self.name} ended before all tasks were done", cause="".join(said[-1:]))


@contextmanager
def _started(asked: Asked, talk: Path, works: Iterable[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Start the engine's process, which a thread feeds works; its stderr goes to the file `talk`.

    Yields the process. At the end of the block it gets a SIGTERM, after 60 s a SIGKILL; then its group is
    killed.
    """
    command = [sys.executable, "-c", _MAIN, msgspec.json.encode(asked).decode()]
    environment = os.environ | {"TMPDIR": asked.files}  # libraries leave things behind
    with (
        talk.open("wb") as errors,
        subprocess.Popen(
            # A session of its own: it is killed as a group, and
            # a terminal's Ctrl-C reaches the command alone.
            command,
            stdin=-1,
            stdout=-1,
            stderr=errors,
            env=environment,
            start_new_session=True,
        ) as process,
    ):
        feeder = threading.Thread(target=_feed, args=(process.stdin, works), daemon=True)
        feeder.start()
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(_CANCEL_S)
            except subprocess.TimeoutExpired:
                process.kill()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            feeder.join()  # only now: the kill breaks the pipe in which it may wait


def _feed(pipe: IO[bytes], works: Iterable[bytes]) -> None:
    """Write works into the pipe, line by line, then an empty line; return early if the process stops reading.

    If `works` raises, the pipe is closed, which cancels the job, and the error passes.
    """
    try:
        for work in works:
            pipe.write(work + b"\n")  # JSON: no line breaks in it
        pipe.write(_END)
        pipe.flush()
    except BrokenPipeError:
        return
    except BaseException:
        pipe.close()  # cancels the job, which would wait for its last work
        raise


def main() -> None:
    """Run an engine, with works from stdin and outcomes to stdout; then kill the process group.

    The first argument of the program is an `Asked` in JSON. Errors of the engine are outcomes. This function
    never returns.
    """
    asked = msgspec.json.decode(sys.argv[1], type=Asked)
    _adopt_orphans()
    outcomes = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not get among the outcomes
    # As by Ctrl-C: KeyboardInterrupt closes `run` below, which cancels the engine's works.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    silent = threading.Timer(asked.silent_s, _end_silent, (asked, outcomes))
    silent.daemon = True
    silent.start()
    try:
        if asked.address:
            require_reachable(asked.engine, asked.address)
        with closing(_module(asked.engine).run(_works(silent), asked)) as done:
            for outcome in done:
                outcomes.write(outcome + b"\n")
                outcomes.flush()
    except (KeyboardInterrupt, SystemExit):  # Ray makes the latter of a signal
        pass
    except ExportError as error:
        outcomes.write(failed(error) + b"\n")
    except Exception as error:  # noqa: BLE001 - libraries raise what they like
        cause, hint = why(error)
        outcomes.write(failed(EngineFailed(f"{asked.engine} gave up", cause=cause, hint=hint)) + b"\n")
    _end(asked, outcomes)


def _end_silent(asked: Asked, outcomes: IO[bytes]) -> None:
    """Write an EngineFailed as outcome, as the engine did not start in time, and kill this process.

    A timer's thread calls it: the main thread is stuck in the engine's library.
    """
    where = f"at {asked.address}" if asked.address else "here"
    error = EngineFailed(
        f"{asked.engine} did not begin {where} within {asked.silent_s:g} s",
        hint="see that its cluster runs there, of the same version as here, and run the same command again"
        if asked.address
        else "run the same command again when this machine has less to do, or with --engine local",
    )
    outcomes.write(failed(error) + b"\n")
    _end(asked, outcomes)


def _end(asked: Asked, outcomes: IO[bytes]) -> None:
    """Write the end of outcomes, remove the engine's files, and kill this process and all that it started."""
    with suppress(BrokenPipeError):
        outcomes.write(_END)
        outcomes.flush()
    shutil.rmtree(asked.files, ignore_errors=True)  # a killed command cannot do it
    _kill_children()
    os.killpg(0, signal.SIGKILL)  # threads of libraries may hang


def _adopt_orphans() -> None:
    """Make this process the parent of its orphaned descendants, on Linux; elsewhere do nothing.

    Ray's processes start sessions of their own, and linger.
    """
    import ctypes

    with suppress(AttributeError, OSError):  # Linux alone has it
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _kill_children() -> None:
    """Kill the children of this process by SIGKILL, and the processes orphaned by that, until none is left.

    At most ten generations; waits for each child to end.
    """
    for _ in range(_GENERATIONS):
        children = [pid for pid, parent in _processes() if parent == os.getpid()]
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        if not children:
            return


def _processes() -> Iterator[tuple[int, int]]:
    """Yield (process id, parent's process id) of every process; nothing without /proc."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            after_name = path.read_text().rpartition(")")[2].split()
            yield int(path.parent.name), int(after_name[1])


def _works(silent: threading.Timer) -> Iterator[bytes]:
    """Yield the lines of stdin up to an empty one, waiting for each.

    The first use ends the timer `silent`. When stdin ends, this process gets a SIGTERM.
    """
    # An engine asks for the first work when it has reached its cluster.
    lines: SimpleQueue[bytes] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin.buffer:
            lines.put(line.rstrip(b"\n"))
        os.kill(os.getpid(), signal.SIGTERM)  # the command is gone

    threading.Thread(target=read, daemon=True).start()
    silent.cancel()
    yield from iter(lines.get, b"")


def _module(engine: str) -> Any:
    return import_module(f"{__package__}.{engine}")
