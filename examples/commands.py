"""The product's commands, run and shown as a user would run them, in a directory of the demo's own."""

from __future__ import annotations

import contextlib
import re
import select
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_STARTUP_S = 180
_SHUTDOWN_S = 10

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
    command: Words = ["serve-model", "run", model, "--port", "0"]
    show(command)
    with (
        tempfile.TemporaryFile() as talk,
        subprocess.Popen(_installed(command), stdout=subprocess.PIPE, stderr=talk, bufsize=0) as server,
    ):
        try:
            yield _ready(server, talk)
        finally:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(_SHUTDOWN_S)
            server.kill()


def _ready(server: subprocess.Popen[bytes], talk: IO[bytes]) -> str:
    deadline = time.monotonic() + _STARTUP_S
    while select.select([server.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
        line = server.stdout.readline().decode()
        if found := re.match(r"serving .* on (\S+:\d+)$", line):
            print(f"   {line}", end="", flush=True)
            return found[1]
        if not line:
            break
    talk.seek(0)
    sys.exit(f"error: serve-model did not get ready:\n{talk.read().decode(errors='replace')}")


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
