"""Increments of real clusters: nothing is lost with asynchronous workers, whoever dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from exporter.delta.history import read_history
from tests.increments import differing, starts
from tests.integration.increment_cluster import Cluster, Job


def final_step(job: Job) -> int:
    return max(int(path.stem.rpartition("-")[2]) for path in job.checkpoints.glob("model.ckpt-*.index"))


def assert_exact(job: Job) -> None:
    history = read_history(job.checkpoints)
    final = job.checkpoints / f"model.ckpt-{final_step(job)}"
    found = starts(history, job.checkpoints)
    assert found
    for checkpoint in found:
        assert differing(job.checkpoints, checkpoint, final) == [], checkpoint


def test_every_optimizer_is_exact_with_asynchronous_workers(tmp_path: Path) -> None:
    job = Job(
        tmp_path,
        steps=300,
        optimizers=("sgd", "adagrad", "ftrl", "rmsprop", "momentum", "adam"),
        save_increment_steps=4,
        save_checkpoint_steps=80,
    )
    with Cluster(job) as cluster:
        cluster.wait()
    assert_exact(job)
    history = read_history(job.checkpoints)
    assert len(history.increments) > 20
    assert len({stored.increment.run for stored in history.increments}) == 1
