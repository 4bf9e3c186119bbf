"""Environments of any TensorFlow and Python for `trainer_of_any_age`, made once and kept between runs."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from examples.cluster import free_ports
from exporter import ExportRequest, Updates, export, export_incremental
from exporter.increments.history import read_history
from tests.support.increments import differing, starts, values_of
from tests.support.updatable import Loaded, loaded

ROOT = Path(__file__).parents[2]
TRAINER = Path(__file__).with_name("trainer_of_any_age.py")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "export-model/trainers"
ROWS = 600
_OLD_PIP = ("pip<24", "setuptools<66")
"""What installs the wheels of before 2021."""


class Environment(NamedTuple):
    """A Python, and packages that work together on it; the first is TensorFlow, after which it is called."""

    python: str
    packages: tuple[str, ...]
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """TensorFlow's version."""
        return self.packages[0].partition("==")[2]


_1_12 = (
    "tensorflow==1.12.3 protobuf==3.19.6 numpy==1.16.6 absl-py==0.15.0 gast==0.2.2 astor==0.8.1"
    " termcolor==1.1.0 six==1.16.0 keras-applications==1.0.8 keras-preprocessing==1.1.2 h5py==2.10.0"
    " grpcio==1.48.2"
)
ENVIRONMENTS = (
    Environment("3.6", tuple(_1_12.split()), ("--no-deps",)),
    Environment("3.7", ("tensorflow==1.15.5", "protobuf<3.21", "numpy<1.19", "tensorflow-estimator==1.15.1")),
    Environment("3.8", ("tensorflow-cpu==2.4.4", "protobuf<3.21", "numpy<1.20")),
    Environment("3.8", ("tensorflow-cpu==2.8.4", "protobuf<3.21", "numpy<1.24")),
    Environment("3.9", ("tensorflow-cpu==2.11.1", "protobuf<3.20", "numpy<1.24")),
    Environment("3.8", ("tensorflow-cpu==2.13.1", "numpy<1.25")),
)
BY_NAME = {environment.name: environment for environment in ENVIRONMENTS}


