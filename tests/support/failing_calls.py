"""Commands in circumstances: calls on files fail, as on network disks; the clock is wrong; all is read-only.

`failing_calls.c` is compiled where a compiler is. A process that has loaded it, and what commands import,
forks one for each command, so that each costs milliseconds.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

import pytest

from tests.support.commands import Ran
from tests.support.forks import PRELOADED

ERRORS = (errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EROFS)
_LONGEST_S = 120


@dataclass(frozen=True)
class Failure:
    """The call `number` (0: none) fails with an error; if it `lasts`, every later one, too."""

    number: int = 0
    error: int = errno.EIO
    lasts: bool = False

    def __str__(self) -> str:
        return f"call {self.number} {'and later ' if self.lasts else ''}{errno.errorcode[self.error]}"


NONE = Failure()


class Commands:
    """Runs commands; see `failing_commands`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._asked: IO[str] = process.stdin
        self._answers: IO[str] = process.stdout

    def run(
        self,
        below: Path,
        failure: Failure,
        *arguments: object,
        ahead_s: float = 0.0,
        is_read_only: bool = False,
    ) -> tuple[Ran, int]:
        """What a command left, and how many calls on files below a directory it made.

        Its clock is so many seconds ahead; `is_read_only`: it sees the directory mounted so, alone.
        """
        how = [os.fspath(below), failure.number, failure.error, failure.lasts, ahead_s, is_read_only]
        print(json.dumps([*how, [*map(str, arguments)]]), file=self._asked, flush=True)
        code, out, err, calls = json.loads(self._answers.readline())
        return Ran(code, out, err), calls


@contextmanager
def failing_calls() -> Iterator[Path | None]:
    """The library that makes calls fail; None where no C compiler is."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory, "failing_calls.so")
        source = Path(__file__).with_suffix(".c")
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        yield library


def failing(library: Path, below: Path, failure: Failure) -> dict[str, str]:
    """The environment of a process in which a call fails."""
    how = f"{failure.number} {failure.error} {failure.lasts:d} {below}"
    return {"LD_PRELOAD": str(library), "FAILING_CALLS": how}


def failing_commands() -> Commands:
    """A process that runs commands, one for all tests; they are skipped where no C compiler is."""
    commands = _started()
    if commands is None:
        pytest.skip("no C compiler: calls to the system cannot be made to fail")
    return commands


@cache
def _started() -> Commands | None:
    stack = ExitStack()
    atexit.register(stack.close)
    library = stack.enter_context(failing_calls())
    if library is None:
        return None
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.failing_calls"],
        env={**os.environ, "LD_PRELOAD": str(library)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    return Commands(process)


def may_mount() -> bool:
    """True if a process may have mounts of its own here."""
    asked = ["unshare", "-m", "true"]
    return shutil.which("unshare") is not None and subprocess.run(asked, check=False).returncode == 0


_ahead_s = 0.0


def _set_clock() -> None:
    """As `tests.support.clocks`: before anything is imported that keeps `time.time` for later."""
    real = time.time
    time.time = lambda: real() + _ahead_s


def _mount_read_only(directory: str) -> None:
    new_namespace = 0x00020000  # CLONE_NEWNS
    assert ctypes.CDLL(None, use_errno=True).unshare(new_namespace) == 0, os.strerror(ctypes.get_errno())
    for how in (("--make-rprivate", "/"), ("--bind", directory, directory)):
        subprocess.run(["mount", *how], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", directory], check=True)


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    _set_clock()
    for module in PRELOADED:
        __import__(module)
    for line in sys.stdin:
        receiver, sender = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(_LONGEST_S)
            _answer(sender, *json.loads(line))
        os.close(sender)
        with os.fdopen(receiver) as talk:
            said = talk.read()
        _, status = os.waitpid(child, 0)
        print(said or json.dumps([-1, "", f"ended with status {status}", 0]), file=answers, flush=True)


def _answer(
    sender: int,
    below: str,
    number: int,
    error: int,
    lasts: bool,
    ahead_s: float,
    is_read_only: bool,
    arguments: list[str],
) -> None:
    global _ahead_s
    _ahead_s = ahead_s
    if is_read_only:
        _mount_read_only(below)
    calls = ctypes.CDLL(None)
    calls.failing_arm(below.encode(), number, error, lasts)
    try:
        from tests.support.commands import export_small

        ran = export_small(*arguments)
        said = [ran.code, ran.out, ran.err, calls.failing_count()]
    except BaseException as unexpected:  # noqa: BLE001  the parent shows it
        said = [-1, "", f"Traceback: {unexpected!r}", calls.failing_count()]
    with os.fdopen(sender, "w") as talk:
        json.dump(said, talk)
    os._exit(0)


if __name__ == "__main__":
    _serve()
