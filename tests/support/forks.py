"""Processes that cost milliseconds: forked from one that has imported what they need, TensorFlow too.

A process has one fork server, whoever asks for it, and that takes the last list of modules it is given. So
there is one list: without it a killed process imports for longer than it lives.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TextIO

from examples.cluster import NodeCommand

PRELOADED = [
    "tensorflow",
    "pytest",
    "exporter.pipeline.full",
    "exporter.pipeline.incremental",
    "exporter.pipeline.newest_base",
    "exporter.verify.log",
    "tests.support.logs",
    "tests.support.publishing",
    "tests.integration.increment_nodes",
]
if gone := [name for name in PRELOADED if find_spec(name) is None]:  # a server passes over it in silence
    raise ImportError(f"there is no module {gone[0]}")

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(PRELOADED)


def run_warm(program: Path | str, *arguments: object, timeout_s: float = 300) -> str:
    """Run a script, or a module by its name, as `python` does; its stdout.

    Raises:
        subprocess.CalledProcessError: it failed, or took too long.
    """
    with tempfile.TemporaryDirectory() as directory:
        talk = Path(directory)
        process = FORKS.Process(target=_as_main, args=(talk, program, [*map(str, arguments)]))
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
        out, err = ((talk / name).read_text(errors="replace") for name in ("stdout", "stderr"))
    if process.exitcode:
        sys.stderr.write(err)  # pytest shows it
        raise subprocess.CalledProcessError(process.exitcode, [str(program), *map(str, arguments)], out, err)
    return out


@dataclass(frozen=True)
class Warm:
    """A process that runs a module, as `subprocess.Popen` has it."""

    process: BaseProcess
    stdout: TextIO
    stderr: TextIO

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def kill(self) -> None:
        self.process.kill()

    def terminate(self) -> None:
        self.process.terminate()

    def wait(self, timeout_s: float) -> int:
        self.process.join(timeout_s)
        assert self.process.exitcode is not None, f"still runs after {timeout_s:g} s"
        return self.process.exitcode


@contextmanager
def started_warm(module: str, *arguments: object) -> Iterator[Warm]:
    """Run a module as `python -m` does, in the environment that is here now, until the context ends."""
    (out, its_out), (err, its_err) = (multiprocessing.Pipe(duplex=False) for _ in range(2))
    given = ((its_out, its_err), {**os.environ}, module, [*map(str, arguments)])
    process = FORKS.Process(target=_as_main_in, args=given, daemon=True)
    process.start()
    with (
        os.fdopen(os.dup(out.fileno()), errors="replace") as stdout,
        os.fdopen(os.dup(err.fileno()), errors="replace") as stderr,
    ):
        for end in (out, err, its_out, its_err):
            end.close()
        try:
            yield Warm(process, stdout, stderr)
        finally:
            process.kill()
            process.join()


class WarmNode:
    """A node of `examples.cluster`, forked warm, as `subprocess.Popen` has it."""

    def __init__(self, command: NodeCommand, env: Mapping[str, str], log: Path) -> None:
        log.touch()  # whoever started the node reads it at once; the node is there in a while
        given = (command.words, command.cwd or Path.cwd(), command.seconds, {**env}, log)
        self._process = FORKS.Process(target=_as_node, args=given, daemon=True)
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout or 0)


def _as_node(words: Sequence[str], cwd: Path, seconds: int, environment: dict[str, str], log: Path) -> None:
    signal.alarm(seconds)
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    _run(Path(words[0]), [*words[1:]])


def _as_main_in(
    streams: tuple[Connection, Connection], environment: Mapping[str, str], module: str, arguments: list[str]
) -> None:
    for descriptor, stream in enumerate(streams, 1):
        os.dup2(stream.fileno(), descriptor)
        stream.close()
    os.environ.clear()
    os.environ.update(environment)
    _run(module, arguments)


def _as_main(talk: Path, program: Path | str, arguments: list[str]) -> None:
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(talk / name, os.O_WRONLY | os.O_CREAT), descriptor)
    _run(program, arguments)


def _run(program: Path | str, arguments: list[str]) -> None:
    sys.argv = [str(program), *arguments]
    if isinstance(program, Path):
        sys.path.insert(0, str(program.parent))
        runpy.run_path(str(program), run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
