"""`make soak`: hundreds of increments of one cluster whose processes die at random, and nothing is lost.

pytest does not collect this by itself; the short forms are in `test_increments_cluster`. SOAK_INCREMENTS and
SOAK_SEED change how long it takes, and who dies.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from exporter.delta.history import read_history
from tests.increments import differing, starts
from tests.integration.increment_cluster import Cluster, Job, log
from tests.integration.test_increments_cluster import newest

INCREMENTS = int(os.environ.get("SOAK_INCREMENTS", "500"))
SEED = int(os.environ.get("SOAK_SEED", "1"))
BETWEEN_ENDS = 60
"""Increments until the training ends and what is there is compared; then it goes on."""


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
    with Cluster(job) as cluster:
        while len(seen) < INCREMENTS:
            deaths += die_at_random(cluster, dice, seen)
            job.end.touch()
            cluster.wait(240)
            compared += compare(job)
            print(f"{len(seen)} increments, {deaths} deaths, {compared} full checkpoints were exact")
            restart(cluster)
    assert "restored" in log(tmp_path, "chief-0")


def die_at_random(cluster: Cluster, dice: random.Random, seen: set[str]) -> int:
    """Kill one process, or several, again and again; how many died."""
    deaths, goal = 0, min(INCREMENTS, len(seen) + BETWEEN_ENDS)
    while len(seen) < goal:
        following = len(seen) + dice.randint(3, 25)
        cluster.wait_for("progress", lambda goal=following: look(cluster.job, seen) >= goal, 120)
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


def restart(cluster: Cluster) -> None:
    """Begin again where the training ended."""
    cluster.job.end.unlink()
    for name in cluster.job.names:
        cluster.kill(name)
        cluster.start(name)
