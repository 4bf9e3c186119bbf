"""Trainings by `trainer_of_any_age` in environments of any TensorFlow, and models that follow them."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from examples.cluster import free_ports
from exporter import ExportRequest, Updates, export, export_incremental
from exporter.checkpoint.locate import candidates
from exporter.increments.history import read_history
from tests.support.environments import CACHE as CACHE
from tests.support.environments import clean_environ
from tests.support.increments import differing, full, starts, values_of
from tests.support.updatable import Loaded, loaded

TRAINER = Path(__file__).with_name("trainer_of_any_age.py")
ROWS = 600


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
            return subprocess.Popen(command, stdout=sink, stderr=sink, env=clean_environ())

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
        """The full checkpoint that the state file names: a trainer that was set back leaves higher steps."""
        return candidates(self.train)[0]

    @contextmanager
    def served(self, *, is_quiet: bool = True) -> Iterator[Loaded]:
        """A base of what is trained so far, loaded; a training that is not quiet goes on meanwhile."""
        base = export(self.request)
        with loaded(base.published.path) as server:
            if is_quiet:
                self.assert_answers(server)
            yield server

    def increments(self) -> set[str]:
        """The names of the increments that are there."""
        return {path.name for path in (self.train / "increments").glob("0*")}

    def set_back(self, step: int) -> None:
        """Have the next training begin at an older full checkpoint: `checkpoint` names it."""
        state = self.train / "checkpoint"
        state.write_text(f'model_checkpoint_path: "model.ckpt-{step}"\n')

    def assert_followed(self, server: Loaded) -> None:
        """Publish what increments tell, and nothing else; the model answers as the last checkpoint does."""
        delta = export_incremental(self.request)
        assert delta.published is not None
        assert delta.compared_bytes == 0, delta.reason
        server.update()
        self.assert_answers(server)

    def assert_answers(self, server: Loaded, suffix: str = "") -> None:
        """The model answers with the values of the newest full checkpoint, bit for bit.

        With a `suffix`, with those of the variables whose names end so.
        """
        values = values_of(self.newest)
        if suffix:
            values = {name.removesuffix(suffix): values[name] for name in values if name.endswith(suffix)}
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
        equal = history.same(full(self.train, self.newest.name))
        chains = {start: history.after(start) for start in starts(history, self.train)}
        whole = {start: chain for start, chain in chains.items() if chain and chain[-1].increment.id in equal}
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
        (self.trainings.train / "started").unlink(missing_ok=True)
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


def wait_for_increments(trainings: Trainings, count: int) -> None:
    """Wait until there are so many increments that were not there before."""
    there = trainings.increments()
    deadline = time.monotonic() + 900
    while len(trainings.increments() - there) < count:
        assert time.monotonic() < deadline, trainings.log.read_text(errors="replace")[-6000:]
        time.sleep(0.05)


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
