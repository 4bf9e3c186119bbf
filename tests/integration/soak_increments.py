"""`make soak`: hundreds of increments of one cluster whose processes die at random, and nothing is lost.

`export-model --incr --watch` follows the cluster all the time; a model that is loaded once takes the deltas.
Each time that the training has ended, increments give its last state from every full checkpoint that they
lead on from, and the model answers with its last values, bit for bit. Every third time the training begins
again at an older checkpoint.

pytest does not collect this by itself; the short forms are in `test_increments_cluster`. SOAK_INCREMENTS and
SOAK_SEED change how long it takes, and who dies.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from exporter import ExportRequest, export_incremental
from exporter.increments.history import read_history
from tests.integration import increment_nodes
from tests.integration.increment_cluster import Cluster, Job, log, newest
from tests.support.increments import differing, starts, values_of
from tests.support.updatable import Loaded, loaded

INCREMENTS = int(os.environ.get("SOAK_INCREMENTS", "500"))
SEED = int(os.environ.get("SOAK_SEED", "1"))
BETWEEN_ENDS = 60
"""Increments until the training ends and what is there is compared; then it goes on."""


@dataclass(frozen=True)
class Followed:
    """A job and the model that is exported from it."""

    job: Job

    @property
    def request(self) -> ExportRequest:
        return ExportRequest(
            self.job.checkpoints,
            self.job.directory / "model",
            model=f"{increment_nodes.__file__}:serving",
            model_args={"optimizers": ",".join(self.job.optimizers)},
        )

    @contextmanager
    def watched(self) -> Iterator[None]:
        """The command beside the training, for as long as the context lasts; it must not fail."""
        request = self.request
        command = [sys.executable, "-m", "exporter", "--ckpt-dir", request.ckpt_dir, "--out", request.out]
        with (self.job.directory / "export.log").open("wb") as sink:
            watcher = subprocess.Popen([*command, "--incr", "--watch"], stdout=sink, stderr=sink)
        try:
            yield
            assert watcher.poll() is None, (self.job.directory / "export.log").read_text()
        finally:
            watcher.terminate()
            watcher.wait(60)

    def assert_served(self, server: Loaded) -> int:
        """Take what is published, and answer with the trainer's last values; the position."""
        export_incremental(self.request)
        position = server.update()["position"]
        answer = server.predict(rows=np.arange(increment_nodes.ROWS))
        expected = increment_nodes.served(self.job.optimizers, values_of(newest(self.job.checkpoints)))
        for name, value in expected.items():
            assert answer[name].tobytes() == value.tobytes(), name
        return int(position)


@pytest.mark.timeout(3600)
def test_hundreds_of_increments_of_a_cluster_that_dies_piece_by_piece(tmp_path: Path) -> None:
    job = Job(
        tmp_path,
        steps=10**9,
        workers=3,
        optimizers=("sgd", "adagrad", "ftrl", "rmsprop", "adam"),
        save_increment_steps=2,
        save_checkpoint_steps=300,
        restores=True,
        pause_s=0.01,
    )
    dice = random.Random(SEED)
    seen: set[str] = set()
    deaths = compared = 0
    followed = Followed(job)
    with Cluster(job) as cluster:
        cluster.wait_for("a checkpoint", lambda: (job.checkpoints / "checkpoint").exists(), 120)
        base = export_incremental(followed.request)
        assert base.published is not None
        with loaded(base.published.path) as server, followed.watched():
            for end in range(1, INCREMENTS):
                deaths += die_at_random(cluster, dice, seen)
                job.end.touch()
                cluster.wait(240)
                compared += compare(job)
                position = followed.assert_served(server)
                print(
                    f"{len(seen)} increments, {deaths} deaths, {compared} full checkpoints were exact, "
                    f"position {position} is served",
                    flush=True,
                )
                if len(seen) >= INCREMENTS:
                    break
                restart(cluster, set_back=end % 3 == 0)
    assert "restored" in log(tmp_path, "chief-0")


def die_at_random(cluster: Cluster, dice: random.Random, seen: set[str]) -> int:
    """Kill one process, or several, again and again; how many died."""
    deaths, goal = 0, min(INCREMENTS, len(seen) + BETWEEN_ENDS)
    while len(seen) < goal:
        following = len(seen) + dice.randint(3, 25)
        cluster.wait_for("progress", lambda goal=following: look(cluster.job, seen) >= goal, 400)
        time.sleep(dice.random() * 0.3)
        victims = dice.sample(cluster.job.names, dice.choice([1, 1, 1, 2, 3]))
        for name in victims:
            cluster.kill(name)
        for name in victims:
            cluster.start(name)
        deaths += len(victims)
    return deaths


def look(job: Job, seen: set[str]) -> int:
    """How many increments there have been; old ones are pruned."""
    seen.update(path.name for path in (job.checkpoints / "increments").glob("0*"))
    return len(seen)


def compare(job: Job) -> int:
    """Every full checkpoint that increments lead on from to the end gives the last state, bit for bit.

    How many there are. A trainer that died after a full checkpoint and before the next increment goes on from
    that checkpoint: increments of before end there, and claim no more.
    """
    history, last = read_history(job.checkpoints), newest(job.checkpoints)
    chains = {start: history.after(start) for start in starts(history, job.checkpoints)}
    final = max(history.increments, key=lambda stored: stored.increment.to_step)
    whole = {start: chain for start, chain in chains.items() if chain and chain[-1] == final}
    assert whole
    for start, chain in whole.items():
        assert differing(job.checkpoints, start, last, chain) == [], start
    return len(whole)


def restart(cluster: Cluster, *, set_back: bool) -> None:
    """Begin again where the training ended; or, set back, at the full checkpoint before the last."""
    job = cluster.job
    job.end.unlink()
    if set_back:
        older = newest(job.checkpoints)
        for path in job.checkpoints.glob(f"{older.name}.*"):
            path.unlink()
        older = newest(job.checkpoints)
        (job.checkpoints / "checkpoint").write_text(f'model_checkpoint_path: "{older.name}"\n')
        print(f"set back to {older.name}", flush=True)
    for name in job.names:
        cluster.start(name, restores=not set_back)
