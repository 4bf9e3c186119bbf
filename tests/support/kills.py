"""Processes that are killed at a chosen step: at every call to the system that changes or looks up files."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.support.budget import THOROUGH
from tests.support.forks import FORKS

CHANGES = {
    "os.mkdir",
    "os.rename",
    "os.link",
    "os.symlink",
    "os.remove",
    "os.rmdir",
    "os.chmod",
    "os.truncate",
    "fcntl.flock",
    "fsync",
}
LOOKS = {"open", "os.scandir", "os.listdir", "shutil.rmtree"}

Action = Callable[..., object]
"""What is interrupted: a function of a module and its arguments, the first of them the directory watched."""


def run(target: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    process = FORKS.Process(target=target, args=arguments)
    process.start()
    return process


def ended(process: ForkServerProcess) -> int | None:
    process.join(60)
    return process.exitcode


def points(steps: int, kind: int, outcomes: Mapping[int, object]) -> Iterator[int]:
    """The steps of 1 to `steps` at which a campaign kills: every fourth, or all of them (`make thorough`).

    Each `kind` of a campaign begins at another of the first four, so that together they see all. Where what
    two kills left differs (`outcomes`, which the campaign fills), those between them follow: the steps around
    each change that readers see are always among them.
    """
    every = 1 if THOROUGH else 4
    coarse = sorted({*range(1 + kind % every, steps + 1, every), 1, steps})
    yield from coarse
    for before, after in pairwise(coarse):
        if outcomes[before] != outcomes[after]:
            yield from range(before + 1, after)


def killed_at(point: int, action: Action, directory: Path, *arguments: Any) -> int | None:
    """The exit code of a process that does an action and is to die as its step `point` begins."""
    _, sender = FORKS.Pipe(duplex=False)
    return ended(run(_die_at, point, sender, action, directory, *arguments))


def count_steps(action: Action, directory: Path, *arguments: Any) -> int:
    """How many steps `action(directory, *arguments)` takes."""
    receiver, sender = FORKS.Pipe(duplex=False)
    assert ended(run(_die_at, 0, sender, action, directory, *arguments)) == 0
    return int(receiver.recv())


def _die_at(point: int, steps: Connection, action: Action, directory: Path, *arguments: Any) -> None:
    """Be killed as step `point` begins, which is when the one before has ended.

    CPython announces each call to the system that changes or looks up files; fsync alone is silent.
    """
    count = 0

    def step(event: str, audited: tuple[Any, ...]) -> None:
        nonlocal count
        if event in CHANGES or (event in LOOKS and str(directory) in str(audited)):
            count += 1
            if count == point:
                os.kill(os.getpid(), signal.SIGKILL)

    real_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        step("fsync", (descriptor,))
        real_fsync(descriptor)

    os.fsync = fsync  # type: ignore[assignment]
    sys.dont_write_bytecode = True  # else who imports a module first takes more steps than others
    sys.addaudithook(step)
    action(directory, *arguments)
    steps.send(count)
