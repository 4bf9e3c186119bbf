"""Measure two things side by side: each in a process of its own, in turns, compared by their medians.

This process stays small and never imports TensorFlow: a child's peak memory is counted from that of the
process that started it.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.benchmarks.rows import Quantity, Row, bytes_, seconds

ROOT = Path(__file__).parent.parent.parent
JOB_SECONDS = 600.0
_BLOCK = 512  # the unit of ru_oublock
_JOB = "tests.benchmarks.job"


@dataclass(frozen=True, slots=True)
class Sample:
    """What one process did. `result` is what a job returned, for comparison with another's."""

    seconds: float
    peak_bytes: int
    written_bytes: int
    result: Any = None


@dataclass(frozen=True, slots=True)
class Medians:
    """Several samples of one thing; each figure is a median of its own."""

    samples: tuple[Sample, ...]

    @property
    def time(self) -> Quantity:
        return seconds(statistics.median(sample.seconds for sample in self.samples))

    @property
    def peak(self) -> Quantity:
        return bytes_(statistics.median(sample.peak_bytes for sample in self.samples))

    @property
    def written(self) -> Quantity:
        return bytes_(statistics.median(sample.written_bytes for sample in self.samples))


Measured = Callable[[], Sample]
"""Something to run and measure."""

Benchmark = Callable[["Lab"], Iterator[Row]]
"""Checks that two ways of doing a thing give the same, then measures both and yields rows."""


class Lab:
    """What a benchmark works with: a place for files, how often to repeat, and how to say what it does.

    `scale` is how many times as large as usual bases of copies are.
    """

    def __init__(self, directory: Path, *, quick: bool, say: Callable[[str], None], scale: int = 1) -> None:
        self.directory = directory
        self.quick, self.scale = quick, scale
        self.say = say

    def fresh(self, name: str) -> Path:
        """A path where nothing is: what an earlier run left there is removed."""
        path = self.directory / name
        if path.is_file():
            path.unlink()
        shutil.rmtree(path, ignore_errors=True)
        return path

    def once(self, name: str, make: Callable[[Path], object]) -> Path:
        """A directory that several benchmarks share, made by the first."""
        path = self.directory / name
        if not path.exists():
            self.say(f"making {name}")
            path.mkdir()
            make(path)
        return path

    def side_by_side(self, *contestants: Measured, repeats: int = 5) -> list[Medians]:
        """Run the contestants in turns, after a round that only warms the page cache.

        Every other round goes backwards: what one leaves behind, good or bad, is not always the same one's.
        """
        if self.quick:
            return [Medians((contestant(),)) for contestant in contestants]
        samples: list[list[Sample]] = [[] for _ in contestants]
        turns = list(zip(contestants, samples, strict=True))
        for number in range(1 + repeats):
            for contestant, own in turns if number % 2 == 0 else reversed(turns):
                own.append(_settled(contestant))
        return [Medians(tuple(own[1:])) for own in samples]


def _settled(contestant: Measured) -> Sample:
    os.sync()  # nobody pays for what another has left to write
    return contestant()


def _environment() -> dict[str, str]:
    """Python keeps compiled modules, as an installed package has them, also where the caller forbids it."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def job(name: str, *arguments: object, python: Path | None = None) -> Sample:
    """Run `module:function` of this package in a process of its own; see `tests.benchmarks.job`.

    `python` is the interpreter of another environment, if it has to be in one.
    """
    run = _run if python is None else partial(_run_fresh, python=python)
    return Sample(**json.loads(run(_JOB, name, *arguments).splitlines()[-1]))


def _run_fresh(module: str, *arguments: object, python: Path = Path(sys.executable)) -> str:
    command = [python, "-m", module, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT, env=_environment(), stdout=subprocess.PIPE, timeout=JOB_SECONDS, check=True
    )
    return done.stdout.decode()


_run: Callable[..., str] = _run_fresh


def use_warm_processes() -> None:
    """Run jobs in processes that have imported TensorFlow before: quick, and no measurement any more."""
    global _run
    from tests.support.forks import run_warm

    _run = run_warm


def command(*arguments: object) -> Sample:
    """Run a whole command and see it end: wall-clock time, peak memory, bytes written."""
    with tempfile.TemporaryFile() as talk:
        started = time.perf_counter()
        process = subprocess.Popen(
            [*map(str, arguments)], cwd=ROOT, env=_environment(), stdout=talk, stderr=talk
        )
        _, status, usage = os.wait4(process.pid, 0)
        took = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            talk.seek(0)
            raise RuntimeError(f"{arguments}: exit code {process.returncode}\n{talk.read().decode()}")
    return Sample(took, usage.ru_maxrss << 10, usage.ru_oublock * _BLOCK)
