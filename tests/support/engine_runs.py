"""Run jobs on engines, each in an environment of its extra, and with workers that die at a chosen step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.checkpoint.tensor_bundle import BundleWriter, read_catalog
from exporter.jobs.execute import execute
from exporter.jobs.task import Range
from tests.support.once import once_a_run
from tests.support.project import PROJECT

ROOT = Path(__file__).parent.parent.parent
ENGINES = ("local", "ray", "dask", "beam")
LIBRARIES = {"ray": "ray", "dask": "distributed", "beam": "apache_beam"}
TABLES = 16
PYTHON = "bin/python"
"""The interpreter of an environment."""
_FAULTS = Path(__file__).parent / "worker_faults"


def python_of(engine: str, factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the engine's extra: this one, or one made for this test run."""
    if is_here(engine):
        return Path(sys.executable)
    made = once_a_run(factory, f"environment-of-{engine}", partial(make_environment, engine))
    return made / PYTHON


def is_here(engine: str) -> bool:
    """True if this interpreter has what the engine's extra installs."""
    return engine == "local" or find_spec(LIBRARIES[engine]) is not None


def make_environment(engine: str, directory: Path) -> None:
    """What is here, and over it the engine's extra, with what it needs in other versions."""
    venv.create(directory, symlinks=True)
    packages = directory / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    (packages / "below.pth").write_text("\n".join([str(ROOT), *map(str, _packages())]) + "\n")
    pip = [directory / PYTHON, "-m", "pip"]
    install = [*pip, "install", "--quiet", *PROJECT["project"]["optional-dependencies"][engine]]
    subprocess.run(install, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    subprocess.run([*pip, "check"], check=True, stdout=subprocess.DEVNULL)


def _packages() -> list[Path]:
    return [Path(entry) for entry in sys.path if entry.endswith("-packages")]


def checkpoint(directory: Path, rows: int = 100) -> Path:
    """The prefix of a checkpoint of tables in one shard, [rows, 4] float32 each."""
    with BundleWriter(directory / "model.ckpt") as writer:
        for number in range(TABLES):
            writer.add(
                f"t{number:02}", np.random.default_rng(number).normal(size=(rows, 4)).astype(np.float32)
            )
    return directory / "model.ckpt"


class EngineRuns:
    """Jobs of one engine: what a process of `engine_job` says, and its workers' faults."""

    def __init__(self, engine: str, python: Path, directory: Path) -> None:
        self.engine = engine
        self.directory = directory
        self.prefix = checkpoint(directory)
        self.kept = directory / "jobs"
        self.faults = directory / "faults"
        self.faults.mkdir()
        self.python = python
        self._runs = 0

    @property
    def environment(self) -> dict[str, str]:
        """What processes find around them: the faults, and this repository."""
        path = os.pathsep.join([str(_FAULTS), str(ROOT)])
        return os.environ | {"PYTHONPATH": path, "WORKER_FAULTS": str(self.faults)}

    def asked(self, **more: Any) -> dict[str, Any]:
        """A job of all tables; each run writes to a place of its own."""
        self._runs += 1
        out = self.directory / f"out-{self._runs}"
        return {
            "engine": self.engine,
            "prefix": str(self.prefix),
            "out": str(out),
            "kept": str(self.kept),
            "task_bytes": 800,
        } | more

    def start(self, **more: Any) -> subprocess.Popen[str]:
        command = [self.python, "-m", "tests.support.engine_job", json.dumps(self.asked(**more))]
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
            cwd=self.directory,
        )

    def run(self, **more: Any) -> dict[str, Any]:
        """What a job says; `{"exit": code}` of one that was killed."""
        process = self.start(**more)
        out, err = process.communicate(timeout=300)
        if process.returncode:
            assert process.returncode == -signal.SIGKILL, err
            return {"exit": process.returncode}
        assert not err, "nothing of an engine's own talk is seen"
        return json.loads(out)

    def at(self, step: str, task: int, what: str) -> Path:
        """Have whoever does the task do `what` at a step of it."""
        path = self.faults / f"{step}-variables.data-{task:05}-of-{TABLES:05}"
        path.write_text(what)
        return path

    def outputs(self) -> set[str]:
        """Files of jobs that are kept."""
        return {path.name for path in self.kept.rglob("*") if path.is_file()}

    def receipts(self) -> set[str]:
        return {path.name for path in self.kept.glob("*/receipts/*.json")}

    @property
    def shard(self) -> Path:
        """The file of all tables."""
        return read_catalog(self.prefix).shards[0]

    def table_range(self) -> Range:
        """Where the first table lies in the shard."""
        extent = read_catalog(self.prefix).tensors["t00"].extents[0]
        return Range(0, extent.offset, extent.size)

    @contextmanager
    def dask_cluster(
        self, workers: int, path: str = ""
    ) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
        """The address of a scheduler on loopback, and its workers, each a node as far as Dask knows.

        They find packages in `path` first.
        """
        with ExitStack() as stack:
            file = self.directory / "scheduler.json"
            loopback = ["--host", "127.0.0.1", "--no-dashboard"]
            stack.enter_context(self._dask("scheduler", *loopback, "--port", "0", "--scheduler-file", file))
            wait_until(file.exists, "the scheduler is there")
            address = json.loads(file.read_text())["address"]
            node = ["worker", *loopback, "--no-nanny", "--nthreads", "1", address]
            yield address, [stack.enter_context(self._dask(*node, path=path)) for _ in range(workers)]

    @contextmanager
    def _dask(self, role: str, *arguments: object, path: str = "") -> Iterator[subprocess.Popen[bytes]]:
        command = [self.python, "-m", f"distributed.cli.dask_{role}", *map(str, arguments)]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        environment = self.environment
        environment["PYTHONPATH"] = os.pathsep.join([*filter(None, [path]), environment["PYTHONPATH"]])
        with subprocess.Popen(command, env=environment, cwd=self.directory, **quiet) as process:
            try:
                yield process
            finally:
                process.kill()

    def await_no_process(self) -> None:
        """Workers end with the command; idle ones of Ray once they see that it did, and that may take."""
        wait_until(lambda: not self._processes(), f"no process is left: {self._processes()}", 90)

    def _processes(self) -> list[int]:
        """Those that began in a job of this one."""
        mark = f"WORKER_FAULTS={self.faults}".encode()
        return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if mark in _read(path)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def wait_until(is_so: Any, what: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


class Noted:
    """The engine of this process, which notes what it does and may end early or do everything twice."""

    name = "noted"

    def __init__(self, *, stop_after: int = 1 << 30, times: int = 1) -> None:
        self.done: list[bytes] = []
        self._stop, self._times = stop_after, times

    def run(self, works: Iterable[bytes]) -> Generator[bytes, None, None]:
        for work in works:
            if len(self.done) == self._stop:
                return
            self.done.append(work)
            for _ in range(self._times):
                yield execute(work)
