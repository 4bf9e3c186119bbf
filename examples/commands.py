"""The product's commands, run and shown as a user would run them, in a directory of the demo's own."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shlex
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_STARTUP_S = 180
_SHUTDOWN_S = 10
_POLL_S = 0.05

Words = list[str | Path]


def show(command: Words) -> None:
    """Print a command as it would be typed."""
    print(f"   $ {shlex.join(map(str, command))}", flush=True)


def run(command: Words) -> str:
    """What a command says. Ends this process if it fails."""
    done = subprocess.run(_installed(command), capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stdout + done.stderr
        sys.exit(f"error: {shlex.join(map(str, command))} ended with status {done.returncode}:\n{said}")
    return done.stdout


@contextlib.contextmanager
def serve(model: Path) -> Iterator[str]:
    """The address of a `serve-model` that serves `model`."""
    with serve_replicas(model, 1) as (address,):
        yield address


@contextlib.contextmanager
def serve_replicas(model: Path, count: int) -> Iterator[list[str]]:
    """The addresses of so many servers of `model`, each a process."""
    command: Words = ["serve-model", "run", model, "--port", "0"]
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            show(command)
        servers = [stack.enter_context(background(command)) for _ in range(count)]
        yield [server.await_line(r"serving .* on (\S+:\d+)$") for server in servers]


class Background:
    """A command that runs until the context around it ends."""

    def __init__(self, command: Words, process: subprocess.Popen[bytes], talk: IO[bytes]) -> None:
        self._command = command
        self._process = process
        self._talk = talk

    def await_line(self, pattern: str) -> str:
        """Print the first line on stdout that matches; its group. Ends this process if none comes."""
        deadline, out = time.monotonic() + _STARTUP_S, self._process.stdout
        while select.select([out], [], [], max(0.0, deadline - time.monotonic()))[0]:
            line = out.readline().decode()
            if found := re.match(pattern, line):
                print(f"   {line}", end="", flush=True)
                return found[1]
            if not line:
                break
        raise self.ended("did not get ready")

    def await_note(self, pattern: str) -> None:
        """Return when it has said something on stderr that matches. Ends this process if it does not."""
        deadline = time.monotonic() + _STARTUP_S
        while not re.search(pattern, said := self._said()):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise self.ended("did not get ready")
            time.sleep(_POLL_S)
        print(textwrap.indent(said, "   "), end="", flush=True)

    def lines(self) -> Iterator[str]:
        """What it says on stdout, line by line, until it ends."""
        for line in self._process.stdout:
            yield line.decode()

    def ended(self, how: str = "ended") -> SystemExit:
        """What to raise when it should still run: it tells what the command said last."""
        return SystemExit(f"error: {shlex.join(map(str, self._command))} {how}:\n{self._said()}")

    def _said(self) -> str:
        size = os.fstat(self._talk.fileno()).st_size  # it writes at the same offset: nothing may seek
        return os.pread(self._talk.fileno(), size, 0).decode(errors="replace")


@contextlib.contextmanager
def background(command: Words) -> Iterator[Background]:
    """A command that runs beside this process inside the context."""
    with (
        tempfile.TemporaryFile() as talk,
        subprocess.Popen(_installed(command), stdout=subprocess.PIPE, stderr=talk, bufsize=0) as process,
    ):
        try:
            yield Background(command, process, talk)
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_SHUTDOWN_S)
            process.kill()


def _installed(command: Words) -> list[str]:
    """The console script of this Python's environment, whatever PATH says."""
    return [str(Path(sys.executable).with_name(str(command[0]))), *map(str, command[1:])]


@contextlib.contextmanager
def workspace(keep: Path | None) -> Iterator[Path]:
    """The directory `keep`, which stays; without it one that does not outlive the context."""
    if keep:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
    else:
        with tempfile.TemporaryDirectory(prefix="demo-") as directory:
            yield Path(directory)