def interpreter(version: str) -> str | None:
    """A Python of that version, on the path or of pyenv."""
    if found := shutil.which(f"python{version}"):
        done = subprocess.run([found, "-V"], capture_output=True, text=True, check=False)
        if done.returncode == 0 and f" {version}." in done.stdout:
            return found
    versions = sorted((Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python"))
    return str(versions[-1]) if versions else None


def python_of(name: str) -> Path:
    """The interpreter of the environment of a TensorFlow; the test is skipped if its Python is missing."""
    environment = BY_NAME[name]
    found = interpreter(environment.python)
    if found is None:
        pytest.skip(f"TensorFlow {name}: there is no Python {environment.python} on the path or of pyenv")
    CACHE.mkdir(parents=True, exist_ok=True)
    directory = CACHE / name
    with (CACHE / f"{name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        if not (directory / ".complete").exists():
            shutil.rmtree(directory, ignore_errors=True)
            subprocess.run([found, "-m", "venv", directory], check=True)
            for packages in (_OLD_PIP, (*environment.options, *environment.packages)):
                pip = [directory / "bin/python", "-m", "pip", "install", "-q", *packages]
                subprocess.run(pip, check=True, cwd="/")
            (directory / ".complete").touch()
    return directory / "bin/python"


class Trainings:
    """Trainings in one directory, one after the other, by one TensorFlow; and the model that follows them."""

    def __init__(self, python: Path, directory: Path, optimizers: Sequence[str], **job: Any) -> None:
        self.python, self.directory = python, directory
        self.optimizers = tuple(optimizers)
        self.job = {"partitioner": "fixed", "optimizers": list(optimizers), **job}
        self.job["directory"] = str(directory / "train")
        self.train = directory / "train"
        self.train.mkdir(parents=True, exist_ok=True)
        self.log = directory / "log"

    def run(self, steps: int, **job: Any) -> None:
        """Train on to a step.

        Raises:
            AssertionError: it failed, with the end of what it said.
        """
        done = self.start(steps=steps, **job)
        code = done.wait(240)
        assert code == 0, self.log.read_text(errors="replace")[-3000:]

    def start(self, **job: Any) -> subprocess.Popen[bytes]:
        """A process of the training."""
        command = [self.python, "-W", "ignore", TRAINER, json.dumps({**self.job, **job})]
        with self.log.open("ab") as sink:
            return subprocess.Popen(command, stdout=sink, stderr=sink, env=self._environment)

    @property
    def _environment(self) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TF_CONFIG")}

    @property
    def request(self) -> ExportRequest:
        """The export of what is trained, by rows."""
        return ExportRequest(
            self.train,
            self.directory / "model",
            model=f"{__file__}:serving",
            model_args={"optimizers": ",".join(self.optimizers), "partitioner": self.job["partitioner"]},
            updates=Updates(),
        )

    @property
    def newest(self) -> Path:
        """The full checkpoint of the highest step."""
        found = self.train.glob("model.ckpt-*.index")
        return max(found, key=lambda path: int(path.stem.rpartition("-")[2])).with_suffix("")

    @contextmanager
    def served(self) -> Iterator[Loaded]:
        """A base of what is trained so far, loaded."""
        base = export(self.request)
        with loaded(base.published.path) as server:
            self.assert_answers(server)
            yield server

    def assert_followed(self, server: Loaded) -> None:
        """Publish what increments tell, and nothing else; the model answers as the last checkpoint does."""
        delta = export_incremental(self.request)
        assert delta.published is not None
        assert delta.compared_bytes == 0, delta.reason
        server.update()
        self.assert_answers(server)

    def assert_answers(self, server: Loaded) -> None:
        """The model answers with the values of the newest full checkpoint, bit for bit."""
        values = values_of(self.newest)
        answer = server.predict(rows=np.arange(ROWS))
        for optimizer in self.optimizers:
            expected = {
                "shared": values[f"{optimizer}/parts/shared"],
                "table": values[f"{optimizer}/table"][np.arange(ROWS) // 2],
                "dense": np.tile(values[f"{optimizer}/dense"].T, (ROWS, 1)),
            }
            for name, value in expected.items():
                assert answer[f"{optimizer}_{name}"].tobytes() == value.tobytes(), name

    def assert_exact(self) -> int:
        """Each full checkpoint that increments lead on from is, with them, the last one, bit for bit.

        How many there are. A trainer that died after a full checkpoint and before the next increment goes on
        from that checkpoint: increments of before end there, and claim no more.
        """
        history = read_history(self.train)
        last = max(history.increments, key=lambda stored: stored.increment.to_step)
        chains = {start: history.after(start) for start in starts(history, self.train)}
        whole = {start: chain for start, chain in chains.items() if chain and chain[-1] == last}
        assert whole
        for start, chain in whole.items():
            assert differing(self.train, start, self.newest, chain) == [], start
        return len(whole)


class TrainerCluster:
    """Parameter servers, a chief and workers, each a process; those that still run at the end are killed."""

    def __init__(self, trainings: Trainings, workers: int = 1, ps: int = 2, **job: Any) -> None:
        self.trainings, self.job = trainings, job
        self.names = [*(f"ps-{i}" for i in range(ps)), "chief-0", *(f"worker-{i}" for i in range(workers))]
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.cluster: dict[str, list[str]] = {}

    def __enter__(self) -> TrainerCluster:
        for name, port in zip(self.names, free_ports(len(self.names)), strict=True):
            self.cluster.setdefault(name.partition("-")[0], []).append(f"127.0.0.1:{port}")
        for name in self.names:
            self.start(name)
        return self

    def __exit__(self, *_: Any) -> None:
        for name in self.names:
            self.kill(name)

    def start(self, name: str) -> None:
        """Start a node."""
        kind, _, index = name.partition("-")
        (self.trainings.train / f"done-{index}").unlink(missing_ok=True)
        task = {"task": [kind, int(index)], "cluster": self.cluster}
        self.nodes[name] = self.trainings.start(**task, **self.job)

    def kill(self, name: str) -> None:
        """Kill a node, if it still runs."""
        self.nodes[name].kill()
        self.nodes[name].wait()

    def wait(self, seconds: float = 240) -> None:
        """Wait until the chief has ended well."""
        try:
            code = self.nodes["chief-0"].wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        assert code == 0, self.trainings.log.read_text(errors="replace")[-6000:]


def serving(optimizers: str, partitioner: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Everything that is trained, by rows; `optimizers` are those of the job, with commas between."""
    import tensorflow as tf

    from tests.support.trainer_of_any_age import PARTITIONERS

    v1 = tf.compat.v1
    rows = v1.placeholder(tf.int64, [None], name="rows")
    outputs = {}
    for optimizer in optimizers.split(","):
        with v1.variable_scope(optimizer):
            shared = v1.get_variable("parts/shared", [ROWS, 4], partitioner=PARTITIONERS[partitioner]())
            table = v1.get_variable("table", [ROWS // 2, 3])
            dense = v1.get_variable("dense", [7, 1])
        outputs[f"{optimizer}_shared"] = tf.nn.embedding_lookup(shared, rows)
        outputs[f"{optimizer}_table"] = tf.gather(table, rows // 2)
        outputs[f"{optimizer}_dense"] = tf.tile(tf.transpose(dense), [tf.size(rows), 1])
    return {"rows": rows}, outputs
