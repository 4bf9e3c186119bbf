"""Increments of real clusters: nothing is lost with asynchronous workers, whoever dies."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import pytest

from exporter.increments.history import History, read_history
from exporter.increments.increment import CheckpointId
from exporter.options import ExportRequest, Updates
from exporter.pipeline.incremental import export_incremental
from tests.integration.increment_cluster import Cluster, Job, log, newest, step_of
from tests.integration.increment_nodes import keyed_serving
from tests.support.budget import thorough
from tests.support.increments import differing, full, starts
from tests.support.keyed_training import Served, stored_rows
from tests.support.publishing import delta_of


def assert_exact(job: Job, since: int = 0) -> History:
    """Every full checkpoint from step `since` on leads to the trainer's last state, bit for bit.

    Those before a restart at a full checkpoint do not: what changed between the last increment and that
    checkpoint was never recorded.
    """
    history = read_history(job.checkpoints)
    known = [start for start in starts(history, job.checkpoints) if start.step >= since]
    leading = [checkpoint for checkpoint in known if not ends_at_a_restart(history, checkpoint)]
    assert leading
    for checkpoint in leading:
        assert differing(job.checkpoints, checkpoint, newest(job.checkpoints)) == [], checkpoint
    return history


def ends_at_a_restart(history: History, checkpoint: CheckpointId) -> bool:
    """True if a session restored the full checkpoint that was saved after the last increment from here."""
    chain = history.after(checkpoint)
    last = chain[-1].increment.id if chain else None
    saved = {found.checkpoint for found in history.markers if found.after == last and not found.is_equal}
    return checkpoint not in saved and any(each.increment.parent in saved for each in history.increments)


def increments(job: Job) -> int:
    return len(list((job.checkpoints / "increments").glob("0*")))


@pytest.mark.landing
def test_every_optimizer_is_exact_with_asynchronous_workers(tmp_path: Path) -> None:
    job = Job(
        tmp_path,
        steps=200,
        optimizers=("sgd", "adagrad", "ftrl", "rmsprop", "momentum", "adam"),
        save_increment_steps=5,
        save_checkpoint_steps=60,
        pause_s=0.1,
    )
    with Cluster(job) as cluster:
        cluster.wait()
    history = assert_exact(job)
    assert len(history.increments) >= 3
    assert len({stored.increment.run for stored in history.increments}) == 1


@thorough
def test_workers_die_at_random(tmp_path: Path) -> None:
    job = Job(tmp_path, steps=700, save_increment_steps=3, save_checkpoint_steps=10_000, pause_s=0.02)
    dice = random.Random(5)
    with Cluster(job) as cluster:
        for _ in range(6):
            seen = increments(job)
            cluster.wait_for("progress", lambda seen=seen: increments(job) > seen + 3)
            time.sleep(dice.random() * 0.2)
            name = f"worker-{dice.randrange(job.workers)}"
            cluster.kill(name)
            cluster.start(name)
        cluster.wait()
    history = assert_exact(job)
    assert len(history.increments) > 30


@pytest.mark.landing
def test_chief_and_parameter_servers_die_and_training_goes_on_where_it_stopped(tmp_path: Path) -> None:
    job = Job(
        tmp_path, steps=900, save_increment_steps=3, save_checkpoint_steps=100, restores=True, pause_s=0.03
    )
    dice = random.Random(7)
    with Cluster(job) as cluster:
        for victims in (["chief-0"], ["ps-0"], ["chief-0", "ps-1"], ["chief-0", "worker-0"]):
            seen = increments(job)
            cluster.wait_for("progress", lambda seen=seen: increments(job) > seen + 3)
            time.sleep(dice.random() * 0.3)
            for name in victims:
                cluster.kill(name)
            for name in victims:
                cluster.start(name)
        seen = increments(job)
        cluster.wait_for("progress", lambda: increments(job) > seen + 3)
        job.end.touch()
        cluster.wait()
    assert_exact(job)
    assert "restored" in log(tmp_path, "chief-0")


@pytest.mark.landing
def test_a_trainer_that_is_set_back_forks(tmp_path: Path) -> None:
    # The pause lets a checkpoint be written every 40 steps on a busy machine, too: an older one is needed.
    job = Job(tmp_path, steps=120, workers=1, save_increment_steps=5, save_checkpoint_steps=40, pause_s=0.02)
    with Cluster(job) as cluster:
        cluster.wait()
        abandoned = read_history(job.checkpoints)
        older = sorted((m.checkpoint for m in abandoned.markers), key=lambda found: found.step)[1]
        assert older.step < abandoned.increments[-1].increment.to_step
        for path in job.checkpoints.glob("model.ckpt-*"):
            if step_of(path) > step_of(Path(older.name)):
                path.unlink()
        (job.checkpoints / "checkpoint").write_text(f'model_checkpoint_path: "{older.name}"\n')
        for name in ("ps-0", "ps-1"):
            cluster.kill(name)
        for name in job.names:
            cluster.start(name, steps=older.step + 60)
        cluster.wait()
    history = assert_exact(job, since=older.step)
    fork = [stored.increment for stored in history.increments if stored.increment.generation == 2]
    assert fork[0].parent == full(job.checkpoints, older.name)
    assert {increment.run for increment in fork}.isdisjoint(
        stored.increment.run for stored in abandoned.increments
    )


@thorough
def test_keys_come_and_go_while_every_node_dies(tmp_path: Path) -> None:
    """Two workers and the chief meet, and take away, the same keys, for which there is just enough room."""
    job = Job(
        tmp_path,
        steps=1200,
        optimizers=("sgd",),
        save_increment_steps=3,
        save_checkpoint_steps=150,
        restores=True,
        pause_s=0.03,
        keys=60,
    )
    request = ExportRequest(job.checkpoints, tmp_path / "model", model=keyed_serving, updates=Updates())
    with Cluster(job) as cluster:
        cluster.wait_for("a full checkpoint", lambda: increments(job) > 1)
        served = Served(export_incremental(request).published.path)
        for victims in (["worker-0"], ["chief-0"], ["ps-0"], ["chief-0", "ps-1"], ["worker-1", "worker-0"]):
            seen = increments(job)
            cluster.wait_for("progress", lambda seen=seen: increments(job) > seen + 3)
            for name in victims:
                cluster.kill(name)
            delta_of(request)
            for name in victims:
                cluster.start(name)
        cluster.wait()
    history = assert_exact(job)
    assert sum(table.removed for stored in history.increments for table in stored.increment.tables) > 20
    delta_of(request)
    served.update()
    keys = np.arange(job.keys) * 7919 - 10**12
    assert served.rows(keys) == stored_rows(newest(job.checkpoints))


@pytest.mark.landing
def test_a_worker_without_the_hook_is_noticed(tmp_path: Path) -> None:
    job = Job(tmp_path, steps=100_000, workers=1, with_hook=("chief",))
    with Cluster(job) as cluster:
        chief = cluster.nodes["chief-0"]
        cluster.wait_for("the error", lambda: not chief.is_alive())
    assert chief.exitcode == 1
    assert "were not recorded" in log(tmp_path, "chief-0")
